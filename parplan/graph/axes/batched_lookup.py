"""`x[arange(samples), index]` rewritten as a gather, in which every sample looks up in its own row.

Advanced indexing with a range over a whole dimension is the usual way to take one step of every sequence (the last
token that is no padding). As an index op it mixes samples: any row may be read. As a gather it keeps them apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from parplan.graph.axes.call import range_of, shape_of

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
            # Row `i` of the lookup is for row `i` of the source: [size, 1, ...] beside [size, looked up, ...].
            shape, integers = shape_of(lookup), lookup.meta["val"].dtype in (torch.int64, torch.int32)
            fits = integers and shape_of(count) == (size, *(1,) * (len(shape) - 1)) and shape[:1] == (size,)
            positions = count  # 0, 1, ... size - 1, maybe with further dimensions of size 1
            while positions.target in _VIEWS:
                positions = positions.all_input_nodes[0]
            if range_of(positions) == (0, size, 1) and fits and (step < looked or len(shape_of(lookup)) == 1):
                with graph.inserting_before(node):
                    result = _gathered(graph, node, source, lookup, step, looked)
                node.replace_all_uses_with(result)
                graph.erase_node(node)
                while count.op == "call_function" and not count.users:
                    unused, count = count, next(iter(count.all_input_nodes), source)
                    graph.erase_node(unused)
                break


def _gathered(graph: fx.Graph, node: fx.Node, source: fx.Node, lookup: fx.Node, step: int, looked: int) -> fx.Node:
    """`source` looked up along dimension `looked`, in step with dimension `step`."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        made.meta = {**node.meta, "val": target(*values, **named)}
        return made

    shape = shape_of(source)
    if lookup.meta["val"].dtype is not torch.int64:
        lookup = call(aten._to_copy.default, lookup, dtype=torch.int64)
    negative, from_end = call(aten.lt.Scalar, lookup, 0), call(aten.add.Scalar, lookup, shape[looked])
    lookup = call(aten.where.self, negative, from_end, lookup)
    each = lookup.meta["val"].numel() // shape[step]
    sizes = {step: shape[step], looked: each}
    aligned = call(aten.reshape.default, lookup, [sizes.get(dim, 1) for dim in range(len(shape))])
    index = call(aten.expand.default, aligned, [sizes.get(dim, size) for dim, size in enumerate(shape)])
    found = call(aten.gather.default, source, looked, index)
    return call(aten.reshape.default, found, list(shape_of(node)))
