"""The profile store: measurements that outlive the process, shared by all of the user's processes.

Entries are kept by the conditions they were made in and are only ever found under exactly those. What was measured
here is not overwritten by what somebody else measured. One connection serves all threads of a process, in turns.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection
from types import TracebackType
from typing import Any, TypeVar

from parplan.cost_models.profile import store_rows as rows
from parplan.cost_models.profile.fields import LINKS, PARTS, Group, Kept, Table
from parplan.cost_models.profile.mismatches import Summary, strangers
from parplan.cost_models.profile.records import Conditions, LinkEntry, PartEntry
from parplan.cost_models.profile.store_file import (
    Opened,
    default_path,
    open_to_read,
    open_to_write,
    reported,
    snapshot,
    transaction,
)
from parplan.cost_models.profile.store_rows import Merged
from parplan.cost_models.sampling import Measurement
from parplan.errors import ProfileError

__all__ = ["Merged", "ProfileStore", "StoredProfile", "Summary"]

Entry = TypeVar("Entry", PartEntry, LinkEntry)


class ProfileStore:
    """The measurements in one SQLite file; safe with several processes and threads, and after a fork.

    Args:
        path: the file; by default in PARPLAN_CACHE or the user's cache folder.
        read_only: never write; then the folder need not be writable, and a file that is not there is an empty store.

    Raises:
        ProfileError: the file is damaged, foreign, of a newer parplan, or cannot be opened; it is left as it was.

    Attributes:
        path: the file.
        notes: what the user has to be told about the file (an older one was set aside).
    """

    def __init__(self, path: str | Path | None = None, *, read_only: bool = False) -> None:
        self.path = Path(path) if path is not None else default_path()
        self.read_only = read_only
        self.notes = self._open().notes

    def __enter__(self) -> ProfileStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; the store cannot be used any more."""
        self._close()

    def under(self, conditions: Conditions) -> StoredProfile:
        """What was measured under exactly these conditions, to read and to add to."""
        return StoredProfile(self, conditions)

    def conditions(self) -> list[Summary]:
        """Under which conditions how much was measured, and when; sorted."""
        with self._using() as connection:
            return rows.summaries(connection)

    def strangers(self, conditions: Conditions) -> list[str]:
        """Sentences on what is here and was not used because it was measured under other conditions.

        The store's own notes come first.
        """
        return [*self.notes, *strangers(self.conditions(), conditions)]

    def groups(self, conditions: Conditions | None = None) -> list[Group]:
        """All entries, or those under `conditions`, sorted: one moment's, whatever other processes write."""
        with self._using() as connection, snapshot(connection):
            return rows.all_groups(connection, conditions)

    def find(self, table: Table[Entry], conditions: Conditions, **equal: Any) -> tuple[Kept[Entry], ...]:
        """Entries of a table under `conditions` whose fields are as given, sorted by key."""
        with self._using() as connection:
            return rows.select(connection, table, conditions, **equal)

    def put(self, group: Group) -> None:
        """Add the entries of `group`, or replace those with the same keys: all of them or none.

        Raises:
            ProfileError: a figure makes no sense; the file cannot be written.
        """
        with self._writing() as connection:
            rows.put(connection, group)

    def merge(self, groups: Sequence[Group]) -> Merged:
        """Add entries measured elsewhere, all or none; a newer one replaces an older one, unless that is from here.

        Raises:
            ProfileError: a figure makes no sense; the file cannot be written.
        """
        with self._writing() as connection:
            return rows.merge(connection, groups)

    def _open(self) -> Opened:
        opened = open_to_read(self.path) if self.read_only else open_to_write(self.path)
        self._connection, self._lock, self._process = opened.connection, threading.Lock(), os.getpid()
        self._close: Callable[[], object] = weakref.finalize(self, opened.connection.close)
        return opened

    @contextmanager
    def _using(self) -> Iterator[Connection]:
        """The connection for one thread at a time; a process that was forked off opens its own."""
        if self._process != os.getpid():
            _LEFT_TO_THE_PARENT.append(self._connection)
            self._open()
        with self._lock, reported(self.path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.read_only:
            raise ProfileError(f"the profile store {self.path} was opened for reading only")
        with self._using() as connection, transaction(connection):
            yield connection


# Connections from before a fork: SQLite wants them neither used nor closed by the child.
_LEFT_TO_THE_PARENT: list[Connection] = []


class StoredProfile:
    """The entries of a store made under one set of conditions; a `Profile`.

    All methods raise ProfileError when the file is damaged or cannot be used.
    """

    def __init__(self, store: ProfileStore, conditions: Conditions) -> None:
        self.store = store
        self.conditions = conditions

    def get(self, signature: str) -> Measurement | None:
        """The entry of a part, or None."""
        found = self._part(signature)
        return found.entry.measurement if found is not None else None

    def origin(self, signature: str) -> str | None:
        """Where the entry came from: "" when it was measured here, else a name; None where there is no entry."""
        found = self._part(signature)
        return found.origin if found is not None else None

    def put(self, entry: PartEntry) -> None:
        """Add or replace an entry."""
        self.put_all([entry])

    def put_all(self, parts: Iterable[PartEntry], links: Iterable[LinkEntry] = ()) -> None:
        """Add or replace many at once, all or none: much faster than one by one."""
        kept_links = tuple(Kept(link) for link in links)
        self.store.put(Group(self.conditions, tuple(Kept(part) for part in parts), kept_links))

    def family(self, family: str) -> Sequence[PartEntry]:
        """All entries of an op class, sorted by signature."""
        return [kept.entry for kept in self.store.find(PARTS, self.conditions, family=family)]

    def all(self) -> Sequence[PartEntry]:
        """All entries of parts, sorted by signature."""
        return [kept.entry for kept in self.store.find(PARTS, self.conditions)]

    def put_link(self, entry: LinkEntry) -> None:
        """Add or replace a measured communication (same backend, kind, group and bytes)."""
        self.put_all((), [entry])

    def links(self, backend: str) -> Sequence[LinkEntry]:
        """All communications measured with `backend`, sorted by kind, group and bytes."""
        return [kept.entry for kept in self.store.find(LINKS, self.conditions, backend=backend)]

    def _part(self, signature: str) -> Kept[PartEntry] | None:
        return next(iter(self.store.find(PARTS, self.conditions, signature=signature)), None)
