"""Opens the SQLite file of a profile store: makes it, or says what is wrong with it.

A file that cannot be used is never changed: a damaged one may be the only copy, one of another version of parplan is
that version's, and one without parplan's mark belongs to another program. The rollback journal is used and not the
write-ahead log: a profile writes about once a second, home folders are often on network file systems, where the log
does not work, and a log cannot be read from a folder that cannot be written.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parplan.errors import ProfileError

__all__ = ["SCHEMA", "default_path", "open_store", "reported", "transaction"]

SCHEMA = 2
_MARK = 0x50_50_4C_4E  # "PPLN": the application id that SQLite keeps in the file's head
_BUSY_S = 60.0  # how long to wait for other processes' transactions, which take milliseconds

# profile/schema.py names and checks these columns. A change of them is a new schema.
_TABLES = f"""
PRAGMA application_id = {_MARK};
PRAGMA user_version = {SCHEMA};
CREATE TABLE conditions (
    id INTEGER PRIMARY KEY,
    "device" TEXT NOT NULL, "busy" INTEGER NOT NULL, "torch" TEXT NOT NULL, "cuda" TEXT NOT NULL, "flags" TEXT NOT NULL,
    UNIQUE ("device", "busy", "torch", "cuda", "flags"));
CREATE TABLE parts (
    "conditions" INTEGER NOT NULL, "signature" TEXT NOT NULL, "family" TEXT NOT NULL, "flops" REAL NOT NULL,
    "nbytes" REAL NOT NULL, "forward_s" REAL NOT NULL, "backward_s" REAL NOT NULL, "spread" REAL NOT NULL,
    "runs" INTEGER NOT NULL, "reference_s" REAL NOT NULL, "when" TEXT NOT NULL, "origin" TEXT NOT NULL,
    "gradients" TEXT NOT NULL, PRIMARY KEY ("conditions", "signature"));
CREATE TABLE links (
    "conditions" INTEGER NOT NULL, "backend" TEXT NOT NULL, "kind" TEXT NOT NULL, "group" INTEGER NOT NULL,
    "nbytes" INTEGER NOT NULL, "seconds" REAL NOT NULL, "spread" REAL NOT NULL, "runs" INTEGER NOT NULL,
    "reference_s" REAL NOT NULL, "when" TEXT NOT NULL, "origin" TEXT NOT NULL,
    PRIMARY KEY ("conditions", "backend", "kind", "group", "nbytes"))
"""

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


def default_path() -> Path:
    """The file of the user's profiles: in PARPLAN_CACHE, else parplan's folder in the user's cache folder.

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


def open_store(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection to the store in `path`, which is made where there is none.

    Args:
        read_only: the file is not written; where there is none, the connection is to an empty store in memory.

    Raises:
        ProfileError: the file is damaged, foreign, of another version of parplan, or cannot be used.
    """
    doing = f"look at {path}" if read_only else f"make {path.parent} for {path.name}"
    try:
        path.stat() if read_only else path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if read_only and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return _in_memory()
        raise ProfileError(f"cannot {doing}: {error.strerror}; {_ELSEWHERE[3:]}") from error
    with reported(path):
        connection = _connect(f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}")
        try:
            with transaction(connection, "DEFERRED"):  # one moment's look, as another process may be making them
                if _has_tables(connection, path):
                    return connection
            if not read_only:
                with transaction(connection):
                    if not _has_tables(connection, path):  # no other process was faster
                        _create(connection)
                return connection
        except BaseException:
            connection.close()
            raise
    connection.close()
    return _in_memory()


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into what they mean for the user of the store in `path`."""
    try:
        yield
    except sqlite3.Error as error:
        words = next((words for sign, words in _TROUBLES if sign in str(error)), f"cannot be used; {_ELSEWHERE[3:]}")
        raise ProfileError(f"the profile store {path} {words} ({error})") from error


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


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, _BUSY_S, 0, None, False, uri=True)
    connection.row_factory = sqlite3.Row
    return connection


def _in_memory() -> sqlite3.Connection:
    connection = _connect("file::memory:")
    _create(connection)
    return connection


def _create(connection: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";"):
        connection.execute(statement)


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is a store rather than a new, empty one.

    Raises:
        ProfileError: a file of something else, or of another schema.
        sqlite3.DatabaseError: it is damaged.
    """

    def number(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    mark, version = number("PRAGMA application_id"), number("PRAGMA user_version")
    if not mark and not version and not number("SELECT count(*) FROM sqlite_master"):
        return False
    if mark != _MARK:
        raise ProfileError(f"{path} is an SQLite file of something else; move it away or set PARPLAN_CACHE elsewhere")
    if version != SCHEMA:
        older = version < SCHEMA
        which, remedy = ("older", f"move it away, then {_MEASURE_AGAIN}") if older else ("newer", "upgrade parplan")
        raise ProfileError(
            f"{path} was written by a {which} parplan (schema {version}, this one's is {SCHEMA}); it was left as it "
            f"is: {remedy}, or set PARPLAN_CACHE to another folder"
        )
    if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(f"malformed: {' '.join(found.split())}")
    return True
