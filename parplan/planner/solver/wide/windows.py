"""Large-neighbourhood search: a few nodes free, all others as they are, solved by CP-SAT within the room they leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from parplan.planner.solver.cpsat import search
from parplan.planner.solver.limits import LimitRow
from parplan.planner.solver.problem import Edge, FloatArray, Node, Problem
from parplan.planner.solver.wide.arrays import Arrays, Ints, ragged, starts_of
from parplan.planner.solver.wide.assignment import Assignment

__all__ = ["Window", "solve_window", "window", "windows"]


PIECES = 4
"""Connected pieces of every second window."""

ROUNDS, ADDED = 8, 8
"""Rounds of limits added to the problem of a window, and limits added per round."""


@dataclass(frozen=True, eq=False)
class Window:
    """The problem of some nodes with all others as they are.

    Attributes:
        now, cost: where the nodes are, and what that costs.
        usages: the nodes' usages in memory.
        room: bytes per point that the others leave.
    """

    nodes: Ints
    problem: Problem
    now: list[int]
    cost: float
    usages: Ints
    room: FloatArray


def windows(arrays: Arrays, cells: int, seed: int) -> Iterator[Ints]:
    """Sets of nodes that lie together in the graph, or in pieces that hold memory at the same moment, without end.

    Args:
        cells: pairs of strategies on the edges of a set, at most (one node more than fits ends it).
    """
    generator = np.random.default_rng(seed)
    m, free = arrays.memory, np.flatnonzero(arrays.size > 1)
    near = [[int(arrays.node[first]) for first, *_ in sides] for sides in arrays.sides]
    pieces = 1
    while len(free):
        pieces = PIECES + 1 - pieces
        seeds = [int(generator.choice(free))]
        held = arrays.usages[seeds[0]]
        if pieces > 1 and arrays.usages[seeds[0] + 1] > held:
            together = np.unique(m.node[(m.first <= m.first[held]) & (m.last > m.first[held])])
            seeds += [int(v) for v in generator.choice(together, size=pieces - 1)]
        taken: dict[int, int] = {}
        for seed in seeds:
            queue, size = [seed], 0
            for v in queue:  # grows while it is walked through
                if v in taken:
                    continue
                if size * len(seeds) > cells:
                    break
                taken[v] = len(taken)
                size += sum(int(arrays.size[u]) * int(arrays.size[v]) for u in near[v] if u in taken)
                size += int(arrays.size[v])
                queue += [near[v][i] for i in generator.permutation(len(near[v]))]
        yield np.array(sorted(taken))


def window(assignment: Assignment, nodes: Ints) -> Window:
    """The problem of `nodes` with all others as they are."""
    a, m = assignment.arrays, assignment.arrays.memory
    place = np.full(len(a.size), -1)
    place[nodes] = np.arange(len(nodes))
    # Costs with everything around as it is, less the edges inside, which count as pairs.
    inside = np.flatnonzero((place[a.source] >= 0) & (place[a.target] >= 0))
    costs = {int(v): assignment.costs[a.start[v] : a.start[v + 1]].copy() for v in nodes}
    edges = []
    for e in inside.tolist():
        u, v, cell = int(a.source[e]), int(a.target[e]), int(a.cell_start[e])
        pairs = a.cells[cell : cell + a.size[u] * a.size[v]].reshape(a.size[u], a.size[v])
        costs[u] -= pairs[:, assignment.choice[v]]
        costs[v] -= pairs[assignment.choice[u]]
        # Nodes are in ascending order, and u < v. Rows of maxima that are priced in may bring pairs below 0.
        edges.append(Edge(int(place[u]), int(place[v]), pairs - min(0.0, float(pairs.min()))))
    least = {v: float(cost.min()) for v, cost in costs.items()}
    parts = tuple(Node(str(v), np.maximum(cost - least[v], 0.0)) for v, cost in costs.items())
    now = [int(k) for k in assignment.choice[nodes]]
    cost = sum(float(part.cost_s[k]) for part, k in zip(parts, now, strict=True))
    cost += sum(float(edge.cost_s[now[edge.source], now[edge.target]]) for edge in edges)
    # A strategy or pair that alone makes a choice worse need not cost more than that: sums stay within 64 bits.
    worse = 2 * cost
    parts = tuple(replace(part, cost_s=np.minimum(part.cost_s, worse)) for part in parts)
    problem = Problem(parts, tuple(replace(edge, cost_s=np.minimum(edge.cost_s, worse)) for edge in edges))
    mine = np.concatenate([np.arange(a.usages[v], a.usages[v + 1]) for v in nodes.tolist()]).astype(np.intp)
    held = m.amounts[m.start[mine] + assignment.choice[m.node[mine]]]
    return Window(nodes, problem, now, cost, mine, m.spread(held, mine) - assignment.excess)


def solve_window(arrays: Arrays, part: Window, deadline: float, effort: float) -> list[int] | None:
    """A better choice for the window's nodes that keeps all limits; None if none is found."""
    m, mine = arrays.memory, part.usages
    place = np.searchsorted(part.nodes, m.node[mine])
    sizes = arrays.size[m.node[mine]]
    most = np.maximum.reduceat(m.amounts[ragged(m.start[mine], sizes)], starts_of(sizes)) if len(mine) else np.zeros(0)
    # Limits are added where they can be broken most, then where choices break them.
    over = m.spread(most, mine) - part.room
    rows: list[LimitRow] = []
    for _ in range(ROUNDS):
        over = np.where(over > 1e-6, over / m.limit, 0.0)
        added = len(rows)
        while over.any() and len(rows) < added + ADDED:
            point = int(over.argmax())
            live = np.flatnonzero((m.first[mine] <= point) & (m.last[mine] > point))
            terms: dict[int, FloatArray] = {}
            for i in live.tolist():
                v, amounts = int(place[i]), m.amounts[m.start[mine[i]] : m.start[mine[i]] + sizes[i]]
                terms[v] = terms[v] + amounts if v in terms else amounts
            rows.append(LimitRow(f"point {point}", terms, -np.inf, float(part.room[point])))
            # The next limit is one that not all of these usages hold at.
            over[int(m.first[mine[live]].max()) : int(m.last[mine[live]].min())] = 0.0
        cutoff = part.cost * (1 - 1e-9)
        if time.monotonic() > deadline or not part.cost > 0:
            return None
        found = search(part.problem, rows, deadline, 1, part.cost, cutoff, None, None, effort)
        if found.choice is None:
            return None
        over = m.spread(m.amounts[m.start[mine] + np.array(found.choice)[place]], mine) - part.room
        if over.max(initial=0.0) <= 1e-6:
            return list(found.choice)
    return None
