"""From the axes of single ops to the axes of a layer, by joining equal ones.

Within a layer every dimension that ops pass on to each other is one axis. An axis of the layer can
be cut when no op in it is in the way, its sums leave the layer as they are, and it crosses every
tensor once. The batch axis is the one that the samples of the layer's inputs lie along.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
from math import gcd

import torch
from networkx.utils import UnionFind
from torch import fx

from parplan.graph.axes.joint_axis import (
    JointAxis,
    axis_units,
    completed,
    covered,
    cut_together,
    sections_of,
    share_rest,
)
from parplan.graph.axes.linear_ops import carried_terms, routed_terms
from parplan.graph.axes.row_syntax import Cut, OpAxis, Place, Repeats, Section
from parplan.graph.axes.table import axes_of, is_tensor, shape_of
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Axis
from parplan.layout import Sections

__all__ = ["LayerAxes", "Wanted", "joint_axes", "layer_axes"]

MAX_SECTIONS = 64  # of a tensor between layers: finer strides would move in too many pieces


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


def joint_axes(nodes: Sequence[fx.Node], wanted: Mapping[str, Sequence[Wanted]] | None = None) -> list[JointAxis]:
    """All axes of the ops in `nodes`, joined where they meet; `wanted`: how readers cut dimensions of values."""
    calls, sizes = [node for node in nodes if op_name(node) != "getitem"], _sizes(nodes)
    demands = [(one, _wanted_places(value, one, sizes)) for value, own in (wanted or {}).items() for one in own]
    axes = _with_merged({n.name: list(axes_of(n)) for n in calls}, sizes, [p for _, own in demands for p in own])
    parts = _equal_parts(chain.from_iterable(axes.values()), sizes)
    if parts:
        axes = {name: [part for axis in own for part in _in_parts(axis, parts)] for name, own in axes.items()}
        demands = [(one, [part for place in own for part in parts.get(place, [place])]) for one, own in demands]
    union = UnionFind()  # of the places that belong to one axis
    groups = [own for op_axes in axes.values() for axis in op_axes for own in (axis.places(), axis.shared_places())]
    for places in (*filter(None, groups), *(own for one, own in demands if not one.limits)):
        union.union(*places)
    for place in (place for one, own in demands if one.limits for place in own):
        union[place]
    routed = [axis for op_axes in axes.values() for axis in op_axes if axis.routed_by]
    for first, second in combinations(routed, 2):
        if first.routed_by == second.routed_by:  # one list of experts for several tensors of experts
            union.union(first.places()[0], second.places()[0])
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
    for place in _unmentioned(calls, axes, union):
        joint[union[place]].cuts.add(Cut.BLOCKED)
    for place in union:
        joint[union[place]].add(place)
    found = completed(_sharing(axes, union, joint, sizes), sizes)
    for one, places in demands:
        if one.limits:
            found.append(_limited(one, [joint[union[place]] for place in places]))
            continue
        for known in found:
            if places[0] in known.places:
                known.wanted, known.reader = one.sections is not None, one.name
    _settle_sections(found, calls, axes, union, sizes)
    return [axis for axis in found if axis.dims]


def _settle_sections(
    found: Sequence[JointAxis],
    calls: Sequence[fx.Node],
    axes: Mapping[str, Sequence[OpAxis]],
    known: Iterable[Place],
    sizes: Mapping[str, tuple[int, ...]],
) -> None:
    """Settle what of a dimension lies beside the sections of an axis: all parts have it whole, or nothing is cut.

    It is whole for heads alone (stacks of matrices): elsewhere that is rare, and every axis costs planning time.
    """
    stacks = {node.name for node in calls if op_name(node) in _PRODUCTS}
    every = [axis for op_axes in axes.values() for axis in op_axes if axis.cut is not Cut.MAP]
    summed = {place for axis in every for place in axis.dims.items()}
    # Beside shared sections chunks are of other sizes, and neighbours would have to draw alike for these alone.
    chunks = {n.all_input_nodes[0].name for n in calls if op_name(n) in ("chunk", "split")}
    drawn = {n.name for n in calls if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())}
    for axis in found:
        free = axis.open and not axis.routed and not stacks.isdisjoint(axis.dims)
        # A term of a sum would have the rest in every part.
        if axis.sections and free and summed.isdisjoint((tensor, axis.dims[tensor]) for tensor in axis.sections):
            share_rest(axis, known, sizes)
        axis.crossed |= {tensor for tensor in axis.sections if not covered(axis, tensor, sizes)}
        axis.crossed |= (chunks | drawn) & axis.limits.keys() & axis.sections.keys()


def _unmentioned(calls: Sequence[fx.Node], axes: Mapping[str, Sequence[OpAxis]], union: UnionFind) -> list[Place]:
    """Places in the tensors of a call that its row says nothing about: they stay whole."""
    special: dict[str, set[Place]] = defaultdict(set)
    for place in union:
        if not place.plain:
            special[place.tensor].add(place)
    found: list[Place] = []
    for node in calls:
        results = [user for user in node.users if op_name(user) == "getitem"] or [node]
        tensors = [t for t in (*node.all_input_nodes, *results) if is_tensor(t)]
        known = {place for axis in axes[node.name] for place in (*axis.places(), *axis.shared_places())}
        all_places = {Place(tensor.name, dim) for tensor in tensors for dim in range(len(shape_of(tensor)))}
        all_places.update(place for tensor in tensors for place in special[tensor.name])
        found += sorted(all_places - known, key=_order)
    return found


def _order(place: Place) -> tuple[str, int, int, int]:
    return place.tensor, place.dim, place.outer, place.section.start if place.section is not None else -1


def _sharing(
    axes: Mapping[str, Sequence[OpAxis]],
    union: UnionFind,
    joint: Mapping[Place, JointAxis],
    sizes: Mapping[str, tuple[int, ...]],
) -> list[JointAxis]:
    """All axes, those with fewer units (heads of keys) taken into those whose neighbouring parts share them."""
    led: dict[Place, dict[Place, dict[str, int]]] = defaultdict(dict)
    for one in (one for op_axes in axes.values() for one in op_axes if one.shared):
        shared = led[union[one.places()[0]]].setdefault(union[one.shared_places()[0]], {})
        shared.update(one.repeats)
    leaders = Counter(root for own in led.values() for root in own)
    found = []
    for root, axis in joint.items():
        if root not in led:
            found += [axis] if root not in leaders else []
            continue
        whole = cut_together([axis])
        if root in leaders or any(leaders[other] > 1 for other in led[root]):
            whole.cuts.add(Cut.BLOCKED)
        for other, repeats in led[root].items():
            part = joint[other]
            units = axis_units(part, sizes)
            # A sum over parts that several have would count them several times: then each is in one part.
            once = part.partial or part.first_only or part.cuts - {Cut.MAP}
            whole.take(part, 0 if once else units)
            if not once:
                whole.repeats |= {tensor: Repeats(dim, units) for tensor, dim in repeats.items()}
        found.append(whole)
    return found


@dataclass(frozen=True)
class Wanted:
    """A dimension of a value that a reader cuts.

    Args:
        name: the axis's in the reader.
        sections: in which it cuts the dimension; None for one that is cut as a whole.
        units: the reader's, where neighbours share sections.
    """

    dim: int
    name: str
    sections: Sections | None = None
    units: int = 0

    @property
    def limits(self) -> tuple[int, ...]:
        """Those of the sections, where neighbours share some."""
        return self.sections.limits if self.sections is not None and any(self.sections.limits) else ()


def _limited(wanted: Wanted, parts: Sequence[JointAxis]) -> JointAxis:
    """The axis of sections of which neighbours share some."""
    found = JointAxis(names=["shared-heads"], units=wanted.units)
    for limit, part in zip(wanted.limits, parts, strict=True):
        found.take(part, limit)
        if part.partial or part.first_only or part.cuts - {Cut.MAP}:
            found.cuts.add(Cut.BLOCKED)
    return found


def _wanted_places(value: str, wanted: Wanted, sizes: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """The places in a value that make up the sections."""
    sections, size = wanted.sections, sizes[value][wanted.dim]
    if sections is None or len(sections.sizes) == 1:
        return [Place(value, wanted.dim)]
    if len(set(sections.sizes)) == 1 and not wanted.limits:
        return [Place(value, wanted.dim, len(sections.sizes))]
    return [Place(value, wanted.dim, 1, Section(*ends)) for ends in pairwise(sections.bounds(size))]


def _with_merged(
    axes: dict[str, list[OpAxis]], sizes: Mapping[str, tuple[int, ...]], demanded: Sequence[Place] = ()
) -> dict[str, list[OpAxis]]:
    """Pass axes that are behind others, or a section, on through ops that take the dimension as it is."""
    places = (place for op_axes in axes.values() for axis in op_axes for place in axis.places())
    waiting = [place for place in (*demanded, *places) if not place.plain]
    plain: dict[Place, list[tuple[str, OpAxis]]] = defaultdict(list)
    for node, op_axes in axes.items() if waiting else ():
        for axis in op_axes:
            for place in axis.places() if axis.plain else ():
                plain[place].append((node, axis))
    passed: set[tuple[str, Place]] = set()
    while waiting:
        place = waiting.pop()
        for node, axis in plain[Place(place.tensor, place.dim)]:
            alike = len({sizes[tensor][dim] for tensor, dim in axis.dims.items()}) == 1
            outer = dict.fromkeys(axis.dims, place.outer) if place.outer > 1 else {}
            sections = _scaled(place, axis, sizes)
            fits = axis.dims.keys() == (outer | sections).keys() and (alike or not outer)
            if (node, place) in passed or axis.units or not fits or axis.cut not in (Cut.MAP, Cut.SUM):
                continue
            merged = replace(axis, outer=outer, sections=sections)
            passed |= {(node, other) for other in merged.places()}
            axes[node].append(merged)
            waiting += merged.places()
    return axes


def _equal_parts(axes: Iterable[OpAxis], sizes: Mapping[str, tuple[int, ...]]) -> dict[Place, list[Place]]:
    """Places behind something of which an op takes a part as a section: by place, all such sections, which are equal.

    `repeat(2)` makes heads an axis behind two halves, and `chunk(2)` takes the halves apart.
    """
    special = {place for axis in axes for place in axis.places() if not place.plain}
    found: dict[Place, list[Place]] = {}
    for place in (place for place in special if 1 < place.outer <= MAX_SECTIONS):
        size = sizes[place.tensor][place.dim] // place.outer
        starts = range(0, size * place.outer, size)
        parts = [Place(place.tensor, place.dim, 1, Section(start, start + size)) for start in starts]
        found |= {} if special.isdisjoint(parts) else {place: parts}
    return found


def _in_parts(axis: OpAxis, parts: Mapping[Place, Sequence[Place]]) -> list[OpAxis]:
    """The axis behind something as one axis for each part, where its places are known as parts."""
    known = [parts[place] for place in axis.places() if place in parts]
    if not known or len({len(each) for each in known}) > 1:
        return [axis]
    names = {each[0].tensor for each in known}
    outer = {tensor: size for tensor, size in axis.outer.items() if tensor not in names}
    rows = [{place.tensor: place.section for place in row if place.section} for row in zip(*known, strict=True)]
    return [replace(axis, outer=outer, sections={**axis.sections, **sections}) for sections in rows]


def _scaled(place: Place, axis: OpAxis, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Section]:
    """The same section in all tensors of an axis: of [queries | keys] as heads, and as features of all heads."""
    found, size, section = dict[str, Section](), sizes[place.tensor][place.dim], place.section
    if section is None:
        return found
    for tensor, dim in axis.dims.items():
        start, stop = section.start * sizes[tensor][dim], section.stop * sizes[tensor][dim]
        if start % size == 0 == stop % size:
            found[tensor] = Section(start // size, stop // size)
    return found


def layer_axes(
    nodes: Sequence[fx.Node],
    outputs: Sequence[str],
    fixed: Sequence[str],
    batch_dims: Mapping[str, int],
    kind: str,
    batch_size: int = 1,
    buffers: Sequence[str] = (),
    wanted: Mapping[str, Sequence[Wanted]] | None = None,
) -> LayerAxes:
    """Axes of the layer made of `nodes`.

    Args:
        outputs: values other layers take from it.
        fixed: its parameters and buffers: they hold no samples.
        batch_dims: where samples lie in the values it takes in.
        kind: the layer's kind, which helps to name axes.
        batch_size: samples there are. A dimension that is no multiple of it ([batch / 2, 2]) does not hold samples.
        buffers: those of `fixed` that the layer may write, as parts that are views.
        wanted: outputs that readers cut in sections, and how.
    """
    joint = joint_axes(nodes, wanted)
    sizes = _sizes(nodes)
    inside = {n.name for n in nodes}
    batches = [axis for axis in joint if any(batch_dims.get(v) == d and axis.plain(v) for v, d in axis.dims.items())]
    apart = sum(len(axis.dims) for axis in batches) == len(set().union(*(axis.dims for axis in batches)))
    within = dict(chain.from_iterable(axis.dims.items() for axis in batches)) if apart else dict[str, int]()
    known = {tensor for axis in joint for tensor in axis.dims} - set(outputs) - set(buffers) | set(wanted or {})
    for axis in joint:
        steady = {t for t, dim in axis.dims.items() if t in fixed or batch_dims.get(t, within.get(t, dim)) != dim}
        if not _may_cross(axis, inside - set(outputs), steady & known if axis not in batches else set(), fixed):
            axis.cuts.add(Cut.BLOCKED)
    sampled = list(batches)
    if len(batches) > 1 and apart:
        batches = [cut_together(batches)]  # they meet in no tensor (queries and keys on their own)
    taken = {t.name for n in nodes for t in n.all_input_nodes if t.name in inside and op_name(n) != "getitem"}
    batch, mixed, out_dims = None, False, dict[str, int]()
    if len(batches) == 1:
        axis, units = batches[0], axis_units(batches[0], sizes)
        free = axis.open and not axis.partial and not any(tensor in axis.dims for tensor in fixed)
        # Of no other op than batch norm do replicas exchange statistics.
        exchanged = Cut.MIXED not in axis.cuts or any(op_name(node) == "batch_norm" for node in nodes)
        if free and exchanged and units >= 1 and units % batch_size == 0:
            batch, mixed = Axis("batch", units, dict(axis.dims)), Cut.MIXED in axis.cuts
    for axis in batches:
        both = set[str]().union(*(other.dims for other in batches if other is not axis))  # all pairs of samples
        for tensor, dim in axis.dims.items():
            plain = tensor in outputs and axis.plain(tensor) and tensor not in axis.crossed | both
            if plain and sizes[tensor][dim] % batch_size == 0:
                out_dims[tensor] = dim
    merged = any(axis.outer.get(output, 1) > 1 for axis in batches for output in outputs)
    for axis in joint:
        if axis.partial & taken and not axis.routed:
            axis.partial = carried_terms(nodes, axis.partial, axis.dims.keys(), outputs)
    products = [{n.name, *(t.name for t in n.all_input_nodes)} for n in nodes if op_name(n) in _PRODUCTS]
    others: dict[str, Axis] = {}
    ranks: dict[str, tuple[bool, bool, int]] = {}
    for axis in joint:
        units = axis_units(axis, sizes)
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
            named = _named(axis, units, kind, sizes, outputs, any(names <= axis.dims.keys() for names in products))
            if named is None:
                continue
            # Of two axes with one name that is kept which a reader wants in sections, else one without, or the larger.
            crossing = (tensor for tensor in axis.dims if tensor not in inside or tensor in outputs)
            rank = axis.wanted, all(axis.plain(tensor) for tensor in crossing), units
            if named.name not in ranks or rank > ranks[named.name]:
                others[named.name], ranks[named.name] = named, rank
    return LayerAxes(batch, mixed, tuple(others.values()), out_dims, merged)


def _may_cross(axis: JointAxis, inner: Set[str], able: Set[str], fixed: Sequence[str]) -> bool:
    """Whether an axis is cut in the same way where its tensors come from and go to as in the layer.

    Args:
        inner: tensors that stay in the layer.
        able: tensors that may be in sections between layers: those that take them know of them, their sizes do not
            depend on the batch, and nobody writes parts of them in place.
    """
    crossing = axis.dims.keys() - inner
    in_sections = {tensor for tensor in crossing if not axis.plain(tensor)}
    few = all(max(axis.outer[t], len(axis.sections.get(t, ()))) <= MAX_SECTIONS for t in in_sections)
    # Blocks of a parameter are equal or apart: sections that are shared, beside others, would overlap.
    overlap = axis.limits.keys() & axis.sections.keys() & set(fixed)
    written = (axis.limits.keys() & set(fixed)) - able
    return in_sections <= able and few and not overlap and not written and crossing.isdisjoint(axis.repeats)


def _sizes(nodes: Sequence[fx.Node]) -> dict[str, tuple[int, ...]]:
    tensors = {t for node in nodes for t in (node, *node.all_input_nodes) if is_tensor(t)}
    return {tensor.name: shape_of(tensor) for tensor in tensors}


_PRODUCTS = ("baddbmm", "bmm", "einsum", "matmul", "scaled_dot_product_attention")
_BY_RANK = {2: ("", "features"), 3: ("", "sequence", "features"), 4: ("", "channels"), 5: ("", "channels")}


def _named(
    axis: JointAxis, units: int, kind: str, sizes: Mapping[str, tuple[int, ...]], outputs: Sequence[str], stacked: bool
) -> Axis | None:
    """The axis with a name, or None for one nobody would cut (height and width of images).

    Args:
        stacked: a product has a matrix for each of its units, in both operands and the result.
    """
    name = axis.names[0] if axis.names else ""
    if not name:
        tensor = next((t for t in outputs if t in axis.dims), next(iter(axis.dims)))
        by_rank = _BY_RANK.get(len(sizes[tensor]), ())
        name = by_rank[axis.dims[tensor]] if axis.dims[tensor] < len(by_rank) else ""
        name = "heads" if name == "channels" and kind == "attention" else name
        name = axis.reader or name if name in ("", "channels") else name
        name = name or ("heads" if stacked else "")
    if name in ("", "batch"):
        return None
    sets = frozenset(axis.partial), frozenset(axis.first_only)
    return Axis(name, units, dict(axis.dims), *sets, sections_of(axis), dict(axis.repeats))
