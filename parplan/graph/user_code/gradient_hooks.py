"""Tensor hooks that a forward registers (`h.register_hook(...)`), kept as ops of the captured graph.

A hook sees the whole gradient of its tensor, the sum over all uses, those before the registration too. So each hook
becomes an op directly behind the tensor's definition, through which all uses go: forward it hands its tensor on, and
its backward calls the hook. It runs on one device, as a hook may look across samples (`g / g.norm()`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, shape_of
from parplan.graph.user_code.hook_code import HookCode

__all__ = ["GRADIENT_HOOK", "Handle", "HookSite", "gradient_hook"]


@torch.library.custom_op("parplan::gradient_hook", mutates_args=())
def gradient_hook(tensor: Tensor, values: Sequence[Tensor], site: str) -> Tensor:
    """The tensor, unchanged; where a step runs, the hook is called with its gradient (`HookSite.attach`).

    `values` are tensors of the forward that the hook reads.
    """
    return tensor.clone()


@gradient_hook.register_fake
def _(tensor: Tensor, values: Sequence[Tensor], site: str) -> Tensor:
    return torch.empty_like(tensor)


gradient_hook.register_autograd(
    lambda ctx, gradient: (gradient, [None] * ctx.values, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "values", len(inputs[1])),
)

GRADIENT_HOOK = torch.ops.parplan.gradient_hook.default

# Until it is routed, nothing reads what the op gives; an exporter must not take it for dead code.
torch.fx.node.has_side_effect(GRADIENT_HOOK)


def _axes(call: Call) -> tuple[OpAxis, ...]:
    found = []
    for dim, size in enumerate(call.out_shape):
        alike = [t.name for t in call.tensors() if len(shape_of(t)) > dim and shape_of(t)[dim] == size]
        found.append(OpAxis(dict.fromkeys((*alike, call.outputs[0]), dim)))
    return tuple(found)


OWN_ROWS[GRADIENT_HOOK] = _axes


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
    name: str = "hook"
    whole: str = "a tensor hook is given the gradient of all samples"
    repeatable: bool = False
    random: bool = False

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
