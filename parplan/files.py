"""Files that are whole or as they were: written beside their place, then moved there in one step; their checksums."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from parplan.errors import CheckpointError, ParplanError

if sys.platform != "win32":
    import fcntl

__all__ = ["check_writable", "checked_digest", "replacing", "write_digest", "write_files"]

MARK = b"\nparplan checkpoint 1 sha256 "
TRAILER_BYTES = len(MARK) + 2 * hashlib.sha256().digest_size + 1
CHUNK_BYTES = 1 << 22


def write_digest(file: BinaryIO) -> None:
    """Append a line with the SHA-256 of all that a file has."""
    digest = _digest(file, file.seek(0, os.SEEK_END))
    file.write(MARK + digest.encode() + b"\n")


def checked_digest(file: BinaryIO, name: object) -> str | None:
    """The SHA-256 that a file ends with, of all before it; None where it has none.

    Raises:
        CheckpointError: it is that of something else.
    """
    size = file.seek(0, os.SEEK_END) - TRAILER_BYTES
    file.seek(max(size, 0))
    trailer = file.read()
    if not trailer.startswith(MARK):
        return None
    digest, written = _digest(file, size), trailer[len(MARK) : -1].decode("ascii", "replace")
    if (written, trailer[-1:]) != (digest, b"\n"):
        raise CheckpointError(
            f"{name} is damaged: its SHA-256 is {digest}, and was {written} when it was written; take an older "
            "checkpoint"
        )
    return digest


def _digest(file: BinaryIO, size: int) -> str:
    """SHA-256 of the first `size` bytes."""
    digest = hashlib.sha256()
    file.seek(0)
    while size and (chunk := file.read(min(size, CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def check_writable(path: str, option: str) -> None:
    """Refuse a place that cannot be written, before the work that would be lost.

    Raises:
        ParplanError: a folder, or no folder there, or not allowed.
    """
    if not path:
        raise ParplanError(f"{option}: the name of the file is empty; name one")
    place = Path(os.path.realpath(path))
    if place.is_dir():
        raise ParplanError(f"{option} {path}: that is a folder; name a file in it")
    if not place.parent.is_dir():
        raise ParplanError(f"{option} {path}: there is no folder {place.parent}; make it first")
    if not os.access(place if _is_special(place) else place.parent, os.W_OK):
        raise ParplanError(f"{option} {path}: writing there is not allowed; choose another place")


def write_files(texts: Mapping[str, str]) -> None:
    """Write each text to its path; no file is touched before all are on disk beside their places.

    Raises:
        ParplanError: the disk is full, a folder is gone.
    """
    path = ""
    try:
        with contextlib.ExitStack() as stack:
            for path, text in texts.items():
                place = Path(os.path.realpath(path))
                if _is_special(place):
                    place.write_text(text, encoding="utf-8")
                    continue
                file = stack.enter_context(replacing(place))
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise ParplanError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` once the block has ended and all of it is on the disk.

    An error leaves the old file, and so does a killed process; the part of a file it leaves is removed by the next one.
    """
    place = Path(os.path.realpath(path))
    if _is_special(place):
        raise OSError(None, "there is a folder, a pipe or a device of that name")
    # Parts of files that killed processes left; a process that still writes holds a lock on its own.
    for part in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 32}.tmp"):
        with contextlib.suppress(OSError), part.open("rb") as left:
            if _lock(left):
                part.unlink()
    beside = place.with_name(f".{place.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("x+b") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())  # so that a crash cannot leave the new name with nothing in it
            if place.exists():
                shutil.copymode(place, beside)
            os.replace(beside, place)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _lock(file: BinaryIO) -> bool:
    """Whether the file is locked by this process now; always False where the system has no such locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_special(place: Path) -> bool:
    """A pipe, a device or a folder: there is nothing to replace."""
    return place.exists() and not place.is_file()
