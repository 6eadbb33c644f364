"""The profile store: measurements that outlive the process, shared by all of the user's processes.

Entries are kept by the conditions they were measured under and are only found under exactly those. An entry measured on
this machine is not replaced by an imported one. A store is for the thread that opened it; other threads and processes
open their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection, DatabaseError
from typing import Any

from parplan.cost_models.profile.records import Conditions, Entry, EntryGroup, LinkEntry, PartEntry, SessionProfile
from parplan.cost_models.profile.schema import CONDITIONS, LINKS, PARTS, EntryTable
from parplan.cost_models.profile.store_file import default_path, open_store, reported, transaction
from parplan.errors import ProfileError
from parplan.fields import read_fields

__all__ = ["Merged", "ProfileStore", "StoredProfile"]


@dataclass(frozen=True)
class Merged:
    """Result of an import: entries that are new, that replaced an older one, and that left the store as it was."""

    added: int = 0
    replaced: int = 0
    kept: int = 0

    def describe(self) -> str:
        """Words for a report: `12 entries added, 3 replaced by newer ones, 1 left as it was`."""
        left = "1 left as it was" if self.kept == 1 else f"{self.kept} left as they were"
        entries = "1 entry" if self.added == 1 else f"{self.added} entries"
        return f"{entries} added, {self.replaced} replaced by newer ones, {left}"


class ProfileStore:
    """The measurements in one SQLite file, which several processes and threads may have open.

    Args:
        path: the file; by default in PARPLAN_CACHE or the user's cache folder.
        read_only: never write; then the folder need not be writable, and a file that is not there is an empty store.

    Raises:
        ProfileError: the file is damaged, foreign, of another version of parplan, or cannot be opened; it is left as
            it was.

    Attributes:
        path: the file.
    """

    def __init__(self, path: str | Path | None = None, *, read_only: bool = False) -> None:
        self.path = Path(path) if path is not None else default_path()
        self.read_only = read_only
        self._connection = open_store(self.path, read_only=read_only)
        self._close = weakref.finalize(self, self._connection.close)

    def __enter__(self) -> ProfileStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; the store cannot be used any more."""
        self._close()

    def under(self, conditions: Conditions) -> StoredProfile:
        """The entries measured under exactly these conditions, to read and to add to."""
        return StoredProfile(self, conditions)

    def groups(self, conditions: Conditions | None = None) -> list[EntryGroup]:
        """All entries, or those under `conditions`, sorted: one moment's, whatever other processes write."""
        connection = self._connection
        with reported(self.path), transaction(connection, "DEFERRED"):
            names, found = _listed(field.name for field in CONDITIONS), [conditions] if conditions is not None else []
            if conditions is None:
                rows = connection.execute(f"SELECT {names} FROM conditions ORDER BY {names}").fetchall()
                with _damage():
                    every = (read_fields(dict(row), CONDITIONS, "conditions", ProfileError) for row in rows)
                    found = [Conditions(**values) for values in every]
            groups = [_group(connection, each) for each in found]
        return [group for group in groups if group.parts or group.links]

    def put(self, conditions: Conditions, entries: Iterable[PartEntry | LinkEntry]) -> None:
        """Add entries, or replace those with the same keys: all of them or none.

        Raises:
            ProfileError: a figure makes no sense; the file cannot be written.
        """
        with self._writing() as connection:
            for entry in entries:
                _put(connection, conditions, entry)

    def merge(self, groups: Sequence[EntryGroup]) -> Merged:
        """Add imported entries, all or none; a newer one replaces an older one, unless that was measured here.

        Raises:
            ProfileError: a figure makes no sense; the file cannot be written.
        """
        counts = {"added": 0, "replaced": 0, "kept": 0}
        with self._writing() as connection:
            for group in groups:
                known = {entry.key: entry for entry in _group(connection, group.conditions).entries}
                for entry in group.entries:
                    present = known.get(entry.key)
                    if present is not None and (not present.origin or _second(entry) <= _second(present)):
                        counts["kept"] += 1
                    else:
                        counts["added" if present is None else "replaced"] += 1
                        _put(connection, group.conditions, entry)
        return Merged(**counts)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.read_only:
            raise ProfileError(f"the profile store {self.path} was opened for reading only")
        with reported(self.path), transaction(self._connection):
            yield self._connection


class StoredProfile(SessionProfile):
    """The entries that a store has now under one set of conditions; what is put here is stored, too.

    Raises:
        ProfileError: the file is damaged or cannot be used.
    """

    def __init__(self, store: ProfileStore, conditions: Conditions) -> None:
        super().__init__(*store.groups(conditions))
        self._store, self._conditions = store, conditions

    def put(self, *entries: PartEntry | LinkEntry) -> None:
        """Add or replace entries, all or none: many at once are much faster than one by one."""
        self._store.put(self._conditions, entries)
        super().put(*entries)


def _second(entry: PartEntry | LinkEntry) -> str:
    """When it was measured, without the time zone, which is UTC however it is written: text that sorts by time."""
    return (entry.measurement.when if isinstance(entry, PartEntry) else entry.when)[:19]


def _group(connection: Connection, conditions: Conditions) -> EntryGroup:
    return EntryGroup(conditions, _select(connection, PARTS, conditions), _select(connection, LINKS, conditions))


def _select(connection: Connection, table: EntryTable[Entry], conditions: Conditions) -> tuple[Entry, ...]:
    """Entries under `conditions`, sorted by key."""
    values = vars(conditions)
    tests = " AND ".join(f'"{name}" = ?' for name in values)
    rows = connection.execute(
        f"SELECT {_listed(field.name for field in table.fields)} FROM {table.name} JOIN conditions "
        f'ON {table.name}."conditions" = conditions.id WHERE {tests} ORDER BY {_listed(table.key)}',
        tuple(values.values()),
    )
    with _damage():
        return tuple(table.entry(dict(row), table.word) for row in rows)


def _put(connection: Connection, conditions: Conditions, entry: PartEntry | LinkEntry) -> None:
    values = read_fields(vars(conditions), CONDITIONS, "conditions", ProfileError)
    table: EntryTable[Any] = PARTS if isinstance(entry, PartEntry) else LINKS
    row = table.row(entry)
    _insert(connection, "INSERT OR IGNORE INTO conditions", values)
    same = " AND ".join(f'"{name}" = ?' for name in values)
    number = connection.execute(f"SELECT id FROM conditions WHERE {same}", tuple(values.values())).fetchone()["id"]
    _insert(connection, f"INSERT OR REPLACE INTO {table.name}", {"conditions": number, **row})


def _insert(connection: Connection, words: str, values: dict[str, Any]) -> None:
    marks = ", ".join("?" * len(values))
    connection.execute(f"{words} ({_listed(values)}) VALUES ({marks})", tuple(values.values()))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@contextmanager
def _damage() -> Iterator[None]:
    """A value that was never written can only be damage to the file."""
    try:
        yield
    except ProfileError as error:
        raise DatabaseError(f"malformed {error}") from error
