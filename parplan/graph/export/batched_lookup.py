"""`x[arange(samples), index]` rewritten as a gather, in which every sample looks up in its own row.

Advanced indexing with a range over a whole dimension is the usual way to take one step of every sequence (the last
token that is no padding). As an index op it mixes samples: any row may be read. As a gather it keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from parplan.graph.axes.call import call_like, range_of, shape_of

__all__ = ["gather_batched_lookups"]

aten = torch.ops.aten
_VIEWS = (aten.unsqueeze.default, aten.view.default, aten.reshape.default)


def gather_batched_lookups(graph: fx.Graph) -> None:
    """Rewrite all such lookups in an exported graph."""
    for node in list(graph.nodes):
        if node.target is not aten.index.Tensor:
            continue
        source, indices = node.args
        places = [place for place, index in enumerate(indices) if index is not None]
        if len(places) != 2 or places[1] != places[0] + 1:
            continue
        for step, looked in (places, places[::-1]):
            size, count, lookup = shape_of(source)[step], indices[step], indices[looked]
            shape = torch.broadcast_shapes(shape_of(count), shape_of(lookup))
            # Row `i` of the lookup is for row `i` of the source, along the one dimension in which the range lies.
            own = (*(1,) * (len(shape) - len(shape_of(count))), *shape_of(count))
            along = [dim for dim, length in enumerate(own) if length != 1]
            fits = lookup.meta["val"].dtype in (torch.int64, torch.int32) and [own[dim] for dim in along] == [size]
            positions = count  # 0, 1, ... size - 1, maybe with further dimensions of size 1
            while positions.target in _VIEWS:
                positions = positions.all_input_nodes[0]
            if range_of(positions) == (0, size, 1) and fits:
                with graph.inserting_before(node):
                    result = _gathered(node, (step, looked), shape, along[0])
                node.replace_all_uses_with(result)
                graph.erase_node(node)
                while count.op == "call_function" and not count.users:
                    unused, count = count, next(iter(count.all_input_nodes), source)
                    graph.erase_node(unused)
                break


def _gathered(node: fx.Node, places: Sequence[int], looked_up: tuple[int, ...], along: int) -> fx.Node:
    """A lookup as a gather.

    Args:
        places: the dimension that is in step with the indices, and the one that is looked up in.
        looked_up: shape of the indices, broadcast.
        along: its dimension that is in step.
    """
    source: Any = node.args[0]
    indices: Any = node.args[1]
    (step, looked), lookup = places, indices[places[1]]
    shape, rank, call = shape_of(source), len(looked_up), partial(call_like, node)
    if lookup.meta["val"].dtype is not torch.int64:
        lookup = call(aten._to_copy.default, lookup, dtype=torch.int64)
    negative, from_end = call(aten.lt.Scalar, lookup, 0), call(aten.add.Scalar, lookup, shape[looked])
    lookup = call(aten.where.self, negative, from_end, lookup)
    others = [dim for dim in range(rank) if dim != along]
    if shape_of(lookup) != looked_up:
        lookup = call(aten.expand.default, lookup, list(looked_up))
    if along:
        lookup = call(aten.permute.default, lookup, [along, *others])
    each = lookup.meta["val"].numel() // shape[step]
    sizes = {step: shape[step], looked: each}
    aligned = call(aten.reshape.default, lookup, [sizes.get(dim, 1) for dim in range(len(shape))])
    index = call(aten.expand.default, aligned, [sizes.get(dim, size) for dim, size in enumerate(shape)])
    found = call(aten.gather.default, source, looked, index)
    # The two dimensions are those of the indices now, in the order in which source has them.
    first = min(step, looked)
    order = [along, *others] if step < looked else [*others, along]
    sizes_behind = [looked_up[dim] for dim in order]
    found = call(aten.reshape.default, found, [*shape[:first], *sizes_behind, *shape[first + 2 :]])
    if order == sorted(order):
        return found
    moved = [first + order.index(dim) for dim in range(rank)]
    return call(aten.permute.default, found, [*range(first), *moved, *range(first + rank, len(shape) + rank - 2)])
