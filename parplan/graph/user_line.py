"""The line of the user's own code, and the layer, that an exception or a call comes from, without frames of callers."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from torch import nn

__all__ = ["calling_line", "code_line", "failing_layer", "failing_module", "is_users", "user_line"]

_OURS = Path(__file__).resolve().parent.parent


def user_line(error: BaseException) -> str:
    """`model.py:12: return self.fc(x)`; empty where no line is the user's (a container of torch's own layers).

    The innermost line that is not installed, not Python's and not ours.
    """
    return _innermost(traceback.extract_tb(error.__traceback__))


def failing_module(error: BaseException, model: nn.Module) -> str:
    """The dotted name of the innermost module of `model` whose code raised; empty for the model itself, or none."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


def failing_layer(error: BaseException, layers: Sequence[str], producer: Mapping[str, str]) -> str:
    """The layer whose line of generated code raised; the first and last of `layers`, which it is of, if none is known.

    Args:
        producer: the layer that makes a value, by the value's name in the code.
    """
    ends = " .. ".join(dict.fromkeys((layers[0], layers[-1])))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        made = (frame.line or "").partition("=")[0].strip()
        if frame.filename.startswith("<") and producer.get(made) in layers:
            return producer[made]
    return ends


def calling_line() -> str:
    """The user's line that is being run, in the form of `user_line`."""
    return _innermost(traceback.extract_stack())


def _innermost(stack: traceback.StackSummary) -> str:
    frames = [frame for frame in stack if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


@cache  # of every frame of a stack, many times a capture
def is_users(filename: str) -> bool:
    """Whether a file is neither installed, nor Python's, nor ours."""
    path = Path(filename)
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    return not filename.startswith("<") and not any(path.is_relative_to(base) for base in (_OURS, *installed))


def code_line(trace: str) -> str:
    """The same from the text of a stack trace, as exported nodes carry one; empty where no line is the user's."""
    lines = [line.strip() for line in trace.splitlines()]
    found = ""
    for number, line in enumerate(lines):
        place = _FRAME.match(line)
        if place and is_users(place[1]):
            found = f"{place[1]}:{place[2]}: {lines[number + 1] if number + 1 < len(lines) else ''}"
    return found


_FRAME = re.compile(r'File "(.+)", line (\d+)')
