"""The step's seconds as costs that add up and maxima: from priced parts of layers and edges to T (docs/objective.md).

Forward: layers run one after another. In passes, samples for the next pass and results of the last one travel beside
the compute of a pass, so every pass but one takes the longest of

    C                 compute in the passes, with the transfers W between layers there, which hold it up
    h X + W           samples that go in; h is the share that travels beside compute (StepCost.overlap)
    h Y + W           results that come out
    h (X + Y) + W     where both use the same lanes (interleave)

and (1 - h) (X + Y). Backward is the same with gradients. Gradient sums start when a layer's backward of the last pass
is done and go one after another on each device; then a device updates what it holds. With D_i the moment when layer
i's backward is done, and E_i that when its sum and those of all layers behind it are,

    E_i = max(E_i+1, D_i) + sum_i          T = forward + max(D_0, E_0 + updates)

for every device that is followed. Of M micro-batches all but the last add forward and backward without sums,

    T = M forward + (M - 1) backward + max(D_0, E_0 + updates)

but for sums to slices, which are part of every one: (M - 1) max(D_0, E_0) then, of those sums alone. Weights that are
gathered again wait for the sums behind them, on the same links: D_i-1 = max(D_i, E_i) + gather + backward.

D_i counts in E_i on the devices that layer i uses only. A device also sends back the gradients of what it read before
it updates. E_i is also at least the backward of the device's own layers down to i, and T at least all of it: that never
sets T, but bounds it well where options are mixed, of which D_i then counts too little.

A layer that stands for the equal layers of many repeated blocks (graph/repeated.py) counts as often, and no gradient
sum waits for its D_i: over the blocks in between, D_i and E_i change by the same each, so the most is that of the first
or the last block, which are there themselves.

Branches that run at the same time on disjoint devices are tracks of a phase: its forward is the longest of the tracks'
own, and so is its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parplan.plan import Scheme
from parplan.planner.search_space.shape import Shape
from parplan.planner.solver.problem import FloatArray, Maximum, Row

__all__ = ["OWN", "EdgeParts", "NodeParts", "StepParts", "assembled", "edge_totals", "node_totals"]


OWN = "own backward"
"""The name of maxima of what a device goes back itself, which never set T."""


@dataclass(frozen=True, eq=False)
class NodeParts:
    """Seconds of one layer per option, shape (options,) each.

    Args:
        once_s: what counts once and hides nothing: forward outside of passes, batch statistics.
        arrival_s: inputs of the user that come once; they are on all devices, which they hold.
        pass_forward_s, pass_backward_s: compute of one pass, of layers in passes.
        backward_s: compute of the backward outside of passes, with what gradient sums take from it.
        samples_in_s: inputs of the user that one pass brings in.
        sum_s: the gradient sum, as far as it runs beside the backward.
        interference_s: what gradient sums take from the backward, which has it.
        update_s: the optimizer's update and the part of the sum after it.
        scatter_s, scatter_interference_s, late_scatter_s: of sums to slices, which all micro-batches take: the same.
        regathers: 1 where weights are gathered again for the backward, else 0.
        lanes: whether an option uses each lane, shape (lanes, options).
        beside: of layers of branches, whether each lane's time has an option: its own, and what runs one after another.
        order: of layers of branches, per option all lanes by how much its placement gives them to do, the most first.
    """

    once_s: FloatArray
    arrival_s: FloatArray
    backward_s: FloatArray
    pass_forward_s: FloatArray
    pass_backward_s: FloatArray
    samples_in_s: FloatArray
    sum_s: FloatArray
    interference_s: FloatArray
    update_s: FloatArray
    scatter_s: FloatArray
    scatter_interference_s: FloatArray
    late_scatter_s: FloatArray
    lanes: FloatArray
    regathers: FloatArray
    beside: FloatArray | None = None
    order: NDArray[np.intp] | None = None

    def each(self, change: Callable[[FloatArray], FloatArray]) -> NodeParts:
        """The same with all seconds changed."""
        names = (own.name for own in fields(self) if own.name.endswith("_s"))
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def scaled(self, times: int) -> NodeParts:
        """Parts of so many equal layers."""
        return self.each(lambda seconds: times * seconds)

    @staticmethod
    def alone(once_s: FloatArray, lanes: int) -> NodeParts:
        """Parts of a decision that is no layer: what counts once, on no device."""
        none: dict[str, Any] = {own.name: np.zeros_like(once_s) for own in fields(NodeParts) if own.name.endswith("_s")}
        zero = {**none, "regathers": np.zeros_like(once_s), "lanes": np.zeros((lanes, len(once_s)))}
        return NodeParts(**{**zero, "once_s": once_s})

    @property
    def before_last(self) -> NodeParts:
        """Parts in a micro-batch behind which others come."""
        return replace(
            self,
            backward_s=self.backward_s - self.interference_s + self.scatter_interference_s,
            sum_s=self.scatter_s,
            interference_s=self.scatter_interference_s,
            update_s=self.late_scatter_s,
        )


@dataclass(frozen=True, eq=False)
class EdgeParts:
    """Seconds of one edge per pair of options, shape (options of source, options of target) each; inf forbids a pair.

    Args:
        once: forward and backward of values that move once.
        within: those between layers in passes, per pass.
        inwards, outwards: those over the boundary of the passes, per pass.
        reader: the node in whose forward and backward they count, if not the target.
    """

    source: int
    target: int
    allowed: FloatArray
    once: tuple[FloatArray, FloatArray]
    within: tuple[FloatArray, FloatArray] | None = None
    inwards: tuple[FloatArray, FloatArray] | None = None
    outwards: tuple[FloatArray, FloatArray] | None = None
    reader: int | None = None

    MOVED = ("once", "within", "inwards", "outwards")

    @property
    def counted_at(self) -> int:
        """The node in whose forward and backward the seconds count."""
        return self.target if self.reader is None else self.reader

    def scaled(self, times: int | FloatArray) -> EdgeParts:
        """Parts of so many equal edges, for each option of the target if it is an array."""
        moved = {name: getattr(self, name) for name in self.MOVED}
        more: dict[str, Any] = {
            name: (times * one[0], times * one[1]) for name, one in moved.items() if one is not None
        }
        return replace(self, **more)

    def added(self, other: EdgeParts) -> EdgeParts:
        """Both between the same two nodes."""
        moved = {name: (getattr(self, name), getattr(other, name)) for name in self.MOVED}
        both: dict[str, Any] = {
            name: more if one is None else one if more is None else (one[0] + more[0], one[1] + more[1])
            for name, (one, more) in moved.items()
        }
        return replace(self, allowed=self.allowed + other.allowed, **both)


@dataclass(frozen=True, eq=False)
class StepParts:
    """All parts of a step.

    Args:
        hidden: the share of transfers over the boundary of passes that takes nothing from compute.
        phases: branches that may run at the same time, each of nodes in forward order.
        layers: nodes that are layers or the delivery; those behind decide for others.
        far_s: seconds that no step worth considering takes: what takes a layer's backward out of the rows of devices
            that it does not use, and sums out of those of gathers that it does not have. T is exact below it.
        between: nodes that stand for the layers of repeated blocks between the first and the last.
        micro_batches: of a step; the seconds are of one of them.
    """

    nodes: Sequence[NodeParts]
    edges: Sequence[EdgeParts]
    shape: Shape
    hidden: float
    phases: Sequence[Sequence[Sequence[int]]]
    far_s: float
    layers: int
    between: frozenset[int]
    micro_batches: int = 1


def node_totals(parts: StepParts, v: int) -> FloatArray:
    """Seconds of compute of a layer in all its passes and micro-batches, hidden or not, per option; updates and
    arrivals included."""
    own, passes, more = parts.nodes[v], parts.shape.passes, parts.micro_batches - 1
    inside = own.pass_forward_s + own.pass_backward_s + own.samples_in_s
    once, again = (one.once_s + one.arrival_s + one.backward_s + one.update_s for one in (own, own.before_last))
    return once + more * again + passes * inside


def edge_totals(parts: StepParts, edge: EdgeParts) -> FloatArray:
    """Seconds that the values of an edge move in all passes and micro-batches, hidden or not, per pair of options."""
    several = (moved for moved in (edge.within, edge.inwards, edge.outwards) if moved is not None)
    once = parts.micro_batches * (edge.once[0] + edge.once[1])
    return once + parts.shape.passes * sum((one[0] + one[1] for one in several), 0.0)


@dataclass(eq=False)
class _Sum:
    """A row while it is added up."""

    nodes: dict[int, FloatArray] = field(default_factory=dict)
    edges: dict[int, FloatArray] = field(default_factory=dict)
    maxima: dict[int, float] = field(default_factory=dict)

    def node(self, v: int, values: FloatArray, factor: float = 1.0) -> None:
        if factor and values.any():
            self.nodes[v] = self.nodes.get(v, 0.0) + factor * values

    def edge(self, e: int, values: FloatArray, factor: float = 1.0) -> None:
        if factor and values.any():
            self.edges[e] = self.edges.get(e, 0.0) + factor * values

    def row(self) -> Row:
        return Row(self.nodes, self.edges, self.maxima)


def assembled(parts: StepParts) -> tuple[list[FloatArray], list[FloatArray], tuple[Maximum, ...]]:
    """Costs per node and per edge, and the maxima, of T."""
    shape = parts.shape
    again, more = (shape.passes - 1) * (1 - parts.hidden), parts.micro_batches - 1
    in_phase = {v for phase in parts.phases for branch in phase for v in branch}
    sliced = (one for own in parts.nodes for one in (own.scatter_s, own.late_scatter_s, own.regathers))
    in_slices = more > 0 and any(one.any() for one in sliced)
    nodes, edges = [], []
    for v, own in enumerate(parts.nodes):
        once, rest = own.once_s + own.pass_forward_s, own.arrival_s + (1 + again) * own.samples_in_s
        rest = rest + (0.0 if shape.by_device else own.update_s + more * own.late_scatter_s) + more * own.arrival_s
        back = 0.0 if in_slices else own.before_last.backward_s
        nodes.append(rest if v in in_phase else once + more * (own.once_s + back) + rest)
    for part in parts.edges:
        once = (1 + more) * part.once[0] + (0.0 if in_slices else more * part.once[1])
        cost = part.allowed if part.counted_at in in_phase else part.allowed + once
        cost = cost + part.within[0] if part.within is not None else cost
        for moved in (part.inwards, part.outwards):
            cost = cost + (1 + again) * moved[0] + again * moved[1] if moved is not None else cost
        # The gradients of results come before any backward.
        edges.append(cost + part.outwards[1] if part.outwards is not None else cost)
    maxima: list[Maximum] = []
    before = replace(parts, nodes=[own.before_last for own in parts.nodes]) if more else parts
    for phase in parts.phases:
        maxima.append(Maximum("forward of branches", tuple(_phase_rows(parts, phase, False)), 1.0 + more))
        if more and not in_slices:
            rows = _phase_rows(before, phase, True)
            maxima.append(Maximum("backward of branches in micro-batches before", tuple(rows), float(more)))
    if shape.passes > 1:
        for backward in (False, True):
            name = "backward in passes" if backward else "forward in passes"
            maxima.append(Maximum(name, _pass_rows(parts, backward), shape.passes - 1.0))
    if in_slices:
        _Backward(before, maxima).build("backward in micro-batches before", float(more))
    _Backward(parts, maxima).build()
    return nodes, edges, tuple(maxima)


def _tracks(parts: StepParts, phase: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], int | None]]:
    """The nodes of a phase that follow each other: all on each lane, or those of each branch where none is followed."""
    if parts.shape.average:
        return [(branch, None) for branch in phase]
    members = sorted(v for branch in phase for v in branch)
    return [(members, place) for place in range(len(parts.shape.lanes))]


Places = int | NDArray[np.intp] | None
"""A lane, or one for every option of a layer; None: all of them."""


def _places(parts: StepParts, v: int, place: int | None) -> Places:
    """The lanes that a row takes for a node's options: those with the `place`-th most to do, or the lane itself."""
    order = parts.nodes[v].order
    return place if place is None or order is None else order[place]


def _counted(parts: StepParts, v: int, places: Places) -> FloatArray | float:
    """Whether a lane's time has a layer, per option."""
    beside = parts.nodes[v].beside
    return 1.0 if places is None or beside is None else beside[places, np.arange(beside.shape[1])]


def _held(parts: StepParts, e: int, places: Places) -> FloatArray | float:
    """Whether a lane's time has a transfer, per pair of options: it holds the devices of both ends."""
    edge = parts.edges[e]
    counted = _counted(parts, edge.target, places)
    if places is None or isinstance(counted, float):
        return 1.0
    held: FloatArray = np.maximum(np.atleast_2d(parts.nodes[edge.source].lanes[places]).T, counted)
    return held


def _phase_rows(
    parts: StepParts, phase: Sequence[Sequence[int]], backward: bool, begin: Mapping[int, float] | None = None
) -> list[Row]:
    """Rows of the time that a phase of branches takes one way: of its lanes, or its branches where none is followed.

    A row takes another lane for every placement: the first that with the most to do, the next that with the second
    most. Which placement is chosen then hardly matters to the prices of rows, and their bound is close.

    Args:
        begin: factors of the maxima at which it begins.
    """
    rows = []
    for track, place in _tracks(parts, phase):
        row = _Sum(maxima=dict(begin or {}))
        for v in track:
            own = parts.nodes[v]
            row.node(v, _counted(parts, v, _places(parts, v, place)) * (own.backward_s if backward else own.once_s))
            for e, edge in ((e, edge) for e, edge in enumerate(parts.edges) if edge.counted_at == v):
                row.edge(e, _held(parts, e, _places(parts, edge.target, place)) * edge.once[backward])
        rows.append(row.row())
    if not parts.shape.average:
        return rows
    # By the shares of the devices that options count by: disjoint blocks are no more than all of them.
    whole = _Sum(maxima=dict(begin or {}))
    for branch in rows:
        for v, values in branch.nodes.items():
            whole.node(v, parts.nodes[v].lanes[0] * values)
        for e, values in branch.edges.items():
            whole.edge(e, parts.nodes[parts.edges[e].target].lanes[0] * values)
    return [*rows, whole.row()]


def _pass_rows(parts: StepParts, backward: bool) -> tuple[Row, ...]:
    """Rows of the time of one pass: compute, samples in and results out, these together where they share lanes."""
    compute, inwards = _Sum(), _Sum()
    outwards = inwards if parts.shape.scheme is Scheme.INTERLEAVE else _Sum()
    rows = (compute, inwards) if outwards is inwards else (compute, inwards, outwards)
    for v, own in enumerate(parts.nodes):
        compute.node(v, own.pass_backward_s if backward else own.pass_forward_s)
        if not backward:
            inwards.node(v, own.samples_in_s, parts.hidden)
    for e, edge in enumerate(parts.edges):
        if edge.within is not None:
            for row in rows:
                row.edge(e, edge.within[backward])
        if edge.inwards is not None:
            inwards.edge(e, edge.inwards[backward], parts.hidden)
        if edge.outwards is not None:
            outwards.edge(e, edge.outwards[backward], parts.hidden)
    return tuple(row.row() for row in rows)


class _Backward:
    """The backward of the last pass with the gradient sums beside it, then the updates, as maxima."""

    def __init__(self, parts: StepParts, maxima: list[Maximum]) -> None:
        self.parts, self.far_s, self.maxima = parts, parts.far_s, maxima
        self.by_device = parts.shape.by_device
        self.into: list[list[int]] = [[] for _ in parts.nodes]
        for e, edge in enumerate(parts.edges):
            self.into[edge.counted_at].append(e)
        self.ends: list[int | None] = [None] * len(parts.nodes[0].lanes)
        self.busy = [_Sum() for _ in self.ends]  # what each lane has gone back itself

    def build(self, name: str = "backward", weight: float = 1.0) -> None:
        """List the maxima, the last of them with a weight."""
        phase_of = {v: phase for phase in self.parts.phases for branch in phase for v in branch}
        done, gone = _Sum(), set[int]()
        for v in range(self.parts.layers - 1, -1, -1):
            if v not in phase_of:
                done = self.node(v, done)
            elif id(phase_of[v]) not in gone:
                gone.add(id(phase_of[v]))
                begin = self.add("branches begin to go back", done.row())
                tracks = _tracks(self.parts, phase_of[v])
                own = [_Sum(maxima={begin: 1.0}) for _ in tracks]
                # In the order of plans without branches: a device's gradient sums go one after another.
                members = ((member, t) for t, (track, _) in enumerate(tracks) for member in track)
                for member, t in sorted(members, reverse=True):
                    own[t] = self.node(member, own[t], tracks[t][1])
                rows = _phase_rows(self.parts, phase_of[v], True, {begin: 1.0})
                done = _Sum(maxima={self.add("backward of branches", *rows): 1.0})
        rows = [done.row()]
        for place, end in enumerate(self.ends):
            if end is not None:
                for row in (_Sum(maxima={end: 1.0}), *((self.busy[place],) if self.by_device else ())):
                    for v, own_parts in enumerate(self.parts.nodes if self.by_device else ()):
                        row.node(v, own_parts.lanes[place] * own_parts.update_s)
                    rows.append(row.row())
        self.maxima.append(Maximum(name, tuple(rows), weight))

    def add(self, name: str, *rows: Row) -> int:
        """A maximum for later ones to use; gives its place."""
        self.maxima.append(Maximum(name, rows))
        return len(self.maxima) - 1

    def node(self, v: int, done: _Sum, lane: int | None = None) -> _Sum:
        """Node v goes back after what is `done`; gives what is done then, the gradients that it sends back included.

        Args:
            lane: the one that this is the time of; None: of all.
        """
        own, counted = self.parts.nodes[v], _counted(self.parts, v, lane)
        places = [(place, end) for place, end in enumerate(self.ends) if lane is None or place == lane]
        if own.regathers.any():
            rows = [done.row()]
            for place, end in places:
                if end is not None:
                    beyond = -self.far_s * (1 - own.regathers * (own.lanes[place] == 1))
                    rows.append(Row({v: beyond}, maxima={end: 1.0}))
            done = _Sum(maxima={self.add(f"gathers before the backward of {v}", *rows): 1.0})
        done.node(v, counted * (own.backward_s + own.pass_backward_s))
        if self.by_device or own.sum_s.any():
            before = self.add(f"backward of {v}", done.row())
            done = _Sum(maxima={before: 1.0})
            for place, end in places:
                used = own.lanes[place]
                rows = []
                if self.by_device and used.any():
                    busy = self.busy[place]
                    busy.node(v, used * (own.backward_s + own.pass_backward_s))
                    if own.sum_s.any() and v not in self.parts.between:
                        here = self.add(f"{OWN} of {v}", busy.row())
                        self.busy[place] = _Sum(maxima={here: 1.0})
                        rows.append(Row({v: used * own.sum_s}, maxima={here: 1.0}))
                # A layer that stands for several, each of which the next gather waits for, is as one of their length.
                late = own.regathers if v in self.parts.between else 1.0
                starts = ((before, late * (used == 1)),) if np.any(late) else ()
                for earlier, counts in (*starts, (end, 1.0)):
                    if earlier is not None and (used.any() or earlier == end):
                        row = _Sum(maxima={earlier: 1.0})
                        row.node(v, used * own.sum_s - self.far_s * (1.0 - counts))
                        rows.append(row.row())
                if rows and (used.any() or self.by_device):
                    self.ends[place] = self.add(f"gradient sums of {v}", *rows)
        for e in self.into[v]:
            edge = self.parts.edges[e]
            done.edge(e, _held(self.parts, e, lane) * edge.once[1])
            for moved in (edge.within, edge.inwards):
                if moved is not None:
                    done.edge(e, moved[1])
        # A device updates when it has sent these, too.
        if self.by_device and done.edges and v not in self.parts.between:
            for place, _ in places:
                for e, edge in ((e, self.parts.edges[e]) for e in self.into[v]):
                    self.busy[place].edge(e, self.parts.nodes[edge.target].lanes[place] * edge.once[1])
                if (end := self.ends[place]) is not None and own.lanes[place].any():
                    row = _Sum(dict(done.nodes), dict(done.edges), dict(done.maxima))
                    row.node(v, -self.far_s * (own.lanes[place] < 1))
                    self.ends[place] = self.add(f"gradients of {v} are back", _Sum(maxima={end: 1.0}).row(), row.row())
        return done
