"""A captured graph at another number of samples, for pricing: `at_batch(graph, batch)`.

A capture makes room for its inputs and takes seconds, a price needs shapes only. So one capture at a small batch serves
every batch that somebody wants priced (a search for the best batch, the batch at which a plan changes). Shapes change
with the samples; the ops stay those of the capture, so the graph is for cost models and the planner, not for running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parplan.errors import CaptureError
from parplan.graph.layer_graph import Axis, LayerGraph

__all__ = ["at_batch"]


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
