"""The line of the user's own code that an exception comes from, without the frames of whoever called it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["is_users_file", "user_line"]

_OURS = Path(__file__).resolve().parent.parent


def user_line(error: BaseException) -> str:
    """`model.py:12: return self.fc(x)`; empty where no line is the user's (a container of torch's own layers).

    The innermost line that is not installed, not Python's and not ours.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def is_users_file(filename: str) -> bool:
    """Whether code is neither installed, nor Python's, nor ours."""
    path = Path(filename)
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    return not filename.startswith("<") and not any(path.is_relative_to(base) for base in (_OURS, *installed))
