"""The line of the user's own code, and the layer, that an exception or a call comes from, without frames of callers."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

from torch import fx, nn

__all__ = [
    "calling_line", "code_line", "failing_layer", "failing_module", "frame_line", "is_users", "library_line",
    "source_line", "user_line",
]  # fmt: skip

_OURS = Path(__file__).resolve().parent.parent
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # also of another environment on the path


def user_line(error: BaseException) -> str:
    """`model.py:12: return self.fc(x)`; empty where no line is the user's (a container of torch's own layers).

    The innermost line that is not installed, not Python's and not ours.
    """
    return _innermost(traceback.extract_tb(error.__traceback__))


def library_line(error: BaseException, model: nn.Module) -> str:
    """The innermost line of the packages that the classes of `model` are from, torch left out; empty without one.

    For models of an installed library, in whose tracebacks no line is the user's.
    """
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
            found = frame_line(frame, line)
    return found


def frame_line(frame: FrameType, line: int | None = None) -> str:
    """A line of the code of a frame, the one that it is at or another, in the form of `user_line`."""
    return source_line(frame.f_code.co_filename, line or frame.f_lineno)


def source_line(filename: str, number: int) -> str:
    """A line of a file in the form of `user_line`."""
    return f"{_shown(filename)}:{number}: {linecache.getline(filename, number).strip()}"


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
            return name, code_line(node)
    names = list(layers)
    return " .. ".join(dict.fromkeys((names[0], names[-1]))), ""


def calling_line() -> str:
    """The user's line that is being run, in the form of `user_line`."""
    return _innermost(traceback.extract_stack())


def _innermost(stack: traceback.StackSummary) -> str:
    frames = [frame for frame in stack if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _shown(filename: str) -> str:
    """The path of a file; of an installed one, from its package on."""
    parts = Path(filename).parts
    places = [i for i, part in enumerate(parts) if part in _INSTALLED]
    return str(Path(*parts[places[-1] + 1 :])) if places else filename


@cache  # of every frame of a stack, many times a capture
def is_users(filename: str) -> bool:
    """Whether a file is neither installed, nor Python's, nor ours."""
    path = Path(filename)
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    if filename.startswith("<") or _INSTALLED.intersection(path.parts):
        return False
    return not any(path.is_relative_to(base) for base in (_OURS, *installed))


def code_line(node: fx.Node, installed: bool = False) -> str:
    """The line that an exported node comes from, in the form of `user_line`, from the stack trace that it carries.

    Args:
        installed: where no line is the user's, take the innermost one; else that is empty.
    """
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    found, innermost = "", ""
    for number, line in enumerate(lines):
        place = _FRAME.match(line)
        if place:
            innermost = f"{_shown(place[1])}:{place[2]}: {lines[number + 1] if number + 1 < len(lines) else ''}"
            found = innermost if is_users(place[1]) else found
    return found or (innermost if installed else "")


_FRAME = re.compile(r'File "(.+)", line (\d+)')
