"""Heads merged with samples in one dimension ([samples * heads]): the sizes that it is unflattened to between layers.

`bmm` wants one leading dimension, and norms of every head are called on rows of [samples * positions * heads]. Inside a
layer heads are an axis behind samples there. Between layers they would lie in strides of as many pieces as a device has
samples; with a dimension of their own they are blocks, and can be cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from networkx.utils import UnionFind
from torch import fx

from parplan.graph.axes.call import is_tensor, shape_of
from parplan.graph.axes.row_syntax import Cut, OpAxis, Place
from parplan.graph.axes.table import axes_of
from parplan.graph.kinds import op_name

__all__ = ["merged_heads"]


def merged_heads(graph: fx.Graph, samples: Mapping[str, Place], batch: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Values of which a dimension merges samples with heads behind them.

    Heads are a leading dimension of a product of matrices, or are merged into it behind the samples.

    Args:
        samples: where samples lie in values.
        batch: how many there are.

    Returns:
        By value, the dimension and the sizes that it is merged of, samples first.
    """
    named = {node.name: node for node in graph.nodes if is_tensor(node)}
    shapes = {name: shape_of(node) for name, node in named.items()}
    front = [p for p in samples.values() if p.outer == 1 and shapes[p.tensor][p.dim] > batch]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    # Rows of all tokens alone need not be followed through the graph.
    lengths = {shapes[place.tensor][place.dim] for place in front}
    products = {shapes[n.name][0] for n in calls if op_name(n) in _PRODUCTS and len(shapes[n.name]) == 3}
    around = [(p.tensor, axis) for p in front for n in (named[p.tensor], *named[p.tensor].users) for axis in axes_of(n)]
    if lengths.isdisjoint(products) and all(axis.outer.get(tensor, 1) <= batch for tensor, axis in around):
        return {}
    axes = {node: axes_of(node) for node in calls}
    dimensions, joined = _dimensions(axes.values(), shapes)
    begins, inner = defaultdict[Place, set[int]](set), defaultdict[Place, set[Place]](set)
    for axis in (axis for own in axes.values() for axis in own):
        for place in (place for place in axis.places() if place.outer > 1 and place.section is None):
            root = dimensions[Place(place.tensor, place.dim)]
            begins[root].add(place.outer)
            inner[root].add(joined[place])
    stacks = [Place(node.name, dim) for node in calls for dim in _stacked(node, axes[node])]
    alone = {dimensions[place] for place in stacks if len(shapes[place.tensor]) == 3}
    beside = {joined[place] for place in stacks if place.dim > 0}
    sizes: dict[Place, tuple[int, ...]] = {}
    for root in {dimensions[place] for place in front}:
        ends = [1, *sorted(begins[root]), shapes[root.tensor][root.dim]]
        # Samples are in front; `view(2, samples * tokens)` begins inside of them, which mixes them.
        fits = ends[1] == batch and all(end % begin == 0 for begin, end in pairwise(ends))
        if fits and ((root in alone and begins[root] == {batch}) or not beside.isdisjoint(inner[root])):
            sizes[root] = tuple(end // begin for begin, end in pairwise(ends))
    return {place.tensor: (place.dim, sizes[root]) for place in dimensions if (root := dimensions[place]) in sizes}


def _dimensions(axes: Iterable[Sequence[OpAxis]], shapes: Mapping[str, tuple[int, ...]]) -> tuple[UnionFind, UnionFind]:
    """Dimensions that ops pass on to each other as they are, and places of one axis."""
    dimensions, joined = UnionFind(), UnionFind()
    for axis in (axis for own in axes for axis in own):
        joined.union(*axis.places())
        alike = defaultdict[int, list[Place]](list)
        for tensor, dim in axis.dims.items():
            alike[shapes[tensor][dim]].append(Place(tensor, dim))
        for same in alike.values():
            dimensions.union(*same)
    return dimensions, joined


_PRODUCTS = ("baddbmm", "bmm", "matmul", "scaled_dot_product_attention")


def _stacked(node: fx.Node, axes: Sequence[OpAxis]) -> list[int]:
    """Dimensions of a product along which it has a matrix for each part in all operands."""
    if op_name(node) not in _PRODUCTS:
        return []
    attends = op_name(node) == "scaled_dot_product_attention"  # whose heads of keys may be fewer, and masks have none
    operands = node.all_input_nodes[:1] if attends else node.all_input_nodes[-2:]
    names, rank = {node.name, *(operand.name for operand in operands)}, len(shape_of(node))
    return [
        axis.dims[node.name]
        for axis in axes
        if axis.cut is Cut.MAP and names <= axis.dims.keys() and axis.dims[node.name] < rank - 2
    ]
