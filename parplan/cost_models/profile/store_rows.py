"""Reads and writes the rows of a profile store's tables; the caller holds the connection and any transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from parplan.cost_models.profile.fields import CONDITIONS, LINKS, ORIGIN, PARTS, Group, Kept, Table, checked
from parplan.cost_models.profile.mismatches import Summary
from parplan.cost_models.profile.records import Conditions, LinkEntry, PartEntry
from parplan.errors import ProfileError

__all__ = ["Merged", "all_groups", "merge", "put", "select", "summaries"]

Entry = TypeVar("Entry", PartEntry, LinkEntry)

_SAME_CONDITIONS = " AND ".join(f'c."{field.name}" = ?' for field in CONDITIONS)

_SUMMARIES = (
    "SELECT c.*, sum(parts) AS parts, sum(links) AS links, min(nullif(first, '')) AS first, max(last) AS last FROM ("
    + " UNION ALL ".join(
        f'SELECT "conditions", {counts}, min(nullif("when", \'\')) AS first, max("when") AS last '
        f'FROM {table} GROUP BY "conditions"'
        for table, counts in (("parts", "count(*) AS parts, 0 AS links"), ("links", "0 AS parts, count(*) AS links"))
    )
    + ") e JOIN conditions c ON c.id = e.conditions GROUP BY c.id ORDER BY "
    + ", ".join(f'c."{field.name}"' for field in CONDITIONS)
)


@dataclass(frozen=True)
class Merged:
    """What an import did: entries that are new, that took an older one's place, and that left the store as it was."""

    added: int = 0
    replaced: int = 0
    kept: int = 0

    def describe(self) -> str:
        """Words for a report: `12 entries added, 3 replaced by newer ones, 1 left as it was`."""
        left = "1 left as it was" if self.kept == 1 else f"{self.kept} left as they were"
        entries = "1 entry" if self.added == 1 else f"{self.added} entries"
        return f"{entries} added, {self.replaced} replaced by newer ones, {left}"


def select(
    connection: sqlite3.Connection, table: Table[Entry], conditions: Conditions, **equal: Any
) -> tuple[Kept[Entry], ...]:
    """Entries under `conditions` whose fields are as given in `equal`, sorted by key.

    Raises:
        sqlite3.DatabaseError: also for a row that no parplan wrote.
    """
    columns = ", ".join(f'e."{field.name}"' for field in (*table.fields, ORIGIN))
    tests = "".join(f' AND e."{name}" = ?' for name in equal)
    order = ", ".join(f'e."{name}"' for name in table.key)
    rows = connection.execute(
        f'SELECT {columns} FROM {table.name} e JOIN conditions c ON e."conditions" = c.id '
        f"WHERE {_SAME_CONDITIONS}{tests} ORDER BY {order}",
        (*vars(conditions).values(), *equal.values()),
    )
    with _damage():
        return tuple(table.kept(dict(row), table.word) for row in rows)


def all_groups(connection: sqlite3.Connection, conditions: Conditions | None = None) -> list[Group]:
    """All entries, or those under `conditions`, sorted by conditions and keys."""
    wanted = [s.conditions for s in summaries(connection) if conditions is None or s.conditions == conditions]
    return [Group(each, select(connection, PARTS, each), select(connection, LINKS, each)) for each in wanted]


def summaries(connection: sqlite3.Connection) -> list[Summary]:
    """How much there is under which conditions, sorted by these."""
    with _damage():
        return [_summary(row) for row in connection.execute(_SUMMARIES)]


def put(connection: sqlite3.Connection, group: Group) -> None:
    """Add or replace all entries of `group`.

    Raises:
        ProfileError: a figure makes no sense.
    """
    number = _number(connection, group.conditions)
    for part in group.parts:
        _put(connection, PARTS, number, part)
    for link in group.links:
        _put(connection, LINKS, number, link)


def merge(connection: sqlite3.Connection, groups: Sequence[Group]) -> Merged:
    """Add entries measured elsewhere; a newer one replaces an older one, unless that was measured here.

    Raises:
        ProfileError: a figure makes no sense.
    """
    counts = {"added": 0, "replaced": 0, "kept": 0}
    for group in groups:
        number = _number(connection, group.conditions)
        for part in group.parts:
            counts[_merge(connection, PARTS, number, group.conditions, part)] += 1
        for link in group.links:
            counts[_merge(connection, LINKS, number, group.conditions, link)] += 1
    return Merged(**counts)


def _merge(
    connection: sqlite3.Connection, table: Table[Entry], number: int, conditions: Conditions, kept: Kept[Entry]
) -> str:
    key = dict(zip(table.key, table.key_of(kept.entry), strict=True))
    present = select(connection, table, conditions, **key)
    if present and (not present[0].origin or table.second_of(kept.entry) <= table.second_of(present[0].entry)):
        return "kept"
    _put(connection, table, number, kept)
    return "replaced" if present else "added"


def _put(connection: sqlite3.Connection, table: Table[Entry], number: int, kept: Kept[Entry]) -> None:
    row = table.row(kept, f"{table.word} {' '.join(map(str, table.key_of(kept.entry)))[:80]!r}")
    _insert(connection, f"INSERT OR REPLACE INTO {table.name}", {"conditions": number, **row})


def _number(connection: sqlite3.Connection, conditions: Conditions) -> int:
    values = checked(vars(conditions), CONDITIONS, "conditions")
    _insert(connection, "INSERT OR IGNORE INTO conditions", values)
    row = connection.execute(f"SELECT id FROM conditions c WHERE {_SAME_CONDITIONS}", tuple(values.values()))
    return int(row.fetchone()["id"])


def _insert(connection: sqlite3.Connection, words: str, values: dict[str, Any]) -> None:
    names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
    connection.execute(f"{words} ({names}) VALUES ({marks})", tuple(values.values()))


def _summary(row: sqlite3.Row) -> Summary:
    values = checked({field.name: row[field.name] for field in CONDITIONS}, CONDITIONS, "conditions")
    return Summary(Conditions(**values), row["parts"], row["links"], row["first"] or "", row["last"] or "")


@contextmanager
def _damage() -> Iterator[None]:
    """A value that was never written can only be damage to the file."""
    try:
        yield
    except ProfileError as error:
        raise sqlite3.DatabaseError(f"malformed {error}") from error
