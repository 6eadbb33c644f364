"""Reads and checks what people write in files (TOML, JSON, text): one validator for all of parplan's formats.

A format is a list of `Field`: name, value in words (type, unit, range) and a function that reads the value. Every error
says file, table and field, what was found and what is expected; a name that is close to a known one is suggested.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from parplan.errors import ParplanError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Field", "FieldError", "at_most", "choice", "count", "counted", "did_you_mean", "flag", "list_of", "number",
    "numbers", "parse_json", "parse_toml", "ranges", "read_field", "read_fields", "read_file", "runs", "shown",
    "size_text", "table", "text",
]  # fmt: skip

_MOST_WHOLE = 2**62  # SQLite's integers have 64 bits
_MOST_BYTES = 2**28  # of a file: none that a person or parplan writes is that long


class FieldError(ValueError):
    """Raised by a field's reader that can say more than what it expects; the text follows the field's name."""


@dataclass(frozen=True)
class Field:
    """One field of a table.

    Args:
        name: as in the file.
        expected: type, unit and range in words, for the error.
        read: the value as parplan uses it.

            Raises: ValueError or TypeError where the value is not as expected; FieldError to say more.
        required: whether a table without it is refused.
    """

    name: str
    expected: str
    read: Callable[[Any], Any]
    required: bool = True

    def optional(self) -> Field:
        """The same field, which a table may lack."""
        return replace(self, required=False)


def read_fields(
    table: Any, fields: Sequence[Field], where: str, error: type[ParplanError], instead: str = ""
) -> dict[str, Any]:
    """The values of `table` in the order of `fields`, read and checked; optional fields that it lacks are left out.

    Args:
        where: file and table, for errors.
        error: the class of the error.
        instead: what would make up for missing fields, such as "or a preset".

    Raises:
        ParplanError (an `error`): no table, an unknown or missing field, a value that its field does not expect.
    """
    known = [field.name for field in fields]
    if not isinstance(table, Mapping):
        raise error(f"{where} is {shown(table)}; expected a table of {', '.join(known)}")
    for name in table:
        if name not in known:
            raise error(f"{where}: unknown field {shown(name)}; {did_you_mean(str(name), known)}")
    if missing := [field.name for field in fields if field.required and field.name not in table]:
        them = "it" if len(missing) == 1 else "them"
        raise error(f"{where}: missing field {', '.join(map(repr, missing))}; add {them}{' ' * bool(instead)}{instead}")
    return {field.name: read_field(field, table[field.name], where, error) for field in fields if field.name in table}


def read_field(field: Field, value: Any, where: str, error: type[ParplanError]) -> Any:
    """One field's value, read and checked.

    Raises:
        ParplanError (an `error`): the field does not expect the value.
    """
    try:
        return field.read(value)
    except FieldError as problem:
        raise error(f"{where}: {field.name} {problem}") from None
    except (ValueError, TypeError, OverflowError):
        raise error(f"{where}: {field.name} is {shown(value)}; expected {field.expected}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown `word`: the closest known one, and the first of all known ones."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = f"{', '.join(known[:12])}{', ...' if len(known) > 12 else ''}"
    return f"did you mean {close[0]}? Known: {listed}" if close else f"known: {listed}"


def shown(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    if isinstance(value, int) and abs(value) > _MOST_WHOLE:
        return "a whole number beyond reason"  # Python refuses to print the longest
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


def at_most(share: float) -> str:
    """A share of 1 in percent, rounded up, for what is proven to be no more: `0.1 %`, `1.3 %`, `11 %`.

    >>> at_most(0.0004), at_most(0.0121), at_most(0.102)
    ('0.1 %', '1.3 %', '11 %')
    """
    tenths = math.ceil(1000 * share - 1e-6)
    return f"{tenths / 10:.1f} %" if tenths < 100 else f"{math.ceil(100 * share - 1e-6)} %"


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "layer"), counted(1200, "layer")
    ('1 layer', '1,200 layers')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_text(nbytes: float) -> str:
    """Bytes in a unit that suits them, three digits at least.

    >>> size_text(2**20 * 1.5), size_text(2**30 * 4321)
    ('1.5 MiB', '4,321 GiB')
    """
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    unit, size = next(((unit, size) for unit, size in units if nbytes >= size), ("bytes", 1))
    return f"{nbytes / size:,.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"


def text(name: str, pattern: str = ".*", expected: str = "text") -> Field:
    """A text, all of which the regular expression `pattern` matches."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError
        return value

    return Field(name, expected, read)


def flag(name: str) -> Field:
    """True or false."""
    return _of_type(bool, name, "true or false")


def _of_type(kind: type, name: str, expected: str) -> Field:
    """A value of that type of Python's, as it is."""

    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return Field(name, expected, read)


def count(name: str, least: int = 1, most: int = _MOST_WHOLE, meaning: str = "a whole number") -> Field:
    """A whole number from `least` to `most`."""

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError
        return value

    return Field(name, f"{meaning} of at least {least}{'' if most == _MOST_WHOLE else f' and at most {most:,}'}", read)


def number(name: str, least: float, most: float, meaning: str = "a number") -> Field:
    """A finite number from `least` to `most`, read as a float; `meaning` says its unit."""

    def read(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:  # refuses what is not a number, too
            raise ValueError
        return float(value)

    return Field(name, f"{meaning} from {least:,.10g} to {most:,.10g}", read)


def choice(name: str, options: Iterable[str] | type[Enum]) -> Field:
    """One of some words; a member where they are the values of an enumeration."""
    words: dict[Any, Any] = {option.value if isinstance(option, Enum) else option: option for option in options}

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return words[value]

    return Field(name, f"one of {', '.join(words)}", read)


def table(name: str, expected: str) -> Field:
    """A table (an object of JSON)."""
    return _of_type(dict, name, expected)


def list_of(name: str) -> Field:
    """A list, whose items are read one by one."""
    return _of_type(list, name, "a list")


def numbers(name: str, meaning: str, most: int = 2**20) -> Field:
    """Whole numbers from 0 on in order, as a list or as text such as "0-3,8" (see `ranges`); `most` in all."""
    item = count(name, 0)

    def read(value: Any) -> tuple[int, ...]:
        if isinstance(value, list) and len(value) <= most:
            return tuple(item.read(each) for each in value)
        if not isinstance(value, str):
            raise TypeError
        found: list[int] = []
        for part in value.split(","):
            match = re.fullmatch(r"\s*(\d{1,12})(?:\s*-\s*(\d{1,12}))?\s*", part, re.ASCII)
            if match is None:
                raise ValueError
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise FieldError(f"has the range {part.strip()!r}; the lower number comes first: {last}-{first}")
            if len(found) + last - first >= most:
                raise FieldError(f"is {shown(value)}, which names more than {most:,} numbers; name fewer")
            found += range(first, last + 1)
        return tuple(found)

    return Field(name, f'a list of {meaning}, or ranges of them such as "0-3,8-11"', read)


def ranges(values: Iterable[int]) -> str:
    """Whole numbers from 0 on in order as text, ascending neighbours as a range.

    >>> ranges([0, 1, 2, 3, 8, 5, 6])
    '0-3,8,5-6'
    """
    return ",".join(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}" for own in runs(values))


def runs(values: Iterable[int]) -> list[list[int]]:
    """Whole numbers in order, ascending neighbours together."""
    found: list[list[int]] = []
    for value in values:
        if found and value == found[-1][-1] + 1:
            found[-1].append(value)
        else:
            found.append([value])
    return found


def read_file(path: str | Path, kind: str, error: type[ParplanError], instead: str) -> str:
    """The text of a file that a person named, without a byte order mark.

    Args:
        kind: noun for the file in errors, such as "plan".
        instead: what to do about a file that is none, such as "name a TOML file".

    Raises:
        ParplanError (an `error`): no name, a folder, no such file, too long, not text in UTF-8.
    """
    if not str(path):
        raise error(f"the name of the {kind} is empty; {instead}")
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        source = data.decode("utf-8-sig")
    except IsADirectoryError:
        raise error(f"cannot read the {kind} {path}: that is a folder; {instead}") from None
    except OSError as problem:
        raise error(f"cannot read the {kind} {path}: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        why = f"it is not text in UTF-8 (byte {problem.start})"
        raise error(f"cannot read the {kind} {path}: {why}; {instead}") from problem
    if len(data) > _MOST_BYTES or "\0" in source:
        why = f"it is longer than {_MOST_BYTES >> 20} MiB" if len(data) > _MOST_BYTES else "it is binary, not text"
        raise error(f"cannot read the {kind} {path}: {why}; {instead}")
    return source


def parse_toml(source: str, where: str, error: type[ParplanError]) -> dict[str, Any]:
    """The table that TOML text describes.

    Raises:
        ParplanError (an `error`): not TOML.
    """
    try:
        data: dict[str, Any] = tomllib.loads(source)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise error(f"{where} is not TOML: {problem}") from problem
    return data


def parse_json(source: str) -> Any:
    """JSON text as Python values; refuses duplicate names.

    Raises:
        ValueError: not JSON, nested too deep, or a name that an object has twice.
    """
    try:
        return json.loads(source, object_pairs_hook=_without_duplicates)
    except RecursionError as problem:
        raise ValueError(str(problem)) from problem


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"{name!r} appears twice")
        seen[name] = value
    return seen
