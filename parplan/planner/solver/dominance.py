"""Dominance of strategies: drops those that another strategy of the same node can always replace at no cost.

T is the largest of sums of the base costs and of rows with multiplicities >= 0 (see rows), and replacing q by p never
raises T if it raises neither the base costs nor any row. In each the worst case over a neighbour's strategies is the
largest difference of two lines of the edge matrix.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from parplan.planner.solver.problem import FloatArray, Mask, Problem
from parplan.planner.solver.rows import row_table

__all__ = ["undominated"]

MAX_COMPARISONS = 4_000_000
"""Pairs of strategies times neighbours' strategies above which a node is left alone."""


def undominated(problem: Problem) -> list[Mask]:
    """Per node, which strategies to keep; of equals, the first."""
    search = _Search(problem)
    queue = deque(range(len(problem.nodes)))
    waiting = set(queue)
    while queue:
        v = queue.popleft()
        waiting.discard(v)
        if search.shrink(v):
            again = sorted(search.neighbours(v) - waiting)
            queue.extend(again)
            waiting.update(again)
    return search.keep


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.table = problem, row_table(problem)
        self.keep: list[Mask] = [np.ones(node.size, dtype=np.bool_) for node in problem.nodes]
        self.at: list[list[int]] = [[] for _ in problem.nodes]
        self.rows: list[list[FloatArray]] = [[u.amounts for u in node.usages] for node in problem.nodes]
        for e, edge in enumerate(problem.edges):
            self.at[edge.source].append(e)
            self.at[edge.target].append(e)
        for row in problem.linear:
            for v, values in row.terms.items():
                self.rows[v] += [values] if np.isfinite(row.high) else []
                self.rows[v] += [-values] if np.isfinite(row.low) else []

    def neighbours(self, v: int) -> set[int]:
        edges = [self.problem.edges[e] for e in self.at[v]]
        return {edge.source + edge.target - v for edge in edges}

    def shrink(self, v: int) -> bool:
        """Drop what is dominated at v; whether anything was."""
        kept = np.flatnonzero(self.keep[v])
        others = sum(int(self.keep[u].sum()) for u in self.neighbours(v))
        if len(kept) == 1 or len(kept) ** 2 * (1 + others) > MAX_COMPARISONS:
            return False
        better = self._never_worse(v, kept)
        order = np.arange(len(kept))
        beaten = (better & (~better.T | (order[:, None] < order))).any(axis=0)
        self.keep[v][kept[beaten]] = False
        return bool(beaten.any())

    def _never_worse(self, v: int, kept: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Mask:
        """[p, q]: whether p can stand in for q, shape (kept, kept)."""
        node = self.problem.nodes[v]
        better: Mask = np.ones((len(kept), len(kept)), dtype=np.bool_)
        for values in self.rows[v]:
            better &= values[kept][:, None] <= values[kept]
        zeros = np.zeros(better.shape)
        change = {-1: _difference(np.where(node.allowed, node.cost_s, np.inf)[kept, None])}
        for row, seconds in zip(self.table.nodes[v].rows, self.table.nodes[v].seconds, strict=True):
            change[int(row)] = seconds[kept][:, None] - seconds[kept]
        for e in self.at[v]:
            if better.sum() == len(kept):
                return better
            edge, terms = self.problem.edges[e], self.table.edges[e]
            own = np.ix_(kept, np.flatnonzero(self.keep[edge.source + edge.target - v]))
            cost = (edge.cost_s if v == edge.source else edge.cost_s.T)[own]
            lines = {-1: cost}
            for row, seconds in zip(terms.rows.tolist(), terms.seconds, strict=True):
                lines[row] = np.where(np.isfinite(cost), (seconds if v == edge.source else seconds.T)[own], np.inf)
            with np.errstate(invalid="ignore"):  # inf - inf: two forbidden strategies do not replace each other
                change |= {row: change.get(row, zeros) + _difference(line) for row, line in lines.items()}
        for worst in change.values():
            better &= worst <= 0
        return better


def _difference(lines: FloatArray) -> FloatArray:
    """max over k of lines[p, k] - lines[q, k]; pairs that q may not form do not count."""
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isfinite(lines)[None], lines[:, None] - lines[None], -np.inf)
    result: FloatArray = difference.max(axis=2)
    return result
