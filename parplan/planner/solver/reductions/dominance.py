"""Dominance of strategies: drops those that another strategy of the same node can always replace at no cost.

T is the largest, over all selections of one row per maximum, of a linear function (see rows). Replacing q by p never
raises T if it raises none of them, and these differ at one node only by the multiplicities of the rows that it and its
edges have seconds in (see signatures). In each the worst case over a neighbour's strategies is the largest difference
of two lines of the edge matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from parplan.planner.solver.problem import FloatArray, Mask, Problem
from parplan.planner.solver.reductions.signatures import Signatures
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
        self.signatures = Signatures(self.table)
        self.known: dict[tuple[int, ...], list[tuple[float, Sequence[float]]]] = {}
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
        if better.sum() == len(kept):
            return better
        own, near = self.table.nodes[v], [self.table.edges[e] for e in self.at[v]]
        rows = sorted({int(row) for terms in (own, *near) for row in terms.rows})
        signatures = self._signatures(tuple(rows))
        differences: dict[tuple[int, bytes], FloatArray] = {}
        for base, signature in signatures:
            multiplicity = np.zeros(len(self.table.constant))
            multiplicity[rows] = signature
            cost = np.where(node.allowed, node.cost_s if base else 0.0, np.inf)[kept]
            worst = _difference((cost + own.weighted(multiplicity)[kept] if len(own.rows) else cost)[:, None])
            for e, terms in zip(self.at[v], near, strict=True):
                key = e, np.append(multiplicity[terms.rows], base).tobytes()
                if key not in differences:
                    edge = self.problem.edges[e]
                    lines = np.where(np.isfinite(edge.cost_s), edge.cost_s if base else 0.0, np.inf)
                    lines = lines + terms.weighted(multiplicity) if len(terms.rows) else lines
                    lines = lines if v == edge.source else lines.T
                    differences[key] = _difference(lines[kept][:, self.keep[edge.source + edge.target - v]])
                with np.errstate(invalid="ignore"):  # inf - inf: two forbidden strategies do not replace each other
                    worst = worst + differences[key]
            better &= worst <= 0
        return better

    def _signatures(self, rows: tuple[int, ...]) -> list[tuple[float, Sequence[float]]]:
        """How often the base costs and `rows` count together; each by itself where that is too much to list."""
        if rows not in self.known:
            found = self.signatures.of(rows)
            alone = [(0.0, line) for line in np.eye(len(rows)).tolist()]
            self.known[rows] = [(1.0, line) for line in found] if found else [(1.0, [0.0] * len(rows)), *alone]
        return self.known[rows]


def _difference(lines: FloatArray) -> FloatArray:
    """max over k of lines[p, k] - lines[q, k]; pairs that q may not form do not count."""
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isfinite(lines)[None], lines[:, None] - lines[None], -np.inf)
    result: FloatArray = difference.max(axis=2)
    return result
