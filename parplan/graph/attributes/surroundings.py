"""Modes of torch, host reads of tensors and random generators, watched while a model is captured.

A branch on `torch.is_grad_enabled()` is taken once, so the mode belongs to what a captured graph serves. Random numbers
of Python or NumPy would be drawn once and stay: they are refused.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from threading import get_ident
from types import FrameType, FunctionType
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from parplan.compat import HOOK_FIELDS, without_modes
from parplan.errors import CaptureError
from parplan.graph.attributes.constant_values import constant_value
from parplan.graph.attributes.held_values import MISSING
from parplan.graph.attributes.input_checks import InputCheck, asserted, input_check, model_frame
from parplan.graph.user_line import calling_line, frame_line, is_users

__all__ = [
    "MODES", "OF_MODULES", "HostReads", "RandomNumbers", "callers_modes", "compiling_branches", "random_states",
    "seen_attributes", "seen_modes",
]  # fmt: skip

MODES: dict[str, Callable[[], bool]] = {
    name: getattr(torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled")
}
_OUTSIDE: ContextVar[dict[str, bool] | None] = ContextVar("modes of the caller", default=None)
_TORCH, _PARPLAN = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])


# What modules keep for themselves. Modes and hooks are watched elsewhere, parameters, buffers and submodules too.
OF_MODULES = frozenset((
    *HOOK_FIELDS, "__class__", "__dict__", "training", "_parameters", "_buffers", "_modules", "_state_dict_hooks",
    "_non_persistent_buffers_set", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_state_dict_pre_hooks", "_compiled_call_impl", "_version", "call_super_init", "dump_patches",
    "_flat_weights", "_flat_weight_refs",
))  # fmt: skip


class AttributeReads(Protocol):
    """Told of what a forward reads from modules; `place` has the attributes of one."""

    def read(self, place: Any, key: str, value: Any, module: nn.Module | None = None) -> None:
        """One of its own, MISSING where it has none of that name."""

    def read_all(self, place: Any) -> None:
        """All of its own."""

    def read_of_class(self, place: Any, kind: type, key: str) -> None:
        """One that a class has."""

    def is_part(self, place: Any) -> bool:
        """Whether the module is a part of the model."""


@contextmanager
def seen_attributes(reads: AttributeReads) -> Iterator[None]:
    """While it lasts, `reads` is told which attributes of modules are read."""
    thread = get_ident()
    # On the base class, so that `type(module)` and `super()` are what they are; sub-classes inherit it.
    plain = nn.Module.__getattribute__

    def read(self: nn.Module, name: str) -> Any:
        place = object.__getattribute__(self, "__dict__")
        if get_ident() != thread:
            return plain(self, name)
        if name in OF_MODULES:
            if name == "__dict__" and is_users(sys._getframe(1).f_code.co_filename):
                reads.read_all(place)
            if name == "training" and not reads.is_part(place):
                reads.read(place, name, place.get(name), self)
            return plain(self, name)
        if name in place:
            reads.read(place, name, place[name], self)
            return plain(self, name)
        try:
            value = plain(self, name)
        except AttributeError:
            held = [place[group] for group in ("_parameters", "_buffers", "_modules") if name in place.get(group, ())]
            if not held or not reads.is_part(place):
                reads.read(place, name, held[0][name] if held else MISSING, self)
            raise
        kind = next((kind for kind in type(self).__mro__ if name in vars(kind)), None)
        if kind is not None and kind is not object and kind is not nn.Module:
            reads.read_of_class(place, kind, name)
        return value

    with mock.patch.object(nn.Module, "__getattribute__", read):
        yield


@contextmanager
def callers_modes() -> Iterator[None]:
    """Captures inside see the modes that hold on entry, whatever modes the capture itself runs in."""
    token = _OUTSIDE.set({name: read() for name, read in MODES.items()})
    try:
        yield
    finally:
        _OUTSIDE.reset(token)


@contextmanager
def seen_modes(note: Callable[[str, bool], None]) -> Iterator[None]:
    """While it lasts, `note` is told which modes code outside of torch asks for, and the caller's values of them."""
    thread = get_ident()
    outside = _OUTSIDE.get() or {name: read() for name, read in MODES.items()}

    def reader(name: str) -> Callable[[], bool]:
        def read() -> bool:
            now = MODES[name]()
            if get_ident() != thread or sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                return now
            note(name, outside[name])
            return now and outside[name] if name == "is_grad_enabled" else now or outside[name]

        return read

    readers: dict[str, Any] = {name: reader(name) for name in MODES}
    with mock.patch.multiple(torch, **readers):
        yield


# torch's own ways to ask, which pass on the question of the code that calls them.
_ASKS_FOR_OTHERS = tuple(str(Path(_TORCH, *name.split("/"))) for name in ("_utils.py", "_dynamo/external_utils.py"))
_COMPILING: dict[str, FunctionType] = {
    name: FunctionType(function.__code__, function.__globals__, name)
    for name, function in ((name, getattr(torch.compiler, name)) for name in ("is_compiling", "is_exporting"))
}
_told: list[Callable[[FrameType], bool]] = []


def _stand_in() -> bool:
    """Code in the place of torch's, and so with its globals: of functions that users import by name, too."""
    import sys

    from parplan.graph.attributes.surroundings import _told

    answer: bool = _told[-1](sys._getframe())
    return answer


@contextmanager
def compiling_branches(taken: bool) -> Iterator[dict[str, None]]:
    """While it lasts, code outside of torch that asks `torch.compiler.is_compiling()` (or `is_exporting()`) is told so,
    or that it is not.

    Yields:
        The lines that ask, as keys.
    """
    lines = dict[str, None]()

    def told(question: FrameType) -> bool:
        plain: bool = _COMPILING[question.f_code.co_name]()
        frame = question.f_back
        while frame is not None and frame.f_code.co_filename in _ASKS_FOR_OTHERS:
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith((_TORCH, _PARPLAN)):
            return plain
        while frame.f_back is not None and frame.f_code.co_name.startswith("is_"):  # a library's own way to ask
            frame = frame.f_back
        lines[frame_line(frame)] = None
        return taken and plain

    _told.append(told)
    for name in _COMPILING:
        getattr(torch.compiler, name).__code__ = _stand_in.__code__.replace(co_name=name)
    try:
        yield lines
    finally:
        _told.pop()
        for name, plain in _COMPILING.items():
            if not _told:
                getattr(torch.compiler, name).__code__ = plain.__code__


_READS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__")
)
_OF_TENSORS: Any = Tensor
_SIZE_READS = frozenset([
    _OF_TENSORS.shape.__get__, _OF_TENSORS.nbytes.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride,
    Tensor.__len__, torch.numel,
])  # fmt: skip
_PASSES_ON = tuple(str(Path(_TORCH, name)) for name in ("overrides.py", "_tensor.py"))  # between a read and its reader


class HostReads(TorchFunctionMode):
    """Whether Python reads the numbers of a tensor, and what it reads of its sizes.

    Attributes:
        any: whether it has.
        on: whether that counts now.
        inputs: leaves of the model's call, by the nodes that stand for them.
        checks: assertions on inputs, which are taken to hold.
        unchecked: lines of assertions that something else decides, and that a graph leaves out.
        constants: formulas of the values that Python has read.
        sizes: of tensors that the model's own code has read, with the place of the code, as keys.
        measured: a line of torch's layers that reads one; empty for none.
    """

    def __init__(self, watched: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._watched = watched
        self.any = self.on = False
        self.inputs: dict[fx.Node, int] = {}
        self.checks: list[InputCheck] = []
        self.unchecked: list[str] = []
        self.constants: list[str] = []
        self.sizes: dict[tuple[str, int, str], None] = {}
        self.measured = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, on the value of a tensor that no input decides; an assertion on inputs holds."""
        if not self.on or func not in _READS:
            result = func(*args, **(kwargs or {}))
            if self.on and func in _SIZE_READS:
                self._note(result)
            return result
        self.any = True
        constant = constant_value(args[0], self._watched)
        if constant is not None:
            self.constants.append(constant[1])
            with without_modes():
                return func(constant[0], *args[1:], **(kwargs or {}))
        frame = model_frame() if func in (Tensor.item, Tensor.__bool__) else None
        expected = asserted(frame) if frame is not None else None
        if frame is not None and expected is not None:
            check = input_check(args[0], self.inputs, frame, expected)
            if check is not None:
                self.checks.append(check)
                return expected
        return func(*args, **(kwargs or {}))

    def _note(self, size: Any) -> None:
        """Keep a size that code has read."""
        frame = sys._getframe(2)
        while frame.f_back and (frame.f_code.co_filename in _PASSES_ON or "torch_function" in frame.f_code.co_name):
            frame = frame.f_back
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            self.measured = self.measured or frame_line(frame)
        elif not file.startswith(_PARPLAN):
            self.sizes[file, frame.f_lineno, str(size)] = None


_DRAWS = "random uniform randint randrange choice choices sample shuffle gauss normalvariate"
_NUMPY_DRAWS = "random rand randn randint uniform normal choice permutation shuffle beta"


def random_states() -> dict[str, bytes]:
    """The states of Python's and of NumPy's generator, as bytes, because two are compared at every capture."""
    numpy = sys.modules.get("numpy")
    found = {"random": pickle.dumps(random.getstate())}
    return found if numpy is None else {**found, "numpy.random": pickle.dumps(numpy.random.get_state())}


class RandomNumbers:
    """Python's and NumPy's generators from here on."""

    def __init__(self) -> None:
        self._before = random_states()
        self._line = ""
        self._replaced = ExitStack()

        def draw(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            line = calling_line()
            self._line = f"\n  at {line}" if line else ""
            return plain(*args, **kwargs)

        numpy = sys.modules.get("numpy")
        for home, names in ((random, _DRAWS), (getattr(numpy, "random", None), _NUMPY_DRAWS)):
            for name in (name for name in names.split() if hasattr(home, name)):
                self._replaced.enter_context(mock.patch.object(home, name, partial(draw, getattr(home, name))))

    def end(self) -> None:
        """Put back functions and generators.

        Raises:
            CaptureError: numbers were drawn.
        """
        self._replaced.close()
        drawn = [name for name, state in random_states().items() if state != self._before.get(name, state)]
        if not drawn:
            return
        random.setstate(pickle.loads(self._before["random"]))
        if "numpy.random" in self._before:
            sys.modules["numpy"].random.set_state(pickle.loads(self._before["numpy.random"]))
        raise CaptureError(
            f"the forward draws random numbers from {' and '.join(drawn)}, which a captured model would draw once and "
            f"not at every call{self._line}\n  draw them with torch (torch.rand(()), and torch.where instead of a "
            "branch), or outside of the model, and pass them as tensors"
        )
