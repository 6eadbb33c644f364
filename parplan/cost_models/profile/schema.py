"""Fields of stored measurements: the columns of the profile store, the keys of an exported profile, and their checks.

A figure that comes from a file is checked before it is used, whether the file is the store's or an exported text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from math import isinf
from typing import Any, Generic

from parplan.cost_models.profile.records import Entry, LinkEntry, PartEntry
from parplan.cost_models.sampling import Measurement
from parplan.errors import ProfileError
from parplan.fields import Field, count, number, read_fields, text

__all__ = ["CONDITIONS", "LINKS", "PARTS", "EntryTable"]

_CHARACTER = "[^\0\ud800-\udfff]"  # what SQLite and UTF-8 files keep as it is: no NUL, no half of a surrogate pair
_UNKNOWN_SPREAD = 1.0  # as sampling.Measurement has it


@dataclass(frozen=True)
class EntryTable(Generic[Entry]):
    """One kind of entry: its name, its fields and those that tell entries apart, and how a row becomes an entry."""

    name: str
    word: str
    fields: Sequence[Field]
    key: tuple[str, ...]
    make: Callable[[dict[str, Any]], Entry]

    def row(self, entry: Entry) -> dict[str, Any]:
        """The entry as checked plain values, in the order of `fields`.

        Raises:
            ProfileError: a figure that no measurement gives (negative, not a number, beyond reason).
        """
        row = dict(vars(entry))
        if isinstance(entry, PartEntry):
            row |= vars(row.pop("measurement"))
            row["gradients"] = "".join("g" if needed else "-" for needed in entry.gradients)
        if isinf(row["spread"]):  # relative to a median of 0 s
            row["spread"] = _UNKNOWN_SPREAD
        return read_fields(row, self.fields, f"{self.word} {' '.join(map(str, entry.key))[:80]!r}", ProfileError)

    def entry(self, row: Mapping[str, Any], where: str) -> Entry:
        """The entry in `row`, checked.

        Raises:
            ProfileError: a field is missing, unknown, of a wrong type or out of range.
        """
        return self.make(read_fields(row, self.fields, where, ProfileError))


def _part(row: dict[str, Any]) -> PartEntry:
    figures = {field.name: row.pop(field.name) for field in fields(Measurement)}
    gradients = tuple(mark == "g" for mark in row.pop("gradients", ""))
    return PartEntry(**row, measurement=Measurement(**figures), gradients=gradients)


_name = partial(text, pattern=f"{_CHARACTER}+", expected="text that is not empty")
_text = partial(text, pattern=f"{_CHARACTER}*")
_seconds = partial(number, least=0, most=1e6, meaning="seconds")  # eleven days: no part of a step takes that long
_amount = partial(number, least=0, most=1e30)


def _read_time(value: Any) -> str:
    if value != "":
        datetime.fromisoformat(_TIME.read(value)[:19])  # refuses the 31st of February
    return str(value)


_TIME = text("when", r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|\+00:00)?")
_WHEN = Field("when", "a time like 2025-01-31T12:00:00Z (UTC), or empty", _read_time)
CONDITIONS = (_name("device"), count("busy"), _name("torch"), _text("cuda"), _text("flags"))
_MEASURED = (_amount("spread"), count("runs"), _seconds("reference_s"))

PARTS = EntryTable(
    "parts",
    "part",
    (
        _text("signature"),
        _text("family"),
        _amount("flops"),
        _amount("nbytes"),
        _seconds("forward_s"),
        _seconds("backward_s"),
        *_MEASURED,
        _WHEN,
        _text("origin").optional(),
        text("gradients", "[g-]*", 'a "g" or "-" for each operand').optional(),
    ),
    ("signature",),
    _part,
)
LINKS = EntryTable(
    "links",
    "link",
    (
        _name("backend"),
        _name("kind"),
        count("group"),
        count("nbytes", 0),
        _seconds("seconds"),
        *_MEASURED,
        _WHEN,
        _text("origin").optional(),
    ),
    ("backend", "kind", "group", "nbytes"),
    lambda row: LinkEntry(**row),
)
