"""How a custom autograd Function treats samples, found by tracing its forward and its backward.

Both are traced as one graph of ATen ops: arguments and gradients of results in, results and gradients of arguments out.
An axis that every op of that graph leaves apart can be cut, if each gradient has the axis where its argument has it,
and is a term of a sum where the argument has none (a weight). All else runs whole, and the reason is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from parplan.graph.axes.call import memory_of_node, written_memories
from parplan.graph.axes.joint_axis import JointAxis, cut_together
from parplan.graph.axes.linear_ops import dependence
from parplan.graph.axes.row_syntax import Cut
from parplan.graph.axes.table import unknown_ops
from parplan.graph.batch_changes import batch_changes
from parplan.graph.export.functionalise import without_changes
from parplan.graph.layer_axes import joint_axes
from parplan.graph.sites import Treatment

__all__ = ["Followed", "FreeAxis", "follow"]

aten = torch.ops.aten


@dataclass(frozen=True)
class FreeAxis:
    """An axis along which a Function can be cut: its dimension by position among the tensor arguments and results.

    Args:
        units: parts must divide this as well as every size; 0 for no further limit.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    units: int


@dataclass
class Followed(Treatment):
    """Findings about a Function.

    Attributes:
        axes: those that its forward and backward leave apart; where there are none, those of its forward alone.
        traces: its forward, and its forward and backward, as ops; as far as they can be traced.
        writes: whether its backward may write to the gradients it is given.
    """

    axes: tuple[FreeAxis, ...] = ()
    traces: tuple[fx.GraphModule, ...] = ()
    writes: bool = True

    def bar(self, why: str) -> None:
        """Let it run whole."""
        self.whole, self.linear = why, False

    def compare(self, other: Followed, name: str) -> None:
        """Let it run whole where its code has numbers that differ at another batch size."""
        changes = [batch_changes(one, twin) for one, twin in zip(self.traces, other.traces, strict=False)]
        same = [not found.unexplained and not found.results for found in changes]
        if len(self.traces) != len(other.traces) or not all(same):
            self.axes = self.axes if same and same[0] else ()
            self.bar(f"a number in the code of {name} changes with the number of samples")


Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def follow(call: Run, inputs: Sequence[Tensor], name: str) -> Followed:
    """Trace `call`, which runs the Function `name` on tensors without values.

    Args:
        inputs: its tensor arguments; those that need a gradient say so.
    """
    found, ahead = Followed(), _Roles(len(inputs))
    try:
        found.traces = (_traced(call, inputs, [], ahead),)
        ends = [tensor for tensor in call(inputs) if tensor.requires_grad and torch.is_grad_enabled()]
        pulls = [torch.empty_like(tensor, requires_grad=False) for tensor in ends]
        roles = _Roles(len(inputs))
        found.traces = (*found.traces, _traced(call, inputs, pulls, roles))
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        found.whole = f"the code of {name} cannot be traced without values ({type(error).__name__}: {reason[:160]})"
        found.axes = _Reader(found.traces[0], ahead, name).axes()[0] if found.traces else ()
        return found
    reader = _Reader(found.traces[1], roles, name)
    found.axes, found.whole = reader.axes()
    found.writes, found.linear, found.random = reader.writes, reader.is_linear, reader.is_random
    if found.whole:
        found.axes = _Reader(found.traces[0], ahead, name).axes()[0]
    return found


@dataclass
class _Roles:
    """The roles of the arguments and results of a traced graph.

    Attributes:
        arguments: how many of its arguments are the Function's.
        results: how many of its results are the Function's.
        ends: the results that need a gradient, whose gradients are the other arguments.
        grads: the arguments whose gradients are the other results.
    """

    arguments: int
    results: int = 0
    ends: list[int] = field(default_factory=list)
    grads: list[int] = field(default_factory=list)


def _traced(call: Run, inputs: Sequence[Tensor], pulls: Sequence[Tensor], roles: _Roles) -> fx.GraphModule:
    """The forward as ops, with the backward where `pulls`, gradients of the results, are given; fills in `roles`."""

    def both(inputs: list[Tensor], pulls: list[Tensor]) -> list[Tensor]:
        results = list(call(inputs))
        roles.results = len(results)
        if not pulls:
            return results
        wanted = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
        roles.ends = [i for i, tensor in enumerate(results) if tensor.requires_grad]
        ends, sources = [results[i] for i in roles.ends], [inputs[i] for i in wanted]
        given: Sequence[Tensor | None] = torch.autograd.grad(ends, sources, pulls, allow_unused=True)
        found = {i: gradient for i, gradient in zip(wanted, given, strict=True) if gradient is not None}
        roles.grads = list(found)
        return [*results, *found.values()]

    made: fx.GraphModule = make_fx(both)(list(inputs), list(pulls))
    return made


class _Reader:
    """Reads a traced forward and backward."""

    def __init__(self, traced: fx.GraphModule, roles: _Roles, name: str) -> None:
        self._traced = traced
        self._roles = roles
        self._name = name
        graph = traced.graph
        placeholders = list(graph.find_nodes(op="placeholder"))
        self._inputs, self._pulls = placeholders[: roles.arguments], placeholders[roles.arguments :]
        # Whether an op writes to a gradient that was given.
        self.writes = not written_memories(graph.nodes).isdisjoint(map(memory_of_node, self._pulls))
        _masked_writes(graph)
        self._rewritten = without_changes(graph)
        self._nodes = [node for node in graph.nodes if node.op == "call_function"]
        ending: Any = graph.output_node().args[0]
        self._results, self._grads = list(ending[: roles.results]), list(ending[roles.results :])
        # Whether all gradients that it gives are linear in those it is given, and whether it draws random numbers.
        self.is_linear = dependence(self._nodes, self._pulls).linear.issuperset(self._grads)
        tags = (getattr(node.target, "tags", ()) for node in self._nodes)
        self.is_random = any(torch.Tag.nondeterministic_seeded in own for own in tags)

    def axes(self) -> tuple[tuple[FreeAxis, ...], str]:
        """The axes along which it can be cut, or why there are none."""
        unknown = unknown_ops(self._nodes)
        if not self._rewritten or self.writes:
            return (), f"{self._name} changes tensors in place in ways that parplan does not follow"
        if unknown:
            return (), f"parplan does not know how {' and '.join(unknown)} in {self._name} treats samples"
        joint = joint_axes([*self._nodes, *self._ties()])
        found = []
        for axis in (*joint, *self._together(joint)):
            if self._is_free(axis):
                inputs = {i: axis.dims[node.name] for i, node in enumerate(self._inputs) if node.name in axis.dims}
                outputs = {i: axis.dims[node.name] for i, node in enumerate(self._results)}
                found.append(FreeAxis(inputs, outputs, axis.units))
        return tuple(found), "" if found else f"the forward or the backward of {self._name} mixes samples"

    def _ties(self) -> list[fx.Node]:
        """Ops that let a tensor and its gradient have their axes in the same places."""
        pairs = [(self._results[i], pull) for i, pull in zip(self._roles.ends, self._pulls, strict=True)]
        pairs += [(self._inputs[i], gradient) for i, gradient in zip(self._roles.grads, self._grads, strict=True)]
        graph, made = self._traced.graph, []
        with graph.inserting_before(graph.output_node()):
            for one, other in pairs:
                made.append(graph.call_function(aten.add.Tensor, (one, other)))
                made[-1].meta["val"] = one.meta["val"]
        return made

    def _together(self, joint: Sequence[JointAxis]) -> list[JointAxis]:
        """Axes that arguments have at one place without an op that joins them, cut together."""
        groups: dict[tuple[int, int], dict[int, JointAxis]] = defaultdict(dict)
        for axis in joint:
            for node in self._inputs:
                if self._has(axis, node) and axis.open:
                    dim = axis.dims[node.name]
                    groups[dim, node.meta["val"].shape[dim]][id(axis)] = axis
        return [cut_together(group.values()) for group in groups.values() if len(group) > 1]

    def _is_free(self, axis: JointAxis) -> bool:
        """Whether parts of an axis give the same numbers: of what they compute, and of all gradients."""
        # The user's own code takes its sections at indices of the whole tensor, on parts too.
        plain = axis.open and axis.cuts <= {Cut.MAP, Cut.SUM} and not (axis.first_only or axis.routed)
        plain = plain and not axis.sections and not axis.limits
        fixed = any(node.op == "get_attr" and node.name in axis.dims for node in self._traced.graph.nodes)
        if not plain or fixed or not any(self._has(axis, node) for node in self._inputs):
            return False
        terms = dependence(self._nodes, [node for node in self._nodes if node.name in axis.partial])
        wanted = list(self._results)
        for index, gradient in zip(self._roles.grads, self._grads, strict=True):
            if self._has(axis, self._inputs[index]):
                wanted.append(gradient)
            elif gradient not in terms.linear:
                return False
        return all(self._has(axis, node) and node not in terms for node in wanted)

    def _has(self, axis: JointAxis, node: fx.Node) -> bool:
        return node.name in axis.dims and axis.outer[node.name] == 1


def _masked_writes(graph: fx.Graph) -> None:
    """`g[mask] = 0`, the usual way to stop gradients, as the op that fills by a mask."""
    for node in list(graph.nodes):
        if node.target in (aten.index_put_.default, aten.index_put.default):
            into, indices, value, *more = node.args
            mask = indices[0]
            if len(indices) > 1 or mask is None or any(more) or value.meta["val"].dim():
                continue
            if mask.meta["val"].dtype is torch.bool and mask.meta["val"].shape == into.meta["val"].shape:
                changed = node.target is aten.index_put_.default
                node.target = aten.masked_fill_.Tensor if changed else aten.masked_fill.Tensor
                node.args = (into, mask, value)
