"""What every field of a kept profile may hold: one table for the store's columns, the text's keys and all checks.

A figure that comes from a file is checked before it is believed, whether the file is the store's or somebody's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from math import isinf
from typing import Any, Generic, TypeVar

from parplan.cost_models.profile.records import Conditions, LinkEntry, PartEntry
from parplan.cost_models.sampling import Measurement
from parplan.errors import ProfileError

__all__ = ["CONDITIONS", "LINKS", "ORIGIN", "PARTS", "Field", "Group", "Kept", "Row", "Table", "checked"]

Row = Mapping[str, Any]
Entry = TypeVar("Entry", PartEntry, LinkEntry)

_MOST_SECONDS = 1e6  # eleven days: no part of a step takes that long
_MOST_AMOUNT = 1e30
_MOST_COUNT = 2**62  # SQLite's integers have 64 bits
_UNKNOWN_SPREAD = 1.0  # as sampling.Measurement has it


@dataclass(frozen=True)
class Field:
    """A column of the store and a key of the text: its SQL type, what it may hold, and that in words."""

    name: str
    sql: str
    expected: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Kept(Generic[Entry]):
    """An entry and where it came from: "" when it was measured here, else the name of a file or shipped profile."""

    entry: Entry
    origin: str = ""


@dataclass(frozen=True)
class Group:
    """Everything that was measured under one set of conditions."""

    conditions: Conditions
    parts: tuple[Kept[PartEntry], ...] = ()
    links: tuple[Kept[LinkEntry], ...] = ()


@dataclass(frozen=True)
class Table(Generic[Entry]):
    """One kind of entry: its fields, those that tell entries apart, and its way to a row of plain values and back."""

    name: str
    word: str
    fields: tuple[Field, ...]
    key: tuple[str, ...]
    to_row: Callable[[Entry], Row]
    from_row: Callable[[Row], Entry]

    def row(self, kept: Kept[Entry], where: str) -> Row:
        """The entry as checked plain values.

        Raises:
            ProfileError: a figure that no measurement gives (negative, not a number, beyond reason).
        """
        return checked({**self.to_row(kept.entry), "origin": kept.origin}, (*self.fields, ORIGIN), where)

    def kept(self, row: Row, where: str) -> Kept[Entry]:
        """The entry in `row`, checked.

        Raises:
            ProfileError: as `row`; or a field is missing or unknown.
        """
        values = checked(row, (*self.fields, ORIGIN), where)
        return Kept(self.from_row(values), values["origin"])

    def key_of(self, entry: Entry) -> tuple[Any, ...]:
        """What tells the entry apart under the same conditions; also the order of entries."""
        row = self.to_row(entry)
        return tuple(row[name] for name in self.key)

    def second_of(self, entry: Entry) -> str:
        """When it was measured, without the time zone, which is UTC however it is written: text that sorts by time."""
        return str(self.to_row(entry)["when"])[:19]


def checked(row: Row, expected: Sequence[Field], where: str) -> dict[str, Any]:
    """The values in the order of `expected`, whole numbers made floats where those belong.

    Raises:
        ProfileError: a field is missing, unknown, of a wrong type or out of bounds; names `where` and the field.
    """
    names = [field.name for field in expected]
    faults = [f"unknown field {name!r}" for name in sorted(set(row) - set(names))]
    faults += [f"missing field {name!r}" for name in names if name not in row]
    if faults:
        raise ProfileError(f"{where}: {', '.join(faults)}; the fields are {', '.join(names)}")
    for field in expected:
        if not field.accepts(row[field.name]):
            raise ProfileError(f"{where}: {field.name} is {_short(row[field.name])}; expected {field.expected}")
    return {
        field.name: float(row[field.name]) if field.sql.startswith("REAL") else row[field.name] for field in expected
    }


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > _MOST_COUNT:
        return "a whole number beyond reason"  # Python refuses to print the longest
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_text(value: Any) -> bool:
    """Text that SQLite and UTF-8 files keep as it is: no NUL, no half of a surrogate pair."""
    return isinstance(value, str) and not re.search("[\0\ud800-\udfff]", value)


def _is_when(value: Any) -> bool:
    if value == "":
        return True
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00)?", value, re.ASCII):
        return False
    try:
        return datetime.fromisoformat(value[:19]) is not None
    except ValueError:  # the 31st of February
        return False


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_COUNT


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most  # false for NaN and for infinity


def _text(name: str) -> Field:
    return Field(name, "TEXT NOT NULL", "text", _is_text)


def _name(name: str) -> Field:
    return Field(name, "TEXT NOT NULL", "text that is not empty", lambda value: _is_text(value) and value != "")


def _when(name: str) -> Field:
    return Field(name, "TEXT NOT NULL", "a time like 2025-01-31T12:00:00Z (UTC), or empty", _is_when)


def _count(name: str, least: int) -> Field:
    words = f"a whole number of at least {least}"
    return Field(name, "INTEGER NOT NULL", words, lambda value: _is_whole(value, least))


def _bytes_or_none(name: str) -> Field:
    words = "a whole number of bytes, or null where it was not measured"
    return Field(name, "INTEGER", words, lambda value: value is None or _is_whole(value, 0))


def _seconds(name: str) -> Field:
    return Field(
        name, "REAL NOT NULL", f"seconds from 0 to {_MOST_SECONDS:g}", lambda value: _is_number(value, _MOST_SECONDS)
    )


def _amount(name: str) -> Field:
    return Field(
        name, "REAL NOT NULL", f"a number from 0 to {_MOST_AMOUNT:g}", lambda value: _is_number(value, _MOST_AMOUNT)
    )


def _part_row(entry: PartEntry) -> Row:
    row = {**vars(entry), **vars(entry.measurement)}
    del row["measurement"]
    return _with_known_spread(row)


def _part_entry(row: Row) -> PartEntry:
    measured = {field.name for field in fields(Measurement)}
    measurement = Measurement(**{name: row[name] for name in measured})
    return PartEntry(**{f.name: row[f.name] for f in fields(PartEntry) if f.name in row}, measurement=measurement)


def _link_row(entry: LinkEntry) -> Row:
    return _with_known_spread(dict(vars(entry)))


def _link_entry(row: Row) -> LinkEntry:
    return LinkEntry(**{field.name: row[field.name] for field in fields(LinkEntry)})


def _with_known_spread(row: dict[str, Any]) -> Row:
    """The spread relative to a median of 0 s is infinite, which neither JSON nor a mean can hold: it is unknown."""
    return {**row, "spread": _UNKNOWN_SPREAD} if isinf(row["spread"]) else row


ORIGIN = _text("origin")
CONDITIONS = (_name("device"), _count("busy", 1), _name("torch"), _text("cuda"), _text("flags"))

_PART_FIELDS = (
    _text("signature"),
    _text("family"),
    _amount("flops"),
    _amount("nbytes"),
    _seconds("forward_s"),
    _seconds("backward_s"),
    _amount("spread"),
    _count("runs", 1),
    _seconds("reference_s"),
    _bytes_or_none("saved_bytes"),
    _bytes_or_none("peak_bytes"),
    _when("when"),
)
_LINK_FIELDS = (
    _name("backend"),
    _name("kind"),
    _count("group", 1),
    _count("nbytes", 0),
    _seconds("seconds"),
    _amount("spread"),
    _count("runs", 1),
    _seconds("reference_s"),
    _when("when"),
)

PARTS: Table[PartEntry] = Table("parts", "part", _PART_FIELDS, ("signature",), _part_row, _part_entry)
LINKS: Table[LinkEntry] = Table(
    "links", "link", _LINK_FIELDS, ("backend", "kind", "group", "nbytes"), _link_row, _link_entry
)
