"""One line on an error in a user's file: place, exception and text."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["trouble"]


def trouble(error: BaseException, folder: Path) -> str:
    """`model.py:12: ValueError: its text`; the line is the innermost one of a file in `folder`."""
    place = _place(error, folder)
    return f"{place}: {_words(error)}" if place else _words(error)


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}); keep that under __main__"
    text = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    words = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ImportError) and "relative import" in text:
        return f"{words}; name it as package.module:name instead of by file"
    return words


def _place(error: BaseException, folder: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_theirs(frame.filename, folder)]
    return f"{_shown(theirs[-1].filename)}:{theirs[-1].lineno}" if theirs else ""


def _is_theirs(filename: str, folder: Path) -> bool:
    """In the folder, but neither ours nor installed (an environment may live inside the folder)."""
    path, ours = Path(filename), Path(__file__).resolve().parent.parent
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    return path.is_relative_to(folder) and not any(path.is_relative_to(base) for base in (ours, *installed))


def _shown(filename: str) -> str:
    """Relative to the current folder where it lies below it."""
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
