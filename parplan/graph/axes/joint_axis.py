"""Axes of several ops joined: dimensions of a layer's tensors that can only be cut together, and their sections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from math import gcd

from networkx.utils import UnionFind

from parplan.graph.axes.row_syntax import Cut, Place, Repeats, Section
from parplan.layout import Sections

__all__ = ["JointAxis", "axis_units", "completed", "covered", "cut_together", "sections_of", "share_rest"]


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
    sections: dict[str, set[Section]] = field(default_factory=dict)
    wanted: bool = False  # by a layer that reads a value in sections
    reader: str = ""  # name of the axis in a layer that reads a value cut along it
    places: list[Place] = field(default_factory=list)
    limits: dict[str, dict[Section | None, int]] = field(default_factory=dict)  # parts that neighbours share
    repeats: dict[str, Repeats] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether nothing in the layer is in the way of cutting it."""
        return Cut.BLOCKED not in self.cuts and not self.crossed

    def plain(self, tensor: str) -> bool:
        """Whether it is all of a dimension of `tensor`, neither behind another axis nor in sections."""
        return self.outer.get(tensor) == 1 and tensor not in self.sections

    def add(self, place: Place) -> None:
        """Another place that belongs to it."""
        self.places.append(place)
        before = self.dims.get(place.tensor, place.dim), self.outer.get(place.tensor, place.outer)
        is_known, in_sections = place.tensor in self.dims, place.tensor in self.sections
        if before != (place.dim, place.outer) or (is_known and in_sections != (place.section is not None)):
            self.crossed.add(place.tensor)
        self.dims[place.tensor], self.outer[place.tensor] = place.dim, place.outer
        if place.section is not None:
            self.sections.setdefault(place.tensor, set()).add(place.section)

    def take(self, other: JointAxis, limit: int = 0) -> None:
        """Make another axis a part of it, of which neighbours share what more than `limit` shards would cut."""
        self.cuts |= other.cuts
        self.partial |= other.partial
        self.first_only |= other.first_only
        self.names += other.names
        self.crossed |= other.crossed
        self.wanted |= other.wanted
        self.repeats |= other.repeats
        self.routed |= other.routed
        self.units = gcd(self.units, 0 if limit else other.units)
        for place in other.places:
            self.add(place)
            if limit:
                self.limits.setdefault(place.tensor, {})[place.section] = limit


def cut_together(axes: Iterable[JointAxis]) -> JointAxis:
    """Several axes as one, which cuts each of them at the same places."""
    made = JointAxis()
    for axis in axes:
        made.take(axis)
    return made


def covered(axis: JointAxis, tensor: str, sizes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the sections of an axis follow each other and make up all of the dimension of `tensor`."""
    sections = sorted(axis.sections[tensor], key=lambda s: s.start)
    ends = [0, *(end for section in sections for end in (section.start, section.stop))]
    return ends[1::2] == ends[:-1:2] and ends[-1] == sizes[tensor][axis.dims[tensor]]


def completed(axes: Sequence[JointAxis], sizes: Mapping[str, tuple[int, ...]]) -> list[JointAxis]:
    """All axes, those whose sections make up a dimension only together as one, which cuts all sections alike.

    No op joins them: [q | k | v] in a layer without the values' product, or [x | gate] that meet in another layer.
    """
    union, owners = UnionFind(range(len(axes))), defaultdict[tuple[str, int], list[int]](list)
    for number, axis in enumerate(axes):
        for tensor in axis.sections:
            if not covered(axis, tensor, sizes):
                owners[tensor, axis.dims[tensor]].append(number)
    for numbers in owners.values():
        union.union(*numbers)
    found: list[JointAxis] = [] if owners else list(axes)
    for members in union.to_sets() if owners else ():
        parts = [axes[number] for number in sorted(members)]
        whole = cut_together(parts)
        once = set().union(*(part.partial | part.first_only for part in parts))
        # A term of the sum over one axis that is cut along another would lack products of their parts.
        apart = once.isdisjoint(whole.dims) and not any(part.limits or part.repeats or part.routed for part in parts)
        complete = all(covered(whole, tensor, sizes) for tensor in whole.sections)
        found += [whole] if len(parts) > 1 and apart and complete and whole.open else parts
    return found


def share_rest(axis: JointAxis, known: Iterable[Place], sizes: Mapping[str, tuple[int, ...]]) -> None:
    """Let all parts hold what is beside the sections of an axis ([heads of queries | one head of keys and of values]).

    Args:
        axis: changed.
        known: of all axes: where sections of the rest begin and end.
    """
    ends: dict[tuple[str, int], set[int]] = defaultdict(set)
    for place in known:
        if place.section is not None:
            ends[place.tensor, place.dim] |= {place.section.start, place.section.stop}
    for tensor, own in axis.sections.items():
        if not covered(axis, tensor, sizes):
            at = (tensor, axis.dims[tensor])
            bounds = pairwise(sorted({0, sizes[tensor][at[1]], *ends[at]}))
            rest = {Section(a, b) for a, b in bounds if not any(s.start <= a and b <= s.stop for s in own)}
            own |= rest
            axis.limits.setdefault(tensor, {}).update(dict.fromkeys(rest, 1))


def axis_units(axis: JointAxis, sizes: Mapping[str, tuple[int, ...]]) -> int:
    """Greatest common divisor of its sizes, of every section, and of the limits of ops: shards must divide it.

    Where neighbours share parts, the greatest number of which every divisor divides each limit, or is a multiple of it.
    """
    lengths = []
    for tensor, dim in axis.dims.items():
        limits = axis.limits.get(tensor, {})
        sections = axis.sections.get(tensor, (None,))
        whole = sizes[tensor][dim] // axis.outer[tensor]
        lengths += [s.stop - s.start if s is not None else whole for s in sections if not limits.get(s)]
    units = reduce(gcd, lengths, axis.units)
    shared = {limit for limits in axis.limits.values() for limit in limits.values()}
    if not shared:
        return units
    divisors = [number for number in range(1, units + 1) if units % number == 0]
    fitting = {n for n in divisors if all(n % limit == 0 or limit % n == 0 for limit in shared)}
    return max(n for n in divisors if all(d in fitting for d in divisors if n % d == 0))


def sections_of(axis: JointAxis) -> dict[str, Sections]:
    """How the dimensions of its tensors are cut in sections, for those that are."""
    found: dict[str, Sections | None] = {}
    for tensor, outer in axis.outer.items():
        limits, sections = axis.limits.get(tensor, {}), sorted(axis.sections.get(tensor, ()), key=lambda s: s.start)
        if sections:
            found[tensor] = Sections.of([s.stop - s.start for s in sections], [limits.get(s, 0) for s in sections])
        else:
            found[tensor] = Sections.of((1,) * outer, (limits.get(None, 0),) * outer)
    return {tensor: sections for tensor, sections in found.items() if sections is not None}
