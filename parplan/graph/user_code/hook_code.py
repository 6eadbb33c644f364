"""A hook's code and the tensors of a forward that it reads through its closure (`lambda g: g * mask`).

In a captured forward such tensors have no values, so they are taken out of the closure, and put in anew in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from parplan.compat import FakeTensor
from parplan.graph.user_code.module_hooks import Template

__all__ = ["Hook", "HookCode"]

Hook = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class HookCode:
    """A hook.

    Args:
        hook: as the forward registers it.
        bound: bound arguments, defaults and the closure, with the tensors taken out; None where there are no tensors
            among them.
        tensors: the tensors that were taken out.
    """

    hook: Hook
    bound: Template | None
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(hook: Hook) -> HookCode:
        """A hook that is registered in a running capture."""
        template, tensors = Template.of(_held(hook))
        traced = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        return HookCode(hook, template if traced else None, tuple(tensors) if traced else ())

    def reading(self, tensors: Sequence[Tensor]) -> Hook:
        """The hook with these tensors in place of those it was registered with."""
        return self.hook if self.bound is None else _with(self.hook, self.bound.filled(tensors))

    @property
    def is_as_registered(self) -> bool:
        """Whether it still holds what it did when the forward registered it; checked where that was taken out."""
        if self.bound is None:
            return True
        template, tensors = Template.of(_held(self.hook))
        return template.matches(self.bound) and all(map(operator.is_, tensors, self.tensors))


def _held(hook: Any) -> Any:
    """Bound arguments, defaults and closure of a function, as nested lists."""
    if isinstance(hook, partial):
        return [_held(hook.func), list(hook.args), dict(hook.keywords)]
    if isinstance(hook, MethodType):
        return [_held(hook.__func__)]
    if isinstance(hook, FunctionType):
        return [list(_contents(hook)), hook.__defaults__, hook.__kwdefaults__]
    return []


def _contents(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None


def _with(hook: Any, held: Any) -> Any:
    """The function, holding something else."""
    if isinstance(hook, partial):
        inner, args, kwargs = held
        return partial(_with(hook.func, inner), *args, **kwargs)
    if isinstance(hook, MethodType):
        return MethodType(_with(hook.__func__, held[0]), hook.__self__)
    if isinstance(hook, FunctionType):
        contents, defaults, named = held
        made = FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, tuple(map(CellType, contents)))
        made.__kwdefaults__ = named
        return made
    return hook
