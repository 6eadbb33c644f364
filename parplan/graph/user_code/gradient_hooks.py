"""Tensor hooks that a forward registers (`h.register_hook(...)`), kept as ops of the captured graph.

A hook sees the whole gradient of its tensor, the sum over all uses, those before the registration too. So each hook
becomes an op directly behind the tensor's definition, through which all uses go: forward it hands its tensor on, and
its backward calls the hook. It runs on one device, as a hook may look across samples (`g / g.norm()`).

A hook may read tensors of the forward through its closure (`lambda g: g * mask`). In a captured forward they have no
values, so they are taken out of the closure, and put in anew in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from parplan.compat import FakeTensor
from parplan.errors import RuntimeFailure
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, own_op, shape_of
from parplan.graph.sites import Treatment
from parplan.graph.user_code.module_hooks import Template

__all__ = ["GRADIENT_HOOK", "Handle", "Hook", "HookCode", "HookSite"]


def _hooked(tensor: Tensor, values: Sequence[Tensor], site: str) -> Tensor:
    """The tensor, unchanged; where a step runs, the hook is called with its gradient (`HookSite.attach`).

    `values` are tensors of the forward that the hook reads.
    """
    return tensor.clone()


GRADIENT_HOOK = own_op("gradient_hook", _hooked)
torch.library.register_autograd(
    GRADIENT_HOOK,
    lambda ctx, gradient: (gradient, [None] * ctx.values, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "values", len(inputs[1])),
)

# Until it is routed, nothing reads what the op gives; an exporter must not take it for dead code.
torch.fx.node.has_side_effect(GRADIENT_HOOK)


def _axes(call: Call) -> tuple[OpAxis, ...]:
    found = []
    for dim, size in enumerate(call.out_shape):
        alike = [t.name for t in call.tensors() if len(shape_of(t)) > dim and shape_of(t)[dim] == size]
        found.append(OpAxis(dict.fromkeys((*alike, call.outputs[0]), dim)))
    return tuple(found)


OWN_ROWS[GRADIENT_HOOK] = _axes


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
        contents: list[Any] = []
        for cell in hook.__closure__ or ():
            try:
                contents.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                contents.append(None)
        return [contents, hook.__defaults__, hook.__kwdefaults__]
    return []


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


@dataclass
class HookSite:
    """A hook that a captured forward registers.

    Attributes:
        hook: the user's function of a gradient, or of the tensors that it reads and a gradient.
        line: where it is registered.
        removed: whether the forward has removed it again.
        captured: whether the capture is over, after which it can no longer be removed.
    """

    hook: HookCode
    line: str
    removed: bool = False
    captured: bool = False
    name = "hook"
    followed = Treatment("a tensor hook is given the gradient of all samples", random=False)

    def attach(self, tensor: Tensor, values: Sequence[Tensor]) -> Tensor:
        """The tensor with its hook, which reads `values`."""
        hooked = tensor.view_as(tensor)
        if hooked.requires_grad:
            hook = self.hook.reading(values)

            def call(gradient: Tensor) -> Tensor:
                own = gradient.clone()  # the hook may write to it, or keep it
                changed = hook(own)
                return own if changed is None else changed

            hooked.register_hook(call)
        return hooked


class Handle:
    """The result of `register_hook` in a captured forward."""

    def __init__(self, site: HookSite) -> None:
        self._site = site

    def remove(self) -> None:
        """Take the hook away again.

        Raises:
            RuntimeFailure: after the forward that registered it.
        """
        if self._site.captured:
            raise RuntimeFailure(
                "a hook that a compiled forward registers is removed within that forward, not after it; let the hook "
                f"itself decide whether it does something\n  at {self._site.line}"
            )
        self._site.removed = True

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
