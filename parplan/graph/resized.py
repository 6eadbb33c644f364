"""A captured graph at another number of samples, for pricing: `at_batch(graph, batch)`.

A capture makes room for its inputs and takes seconds, a price needs shapes only. So one capture at a small batch serves
every batch that somebody wants priced (a search for the best batch, the batch at which a plan changes). Shapes change
with the samples; the ops stay those of the capture, so the graph is for cost models and the planner, not for running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parplan.errors import CaptureError
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec

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
    if graph.fixed_batch:
        raise CaptureError(f"{graph.model} has constants that depend on the batch; capture it at {batch}")
    dims = _sample_dims(graph, batch)
    values = {name: _value(graph, name, dims, batch) for name in graph.values}
    layers = {name: _layer(graph, layer, batch) for name, layer in graph.layers.items()}
    return replace(graph, batch=batch, values=values, layers=layers)


def _sample_dims(graph: LayerGraph, batch: int) -> Mapping[str, int]:
    """Where samples lie in every value that has them, those between the ops of a layer included.

    Raises:
        CaptureError: a layer takes samples but has no batch axis, so what it makes of them is not known.
    """
    dims = dict(graph.batch_dims)
    for layer in graph.layers.values():
        if layer.batch is not None:
            dims.update(layer.batch.dims)
        elif any(value in graph.batch_dims for value in layer.inputs):
            raise CaptureError(f"{graph.model}: {layer.name} works on all samples at once; capture it at {batch}")
    return dims


def _value(graph: LayerGraph, name: str, dims: Mapping[str, int], batch: int) -> TensorSpec:
    spec, dim = graph.values[name], dims.get(name)
    if dim is None:
        return spec
    size = _scaled(graph, spec.shape[dim], batch, f"{name} has {spec.shape[dim]} in dimension {dim}")
    return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))


def _layer(graph: LayerGraph, layer: Layer, batch: int) -> Layer:
    if layer.batch is None:
        return layer
    units = _scaled(graph, layer.batch.units, batch, f"{layer.name} divides into {layer.batch.units}")
    return replace(layer, batch=replace(layer.batch, units=units))


def _scaled(graph: LayerGraph, size: int, batch: int, what: str) -> int:
    """A size in proportion to the samples, at another number of them (a sample may have several rows)."""
    captured = graph.batch or 1
    if size % captured:
        raise CaptureError(f"{graph.model}: {what}, no multiple of the batch of {captured}; capture it at {batch}")
    return size // captured * batch
