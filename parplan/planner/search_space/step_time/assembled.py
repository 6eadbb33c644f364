"""T of a step's parts: costs that add up, and maxima."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from parplan.planner.search_space.step_time.backward import Backward
from parplan.planner.search_space.step_time.parts import StepParts
from parplan.planner.search_space.step_time.rows import Sum, pass_rows, phase_rows
from parplan.planner.solver.problem import FloatArray, Maximum, Row

__all__ = ["assembled"]


class _Gathers:
    """The forward of layers beside which weights are gathered for the group behind them.

    Attributes:
        layers: those whose forward is in the maxima.
        arrivals: whether that of the user's inputs is.
        phases: maxima of branches, by the first layer of each phase.

    Args:
        in_phase: layers of branches.
    """

    def __init__(self, parts: StepParts, in_phase: Set[int]) -> None:
        self.parts, self.in_phase = parts, in_phase
        self.groups = parts.gather_groups if any(own.gather_s.any() for own in parts.nodes) else ()
        self.phases: dict[int, int] = {}
        self.leaving: dict[int, list[int]] = defaultdict(list)  # what is made moves at once, before gathers end
        for e, edge in enumerate(parts.edges):
            if edge.counted_at not in in_phase:
                self.leaving[edge.source].append(e)
        self.arrivals = bool(self.groups) and self.gathers(self.groups[0])
        self.layers = {
            v
            for place, own in enumerate(self.groups[:-1])
            if any(self.gathers(self.groups[one]) for one in self.behind(place))
            for v in own
        }

    def gathers(self, group: Sequence[int]) -> bool:
        """Whether any option of a group gathers weights."""
        return any(self.parts.nodes[v].gather_s.any() for v in group)

    def behind(self, place: int) -> list[int]:
        """The groups that may be gathered beside one: that behind it and, behind the last of several blocks that it
        stands for, the first of the next block."""
        ends = self.parts.copies(place) > 1 == self.parts.copies(place + 1)
        return [place + 1, *self.parts.blocks_to(place)[-1:]] if ends else [place + 1]

    def maxima(self) -> Iterator[Maximum]:
        """Each group's forward, or the gathers for the group behind it if these take longer."""
        weight, copies = float(self.parts.micro_batches), self.parts.copies
        if self.arrivals:
            rows = Sum()
            for v, node in enumerate(self.parts.nodes):
                rows.node(v, node.arrival_s)
            yield Maximum("inputs and the first weights arrive", (rows.row(), *self.rows(self.groups[0])), weight)
        for place, own in enumerate(self.groups[:-1]):
            if own[0] not in self.layers:
                continue
            each, last, *others = copies(place), *self.behind(place)
            here = each if others else 1  # the last one of many is beside another group than those before
            yield self.beside(own, self.groups[last], weight, here, copies(last) if each == 1 else 1)
            for other in others:
                yield self.beside(own, self.groups[other], (each - 1) * weight, each, each)

    def beside(self, own: Sequence[int], group: Sequence[int], weight: float, copies: int, gathered: int) -> Maximum:
        """The forward of one of so many copies of a group, beside the gathers for one of so many copies of another."""
        row, nodes = Sum(), self.parts.nodes
        for v in own:
            if v in self.phases:
                row.maxima[self.phases[v]] = 1 / copies
            if v not in self.in_phase:
                row.node(v, nodes[v].once_s, 1 / copies)
            for e in self.leaving[v]:
                row.edge(e, self.parts.edges[e].once[0], 1 / copies)
        for v in group:
            row.node(v, nodes[v].gather_interference_s, 1 / gathered)
        return Maximum(f"forward up to {own[-1]} and gathers", (row.row(), *self.rows(group, gathered)), weight)

    def rows(self, group: Sequence[int], copies: int = 1) -> list[Row]:
        """The gathers of one of so many copies of a group, on each lane."""
        found = []
        for place in range(len(self.parts.shape.lanes)):
            row = Sum()
            for v in group:
                own = self.parts.nodes[v]
                row.node(v, own.lanes[place] * own.gather_s, 1 / copies)
            if row.nodes:
                found.append(row.row())
        return found


def assembled(parts: StepParts) -> tuple[list[FloatArray], list[FloatArray], tuple[Maximum, ...]]:
    """Costs per node and per edge, and the maxima, of T."""
    shape = parts.shape
    again, more = (shape.passes - 1) * (1 - parts.hidden), parts.micro_batches - 1
    in_phase = {v for phase in parts.phases for branch in phase for v in branch}
    sliced = (one for own in parts.nodes for one in (own.scatter_s, own.late_scatter_s, own.regathers))
    in_slices = more > 0 and any(one.any() for one in sliced)
    beside = _Gathers(parts, in_phase)
    nodes, edges = [], []
    for v, own in enumerate(parts.nodes):
        rest = own.pass_forward_s + (1 + again) * own.samples_in_s
        rest = rest + (0.0 if beside.arrivals else (1 + more) * own.arrival_s)
        rest = rest + (0.0 if shape.by_device else own.update_s + more * own.late_scatter_s)
        forward = 0.0 if v in beside.layers else (1 + more) * own.once_s
        back = 0.0 if in_slices else more * own.before_last.backward_s
        nodes.append(rest if v in in_phase else forward + back + rest)
    for part in parts.edges:
        forward = 0.0 if part.source in beside.layers else (1 + more) * part.once[0]
        once = forward + (0.0 if in_slices else more * part.once[1])
        cost = part.allowed if part.counted_at in in_phase else part.allowed + once
        cost = cost + part.within[0] if part.within is not None else cost
        for moved in (part.inwards, part.outwards):
            cost = cost + (1 + again) * moved[0] + again * moved[1] if moved is not None else cost
        # The gradients of results come before any backward.
        edges.append(cost + part.outwards[1] if part.outwards is not None else cost)
    maxima: list[Maximum] = []
    before = replace(parts, nodes=[own.before_last for own in parts.nodes]) if more else parts
    for phase in parts.phases:
        weight = 0.0 if phase[0][0] in beside.layers else 1.0 + more
        maxima.append(Maximum("forward of branches", tuple(phase_rows(parts, phase, False)), weight))
        beside.phases[phase[0][0]] = len(maxima) - 1
        if more and not in_slices:
            rows = phase_rows(before, phase, True)
            maxima.append(Maximum("backward of branches in micro-batches before", tuple(rows), float(more)))
    maxima += beside.maxima()
    if shape.passes > 1:
        for backward in (False, True):
            name = "backward in passes" if backward else "forward in passes"
            maxima.append(Maximum(name, pass_rows(parts, backward), shape.passes - 1.0))
    if in_slices:
        Backward(before, maxima).build("backward in micro-batches before", float(more))
    Backward(parts, maxima).build()
    return nodes, edges, tuple(maxima)
