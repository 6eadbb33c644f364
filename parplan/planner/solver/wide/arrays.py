"""A problem as flat arrays, so that steps over all nodes, edges or usages are a few calls of numpy.

Strategies of all nodes stand one after another ("slots"); pairs of all edges ("cells") and amounts of all usages
("holdings") likewise. Time points of all memories are one axis. A point stands for all moments between which no usage
that depends on the choice starts or ends; bytes that every choice holds are already taken off its capacity. A linear
constraint is a point of its own per side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import FloatArray, Problem, Usage
from parplan.planner.solver.rows import RowTable

__all__ = ["Arrays", "Ints", "Memory", "ragged", "starts_of"]

Ints = NDArray[np.intp]


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """The concatenation of `range(start, start + length)` over all pairs."""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


def starts_of(lengths: Ints) -> Ints:
    """Where each of several pieces starts when they stand one after another."""
    result: Ints = np.append(0, np.cumsum(lengths))[:-1].astype(np.intp)
    return result


@dataclass(frozen=True, eq=False)
class Memory:
    """Usages that depend on the choice, by node.

    Attributes:
        capacity: bytes left per time point, below 0 where even the least choice does not fit.
        limit: bytes of the whole memory, per time point.
        node, first, last: per usage, its node and its points [first, last).
        start: per usage, where its holdings start.
        amounts: bytes per holding, above the least that the node holds in that usage.
        slot: slot of each holding.
    """

    capacity: FloatArray
    limit: FloatArray
    node: Ints
    first: Ints
    last: Ints
    start: Ints
    amounts: FloatArray
    slot: Ints

    def loads(self, choice: Ints) -> FloatArray:
        """Bytes per point of a choice (a strategy per node)."""
        held, points = self.amounts[self.start + choice[self.node]], len(self.capacity) + 1
        change = np.bincount(self.first, held, points) - np.bincount(self.last, held, points)
        return np.cumsum(change)[:-1]

    @cached_property
    def usage(self) -> Ints:
        """Usage of each holding."""
        return np.repeat(np.arange(len(self.start)), np.diff(np.append(self.start, len(self.amounts))))

    def priced(self, prices: FloatArray, slots: int) -> FloatArray:
        """Seconds per slot at `prices` in seconds per byte and point."""
        until = np.append(0.0, np.cumsum(prices))
        length = until[self.last] - until[self.first]
        result: FloatArray = np.bincount(self.slot, self.amounts * length[self.usage], slots).astype(np.float64)
        return result


class Arrays:
    """Nodes, edges and memory of a problem; forbidden strategies and pairs cost `forbidden`.

    Attributes:
        size, start: per node, its number of strategies and its first slot.
        node: node of each slot.
        cost: seconds per slot.
        forbidden: more than everything else together costs.
        source, target, cell_start: per edge, its ends and its first cell; cells are row-major, source first.
        cells: seconds per cell.
    """

    def __init__(self, problem: Problem, table: RowTable | None = None, multiplicity: FloatArray | None = None) -> None:
        nodes, edges = problem.nodes, problem.edges
        self.size: Ints = np.array(problem.sizes, dtype=np.intp)
        self.start: Ints = np.append(0, np.cumsum(self.size))
        self.node = np.repeat(np.arange(len(nodes)), self.size)
        costs, pairs = [node.cost_s for node in nodes], [edge.cost_s for edge in edges]
        if table is not None and multiplicity is not None:
            for parts, terms in ((costs, table.nodes), (pairs, table.edges)):
                parts[:] = [part + term.weighted(multiplicity) for part, term in zip(parts, terms, strict=True)]
        cost = np.concatenate(costs)
        cells = np.concatenate([np.zeros(0), *(part.ravel() for part in pairs)])
        largest = max(float(np.abs(values[np.isfinite(values)]).max(initial=1.0)) for values in (cost, cells))
        self.forbidden = 1e3 * largest * (len(nodes) + len(edges))
        self.cost = np.where(np.isfinite(cost), cost, self.forbidden)
        self.cells = np.where(np.isfinite(cells), cells, self.forbidden)
        self.source: Ints = np.array([edge.source for edge in edges], dtype=np.intp)
        self.target: Ints = np.array([edge.target for edge in edges], dtype=np.intp)
        counts = self.size[self.source] * self.size[self.target]
        self.cell_start: Ints = starts_of(counts)
        self.memory = _memory(problem, self.start)

    @cached_property
    def lines(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Every line of every edge's matrix, from both ends: its slot, the other end, its first cell, its stride."""
        sizes = self.size[self.source], self.size[self.target]
        rows, columns = ragged(self.start[self.source], sizes[0]), ragged(self.start[self.target], sizes[1])
        down = ragged(np.zeros_like(self.source), sizes[0]) * np.repeat(sizes[1], sizes[0])
        right = ragged(np.zeros_like(self.target), sizes[1])
        first = [np.repeat(self.cell_start, sizes[0]) + down, np.repeat(self.cell_start, sizes[1]) + right]
        other = [np.repeat(self.target, sizes[0]), np.repeat(self.source, sizes[1])]
        stride = [np.ones_like(down), np.repeat(sizes[1], sizes[1])]
        together = ([rows, columns], other, first, stride)
        slot, far, cell, step = (np.concatenate(parts) for parts in together)
        return slot, far, cell, step

    @cached_property
    def usages(self) -> list[int]:
        """Where each node's usages start in memory, and their number at the end."""
        found: list[int] = np.searchsorted(self.memory.node, np.arange(len(self.size) + 1)).tolist()
        return found

    @cached_property
    def sides(self) -> list[list[tuple[int, int, FloatArray]]]:
        """Per node, its edges: the other end's slots [start, end), and seconds with this end's strategies first."""
        result: list[list[tuple[int, int, FloatArray]]] = [[] for _ in self.size]
        start, size = self.start.tolist(), self.size.tolist()
        for u, v, cell in zip(self.source.tolist(), self.target.tolist(), self.cell_start.tolist(), strict=True):
            pairs = self.cells[cell : cell + size[u] * size[v]].reshape(size[u], size[v])
            result[u].append((start[v], start[v + 1], pairs))
            result[v].append((start[u], start[u + 1], pairs.T))
        return result

    def conditional(self, choice: Ints) -> FloatArray:
        """Seconds per slot of its node and edges, all other nodes at `choice`."""
        slot, other, cell, stride = self.lines
        costs = self.cells[cell + stride * choice[other]]
        return self.cost + np.bincount(slot, costs, len(self.cost))

    def total(self, choice: Ints) -> float:
        """Seconds of a choice."""
        pairs = self.cell_start + choice[self.source] * self.size[self.target] + choice[self.target]
        return float(self.cost[self.start[:-1] + choice].sum() + self.cells[pairs].sum())


@dataclass(frozen=True, eq=False)
class _Held:
    """A usage of a node at the points [first, last)."""

    node: int
    first: int
    last: int
    amounts: FloatArray


def _memory(problem: Problem, start: Ints) -> Memory:
    """All usages on one axis of points, without what no choice can change."""
    used = [(v, usage) for v, node in enumerate(problem.nodes) for usage in node.usages if usage.start < usage.end]
    parts = [[(v, u) for v, u in used if u.resource == resource] for resource in range(len(problem.limits))]
    capacity, whole = [np.zeros(0)], [np.zeros(0)]
    found: list[_Held] = []
    for limit, usages in zip(problem.limits, parts, strict=True):
        offset = sum(map(len, capacity))
        room, held = _timeline(limit, usages) if usages else (np.zeros(0), [])
        found += [replace(item, first=item.first + offset, last=item.last + offset) for item in held]
        capacity.append(room)
        whole.append(np.full(len(room), max(limit, 1.0)))
    for row in problem.linear:
        for side, end in ((1.0, row.high), (-1.0, -row.low)):
            if np.isfinite(end):
                offset = sum(map(len, capacity))
                above = {v: side * values - (side * values).min() for v, values in row.terms.items()}
                found += [_Held(v, offset, offset + 1, values) for v, values in above.items()]
                capacity.append(np.array([end - sum((side * values).min() for values in row.terms.values())]))
                whole.append(np.array([max(sum(values.max() for values in above.values()), 1.0)]))
    found.sort(key=lambda item: (item.node, item.first))
    lengths = np.array([len(item.amounts) for item in found], dtype=np.intp)
    node, first, last = (
        np.array([getattr(item, name) for item in found], dtype=np.intp) for name in ("node", "first", "last")
    )
    return Memory(
        np.concatenate(capacity), np.concatenate(whole), node, first, last,
        starts_of(lengths),
        np.concatenate([np.zeros(0), *[item.amounts for item in found]]),
        ragged(start[node], lengths),
    )  # fmt: skip


def _timeline(limit: float, used: Sequence[tuple[int, Usage]]) -> tuple[FloatArray, list[_Held]]:
    """One memory: bytes left per point, and what depends on the choice where the limit can be broken."""
    points, first = np.unique(np.array([usage.start for _, usage in used]), return_inverse=True)
    last = np.searchsorted(points, [usage.end for _, usage in used])
    least = np.array([usage.amounts.min() for _, usage in used])
    most = np.array([usage.amounts.max() for _, usage in used])
    load, highest = (
        np.cumsum(np.bincount(first, held, len(points) + 1) - np.bincount(last, held, len(points) + 1))[:-1]
        for held in (least, most)
    )
    # Numbers of the points that can be full, and of the usages that matter there.
    full = np.append(0, np.cumsum(highest > limit))
    moving = np.flatnonzero((most > least) & (full[last] > full[first]))
    breaks = np.unique(np.concatenate([first[moving], last[moving]]))
    steps = np.bincount(first[moving], minlength=len(points) + 1) - np.bincount(last[moving], minlength=len(points) + 1)
    # Where nothing depends on the choice one point stands for all: broken, or nothing to say.
    fixed = (limit - load)[np.cumsum(steps)[:-1] == 0].min(initial=0.0)
    beyond = np.full(int(fixed < 0), fixed)
    if not len(breaks):
        return beyond, []
    room = np.minimum.reduceat(np.where(highest > limit, limit - load, np.inf), breaks[:-1])
    number = np.append(0, np.cumsum(np.isfinite(room)))
    held: dict[tuple[int, int, int], FloatArray] = {}
    for i in moving.tolist():
        v, amounts = used[i][0], used[i][1].amounts - least[i]
        key = v, int(number[np.searchsorted(breaks, first[i])]), int(number[np.searchsorted(breaks, last[i])])
        held[key] = held[key] + amounts if key in held else amounts
    return np.append(room[np.isfinite(room)], beyond), [_Held(*key, amounts) for key, amounts in held.items()]
