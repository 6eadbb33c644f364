"""A captured graph at another number of samples, for pricing: `at_batch(graph, batch)`.

A capture makes room for its inputs and takes seconds, a price needs shapes only. So one capture at a small batch serves
every batch that somebody wants priced (a search for the best batch, the batch at which a plan changes). Shapes change
with the samples; the ops stay those of the capture, so the graph is for cost models and the planner, not for running.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.errors import CaptureError
from parplan.graph.kinds import is_batch_reduction
from parplan.graph.layer_graph import LayerGraph

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
    # Where samples lie in every value that has them, those between the ops of a layer included.
    dims, layers = dict(graph.batch_dims), dict(graph.layers)
    for name, layer in graph.layers.items():
        if layer.batch is not None:
            dims.update(layer.batch.dims)
            units = _scaled(graph, layer.batch.units, batch, f"{name} divides into {layer.batch.units}")
            layers[name] = replace(layer, batch=replace(layer.batch, units=units))
        elif any(v in graph.batch_dims for v in layer.inputs) and not any(map(is_batch_reduction, layer.nodes)):
            raise CaptureError(f"{graph.model}: {name} works on all samples at once; capture it at {batch}")
    values = dict(graph.values)
    for name, dim in ((name, dim) for name, dim in dims.items() if name in values):
        shape = list(values[name].shape)
        shape[dim] = _scaled(graph, shape[dim], batch, f"{name} has {shape[dim]} in dimension {dim}")
        values[name] = replace(values[name], shape=tuple(shape))
    return replace(graph, batch=batch, values=values, layers=layers)


def _scaled(graph: LayerGraph, size: int, batch: int, what: str) -> int:
    """A size in proportion to the samples, at another number of them (a sample may have several rows)."""
    captured = graph.batch or 1
    if size % captured:
        raise CaptureError(f"{graph.model}: {what}, no multiple of the batch of {captured}; capture it at {batch}")
    return size // captured * batch
