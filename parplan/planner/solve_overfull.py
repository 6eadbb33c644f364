"""Whether memory is simply too small: a proof by prices on the limits alone, and choices that come near fitting.

With all costs at zero, prices p >= 0 on the memory rows make a bound: if even the cheapest choice has sum p * (load -
limit) > 0, no choice meets all the limits. Equal prices on all memories at one moment already say when the sum over the
devices is too large, which no single device's limit shows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from parplan.planner.presolve import drop_dominated
from parplan.planner.problem import Edge, FloatArray, Node, Problem
from parplan.planner.solve_bound import Priced, Prices, Relaxation, relax
from parplan.planner.solve_local import BRIEF, descend
from parplan.planner.solve_rows import broken_rows, rows_at

__all__ = ["Crowd", "crowd", "overfull", "without_costs"]

ROUNDS, STEPS = 6, 15


@dataclass(frozen=True)
class Crowd:
    """The fullest moment: the least bytes all nodes hold of all memories together, and each node's part."""

    time: int
    least: int
    held: Counter[str]


def without_costs(problem: Problem) -> Problem:
    """The same choices, all free."""
    nodes = tuple(
        replace(n, ahead=_barrier(n.ahead + n.back + n.tail), back=np.zeros(n.size), tail=np.zeros(n.size))
        for n in problem.nodes
    )
    edges = tuple(Edge(e.source, e.target, _barrier(e.ahead + e.back), np.zeros(e.ahead.shape)) for e in problem.edges)
    return replace(problem, nodes=nodes, edges=edges)


def _barrier(costs: FloatArray) -> FloatArray:
    """0 where finite, else inf."""
    return np.where(np.isfinite(costs), 0.0, np.inf)


def overfull(problem: Problem, deadline: float, offer: Callable[[list[int]], object]) -> bool:
    """Whether it is proven that no choice of a presolved problem meets the limits.

    `offer` is given the choices met on the way, each after local search on the limits.
    """
    free = drop_dominated(without_costs(problem))
    rows = rows_at(free.problem, crowd(free.problem).time)
    prices = np.ones(len(rows))
    for _ in range(ROUNDS):
        relaxation = relax(free.problem, rows) if rows else None
        if relaxation is None:
            return False
        found = _priced(relaxation, prices, deadline)
        if found.value > 1e-9:
            return True
        offer(free.lift(descend(free.problem, found.choice, deadline, BRIEF)))
        more = broken_rows(free.problem, found.choice, rows)
        if not more or time.monotonic() > deadline:
            return False
        prices = np.append(found.prices.limits * [row.high for row in rows], np.full(len(more), 0.1 / len(rows)))
        rows += more
    return False


def _priced(relaxation: Relaxation, weights: FloatArray, deadline: float) -> Priced:
    """The best prices found from `weights` (price times limit, per row): their sum stays 1, as only ratios matter."""
    limits = np.array([row.high for row in relaxation.rows])
    none = np.zeros(len(relaxation.tails))
    best = relaxation.at(Prices(none, weights / weights.sum() / limits))
    point = best
    for step in range(STEPS):
        if best.value > 1e-9 or time.monotonic() > deadline:
            break
        climbed = np.maximum(point.prices.limits * limits + 0.2 / (1 + step) * point.slope.limits / limits, 0.0)
        if not climbed.any():
            break
        point = relaxation.at(Prices(none, climbed / climbed.sum() / limits))
        best = point if point.value > best.value else best
    return best


def crowd(problem: Problem) -> Crowd:
    """The moment when all memories together are fullest, each node at its least (in sum over the memories)."""
    change: Counter[int] = Counter()
    for node in problem.nodes:
        for start, end in pairwise(sorted({point for u in node.usages for point in (u.start, u.end)})):
            least = _least(node, start)
            change[start] += least
            change[end] -= least
    times = sorted(change)
    moment = times[int(np.cumsum([change[point] for point in times]).argmax())] if times else 0
    held = Counter({node.name: _least(node, moment) for node in problem.nodes})
    return Crowd(moment, held.total(), held)


def _least(node: Node, moment: int) -> int:
    """The least bytes that a node holds of all memories together."""
    live = [usage.amounts for usage in node.usages if usage.start <= moment < usage.end]
    return int(sum(live, np.zeros(node.size))[node.allowed].min(initial=np.inf)) if node.allowed.any() else 0
