"""From the axes of single ops to the axes of a layer, by joining equal ones.

Within a layer every dimension that ops pass on to each other is one axis. An axis of the layer can
be cut when no op in it is in the way, its sums leave the layer as they are, and it crosses every
tensor once. The batch axis is the one that the samples of the layer's inputs lie along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import gcd

from torch import fx

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


class _Union:
    """Sets of places that belong to one axis."""

    def __init__(self) -> None:
        self._parent: dict[Place, Place] = {}

    def find(self, place: Place) -> Place:
        parent = self._parent.setdefault(place, place)
        if parent != place:
            self._parent[place] = parent = self.find(parent)
        return parent

    def join(self, places: Sequence[Place]) -> None:
        for place in places[1:]:
            self._parent[self.find(place)] = self.find(places[0])

    def places(self) -> list[Place]:
        return list(self._parent)


def joint_axes(nodes: Sequence[fx.Node]) -> list[JointAxis]:
    """All axes of the ops in `nodes`, joined where they meet."""
    calls = [node for node in nodes if not _is_getitem(node)]
    axes = _with_merged({node.name: list(axes_of(node)) for node in calls}, _sizes(nodes))
    union = _Union()
    for op_axes in axes.values():
        for axis in op_axes:
            union.join(axis.places())
    joint: dict[Place, JointAxis] = defaultdict(JointAxis)
    for node in calls:
        for axis in axes[node.name]:
            _absorb(joint[union.find(axis.places()[0])], axis, node)
    for node in calls:
        for place in _unmentioned(node, axes[node.name], union.places()):
            joint[union.find(place)].cuts.add(Cut.BLOCKED)
    for place in union.places():
        _enter(joint[union.find(place)], place)
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


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _absorb(joint: JointAxis, axis: OpAxis, node: fx.Node) -> None:
    joint.cuts.add(axis.cut)
    joint.first_only |= axis.first_only
    if axis.cut is Cut.SUM:
        joint.partial.add(node.name)
    if axis.name:
        joint.names.append(axis.name)
    joint.units = gcd(joint.units, axis.units)


def _enter(joint: JointAxis, place: Place) -> None:
    if (joint.dims.get(place.tensor, place.dim), joint.outer.get(place.tensor, place.outer)) != (
        place.dim,
        place.outer,
    ):
        joint.crossed.add(place.tensor)
    joint.dims[place.tensor], joint.outer[place.tensor] = place.dim, place.outer


def _unmentioned(node: fx.Node, axes: Iterable[OpAxis], known: Iterable[Place]) -> list[Place]:
    """Places in a call's tensors that its row says nothing about: they stay whole."""
    results = [user for user in node.users if _is_getitem(user)] or [node]
    tensors = [t for t in (*node.all_input_nodes, *results) if is_tensor(t)]
    mentioned = {place for axis in axes for place in axis.places()}
    leading = {Place(tensor.name, dim) for tensor in tensors for dim in range(len(shape_of(tensor)))}
    names = {tensor.name for tensor in tensors}
    merged = {place for place in known if place.outer > 1 and place.tensor in names}
    return sorted((leading | merged) - mentioned, key=lambda place: (place.tensor, place.dim, place.outer))


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
        _keep_whole_outside(axis, inside - set(outputs))
    taken = {t.name for n in nodes for t in n.all_input_nodes if t.name in inside and not _is_getitem(n)}
    batches = [axis for axis in joint if any(_carries(axis, value, dim) for value, dim in batch_dims.items())]
    batch, mixed = _batch_axis(batches, sizes, fixed)
    if batch is not None and batch.units % batch_size:
        batch, mixed = None, False
    if mixed and not any(op_name(node) == "batch_norm" for node in nodes):
        batch, mixed = None, False  # of no other op do replicas exchange statistics
    out_dims = (
        {
            t: d
            for t, d in batches[0].dims.items()
            if t in outputs
            and batches[0].outer[t] == 1
            and t not in batches[0].crossed
            and sizes[t][d] % batch_size == 0
        }
        if len(batches) == 1
        else {}
    )
    merged = any(axis.outer.get(output, 1) > 1 for axis in batches for output in outputs)
    others = []
    for axis in joint:
        units = _units(axis, sizes)
        usable = axis.open and Cut.MIXED not in axis.cuts and not (axis.partial & taken)
        if axis not in batches and usable and units > 1 and axis.partial <= set(outputs):
            others.append(_named(axis, units, kind, sizes, outputs))
    return LayerAxes(batch, mixed, _unique([a for a in others if a is not None]), out_dims, merged)


def _keep_whole_outside(axis: JointAxis, inside: set[str]) -> None:
    """An axis merged behind another cannot be cut where its tensor comes from or goes to other layers."""
    if any(outer > 1 and tensor not in inside for tensor, outer in axis.outer.items()):
        axis.cuts.add(Cut.BLOCKED)


def _carries(axis: JointAxis, tensor: str, dim: int) -> bool:
    return axis.dims.get(tensor) == dim and axis.outer[tensor] == 1


def _batch_axis(
    batches: list[JointAxis], sizes: Mapping[str, tuple[int, ...]], fixed: Sequence[str]
) -> tuple[Axis | None, bool]:
    if len(batches) != 1:
        return None, False
    axis = batches[0]
    in_the_way = not axis.open or axis.partial or any(tensor in axis.dims for tensor in fixed)
    units = _units(axis, sizes)
    if in_the_way or units < 1:
        return None, False
    return Axis("batch", units, dict(axis.dims)), Cut.MIXED in axis.cuts


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


def _unique(axes: list[Axis]) -> tuple[Axis, ...]:
    """Axes with different names: of two with one name the larger is kept."""
    best: dict[str, Axis] = {}
    for axis in axes:
        if axis.name not in best or axis.units > best[axis.name].units:
            best[axis.name] = axis
    return tuple(best.values())
