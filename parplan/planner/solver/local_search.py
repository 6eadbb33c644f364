"""Local search: exact deltas of T and of what limits are exceeded by, for all strategies of one node at a time.

It makes a first choice where a graph is too wide for elimination, improves candidates, and settles ties: of strategies
that cost the same, a solution uses the lowest. Forbidden strategies and pairs count as a huge cost here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.limits import Live, Timeline, timeline
from parplan.planner.solver.maxima_state import MaximaState
from parplan.planner.solver.problem import FloatArray, Mask, Problem
from parplan.planner.solver.rows import row_table

__all__ = ["BRIEF", "descend", "first_choice", "leanest_choice", "settle"]

BRIEF = 10_000
"""Looks at a node that a brief improvement takes at most, about a second: counted, so that it is the same anywhere."""

FORBIDDEN = 1e30


def first_choice(problem: Problem) -> list[int]:
    """Per node, the strategy that is cheapest with every edge at its best, all rows counting alike in their maximum."""
    table = row_table(problem)
    shares = np.repeat(1 / np.diff(table.first), np.diff(table.first))
    cost = [
        np.where(node.allowed, node.cost_s + np.maximum(terms.weighted(shares), 0.0), FORBIDDEN)
        for node, terms in zip(problem.nodes, table.nodes, strict=True)
    ]
    for edge, terms in zip(problem.edges, table.edges, strict=True):
        both = np.where(np.isfinite(edge.cost_s), edge.cost_s + np.maximum(terms.weighted(shares), 0.0), FORBIDDEN)
        cost[edge.source] = cost[edge.source] + both.min(axis=1)
        cost[edge.target] = cost[edge.target] + both.min(axis=0)
    return [int(values.argmin()) for values in cost]


def leanest_choice(problem: Problem) -> list[int]:
    """Per node, the strategy that holds the least memory, of equals the cheapest."""
    result = []
    for node in problem.nodes:
        held = sum((usage.amounts for usage in node.usages), np.zeros(node.size))
        cost = node.cost_s
        result.append(int(np.lexsort((cost, np.where(node.allowed, held, np.inf)))[0]))
    return result


def descend(
    problem: Problem, choice: Sequence[int], deadline: float, looks: float = np.inf, rounds: int = 100
) -> list[int]:
    """Change one node at a time, first to exceed limits less, then to cost less, until nothing helps.

    Args:
        looks: at nodes, at most.
    """
    state = _State(problem, choice)
    for _ in range(rounds):
        moves = 0
        for v in range(len(problem.nodes)):
            moves += state.improve(v)
            looks -= 1
            if looks <= 0 or time.monotonic() > deadline:
                return state.choice
        if not moves:
            break
    return state.choice


def settle(problem: Problem, choice: Sequence[int], deadline: float) -> list[int]:
    """The lowest strategy at each of the first BRIEF nodes, in order, that costs no more; for a feasible choice."""
    state = _State(problem, choice)
    for v in range(min(BRIEF, len(problem.nodes))):
        if time.monotonic() > deadline:
            break
        lower = (state.exceeded(v) <= 0) & (np.arange(problem.nodes[v].size) < state.choice[v])
        if lower.any():
            equal = np.flatnonzero(state.added(v, lower, 1e-14 * state.scale) < np.inf)
            state.move(v, int(equal[0]) if len(equal) else state.choice[v])
    return state.choice


@dataclass(frozen=True, eq=False)
class _Side:
    """One edge seen from one end: matrices with this end's strategies first."""

    other: int
    cost_s: FloatArray
    rows: NDArray[np.intp]
    seconds: FloatArray


class _State:
    """A choice with everything needed to price a change of one node."""

    def __init__(self, problem: Problem, choice: Sequence[int]) -> None:
        self.problem, self.table = problem, row_table(problem)
        self.choice = list(choice)
        self.sides: list[list[_Side]] = [[] for _ in problem.nodes]
        for edge, terms in zip(problem.edges, self.table.edges, strict=True):
            cost, rows, seconds = np.minimum(edge.cost_s, FORBIDDEN), terms.rows, terms.seconds
            self.sides[edge.source].append(_Side(edge.target, cost, rows, seconds))
            self.sides[edge.target].append(_Side(edge.source, cost.T, rows, seconds.transpose(0, 2, 1)))
        self.maxima = MaximaState(self.table, choice)
        self.scale = float(sum(n.cost_s[n.allowed].max(initial=0.0) for n in problem.nodes)) + abs(
            float(self.maxima.weights @ self.maxima.values)
        )
        self.lines: list[Timeline] = [timeline(problem, r) for r in range(len(problem.limits))]
        self.loads = [line.loads(lambda item: float(item.amounts[self.choice[item.node]])) for line in self.lines]
        self.live: list[list[Live]] = [[] for _ in problem.nodes]
        for line in self.lines:
            for item in line.live:
                self.live[item.node].append(item)
        self.sums = [float(sum(c[self.choice[v]] for v, c in row.terms.items())) for row in problem.linear]
        self.linear_of: list[list[int]] = [[] for _ in problem.nodes]
        for i, row in enumerate(problem.linear):
            for v in row.terms:
                self.linear_of[v].append(i)

    def added(self, v: int, requested: Mask, limit_s: float = np.inf) -> FloatArray:
        """Seconds that requested strategies of v add to T, one for each; inf for others and those over `limit_s`."""
        cost = np.minimum(self.problem.nodes[v].cost_s, FORBIDDEN)
        for side in self.sides[v]:
            cost = cost + side.cost_s[:, self.choice[side.other]]
        cost = cost - cost[self.choice[v]]
        changes = self._changes(v)
        if not changes:
            return np.where(requested & (cost <= limit_s), cost, np.inf)
        if limit_s < np.inf:
            requested = requested & (cost + self.maxima.least(changes) <= limit_s)
        which = np.flatnonzero(requested)
        result = np.full(len(cost), np.inf)
        if len(which):
            result[which] = cost[which] + self.maxima.added({row: change[which] for row, change in changes.items()})
            if limit_s < np.inf and result.min() > limit_s:
                self.maxima.reject(changes, int(result.argmin()))
        return np.where(result <= limit_s, result, np.inf)

    def _changes(self, v: int) -> dict[int, FloatArray]:
        """The rows whose own seconds depend on v: what each of its strategies adds to what the present one has."""
        terms, now = self.table.nodes[v], self.choice[v]
        changes = dict(zip(terms.rows.tolist(), terms.seconds - terms.seconds[:, [now]], strict=True))
        for side in self.sides[v]:
            seconds = side.seconds[:, :, self.choice[side.other]]
            for row, change in zip(side.rows.tolist(), seconds - seconds[:, [now]], strict=True):
                changes[row] = changes[row] + change if row in changes else change
        return changes

    def exceeded(self, v: int) -> FloatArray:
        """By how much limits are broken per strategy of v, where v takes part."""
        now = self.choice[v]
        over = np.zeros(self.problem.nodes[v].size)
        for item in self.live[v]:
            limit, amounts = self.problem.limits[item.resource], item.amounts
            load = self.loads[item.resource][item.first : item.last] - amounts[now]
            if load.max() + amounts.max() > limit:
                over += np.maximum(load[None] + amounts[:, None] - limit, 0.0).sum(axis=1)
        for i in self.linear_of[v]:
            row = self.problem.linear[i]
            total = self.sums[i] - row.terms[v][now] + row.terms[v]
            over += np.maximum(total - row.high, 0.0) + np.maximum(row.low - total, 0.0)
        return over

    def improve(self, v: int) -> bool:
        """Give v its best strategy; whether it changed."""
        now, over = self.choice[v], self.exceeded(v)
        if len(over) == 1:
            return False
        least = over <= over.min()
        added = self.added(v, least, -1e-12 * self.scale if least[now] else np.inf)
        best = int(added.argmin())
        if not np.isfinite(added[best]):
            return False
        self.move(v, best)
        return True

    def move(self, v: int, strategy: int) -> None:
        """Change v, and everything that is kept up to date."""
        now = self.choice[v]
        if strategy == now:
            return
        changes = self._changes(v)
        if changes:
            self.maxima.move(changes, strategy)
        for item in self.live[v]:
            self.loads[item.resource][item.first : item.last] += item.amounts[strategy] - item.amounts[now]
        for i in self.linear_of[v]:
            values = self.problem.linear[i].terms[v]
            self.sums[i] += float(values[strategy] - values[now])
        self.choice[v] = strategy
