"""One op of a layer at the sizes one device sees: what the tables of work and saved tensors are functions of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import CASTS, LayerGraph, TensorSpec, cast_name, once_per_graph
from parplan.graph.local import LocalLayer, local_shape

__all__ = ["SLICES", "VIEWS", "OpCall", "Operand", "op_calls", "total_bytes"]

# Ops that run no kernel: their result shares the storage of their first input.
VIEWS = frozenset({
    "view", "reshape", "flatten", "unflatten", "unsafe_view", "reshape_alias", "t", "transpose", "permute", "unsqueeze",
    "squeeze", "expand", "expand_as", "alias", "detach", "getitem", "movedim", "swapaxes", "lift_fresh_copy",
})  # fmt: skip

# Views whose backward has to write the gradient of all of their input.
SLICES = frozenset({
    "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "narrow", "diagonal", "unfold", "tensor_split",
})  # fmt: skip


@dataclass(frozen=True)
class Operand(TensorSpec):
    """A tensor an op reads or writes, at local size.

    `state` says that it is a parameter or buffer, which stays anyway.
    """

    name: str = ""
    state: bool = False


@dataclass(frozen=True)
class OpCall:
    """An op with its tensors.

    Args:
        op: bare name, such as "conv2d".
        inputs: tensors it reads, in order of its arguments, each once.
        outputs: tensors it makes; of an op with several results those that are used.
        arguments: positional arguments as captured (sizes not localised), tensors as fx nodes.
    """

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    arguments: tuple[Any, ...] = ()

    @cached_property
    def differentiated(self) -> bool:
        """Whether the op takes part in the backward pass."""
        return any(out.requires_grad for out in self.outputs)

    @cached_property
    def is_view(self) -> bool:
        """Whether the result shares the storage of the first input."""
        return self.op in VIEWS or self.op in SLICES or self.is_idle_dropout

    @property
    def is_idle_dropout(self) -> bool:
        """Whether it is a dropout that drops nothing."""
        return "dropout" in self.op and (self.argument(1) == 0 or self.argument(2) is False)

    def argument(self, position: int, default: Any = None) -> Any:
        """A positional argument, or `default` where the call leaves it out."""
        return self.arguments[position] if len(self.arguments) > position else default


def total_bytes(operands: Iterable[Operand]) -> int:
    """Bytes of several tensors."""
    return sum(operand.nbytes for operand in operands)


def op_calls(graph: LayerGraph, local: LocalLayer) -> tuple[OpCall, ...]:
    """The ops of one device's part of a layer, in execution order; made once for all parts of these sizes."""
    cut = (local.axis.name, local.strategy.shards) if local.axis is not None else None
    known, key = _known_calls(graph), (local.layer.name, local.batch, cut)
    if key not in known:
        known[key] = tuple(_calls(graph, local))
    return known[key]


@once_per_graph
def _known_calls(graph: LayerGraph) -> dict[object, tuple[OpCall, ...]]:
    return {}


def _calls(graph: LayerGraph, local: LocalLayer) -> Iterator[OpCall]:
    def operands(nodes: Iterable[fx.Node]) -> tuple[Operand, ...]:
        found = []
        for name in (node.name for node in nodes if node.name in graph.values):
            spec = graph.values[name]
            state = name in graph.parameters or name in graph.buffers or name in graph.constants
            found.append(Operand(local_shape(graph, local, name), spec.dtype, spec.requires_grad, name, state))
        return tuple(found)

    for node in local.layer.nodes:
        results = [node] if node.name in graph.values else [user for user in node.users if op_name(user) == "getitem"]
        inputs, casts = operands(node.all_input_nodes), node.meta.get(CASTS, {})
        for place, operand in enumerate(inputs):
            if operand.name in casts:  # by autocast, as an op of its own
                name, dtype = cast_name(operand.name, casts[operand.name]), casts[operand.name]
                cast = Operand(operand.shape, dtype, operand.requires_grad, name)
                yield OpCall("to", (operand,), (cast,))
                inputs = (*inputs[:place], cast, *inputs[place + 1 :])
        yield OpCall(op_name(node), inputs, operands(results), node.args)
