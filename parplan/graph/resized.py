"""A captured graph of another size, for pricing: `at_batch(graph, batch)`, `with_fewer_blocks(graph, blocks, copies)`.

A capture makes room for its inputs and takes seconds, a price needs shapes only. So one capture at a small batch serves
every batch that somebody wants priced (a search for the best batch, the batch at which a plan changes), and a model of
many equal blocks is priced as one of a few. Shapes change with the samples; the ops stay those of the capture, so the
graph is for cost models and the planner, not for running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import fx

from parplan.errors import CaptureError
from parplan.graph.layer_graph import Axis, Layer, LayerGraph
from parplan.graph.layers import wired
from parplan.graph.repeated import Blocks

__all__ = ["at_batch", "with_fewer_blocks"]

Said = TypeVar("Said")


def at_batch(graph: LayerGraph, batch: int) -> LayerGraph:
    """`graph` as if it had been captured with `batch` samples.

    Raises:
        CaptureError: the model has no samples, `batch` is below 1, or something in the model depends on their number
            otherwise than in proportion, or in a way that is not known.
    """
    if graph.batch is None:
        raise CaptureError(f"{graph.model} has no samples; there is no other batch of it")
    if batch < 1:
        raise CaptureError(f"{graph.model}: a batch of {batch}; it takes at least 1 sample")
    if batch == graph.batch:
        return graph
    if graph.fixed_batch or graph.grown is None:
        raise CaptureError(f"{graph.model} has constants that depend on the batch; capture it at {batch}")
    if line := graph.size_branches.turned(batch):
        raise CaptureError(f"{graph.model} takes another branch with {batch} samples ({line}); capture it at {batch}")
    grown = graph.grown
    values = dict(graph.values)
    for name, dims in ((name, dims) for name, dims in grown.items() if name in values):
        shape = list(values[name].shape)
        for dim in dims:
            shape[dim] = _scaled(graph, shape[dim], batch, f"{name} has {shape[dim]} in dimension {dim}")
        values[name] = replace(values[name], shape=tuple(shape))
    layers = {}
    for name, layer in graph.layers.items():
        spread = None if layer.batch is None else _axis(graph, layer.batch, grown, batch, name)
        axes = tuple(_axis(graph, axis, grown, batch, name) for axis in layer.axes)
        layers[name] = replace(layer, batch=spread, axes=axes)
    return replace(graph, batch=batch, values=values, layers=layers)


def _axis(graph: LayerGraph, axis: Axis, grown: Mapping[str, tuple[int, ...]], batch: int, layer: str) -> Axis:
    if axis is not graph.layers[layer].batch and not any(dim in grown.get(name, ()) for name, dim in axis.dims.items()):
        return axis
    return replace(axis, units=_scaled(graph, axis.units, batch, f"{layer} divides into {axis.units}"))


def _scaled(graph: LayerGraph, size: int, batch: int, what: str) -> int:
    """A size in proportion to the samples, at another number of them (a sample may have several rows)."""
    captured = graph.batch or 1
    if size % captured:
        raise CaptureError(f"{graph.model}: {what}, no multiple of the batch of {captured}; capture it at {batch}")
    return size // captured * batch


def with_fewer_blocks(graph: LayerGraph, blocks: Blocks, copies: int) -> LayerGraph:
    """`graph` with the first of its equal blocks only: layers behind them take from the last one that is left.

    Args:
        copies: how many are left.

    Raises:
        CaptureError: layers behind the blocks, or the user, take from one that is left out and is not the last.
    """
    names = list(graph.layers)
    if copies >= blocks.copies:
        return graph
    left = blocks.begin + copies * blocks.period
    out, last = names[left : blocks.end], names[blocks.end - blocks.period : blocks.end]
    stands = dict[fx.Node, fx.Node]()
    for name, like in zip(last, names[left - blocks.period : left], strict=True):
        stands.update(zip(graph.layers[name].nodes, graph.layers[like].nodes, strict=True))
    gone = {node for name in out for node in graph.layers[name].nodes}
    in_layers = {node for layer in graph.layers.values() for node in layer.nodes}
    kept, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in next(iter(in_layers)).graph.nodes:
        if node in gone or node.op == "output":
            continue
        early = next((one for one in node.all_input_nodes if stands.get(one, one) not in copied), None)
        if early is None:
            copied[node] = kept.node_copy(node, lambda one: copied[stands.get(one, one)])
        elif node in in_layers:
            raise CaptureError(f"{graph.model}: {node.name} takes {early.name}, of a block in the middle")
    instead = {node.name: like.name for node, like in stands.items()}
    results = tuple(instead.get(one, one) if isinstance(one, str) else one for one in graph.user_outputs)
    if returned := next((node.name for node in gone if node.name in results), None):
        raise CaptureError(f"{graph.model} returns {returned}, of a block in the middle")
    layers = {
        name: _reads(layer, instead, tuple(copied[node] for node in layer.nodes))
        for name, layer in graph.layers.items()
        if name not in out
    }
    taken = {name for one in out for name in (*graph.layers[one].parameters, *graph.layers[one].buffers)}
    taken -= {name for layer in layers.values() for name in (*layer.parameters, *layer.buffers)}
    taken |= {node.name for node in gone}
    producer, digraph = wired(layers)

    def left_of(by_value: Mapping[str, Said]) -> dict[str, Said]:
        return {value: said for value, said in by_value.items() if value not in taken}

    return replace(
        graph, layers=layers, producer=producer, digraph=digraph, user_outputs=results, values=left_of(graph.values),
        batch_dims=left_of(graph.batch_dims), parameters=left_of(graph.parameters), buffers=left_of(graph.buffers),
        constants=left_of(graph.constants), buffer_updates=left_of(graph.buffer_updates),
        counters=left_of(graph.counters),
    )  # fmt: skip


def _reads(layer: Layer, instead: Mapping[str, str], nodes: tuple[fx.Node, ...]) -> Layer:
    """A layer whose nodes are copies, and take other values."""

    def keyed(by_value: Mapping[str, Said]) -> dict[str, Said]:
        return {instead.get(value, value): said for value, said in by_value.items()}

    def own(axis: Axis) -> Axis:
        partial, first_only = (frozenset(instead.get(v, v) for v in some) for some in (axis.partial, axis.first_only))
        return replace(
            axis, dims=keyed(axis.dims), partial=partial, first_only=first_only, sections=keyed(axis.sections),
            repeats=keyed(axis.repeats),
        )  # fmt: skip

    return replace(
        layer, nodes=nodes, inputs=tuple(instead.get(value, value) for value in layer.inputs),
        batch=None if layer.batch is None else own(layer.batch), axes=tuple(map(own, layer.axes)),
    )  # fmt: skip
