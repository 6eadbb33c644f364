"""Opens the SQLite file of a profile store: makes it, brings it up to date, or says what is wrong with it.

A file that cannot be used is never changed: a damaged one may be the only copy, a newer one belongs to a newer parplan,
and one without parplan's mark is somebody else's. The rollback journal is used and not the write-ahead log: a profile
writes about once a second, home folders are often on network file systems, where the log does not work, and a log
cannot be read from a folder that cannot be written.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from parplan.cost_models.profile.fields import CONDITIONS, LINKS, ORIGIN, PARTS, Field, Table
from parplan.cost_models.profile.records import LinkEntry, PartEntry
from parplan.errors import ProfileError

__all__ = ["SCHEMA", "Opened", "default_path", "open_to_read", "open_to_write", "reported", "snapshot", "transaction"]

SCHEMA = 1
_MARK = 0x50_50_4C_4E  # "PPLN": the application id that SQLite keeps in the file's head
_BUSY_S = 60.0  # how long to wait for other processes' transactions, which take milliseconds

# What brings a file of schema n to schema n + 1, statement by statement.
_MIGRATIONS: Mapping[int, Sequence[str]] = {}

_MEASURE_AGAIN = "import a saved export (`parplan profile --import FILE`) or measure again (`parplan profile`)"
_ELSEWHERE = "or set PARPLAN_CACHE to a folder on a local disk that you may write"

_DAMAGED = f"is damaged; it was left as it is: move it away, then {_MEASURE_AGAIN}"

# Words in SQLite's message: what that means, and what to do. The first that fits.
_TROUBLES: tuple[tuple[str, str], ...] = (
    ("not a database", f"is damaged or no profile store; it was left as it is: move it away, then {_MEASURE_AGAIN}"),
    ("malformed", _DAMAGED),
    ("decode to UTF-8", _DAMAGED),
    ("no such", _DAMAGED),
    ("has no column", _DAMAGED),
    ("unable to open", f"cannot be opened; see that its folder can be written, {_ELSEWHERE}"),
    ("readonly", f"cannot be written; see that it and its folder can be, {_ELSEWHERE}"),
    ("full", f"cannot grow, the disk is full; make room, {_ELSEWHERE}"),
    ("locked", f"is in use by another process for more than {_BUSY_S:g} s; wait for that to end, {_ELSEWHERE}"),
    ("I/O error", f"cannot be read or written; see to the disk, {_ELSEWHERE}"),
)  # fmt: skip


class _State(Enum):
    EMPTY = "no tables yet"
    OLD = "an older schema"
    CURRENT = "this schema"


@dataclass(frozen=True)
class Opened:
    """A connection that is ready for use, and what the user has to be told about the file."""

    connection: sqlite3.Connection
    notes: tuple[str, ...] = ()


def default_path() -> Path:
    """Where the user's profiles are: PARPLAN_CACHE, else parplan's folder in the user's cache folder.

    Raises:
        ProfileError: there is no home folder.
    """
    given, cache = os.environ.get("PARPLAN_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if given:
            return Path(given).expanduser() / "profiles.sqlite"
        # relative ones are to be ignored, says the XDG base directory specification
        base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise ProfileError(f"no home folder to keep profiles in ({error}); set PARPLAN_CACHE to a folder") from error
    return base / "parplan" / "profiles.sqlite"


def open_to_read(path: Path) -> Opened:
    """The store in `path`, which is not written; an empty one in memory where there is no file, or an older schema.

    Raises:
        ProfileError: the file is damaged, foreign, of a newer parplan, or cannot be read.
    """
    if not _is_there(path):
        return Opened(_in_memory())
    with reported(path):
        connection = _connect(path, "ro")
        with _closed_on_error(connection):
            state = _state(connection, path)
        if state is _State.CURRENT:
            return Opened(connection)
        version = _pragma(connection, "user_version")
        connection.close()
    older = f"{path} has the layout of an older parplan (schema {version}, this one's is {SCHEMA}): not used"
    return Opened(_in_memory(), (f"{older}; measure again (`parplan profile`)",) if state is _State.OLD else ())


def open_to_write(path: Path) -> Opened:
    """The store in `path`, made where there is none, brought up to date where it is older.

    The entries of an older one that cannot be brought up to date are moved to a file beside it, and a note says so.

    Raises:
        ProfileError: as `open_to_read`; or the place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(f"cannot make {path.parent} for {path.name}: {error.strerror}; {_ELSEWHERE[3:]}") from error
    with reported(path):
        connection = _connect(path, "rwc")
        with _closed_on_error(connection):
            current = _state(connection, path) is _State.CURRENT
            return Opened(connection, () if current else _bring_up(connection, path))


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into what they mean for the user of the store in `path`."""
    try:
        yield
    except sqlite3.Error as error:
        words = next((words for sign, words in _TROUBLES if sign in str(error)), f"cannot be used; {_ELSEWHERE[3:]}")
        raise ProfileError(f"the profile store {path} {words} ({error})") from error


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is read inside is of one moment."""
    with transaction(connection, "DEFERRED"):
        yield


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """All that is written inside, or nothing: whatever ends it, an interrupt or a full disk too."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite rolls back by itself when the disk is full
            connection.execute("ROLLBACK")
        raise


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return _configured(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", _BUSY_S, 0, None, False, uri=True))


def _in_memory() -> sqlite3.Connection:
    connection = _configured(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    _create(connection)
    return connection


def _configured(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _state(connection: sqlite3.Connection, path: Path) -> _State:
    mark, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if not mark and not version and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return _State.EMPTY
    if mark != _MARK:
        raise ProfileError(f"{path} is an SQLite file of something else; move it away or set PARPLAN_CACHE elsewhere")
    if version > SCHEMA:
        raise ProfileError(
            f"{path} was written by a newer parplan (schema {version}, this one's is {SCHEMA}); "
            "upgrade parplan, or set PARPLAN_CACHE to another folder"
        )
    if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(f"malformed: {' '.join(found.split())}")
    return _State.CURRENT if version == SCHEMA else _State.OLD


def _bring_up(connection: sqlite3.Connection, path: Path) -> tuple[str, ...]:
    """Make the tables, or migrate them, or set them aside, unless another process just did; what is to be told."""
    with transaction(connection):
        state, version = _state(connection, path), _pragma(connection, "user_version")
        if state is _State.CURRENT:
            return ()
        if state is _State.OLD and all(older in _MIGRATIONS for older in range(version, SCHEMA)):
            for statement in (s for older in range(version, SCHEMA) for s in _MIGRATIONS[older]):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            return ()
        notes = _set_aside(connection, path, version) if state is _State.OLD else ()
        _create(connection)
    return notes


def _set_aside(connection: sqlite3.Connection, path: Path, version: int) -> tuple[str, ...]:
    """Copy everything to a file beside and drop it here, in the caller's transaction.

    The file itself is not moved: who has it open would take the journal of the new one for its own.
    """
    names = (path.with_name(f"{path.name}.schema{version}{end}") for end in ("", *(f".{n}" for n in range(1, 1000))))
    target = next(name for name in names if not name.exists())
    reader, writer = _connect(path, "ro"), _connect(target, "rwc")
    try:
        reader.backup(writer)
    finally:
        reader.close()
        writer.close()
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    for (name,) in connection.execute(tables).fetchall():
        connection.execute(f'DROP TABLE "{name}"')
    return (
        f"{path} had the layout of an older parplan (schema {version}, this one's is {SCHEMA}); what it held was "
        f"moved to {target}; {_MEASURE_AGAIN}",
    )


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ProfileError(f"cannot look at {path}: {error.strerror}; {_ELSEWHERE[3:]}") from error
    return True


def _create(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA application_id = {_MARK}")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    names = ", ".join(f'"{field.name}"' for field in CONDITIONS)
    connection.execute(f"CREATE TABLE conditions (id INTEGER PRIMARY KEY, {_columns(CONDITIONS)}, UNIQUE ({names}))")
    for table in (PARTS, LINKS):
        connection.execute(_table_sql(table))
    connection.execute('CREATE INDEX families ON parts ("conditions", "family")')


def _table_sql(table: Table[PartEntry] | Table[LinkEntry]) -> str:
    key = ", ".join(f'"{name}"' for name in ("conditions", *table.key))
    columns = _columns((*table.fields, ORIGIN))
    return f'CREATE TABLE {table.name} ("conditions" INTEGER NOT NULL, {columns}, PRIMARY KEY ({key}))'


def _columns(fields: Sequence[Field]) -> str:
    return ", ".join(f'"{field.name}" {field.sql}' for field in fields)
