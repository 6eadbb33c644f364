"""Data-flow analysis that finds inputs which index the samples: offsets of bags, neighbours, edges, segment ids.

Under torchrun every process counts its own samples from 0, while the captured graph sees the samples of all processes,
one process's behind the other's. An input that holds positions of samples then points at samples of other processes,
with the right shapes. So inputs are followed through the graph to the ops that index by them. A dimension holds samples
when its size grows with the batch between two captures. Positions that the model computes by itself (`arange`,
`argsort`, `topk`) are those of the whole batch, and so is an input that is added to such an `arange`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from parplan.graph.axes.call import Call, is_inplace, is_tensor, memory_of_node, shape_of
from parplan.graph.kinds import op_name
from parplan.graph.user_line import code_line

__all__ = ["SampleIndex", "grown_dims", "sample_indices"]


@dataclass(frozen=True)
class SampleIndex:
    """An op that uses an input as positions along samples.

    Args:
        inputs: names of the inputs that the positions come from.
        op: name of the op.
        operand: shape of what is indexed.
        dim: the dimension that is indexed.
        line: the user's code; empty where it is not known.
    """

    inputs: tuple[str, ...]
    op: str
    operand: tuple[int, ...]
    dim: int
    line: str

    def __str__(self) -> str:
        names = " and ".join(repr(name) for name in self.inputs)
        where = f" (at {self.line})" if self.line else ""
        return (
            f"{self.op} takes positions along the samples (dimension {self.dim} of a tensor of shape "
            f"{list(self.operand)}) from input {names}{where}"
        )


def grown_dims(node: fx.Node, twin: fx.Node | None, batch: int) -> frozenset[int]:
    """Dimensions of a node's tensor that grow with the batch.

    Args:
        twin: the same node captured with another batch. Without one, every multiple of the batch counts.
    """
    if not is_tensor(node):
        return frozenset()
    shape = shape_of(node)
    if twin is None or not is_tensor(twin) or len(shape_of(twin)) != len(shape):
        return frozenset(dim for dim, size in enumerate(shape) if size % batch == 0)
    return frozenset(dim for dim, size in enumerate(shape) if size != shape_of(twin)[dim])


def sample_indices(
    one: fx.GraphModule, other: fx.GraphModule | None, inputs: Iterable[str], batch: int
) -> tuple[SampleIndex, ...]:
    """Index ops of an exported graph whose positions along samples come from `inputs`.

    Args:
        other: captured with another batch; None where that failed or gave other ops.
        inputs: placeholders of the user's tensors.
        batch: samples that `one` was captured with.
    """
    flow = _Flow(batch)
    named = set(inputs)
    given = one.graph.find_nodes(op="placeholder")
    flow.run(one, other, [_NONE if _is_mask(node) else _Mark(frozenset({node.name}) & named) for node in given])
    return tuple(dict.fromkeys(flow.found))


@dataclass(frozen=True)
class _Mark:
    """The inputs that a value's positions come from, and whether it counts the samples of the whole batch itself."""

    inputs: frozenset[str] = frozenset()
    counts: bool = False


_NONE = _Mark()

# Ops of which a result holds positions that were computed on the whole batch: by name, the places of these results.
_POSITIONS = {"argmax": 0, "argmin": 0, "argsort": 0, "topk": 1, "sort": 1, "max": 1, "min": 1, "kthvalue": 1}
_POSITIONS |= {"median": 1, "nanmedian": 1, "mode": 1, "multinomial": 0}
_UNREAD = {"empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros"}
_UNREAD |= {"new_ones"}


@dataclass
class _Flow:
    """Follows marks through the nodes of two captures side by side."""

    batch: int
    found: list[SampleIndex] = field(default_factory=list)
    regions: dict[fx.Node, list[_Mark]] = field(default_factory=dict)

    def run(self, one: fx.GraphModule, other: fx.GraphModule | None, given: Sequence[_Mark]) -> list[_Mark]:
        """Marks of the results; those of the placeholders are given."""
        marks = dict(zip(one.graph.find_nodes(op="placeholder"), given, strict=True))
        calls = [[n for n in m.graph.nodes if n.op == "call_function"] for m in (one, other) if m is not None]
        alike = len(calls) == 2 and len(calls[0]) == len(calls[1])
        twins = dict(zip(*calls, strict=True)) if alike else {}
        for node in one.graph.nodes:
            args: Any = node.args
            place = next((i for i, argument in enumerate(args) if _region(one, node, argument) is not None), None)
            if place is not None:
                inner = [marks.get(operand, _NONE) for operand in args[place + 1 :]]
                twin = None if other is None else _region(other, node, args[place])
                self.regions[node] = self.run(_region(one, node, args[place]), twin, inner)
            elif node.op == "call_function":
                marks[node] = self._call(node, marks, twins.get(node))
                if is_inplace(node) and marks[node].inputs and is_tensor(node):
                    memory = memory_of_node(node)
                    seen = [known for known in marks if is_tensor(known) and memory_of_node(known) == memory]
                    marks.update(dict.fromkeys(seen, marks[node]))
        results: Any = one.graph.output_node().args[0]
        return [marks.get(result, _NONE) for result in results]

    def _call(self, node: fx.Node, marks: Mapping[fx.Node, _Mark], twin: fx.Node | None) -> _Mark:
        source, place = (*node.args, None, None)[:2]
        if isinstance(source, fx.Node) and isinstance(place, int) and source in self.regions:
            return self.regions[source][place]
        name = op_name(node).rstrip("_")
        theirs = None if twin is None else Call(twin)
        for argument, dim, index in _INDEXED[name](Call(node)) if name in _INDEXED else ():
            mark, operand = marks.get(index, _NONE), Call(node)[argument]
            if not mark.inputs or not isinstance(operand, fx.Node) or _is_mask(index):
                continue
            grown = grown_dims(operand, theirs[argument] if theirs is not None else None, self.batch)
            if grown and (dim is None or dim in grown):
                at = min(grown) if dim is None else dim
                line = code_line(node)
                self.found.append(SampleIndex(tuple(sorted(mark.inputs)), op_name(node), shape_of(operand), at, line))
        if name == "arange":
            return _Mark(counts=bool(grown_dims(node, twin, self.batch)))
        computed = _POSITIONS.get(name) == 0 or (
            isinstance(source, fx.Node)
            and node.target is operator.getitem
            and _POSITIONS.get(op_name(source)) == node.args[1]
        )
        if computed or name in _UNREAD or _is_mask(node):
            return _NONE
        read = [marks.get(operand, _NONE) for operand in node.all_input_nodes]
        counts = any(mark.counts for mark in read)
        # An input beside a count of the samples is a distance, or a position within a sample.
        relative = name in ("add", "sub", "rsub") and any(mark.counts and not mark.inputs for mark in read)
        inputs = frozenset[str]().union(*(mark.inputs for mark in read if not relative))
        return _Mark(inputs, counts and not inputs)


def _region(module: fx.GraphModule, node: fx.Node, argument: Any) -> Any:
    """The graph that an argument of a region (`torch.no_grad`, autocast) stands for, None for other arguments."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr" or not op_name(node).startswith("wrap_with"):
        return None
    return getattr(module, str(argument.target), None)


def _is_mask(node: fx.Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype in (torch.bool, torch.uint8)


# Of an op that indexes: the argument that is indexed, its dimension (None: any), and the node with the positions.
_Use = tuple[str, int | None, Any]


def _along_dim(index: str) -> Callable[[Call], list[_Use]]:
    def uses(call: Call) -> list[_Use]:
        if call["dim"] is None:
            return [("self", None, call[index])]
        return [("self", call.dim(int(call["dim"]), len(call.shape("self"))), call[index])]

    return uses


def _by_dimension(call: Call) -> list[_Use]:
    """`x[i, :, j]`: one index per dimension; a mask has several."""
    found: list[_Use] = []
    dim = 0
    for index in call["indices"]:
        if index is not None:
            found.append(("self", dim, index))
        dim += len(shape_of(index)) if index is not None and _is_mask(index) else 1
    return found


_INDEXED: dict[str, Callable[[Call], list[_Use]]] = {
    **dict.fromkeys(("index", "index_put", "unsafe_index", "index_put_impl"), _by_dimension),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), _along_dim("index")),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _along_dim("index")),
    "take_along_dim": _along_dim("indices"),
    "take": lambda call: [("self", None, call["index"])],
    "put": lambda call: [("self", None, call["index"])],
    "embedding": lambda call: [("weight", 0, call["indices"])],
    **dict.fromkeys(
        ("embedding_bag", "offset_bags"),
        lambda call: [("weight", 0, call["indices"]), ("indices", 0, call["offsets"])],
    ),
    "segment_reduce": lambda call: [("data", int(call["axis"] or 0), call["offsets"])],
}
