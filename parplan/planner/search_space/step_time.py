"""The step's seconds as costs that add up and maxima: from priced parts of layers and edges to T (docs/objective.md).

Forward: layers run one after another. In passes, samples for the next pass and results of the last one travel beside
the compute of a pass, so every pass but one takes the longest of

    C                 compute in the passes, with the transfers W between layers there, which hold it up
    h X + W           samples that go in; h is the share that travels beside compute (StepCost.overlap)
    h Y + W           results that come out
    h (X + Y) + W     where both use the same lanes (interleave, forward)

and (1 - h) (X + Y). Backward is the same with gradients. Gradient sums start when a layer's backward of the last pass
is done and go one after another on each device; then a device updates what it holds. With D_i the moment when layer
i's backward is done, and E_i that when its sum and those of all layers behind it are,

    E_i = max(E_i+1, D_i) + sum_i          T = forward + max(D_0, E_0 + updates)

for every device that is followed, where D_i counts in E_i on the devices that layer i uses only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parplan.plan import Scheme
from parplan.planner.search_space.shape import Shape
from parplan.planner.solver.problem import FloatArray, Maximum, Row

__all__ = ["EdgeParts", "NodeParts", "StepParts", "assembled"]


@dataclass(frozen=True, eq=False)
class NodeParts:
    """Seconds of one layer per option, shape (options,) each.

    Args:
        once_s: what counts once and hides nothing: forward outside of passes, arrivals, batch statistics.
        pass_forward_s, pass_backward_s: compute of one pass, of layers in passes.
        backward_s: compute of the backward outside of passes, with what gradient sums take from it.
        samples_in_s: inputs of the user that one pass brings in.
        sum_s: the gradient sum, as far as it runs beside the backward.
        update_s: the optimizer's update and the part of the sum after it.
        lanes: whether an option uses each lane, shape (lanes, options).
    """

    once_s: FloatArray
    backward_s: FloatArray
    pass_forward_s: FloatArray
    pass_backward_s: FloatArray
    samples_in_s: FloatArray
    sum_s: FloatArray
    update_s: FloatArray
    lanes: FloatArray


@dataclass(frozen=True, eq=False)
class EdgeParts:
    """Seconds of one edge per pair of options, shape (options of source, options of target) each; inf forbids a pair.

    Args:
        once: forward and backward of values that move once.
        within: those between layers in passes, per pass.
        inwards, outwards: those over the boundary of the passes, per pass.
    """

    source: int
    target: int
    allowed: FloatArray
    once: tuple[FloatArray, FloatArray]
    within: tuple[FloatArray, FloatArray] | None = None
    inwards: tuple[FloatArray, FloatArray] | None = None
    outwards: tuple[FloatArray, FloatArray] | None = None


@dataclass(frozen=True, eq=False)
class StepParts:
    """All parts of a step. `hidden` is the share of transfers over the boundary that takes nothing from compute."""

    nodes: Sequence[NodeParts]
    edges: Sequence[EdgeParts]
    shape: Shape
    hidden: float


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


def assembled(parts: StepParts, far_s: float = 0.0) -> tuple[list[FloatArray], list[FloatArray], tuple[Maximum, ...]]:
    """Costs per node and per edge, and the maxima, of T.

    Args:
        far_s: seconds that no step worth considering takes: what takes a layer's backward out of the rows of devices
            that it does not use. T is exact below it.
    """
    shape = parts.shape
    nodes = [part.once_s + part.pass_forward_s for part in parts.nodes]
    edges = []
    again = (shape.passes - 1) * (1 - parts.hidden)
    for part in parts.edges:
        cost = part.allowed + part.once[0]
        cost = cost + part.within[0] if part.within is not None else cost
        for moved in (part.inwards, part.outwards):
            cost = cost + (1 + again) * moved[0] + again * moved[1] if moved is not None else cost
        # The gradients of results come before any backward.
        edges.append(cost + part.outwards[1] if part.outwards is not None else cost)
    for v, own in enumerate(parts.nodes):
        nodes[v] = nodes[v] + (1 + again) * own.samples_in_s
        if len(shape.lanes) == 1:
            nodes[v] = nodes[v] + own.update_s
    maxima: list[Maximum] = []
    if shape.passes > 1:
        for backward in (False, True):
            rows = _pass_rows(parts, backward)
            maxima.append(Maximum("backward in passes" if backward else "forward in passes", rows, shape.passes - 1.0))
    _backward(parts, far_s, maxima)
    return nodes, edges, tuple(maxima)


def _pass_rows(parts: StepParts, backward: bool) -> tuple[Row, ...]:
    """What one pass takes at least: compute, what goes in, what comes out, and both where they share lanes."""
    compute, inwards, outwards, both = _Sum(), _Sum(), _Sum(), _Sum()
    for v, own in enumerate(parts.nodes):
        compute.node(v, own.pass_backward_s if backward else own.pass_forward_s)
        if not backward:
            inwards.node(v, own.samples_in_s, parts.hidden)
            both.node(v, own.samples_in_s, parts.hidden)
    for e, edge in enumerate(parts.edges):
        if edge.within is not None:
            for row in (compute, inwards, outwards, both):
                row.edge(e, edge.within[backward])
        if edge.inwards is not None:
            inwards.edge(e, edge.inwards[backward], parts.hidden)
            both.edge(e, edge.inwards[backward], parts.hidden)
        if edge.outwards is not None:
            outwards.edge(e, edge.outwards[backward], parts.hidden)
            both.edge(e, edge.outwards[backward], parts.hidden)
    shared = parts.shape.scheme is Scheme.INTERLEAVE and not backward
    return tuple(row.row() for row in ((compute, both) if shared else (compute, inwards, outwards)))


def _backward(parts: StepParts, far_s: float, maxima: list[Maximum]) -> None:
    """The backward of the last pass with the gradient sums beside it, then the updates."""
    count, lanes = len(parts.nodes), parts.shape.lanes
    into: list[list[int]] = [[] for _ in range(count)]
    for e, edge in enumerate(parts.edges):
        into[edge.target].append(e)
    many = len(lanes) > 1
    done = _Sum()  # the backward since the last maximum
    before: int | None = None
    ends: list[int | None] = [None] * len(lanes)
    for v in range(count - 1, -1, -1):
        own = parts.nodes[v]
        # A device updates when it has also sent back the gradients of the layer behind: `done` holds their edges.
        sent = _Sum(dict(done.nodes), dict(done.edges), {before: 1.0}) if many and before is not None else None
        done.node(v, own.backward_s + own.pass_backward_s)
        if many or own.sum_s.any():
            if before is not None:
                done.maxima[before] = 1.0
            maxima.append(Maximum(f"backward of {v}", (done.row(),)))
            before, done = len(maxima) - 1, _Sum()
            for place in range(len(lanes)):
                used = own.lanes[place]
                rows = []
                if used.any():
                    row = _Sum(maxima={before: 1.0})
                    row.node(v, used * own.sum_s - far_s * (1 - used))
                    rows.append(row.row())
                if (earlier := ends[place]) is not None:
                    row = _Sum(maxima={earlier: 1.0})
                    row.node(v, used * own.sum_s)
                    rows.append(row.row())
                if sent is not None and sent.edges:
                    behind = parts.nodes[v + 1].lanes[place]
                    row = _Sum(dict(sent.nodes), dict(sent.edges), dict(sent.maxima))
                    row.node(v + 1, -far_s * (1 - behind))
                    rows.append(row.row())
                if rows:
                    maxima.append(Maximum(f"gradient sums of {v}", tuple(rows)))
                    ends[place] = len(maxima) - 1
        for e in into[v]:
            edge = parts.edges[e]
            done.edge(e, edge.once[1])
            for moved in (edge.within, edge.inwards):
                if moved is not None:
                    done.edge(e, moved[1])
    if before is not None:
        done.maxima[before] = 1.0
    rows = [done.row()]
    for place, end in enumerate(ends):
        if end is not None:
            row = _Sum(maxima={end: 1.0})
            if many:
                for v, own in enumerate(parts.nodes):
                    row.node(v, own.lanes[place] * own.update_s)
            rows.append(row.row())
    maxima.append(Maximum("the rest of the step", tuple(rows), 1.0))
