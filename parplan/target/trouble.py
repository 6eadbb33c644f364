"""Errors of a user's file or a library: one line with place, exception and text."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from parplan.errors import TargetError
from parplan.graph.user_line import is_users

__all__ = ["guarded", "trouble"]

T = TypeVar("T")


def guarded(run: Callable[[], T], what: str, folder: Path) -> T:
    """The result of somebody's code; an exception of theirs (an exit too) is a TargetError: `what` failed, and where.

    `folder` is that of their files, as for `trouble`.
    """
    try:
        return run()
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"{what}: {trouble(error, folder)}") from error


def trouble(error: BaseException, folder: Path) -> str:
    """`model.py:12: ValueError: its text`; the line is the innermost one of a file in `folder`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: {_words(error)}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(folder) and is_users(frame.filename):
            return f"{_shown(frame.filename)}:{frame.lineno}: {_words(error)}"
    return _words(error)


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}); keep that under __main__"
    text = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    words = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, ImportError) and "relative import" in text:
        return f"{words}; name it as package.module:name instead of by file"
    return words


def _shown(filename: str) -> str:
    """Relative to the current folder where it lies below it."""
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
