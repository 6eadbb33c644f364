"""Rows of maxima while they are added up, and those of branches and passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parplan.plan import Scheme
from parplan.planner.search_space.step_time.parts import StepParts
from parplan.planner.solver.problem import FloatArray, Row

__all__ = ["Sum", "counted_on", "held_on", "pass_rows", "phase_rows", "tracks"]


@dataclass(eq=False)
class Sum:
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

    def copy(self) -> Sum:
        return Sum(dict(self.nodes), dict(self.edges), dict(self.maxima))

    def row(self) -> Row:
        return Row(self.nodes, self.edges, self.maxima)


def tracks(parts: StepParts, phase: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], int | None]]:
    """The nodes of a phase that follow each other: all on each lane, or those of each branch where none is followed."""
    if parts.shape.average:
        return [(branch, None) for branch in phase]
    members = sorted(v for branch in phase for v in branch)
    return [(members, place) for place in range(len(parts.shape.lanes))]


Places = int | NDArray[np.intp] | None
"""A lane, or one for every option of a layer; None: all of them."""


def places_of(parts: StepParts, v: int, place: int | None) -> Places:
    """The lanes that a row takes for a node's options: those with the `place`-th most to do, or the lane itself."""
    order = parts.nodes[v].order
    return place if place is None or order is None else order[place]


def counted_on(parts: StepParts, v: int, places: Places) -> FloatArray | float:
    """Whether a lane's time has a layer, per option."""
    beside = parts.nodes[v].beside
    return 1.0 if places is None or beside is None else beside[places, np.arange(beside.shape[1])]


def held_on(parts: StepParts, e: int, places: Places) -> FloatArray | float:
    """Whether a lane's time has a transfer, per pair of options: it holds the devices of both ends."""
    edge = parts.edges[e]
    counted = counted_on(parts, edge.target, places)
    if places is None or isinstance(counted, float):
        return 1.0
    held: FloatArray = np.maximum(np.atleast_2d(parts.nodes[edge.source].lanes[places]).T, counted)
    return held


def phase_rows(
    parts: StepParts, phase: Sequence[Sequence[int]], backward: bool, begin: Mapping[int, float] | None = None
) -> list[Row]:
    """Rows of the time that a phase of branches takes one way: of its lanes, or its branches where none is followed.

    A row takes another lane for every placement: the first that with the most to do, the next that with the second
    most. Which placement is chosen then hardly matters to the prices of rows, and their bound is close.

    Args:
        begin: factors of the maxima at which it begins.
    """
    rows = []
    for track, place in tracks(parts, phase):
        row = Sum(maxima=dict(begin or {}))
        for v in track:
            own = parts.nodes[v]
            row.node(v, counted_on(parts, v, places_of(parts, v, place)) * (own.backward_s if backward else own.once_s))
            for e, edge in ((e, edge) for e, edge in enumerate(parts.edges) if edge.counted_at == v):
                row.edge(e, held_on(parts, e, places_of(parts, edge.target, place)) * edge.once[backward])
        rows.append(row.row())
    if not parts.shape.average:
        return rows
    # By the shares of the devices that options count by: disjoint blocks are no more than all of them.
    whole = Sum(maxima=dict(begin or {}))
    for branch in rows:
        for v, values in branch.nodes.items():
            whole.node(v, parts.nodes[v].lanes[0] * values)
        for e, values in branch.edges.items():
            whole.edge(e, parts.nodes[parts.edges[e].target].lanes[0] * values)
    return [*rows, whole.row()]


def pass_rows(parts: StepParts, backward: bool) -> tuple[Row, ...]:
    """Rows of the time of one pass: compute, samples in and results out, these together where they share lanes."""
    compute, inwards = Sum(), Sum()
    outwards = inwards if parts.shape.scheme is Scheme.INTERLEAVE else Sum()
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
