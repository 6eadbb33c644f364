"""A captured model run by hand, every layer cut as told: what tests compare with the plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from parplan.graph.layer_graph import Axis, Constant, Layer, LayerGraph
from parplan.graph.local import LocalLayer, local_module
from parplan.layout import Grid, Layout, intervals, regions, split_evenly
from parplan.plan import Strategy
from parplan.runtime.transport.base import block_values

__all__ = ["Ran", "assert_same_numbers", "halves", "run_by_hand", "whole"]

Choose = Callable[[LayerGraph, Layer], Strategy]


def whole(graph: LayerGraph, layer: Layer) -> Strategy:
    """Every layer on one device."""
    return Strategy()


def halves(graph: LayerGraph, layer: Layer) -> Strategy:
    """Two replicas wherever samples can be spread and replicas compute without talking."""
    spread = layer.batch is not None and layer.batch.units > 1 and not layer.mixes_batch
    return Strategy(2, 1, None, (0, 1)) if spread else Strategy()


@dataclass(frozen=True)
class Ran:
    """The result in the model's own structure, and what buffers hold afterwards."""

    result: Any
    buffers: Mapping[str, Tensor]


def run_by_hand(graph: LayerGraph, model: nn.Module, args: Sequence[Any], kwargs: Any, choose: Choose) -> Ran:
    """Layer by layer, each cut as `choose` says; values are joined after every layer."""
    values: dict[str, Tensor] = {p: model.get_parameter(name) for p, name in graph.parameters.items()}
    values |= {p: model.get_buffer(name).clone() for p, name in graph.buffers.items()} | dict(graph.constants)
    leaves, _ = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given = zip(graph.user_inputs, leaves, strict=True)
    values |= {name: leaf for name, leaf in given if name is not None and isinstance(leaf, Tensor)}
    for layer in graph.layers.values():
        values |= _run_layer(graph, layer, choose(graph, layer), values)
    results = [
        leaf.value if isinstance(leaf, Constant) else graph.as_returned(leaf, values[leaf])
        for leaf in graph.user_outputs
    ]
    buffers = {name: values[graph.buffer_updates.get(p, p)] for p, name in graph.buffers.items()}
    buffers |= {graph.buffers[p]: values[p] + step for p, step in graph.counters.items()}
    return Ran(pytree.tree_unflatten(results, graph.out_spec), buffers)


def _run_layer(graph: LayerGraph, layer: Layer, strategy: Strategy, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    operands = (*layer.inputs, *layer.parameters, *layer.buffers)
    batch = graph.batch or 1
    rows = split_evenly(batch, strategy.replicas)
    found: list[list[dict[str, Tensor]]] = []
    for row, size in enumerate(rows):
        found.append([])
        for column in range(strategy.shards):
            part = LocalLayer(layer, strategy, column, size)
            local = [_cut(graph, part, values[name], name, sum(rows[:row]), column) for name in operands]
            results = local_module(graph, [part], operands, layer.outputs)(*local)
            found[-1].append(dict(zip(layer.outputs, results, strict=True)))
    shard_axis = layer.axis(strategy.axis) if strategy.shards > 1 else None
    return {
        name: _join([_join([c[name] for c in columns], shard_axis, name) for columns in found], layer.batch, name)
        for name in layer.outputs
    }


def _cut(graph: LayerGraph, part: LocalLayer, value: Tensor, name: str, start: int, column: int) -> Tensor:
    batch, axis = part.layer.batch, part.axis
    if batch is not None and part.strategy.replicas > 1 and name in batch.dims:
        samples = value.shape[batch.dims[name]] // (graph.batch or 1)
        value = value.narrow(batch.dims[name], start * samples, part.batch * samples)
    if axis is not None and name in axis.dims:
        value = block_values(value, regions(value.shape, _columns(axis, name, part.strategy.shards))[column])
    return value


def _columns(axis: Axis, name: str, shards: int) -> Layout:
    return Layout(Grid(tuple(range(shards)), 1, shards), None, axis.dims[name], sections=axis.sections.get(name))


def _join(parts: Sequence[Tensor], axis: Axis | None, name: str) -> Tensor:
    if len(parts) == 1 or axis is None:
        return parts[0]
    if name in axis.partial:
        return torch.stack(list(parts)).sum(0)
    if name not in axis.dims:
        return parts[0]
    if name not in axis.sections:
        return torch.cat(list(parts), axis.dims[name])
    # Terms of the whole: the parts that several have are each a share of what they all have.
    dim, own, shards = axis.dims[name], axis.sections[name], len(parts)
    unit = (
        parts[0].shape[dim]
        * lcm(*own.parts(shards))
        // sum(
            size * lcm(*own.parts(shards)) // count for size, count in zip(own.sizes, own.parts(shards), strict=True)
        )
    )
    shape = [unit * own.total if at == dim else size for at, size in enumerate(parts[0].shape)]
    found = parts[0].new_zeros(shape)
    for column, part in enumerate(parts):
        bounds = pairwise(own.local_bounds(shape[dim], shards))
        shares = [part.narrow(dim, a, b - a) * n / shards for (a, b), n in zip(bounds, own.parts(shards), strict=True)]
        index = [
            i
            for e in intervals(regions(shape, _columns(axis, name, shards))[column][dim])
            for i in range(e.start, e.stop)
        ]
        found = found.index_add(dim, torch.tensor(index), torch.cat(shares, dim))
    return found


def assert_same_numbers(
    graph: LayerGraph, model: nn.Module, args: Sequence[Any], kwargs: Any | None = None, choose: Choose = whole
) -> None:
    """Results, gradients of all parameters and buffers by hand are those of the plain model."""
    kwargs = kwargs or {}
    model.train(graph.training)
    torch.manual_seed(3)
    ran = run_by_hand(graph, model, args, kwargs, choose)
    torch.manual_seed(3)
    expected = model(*args, **kwargs)
    (found, spec), (wanted, wanted_spec) = pytree.tree_flatten(ran.result), pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for one, other in zip(found, wanted, strict=True):
        assert one == other if not isinstance(other, Tensor) else close(one, other)
    by_hand, plain = _gradients(ran.result, model), _gradients(expected, model)
    assert all(close(by_hand[name], gradient) for name, gradient in plain.items())
    assert all(close(ran.buffers[name], buffer) for name, buffer in model.named_buffers() if name in ran.buffers)


def close(one: Tensor, other: Tensor) -> bool:
    """Equal to rounding in float64, in shape and type too."""
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    return True


def _gradients(result: Any, model: nn.Module) -> dict[str, Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not leaves or not wanted:
        return {}
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]
    found = torch.autograd.grad(leaves, list(wanted.values()), cotangents, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))
