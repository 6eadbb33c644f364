"""The words of one line of a layer profile's text: names, fields and their values, each checked where it stands.

Every refusal names the line, the field, what was found and what would fix it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parplan.cost_models.layer_profile import Cut, Effect, Samples, default_effect
from parplan.errors import ProfileError

__all__ = ["EDGE", "LAYER", "TIMES", "Entry", "Line", "count", "entry", "expected", "names", "shown"]

# Beyond these a number is a typing error or another unit: eleven days, a pebibyte, two thousand million.
MOST_SECONDS, MOST_BYTES, MOST_COUNT = 1e6, 2**50, 2**31


@dataclass(frozen=True)
class Line:
    """The words of a line, without its comment; `where` is file:line."""

    where: str
    words: tuple[str, ...]

    def error(self, message: str) -> ProfileError:
        """What is wrong with this line."""
        return ProfileError(f"{self.where}: {message}")


@dataclass(frozen=True)
class Entry:
    """A line with its fields read."""

    line: Line
    fields: Mapping[str, Any]


# ---- words of a line -------------------------------------------------------------------------------------------------


def shown(word: str) -> str:
    """A word of the text in quotes, shortened."""
    return repr(word if len(word) <= 40 else f"{word[:37]}...")


def expected(word: str, known: tuple[str, ...]) -> str:
    """What may have been meant by `word`."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def names(line: Line, wanted: int, form: str) -> tuple[str, ...]:
    """The `wanted` names of layers behind the line's first word; `form` is what such a line looks like."""
    found = line.words[1 : 1 + wanted]
    if len(found) < wanted or any("=" in name and name.partition("=")[0] in _FIELDS for name in found):
        raise line.error(f"a name is missing; write `{form}`")
    if wrong := next((name for name in found if not name.isprintable()), None):
        raise line.error(f"name {shown(wrong)} has characters that cannot be shown; rename it")
    return found


def entry(line: Line, start: int, known: Mapping[str, _Field], what: str) -> Entry:
    """The fields `key=value` from word `start` on; `what` names the line in errors."""
    found: dict[str, Any] = {}
    for word in line.words[start:]:
        key, equals, text = word.partition("=")
        if key not in known:
            raise line.error(f"{what}: {shown(word)} is no field of it; {expected(key, tuple(known))}")
        if not equals or not text:
            raise line.error(f"{what}: {key} has no value; write {key}=VALUE, without blanks")
        if key in found:
            raise line.error(f"{what}: {key} is given twice; keep one")
        found[key] = known[key].read(line, key, text)
    for key, rule in known.items():
        if rule.required and key not in found:
            raise line.error(f"{what}: {key} is missing; add {key}=VALUE")
    return Entry(line, found)


# ---- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """How a field is read, given line, key and text, and whether it has to be there."""

    read: Callable[[Line, str, str], Any]
    required: bool = True


def _seconds(line: Line, key: str, text: str) -> float:
    value = _number(line, key, text)
    if not 0 <= value <= MOST_SECONDS:
        raise line.error(f"{key} is {shown(text)}; give seconds, from 0 to {MOST_SECONDS:,.0f}")
    return value


def _bytes(line: Line, key: str, text: str) -> int:
    value = _number(line, key, text)
    if not (0 <= value <= MOST_BYTES and value == int(value)):
        raise line.error(f"{key} is {shown(text)}; give a whole number of bytes, from 0 to {MOST_BYTES:,}")
    return int(value)


def count(line: Line, key: str, text: str) -> int:
    """A whole number from 1 on."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else 0
    if not 1 <= value <= MOST_COUNT:
        raise line.error(f"{key} is {shown(text)}; give a whole number from 1 to {MOST_COUNT:,}")
    return value


def _number(line: Line, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise line.error(f"{key} is {shown(text)}, not a number; write digits, such as 0.0125 or 1.25e-2") from None
    if not math.isfinite(value):
        raise line.error(f"{key} is {shown(text)}; give what was measured, a finite number")
    return value


def _kind(line: Line, key: str, text: str) -> str:
    if not text.isprintable():
        raise line.error(f"{key} {shown(text)} has characters that cannot be shown; write a word such as conv")
    return text


def _samples(line: Line, key: str, text: str) -> Samples:
    known = {samples.value: samples for samples in Samples}
    if text not in known:
        raise line.error(f"{key} is {shown(text)}; use one of {', '.join(known)}")
    return known[text]


def _cuts(line: Line, key: str, text: str) -> tuple[Cut, ...]:
    cuts = tuple(_one_cut(line, part) for part in text.split(","))
    names = [cut.axis for cut in cuts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise line.error(f"{key}: axis {shown(twice)} is given twice; keep one")
    return cuts


def _one_cut(line: Line, text: str) -> Cut:
    axis, *rest = text.split(":")
    if not axis or not axis.isprintable() or not 1 <= len(rest) <= 2:
        raise line.error(
            f"cut is {shown(text)}; write AXIS:UNITS or AXIS:UNITS:EFFECT@DIMENSION, such as out-features:4096 or "
            "experts:8:output@2"
        )
    units = count(line, f"cut {axis}: units", rest[0])
    if len(rest) == 2:
        return _effect(line, axis, units, rest[1])
    effect = default_effect(axis)
    if effect is None:
        raise line.error(
            f"cut {axis}: what cutting it does is not known; say {axis}:{units}:output (or input, or both)"
        )
    return Cut(axis, units, effect)


def _effect(line: Line, axis: str, units: int, text: str) -> Cut:
    word, at, dims = text.partition("@")
    effects = {effect.value: effect for effect in Effect}
    if word not in effects:
        raise line.error(f"cut {axis}: effect is {shown(word)}; use one of {', '.join(effects)}")
    takes, arrow, gives = dims.partition(">") if at else ("1", "", "")
    if arrow and effects[word] is not Effect.BOTH:
        raise line.error(f"cut {axis}: {word} cuts one dimension, found {shown(dims)}; write {word}@1")
    first = count(line, f"cut {axis}: dimension", takes)
    second = count(line, f"cut {axis}: dimension", gives) if arrow else first
    return {
        Effect.OUTPUT: Cut(axis, units, Effect.OUTPUT, gives=first),
        Effect.INPUT: Cut(axis, units, Effect.INPUT, takes=first),
        Effect.BOTH: Cut(axis, units, Effect.BOTH, first, second),
    }[effects[word]]


TIMES = {"batch": _Field(count), "forward-s": _Field(_seconds), "backward-s": _Field(_seconds)}
EDGE = {"activation-bytes": _Field(_bytes, required=False)}
LAYER = {
    "forward-s": _Field(_seconds),
    "backward-s": _Field(_seconds),
    "activation-bytes": _Field(_bytes),
    "parameter-bytes": _Field(_bytes),
    "saved-bytes": _Field(_bytes, required=False),
    "update-s": _Field(_seconds, required=False),
    "kind": _Field(_kind, required=False),
    "samples": _Field(_samples, required=False),
    "cut": _Field(_cuts, required=False),
}
_FIELDS = frozenset({*LAYER, *TIMES, *EDGE})
