"""One op as a layer of its own, and its parts run by hand: what the proofs of the axis table compare."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from parplan.graph.axes.joint_axis import JointAxis, axis_units, sections_of
from parplan.graph.axes.row_syntax import Cut
from parplan.graph.axes.table import is_tensor
from parplan.graph.layer_axes import joint_axes
from parplan.graph.layer_graph import Axis, Layer, LayerGraph, TensorSpec
from parplan.graph.local import LocalLayer, local_module
from parplan.layout import Grid, Layout, regions
from parplan.plan import Strategy
from parplan.runtime.transport.base import block_values

__all__ = ["OneOp", "part_results", "whole_results"]


@dataclass(frozen=True)
class OpenAxis(Axis):
    """An axis with the size of what it is merged behind, by tensor."""

    outer: Mapping[str, int] = field(default_factory=dict)

    def ways(self, name: str, size: int) -> list[int]:
        """Sizes of the sections of its dimension of `size` in a tensor, each of which is cut by itself."""
        ends = (
            self.sections[name].bounds(size) if name in self.sections else range(0, size + 1, size // self.outer[name])
        )
        return [end - start for start, end in pairwise(ends)]


@dataclass(frozen=True)
class OneOp:
    """One call of an op as a layer, with the values of its operands."""

    graph: LayerGraph
    operands: Mapping[str, Tensor]

    @staticmethod
    def of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OneOp:
        """The layer that calls `op`; results of tuples are taken apart as in an exported graph."""
        code = fx.Graph()
        operands: dict[str, Tensor] = {}

        def node_of(value: Any) -> Any:
            if isinstance(value, list):
                return [node_of(item) for item in value]
            if not isinstance(value, Tensor):
                return value
            node = code.placeholder(f"x{len(operands)}")
            node.meta["val"] = operands[node.name] = value
            return node

        call = code.call_function(op, tuple(node_of(arg) for arg in args), {k: node_of(v) for k, v in kwargs.items()})
        copies = [_copied(arg) for arg in args]
        result = call.meta["val"] = op(*copies, **kwargs)
        nodes = [call]
        for index, item in enumerate(result if isinstance(result, (tuple, list)) else ()):
            nodes.append(code.call_function(operator.getitem, (call, index)))
            nodes[-1].meta["val"] = item
        return OneOp(_graph(tuple(nodes), operands), operands)

    @property
    def layer(self) -> Layer:
        return self.graph.layers["op"]

    def open_axes(self) -> list[OpenAxis]:
        """Every way the table lets this call be cut, with names for them."""
        joint = [axis for axis in joint_axes(self.layer.nodes) if axis.open and Cut.MIXED not in axis.cuts]
        return [self._axis(axis, f"axis{index}") for index, axis in enumerate(joint)]

    def _axis(self, joint: JointAxis, name: str) -> OpenAxis:
        shapes = {tensor: self.graph.values[tensor].shape for tensor in joint.dims}
        units = axis_units(joint, shapes)
        sets = frozenset(joint.partial), frozenset(joint.first_only)
        more = sections_of(joint), dict(joint.repeats)
        return OpenAxis(name, units, dict(joint.dims), *sets, *more, outer=dict(joint.outer))


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def _graph(nodes: tuple[fx.Node, ...], operands: Mapping[str, Tensor]) -> LayerGraph:
    outputs = tuple(node.name for node in nodes if is_tensor(node))
    layer = Layer("op", "other", nodes, tuple(operands), outputs)
    values = {node.name: node.meta["val"] for node in nodes if is_tensor(node)} | dict(operands)
    specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in values.items()}
    return LayerGraph(
        model="OneOp",
        digraph=nx.DiGraph(),
        layers={"op": layer},
        values=specs,
        producer={},
        batch=1,
        batch_dims={},
        user_inputs=tuple(operands),
        user_outputs=outputs,
        in_spec=None,
        out_spec=None,
        parameters={},
        buffers={},
        constants={},
        buffer_updates={},
        counters={},
        training=True,
    )


@dataclass(frozen=True)
class Results:
    """Outputs by name, and the gradients of the operands for the given cotangents."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def whole_results(op: OneOp) -> Results:
    """What the uncut call computes."""
    code = local_module(op.graph, [LocalLayer(op.layer, Strategy(), 0, 1)], op.layer.inputs, op.layer.outputs)
    leaves = _leaves(op)
    outputs = dict(zip(op.layer.outputs, code(*map(_fresh, leaves.values())), strict=True))
    return Results(outputs, _gradients(outputs, leaves))


def part_results(op: OneOp, axis: OpenAxis, shares: Sequence[int], as_batch: bool = False) -> Results:
    """What parts along `axis` compute, put together again.

    Args:
        shares: how many of the axis's units each part gets.
        as_batch: cut as replicas are (samples, maybe unevenly), else as shards.
    """
    leaves = _leaves(op)
    found: list[Mapping[str, Tensor]] = []
    for index, share in enumerate(shares):
        start = sum(shares[:index])
        cut = {name: _part(leaf, axis, name, start, share) for name, leaf in leaves.items()}
        part = _part_of(op, axis, index, share, len(shares), as_batch)
        graph = replace(op.graph, layers={"op": part.layer}, batch=axis.units)
        code = local_module(graph, [part], op.layer.inputs, op.layer.outputs)
        found.append(dict(zip(op.layer.outputs, code(*map(_fresh, cut.values())), strict=True)))
    outputs = {name: _joined([part[name] for part in found], axis, name) for name in op.layer.outputs}
    return Results(outputs, _gradients(outputs, leaves))


def _part_of(op: OneOp, axis: Axis, column: int, share: int, parts: int, as_batch: bool) -> LocalLayer:
    if as_batch:
        return LocalLayer(replace(op.layer, batch=axis), Strategy(replicas=parts), 0, share)
    return LocalLayer(replace(op.layer, axes=(axis,)), Strategy(1, parts, axis.name), column, 1)


def _leaves(op: OneOp) -> dict[str, Tensor]:
    return {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in op.operands.items()}


def _fresh(value: Tensor) -> Tensor:
    """A tensor that ops may change in place (`detach_`)."""
    return value.clone()


def _part(leaf: Tensor, axis: OpenAxis, name: str, start: int, share: int) -> Tensor:
    if name not in axis.dims:
        return leaf
    dim, own = axis.dims[name], axis.sections.get(name)
    if own is not None and any(own.limits):
        shards = axis.units // share
        layout = Layout(Grid(tuple(range(shards)), 1, shards), None, dim, sections=own)
        return block_values(leaf, regions(leaf.shape, layout)[layout.grid.device(0, start // share)])
    sections = leaf.split(axis.ways(name, leaf.shape[dim]), dim)
    units = [section.shape[dim] // axis.units for section in sections]
    return torch.cat([s.narrow(dim, unit * start, unit * share) for s, unit in zip(sections, units, strict=True)], dim)


def _joined(parts: Sequence[Tensor], axis: OpenAxis, name: str) -> Tensor:
    if name in axis.partial:
        return torch.stack(list(parts)).sum(0)
    if name not in axis.dims:
        return parts[0]
    dim, size = axis.dims[name], sum(part.shape[axis.dims[name]] for part in parts)
    ways = axis.ways(name, size)
    pieces = [part.split([way * part.shape[dim] // size for way in ways], dim) for part in parts]
    return torch.cat([own[section] for section in range(len(ways)) for own in pieces], dim)


def _gradients(outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the operands; the same random cotangent for the same output, every time."""
    results = [output for output in outputs.values() if output.requires_grad]
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not results or not wanted:
        return {}
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results]
    found = torch.autograd.grad(results, list(wanted.values()), cotangents, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))
