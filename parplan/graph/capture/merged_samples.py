"""Values whose dimension merges samples with another axis ([time * samples]), unflattened between layers.

Samples that are the inner part of a dimension lie in strides, which no block of a tensor can say. So where such a value
leaves its layer it is reshaped to [time, samples], and its readers reshape it back: between layers, and where results
are handed out, samples have a dimension whose parts are blocks. So are heads that are merged behind samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from parplan.graph.axes.call import call_like, is_tensor, shape_of
from parplan.graph.axes.row_syntax import Cut, OpAxis, Place
from parplan.graph.axes.table import axes_of
from parplan.graph.layers import BOUNDARY, LayerSet

__all__ = ["follow_samples", "unflatten_between_layers"]

aten = torch.ops.aten


def follow_samples(node: fx.Node, places: dict[str, Place], batch: int) -> None:
    """Add where `batch` samples lie in what a node makes, by the op's axes, to where they lie in what it takes."""
    operands = dict.fromkeys(operand.name for operand in node.all_input_nodes)
    read = [places[name] for name in operands if name in places]
    if node.op != "call_function" or not read:
        return
    sizes = {n.name: shape_of(n) for n in (node, *node.all_input_nodes, *node.users) if is_tensor(n)}
    found: dict[str, set[Place]] = {}
    for axis in axes_of(node):
        for outer in {outer for place in read if (outer := _outer(axis, place, sizes)) is not None}:
            for tensor in axis.dims.keys() - operands.keys():
                found.setdefault(tensor, set()).add(Place(tensor, axis.dims[tensor], axis.outer.get(tensor, outer)))
    whole = {tensor: place for tensor, (place, *more) in found.items() if not more}
    places.update({t: p for t, p in whole.items() if sizes[t][p.dim] // p.outer % batch == 0})


def _outer(axis: OpAxis, place: Place, sizes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The size of what samples are merged behind in the results of an op along `axis`; None where it has none there."""
    if axis.dims.get(place.tensor) != place.dim or axis.cut not in (Cut.MAP, Cut.MIXED) or axis.sections:
        return None
    if axis.outer.get(place.tensor, 1) == place.outer:
        return 1
    alike = len({sizes[tensor][dim] for tensor, dim in axis.dims.items() if tensor in sizes}) == 1
    return place.outer if not axis.outer and alike and not axis.units else None


def unflatten_between_layers(
    graph: fx.Graph,
    built: LayerSet,
    behind: Mapping[str, Place],
    heads: Mapping[str, tuple[int, tuple[int, ...]]],
    grown: Mapping[str, Sequence[int]],
    kept: frozenset[str],
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Insert the reshapes; layers have to be built anew afterwards.

    Args:
        behind: values with samples merged behind something: where they lie.
        heads: values with heads merged behind samples: the dimension, and its sizes. As results they stay as they are.
        grown: dimensions that grow with the batch, by value.
        kept: values that are needed as they are (updates of buffers).

    Returns:
        Results of the model that were reshaped: by new name, the dimension to flatten with the next one.
        And the dimensions of what was inserted that grow with the batch.
    """
    layer_of = {node: layer for layer in built.layers.values() for node in layer.nodes}
    results: dict[str, int] = {}
    inserted: dict[str, tuple[int, ...]] = {}
    for node in [node for node in graph.nodes if node in layer_of]:
        place, shape = behind.get(node.name), list(shape_of(node)) if is_tensor(node) else []
        readers = [user for user in node.users if layer_of.get(user) is not layer_of[node]]
        if place is not None:
            dim, samples = place.dim, place.dim + 1
            sizes: tuple[int, ...] = place.outer, shape[dim] // place.outer
        elif node.name in heads:
            dim, sizes = heads[node.name]
            samples = dim
            readers = [user for user in readers if user.op != "output"]
        else:
            continue
        hooked = any(layer_of[n].kind in ("hooks", "function") for n in (node, *readers) if n in layer_of)
        if not readers or hooked or node.name in kept:
            continue
        with graph.inserting_after(node):
            unflattened = _reshape(node, [*shape[:dim], *sizes, *shape[dim + 1 :]], node)
        known = grown.get(node.name, ())
        moved = (samples if own == dim else own + (own > dim) * (len(sizes) - 1) for own in known)
        inserted[unflattened.name] = tuple(moved)
        flattened: dict[str, fx.Node] = {}
        for user in sorted(readers):
            if user.op == "output":
                user.replace_input_with(node, unflattened)
                results[unflattened.name] = dim
                continue
            layer = layer_of[user].name
            if layer not in flattened:
                with graph.inserting_before(user):
                    flattened[layer] = _reshape(unflattened, shape, user)
                inserted[flattened[layer].name] = tuple(known)
            user.replace_input_with(node, flattened[layer])
    return results, inserted


def _reshape(source: fx.Node, shape: list[int], anchor: fx.Node) -> fx.Node:
    """A reshape that belongs to the layer of `anchor`."""
    made = call_like(anchor, aten.reshape.default, source, shape)
    made.meta[BOUNDARY] = anchor
    return made
