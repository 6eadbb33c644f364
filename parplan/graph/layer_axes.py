"""From the axes of single ops to the axes of a layer, by joining equal ones.

Within a layer every dimension that ops pass on to each other is one axis. An axis of the layer can
be cut when no op in it is in the way, its sums leave the layer as they are, and it crosses every
tensor once. The batch axis is the one that the samples of the layer's inputs lie along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations
from math import gcd

from networkx.utils import UnionFind
from torch import fx

from parplan.graph.axes.linear_ops import routed_terms
from parplan.graph.axes.row_syntax import Cut, OpAxis, Place
from parplan.graph.axes.table import axes_of, is_tensor, shape_of
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Axis

__all__ = ["JointAxis", "LayerAxes", "joint_axes", "layer_axes"]


@dataclass
class JointAxis:
    """Dimensions of a layer's tensors that can only be cut together."""

    dims: dict[str, int] = field(default_factory=dict)
    outer: dict[str, int] = field(default_factory=dict)
    cuts: set[Cut] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    first_only: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    units: int = 0
    crossed: set[str] = field(default_factory=set)  # tensors that have it twice
    routed: set[str] = field(default_factory=set)  # lists of experts that rows are looked up by

    @property
    def open(self) -> bool:
        """Whether nothing in the layer is in the way of cutting it."""
        return Cut.BLOCKED not in self.cuts and not self.crossed


@dataclass(frozen=True)
class LayerAxes:
    """The batch axis (if samples can be spread), the others, and where samples are in the outputs.

    `merged` says that in an output they are merged behind another axis.
    """

    batch: Axis | None
    mixed: bool
    others: tuple[Axis, ...]
    batch_dims: Mapping[str, int]
    merged: bool


def joint_axes(nodes: Sequence[fx.Node]) -> list[JointAxis]:
    """All axes of the ops in `nodes`, joined where they meet."""
    calls = [node for node in nodes if op_name(node) != "getitem"]
    axes = _with_merged({node.name: list(axes_of(node)) for node in calls}, _sizes(nodes))
    union = UnionFind()  # of the places that belong to one axis
    for op_axes in axes.values():
        for axis in op_axes:
            union.union(*axis.places())
    routed = [axis for op_axes in axes.values() for axis in op_axes if axis.routed_by]
    for one, other in combinations(routed, 2):
        if one.routed_by == other.routed_by:  # one list of experts for several tensors of experts
            union.union(one.places()[0], other.places()[0])
    joint: dict[Place, JointAxis] = defaultdict(JointAxis)
    for node in calls:
        for axis in axes[node.name]:
            known = joint[union[axis.places()[0]]]
            known.cuts.add(axis.cut)
            known.first_only |= axis.first_only
            if axis.cut is Cut.SUM:
                known.partial.add(node.name)
            if axis.name:
                known.names.append(axis.name)
            known.units = gcd(known.units, axis.units)
            known.routed |= {axis.routed_by} if axis.routed_by else set()
    for node in calls:
        # Places in a call's tensors that its row says nothing about stay whole.
        results = [user for user in node.users if op_name(user) == "getitem"] or [node]
        tensors = [t for t in (*node.all_input_nodes, *results) if is_tensor(t)]
        mentioned = {place for axis in axes[node.name] for place in axis.places()}
        leading = {Place(tensor.name, dim) for tensor in tensors for dim in range(len(shape_of(tensor)))}
        names = {tensor.name for tensor in tensors}
        merged = {place for place in union if place.outer > 1 and place.tensor in names}
        unmentioned = sorted((leading | merged) - mentioned, key=lambda place: (place.tensor, place.dim, place.outer))
        for place in unmentioned:
            joint[union[place]].cuts.add(Cut.BLOCKED)
    for place in union:
        known = joint[union[place]]
        before = known.dims.get(place.tensor, place.dim), known.outer.get(place.tensor, place.outer)
        if before != (place.dim, place.outer):
            known.crossed.add(place.tensor)
        known.dims[place.tensor], known.outer[place.tensor] = place.dim, place.outer
    return [axis for axis in joint.values() if axis.dims]


def _with_merged(axes: dict[str, list[OpAxis]], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, list[OpAxis]]:
    """Pass axes that a view merged behind others on through ops that take the merged dimension as it is."""
    plain: dict[Place, list[tuple[str, OpAxis]]] = defaultdict(list)
    for node, op_axes in axes.items():
        for axis in op_axes:
            for place in axis.places() if not axis.outer else ():
                plain[place].append((node, axis))
    waiting = [place for op_axes in axes.values() for axis in op_axes for place in axis.places() if place.outer > 1]
    passed: set[tuple[str, Place]] = set()
    while waiting:
        place = waiting.pop()
        for node, axis in plain[Place(place.tensor, place.dim)]:
            alike = len({sizes[tensor][dim] for tensor, dim in axis.dims.items()}) == 1 and not axis.units
            if (node, place) in passed or not alike or axis.cut not in (Cut.MAP, Cut.SUM):
                continue
            merged = replace(axis, outer=dict.fromkeys(axis.dims, place.outer))
            passed |= {(node, other) for other in merged.places()}
            axes[node].append(merged)
            waiting += merged.places()
    return axes


def layer_axes(
    nodes: Sequence[fx.Node],
    outputs: Sequence[str],
    fixed: Sequence[str],
    batch_dims: Mapping[str, int],
    kind: str,
    batch_size: int = 1,
) -> LayerAxes:
    """Axes of the layer made of `nodes`.

    Args:
        outputs: values other layers take from it.
        fixed: its parameters and buffers: they hold no samples.
        batch_dims: where samples lie in the values it takes in.
        kind: the layer's kind, which helps to name axes.
        batch_size: samples there are. A dimension that is no multiple of it ([batch / 2, 2]) does not hold samples.
    """
    joint = joint_axes(nodes)
    sizes = _sizes(nodes)
    inside = {n.name for n in nodes}
    for axis in joint:
        # An axis merged behind another cannot be cut where its tensor comes from or goes to other layers.
        if any(outer > 1 and (tensor not in inside or tensor in outputs) for tensor, outer in axis.outer.items()):
            axis.cuts.add(Cut.BLOCKED)
    taken = {t.name for n in nodes for t in n.all_input_nodes if t.name in inside and op_name(n) != "getitem"}
    batches = [
        axis
        for axis in joint
        if any(axis.dims.get(value) == dim and axis.outer[value] == 1 for value, dim in batch_dims.items())
    ]
    sampled = list(batches)
    if len(batches) > 1 and sum(len(axis.dims) for axis in batches) == len(set().union(*(a.dims for a in batches))):
        batches = [_together(batches)]
    batch, mixed, out_dims = None, False, dict[str, int]()
    if len(batches) == 1:
        axis, units = batches[0], _units(batches[0], sizes)
        free = axis.open and not axis.partial and not any(tensor in axis.dims for tensor in fixed)
        # Of no other op than batch norm do replicas exchange statistics.
        exchanged = Cut.MIXED not in axis.cuts or any(op_name(node) == "batch_norm" for node in nodes)
        if free and exchanged and units >= 1 and units % batch_size == 0:
            batch, mixed = Axis("batch", units, dict(axis.dims)), Cut.MIXED in axis.cuts
        for tensor, dim in axis.dims.items():
            plain = tensor in outputs and axis.outer[tensor] == 1 and tensor not in axis.crossed
            if plain and sizes[tensor][dim] % batch_size == 0:
                out_dims[tensor] = dim
    merged = any(axis.outer.get(output, 1) > 1 for axis in batches for output in outputs)
    others: dict[str, Axis] = {}
    for axis in joint:
        units = _units(axis, sizes)
        usable = axis.open and Cut.MIXED not in axis.cuts
        if usable and axis.routed:
            terms = routed_terms(nodes, axis.partial, axis.dims.keys()) if len(axis.routed) == 1 else None
            usable, axis.partial = terms is not None, set(terms or ()) & set(outputs) | axis.partial
        else:
            usable = usable and not (axis.partial & taken)
        # Samples along several axes (all pairs of texts and images): those of one are features of the other's.
        usable = usable and (axis not in sampled or len(batches) > 1)
        if usable and units > 1 and (axis.routed or axis.partial <= set(outputs)):
            if any(axis.dims.get(tensor) == 0 and len(sizes[tensor]) == 3 for tensor in fixed):
                axis.names.append("experts")  # one matrix for each
            named = _named(axis, units, kind, sizes, outputs)
            # Of two axes with one name the larger is kept.
            if named is not None and (named.name not in others or named.units > others[named.name].units):
                others[named.name] = named
    return LayerAxes(batch, mixed, tuple(others.values()), out_dims, merged)


def _together(axes: Sequence[JointAxis]) -> JointAxis:
    """Axes of the samples that meet in no tensor (queries and keys on their own), cut at the same samples."""
    made = JointAxis()
    for axis in axes:
        made.dims |= axis.dims
        made.outer |= axis.outer
        made.cuts |= axis.cuts
        made.partial |= axis.partial
        made.crossed |= axis.crossed
        made.units = gcd(made.units, axis.units)
    return made


def _sizes(nodes: Sequence[fx.Node]) -> dict[str, tuple[int, ...]]:
    tensors = {t for node in nodes for t in (node, *node.all_input_nodes) if is_tensor(t)}
    return {tensor.name: shape_of(tensor) for tensor in tensors}


def _units(axis: JointAxis, sizes: Mapping[str, tuple[int, ...]]) -> int:
    return reduce(gcd, (sizes[tensor][dim] // axis.outer[tensor] for tensor, dim in axis.dims.items()), axis.units)


_BY_RANK = {2: ("", "features"), 3: ("", "sequence", "features"), 4: ("", "channels"), 5: ("", "channels")}


def _named(
    axis: JointAxis, units: int, kind: str, sizes: Mapping[str, tuple[int, ...]], outputs: Sequence[str]
) -> Axis | None:
    """The axis with a name, or None for one nobody would cut (height and width of images)."""
    name = axis.names[0] if axis.names else ""
    if not name:
        tensor = next((t for t in outputs if t in axis.dims), next(iter(axis.dims)))
        by_rank = _BY_RANK.get(len(sizes[tensor]), ())
        name = by_rank[axis.dims[tensor]] if axis.dims[tensor] < len(by_rank) else ""
        name = "heads" if name == "channels" and kind == "attention" else name
    if name in ("", "batch"):
        return None
    return Axis(name, units, dict(axis.dims), frozenset(axis.partial), frozenset(axis.first_only))
