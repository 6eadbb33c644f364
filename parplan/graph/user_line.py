"""The line of the user's own code, and the layer, that an exception or a call comes from, without frames of callers."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from torch import fx, nn

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


def failing_layer(error: BaseException, layers: Mapping[str, Sequence[fx.Node]]) -> tuple[str, str]:
    """The layer whose line of generated code raised, and the user's line that it stands for.

    Args:
        layers: the ops of every layer that the code is of.

    Returns:
        The layer, or the first and last one if none is known; the line, empty if it is not known.
    """
    ops = {node.name: (name, node) for name, nodes in layers.items() for node in nodes}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        made = (frame.line or "").partition("=")[0].strip()
        if frame.filename.startswith("<") and made in ops:
            name, node = ops[made]
            return name, code_line(str(node.meta.get("stack_trace") or ""))
    names = list(layers)
    return " .. ".join(dict.fromkeys((names[0], names[-1]))), ""


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
