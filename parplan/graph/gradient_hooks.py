"""Tensor hooks that a forward registers (`h.register_hook(...)`), kept as ops of the captured graph.

A hook sees the whole gradient of its tensor, the sum over all uses, those before the registration too. So each hook
becomes an op directly behind the tensor's definition, through which all uses go: forward it hands its tensor on, and
its backward calls the hook. It runs on one device, as a hook may look across samples (`g / g.norm()`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from parplan.compat import memory_of, schema_of
from parplan.errors import CaptureError, RuntimeFailure
from parplan.graph.axis_table import OWN_ROWS, Call, is_tensor
from parplan.graph.op_axes import OpAxis

__all__ = ["GRADIENT_HOOK", "Handle", "HookSite", "gradient_hook", "route_through_hooks"]

aten = torch.ops.aten


@torch.library.custom_op("parplan::gradient_hook", mutates_args=())
def gradient_hook(tensor: Tensor, site: str) -> Tensor:
    """The tensor, unchanged; where a step runs, the hook is called with its gradient (`HookSite.attach`)."""
    return tensor.clone()


@gradient_hook.register_fake
def _(tensor: Tensor, site: str) -> Tensor:
    return torch.empty_like(tensor)


gradient_hook.register_autograd(lambda ctx, gradient: (gradient, None))

GRADIENT_HOOK = torch.ops.parplan.gradient_hook.default

# Until it is routed, nothing reads what the op gives; an exporter must not take it for dead code.
torch.fx.node.has_side_effect(GRADIENT_HOOK)


def _axes(call: Call) -> tuple[OpAxis, ...]:
    (source,) = call.tensors()
    return tuple(OpAxis({source.name: dim, call.outputs[0]: dim}) for dim in range(len(call.out_shape)))


OWN_ROWS[GRADIENT_HOOK] = _axes


@dataclass
class HookSite:
    """A hook that a captured forward registers.

    Attributes:
        hook: the user's function of a gradient.
        line: where it is registered.
        removed: whether the forward has removed it again.
        captured: whether the capture is over, after which it can no longer be removed.
    """

    hook: Callable[[Tensor], Tensor | None]
    line: str
    removed: bool = False
    captured: bool = False
    name: str = "hook"
    whole: str = "a tensor hook is given the gradient of all samples"
    repeatable: bool = False
    random: bool = False

    def attach(self, tensor: Tensor) -> Tensor:
        """The tensor with its hook."""
        hooked = tensor.view_as(tensor)
        if hooked.requires_grad:
            hooked.register_hook(self._call)
        return hooked

    def _call(self, gradient: Tensor) -> Tensor:
        """The gradient that goes on; the hook gets one of its own, as it may write to it or keep it."""
        own = gradient.clone()
        changed = self.hook(own)
        return own if changed is None else changed


class Handle:
    """What `register_hook` returns in a captured forward."""

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


# --- after a capture -------------------------------------------------------------------------


def route_through_hooks(
    graph: fx.Graph, sites: dict[str, Any], rename: Callable[[str, str], None] = lambda old, new: None
) -> None:
    """Put every hook's op directly behind the tensor it belongs to, with all uses of that tensor behind it.

    Args:
        rename: told of results of the graph that have another name now.

    Raises:
        CaptureError: the tensor is changed in place, so that there is no one gradient of it.
    """
    hooks: dict[fx.Node, list[fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target is GRADIENT_HOOK:
            if sites[node.args[1]].removed:
                graph.erase_node(node)
            else:
                hooks.setdefault(_same_tensor(node.args[0]), []).append(node)
    for source, own in hooks.items():
        _check_unchanged(graph, source, sites[str(own[0].args[1])])
        _route(source, own, rename)


def _same_tensor(node: Any) -> fx.Node:
    """The node that made a tensor object, in front of ops that hand their operand back as it is."""
    while node.target in _IDENTITIES and _looks(node) == _looks(node.args[0]):
        node = node.args[0]
    same: fx.Node = node
    return same


_IDENTITIES = (
    aten.contiguous.default, aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default, aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout,
    aten.type_as.default, aten.flatten.using_ints, aten.expand_as.default, aten.resolve_conj.default,
)  # fmt: skip


def _looks(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return memory_of(value), value.shape, value.stride(), value.dtype


def _check_unchanged(graph: fx.Graph, source: fx.Node, site: HookSite) -> None:
    """Refuse changes in place of a hooked tensor after it was made, or views of what it was before."""
    memory, after, changed = memory_of(source.meta["val"]), False, False
    before: set[fx.Node] = set()
    for node in graph.nodes:
        own = is_tensor(node) and memory_of(node.meta["val"]) == memory
        inplace = own and getattr(schema_of(node.target), "is_mutable", False)
        changed |= inplace
        late = after and (inplace or (changed and not before.isdisjoint(node.all_input_nodes)))
        if late:
            raise CaptureError(
                f"a tensor with a hook is also changed in place, so it has several gradients\n  at {site.line}\n"
                "  register the hook on a tensor that nothing changes, such as h = h.clone()"
            )
        after |= node is source
        if own and not after:
            before.add(node)


def _route(source: fx.Node, hooks: Sequence[fx.Node], rename: Callable[[str, str], None]) -> None:
    """Hooks run in the order they were registered, so the first one is the last that the tensor passes."""
    users = [user for user in source.users if user not in hooks]
    place = source
    for node in reversed(hooks):
        node.args = (place, *node.args[1:])
        _last_beside(place).append(node)
        place = node
    for user in users:
        user.replace_input_with(source, place)
        if user.op == "output":
            rename(source.name, place.name)


def _last_beside(node: fx.Node) -> fx.Node:
    """The last of a graph's arguments, or of the results of one op, where `node` is one of those; else `node`."""
    alike = [node.target, node.args[:1]] if node.target is operator.getitem else None
    while node.op == node.next.op == "placeholder" or alike == [node.next.target, node.next.args[:1]]:
        node = node.next
    return node
