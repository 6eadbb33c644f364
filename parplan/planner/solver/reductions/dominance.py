"""Dominance of strategies: drops those that another strategy of the same node can always replace at no cost.

T is the largest, over all selections of one row per maximum, of a linear function (see rows). Replacing q by p never
raises T if it raises none of them, and these differ at one node only by the multiplicities of the rows that it and its
edges have seconds in (see signatures). In each the worst case over a neighbour's strategies is the largest difference
of two lines of the edge matrix.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parplan.planner.solver.problem import FloatArray, Mask, Problem, Reduced, restrict
from parplan.planner.solver.reductions.signatures import Signatures
from parplan.planner.solver.rows import Terms, row_table

__all__ = ["drop_dominated"]

MAX_COMPARISONS = 4_000_000
"""Pairs of strategies times neighbours' strategies above which a node is left alone."""


def drop_dominated(problem: Problem, deadline: float = np.inf) -> Reduced:
    """Without strategies that another one can replace; of equals, the first stays. None goes after `deadline`."""
    if time.monotonic() > deadline:
        return Reduced(problem)
    search = _Search(problem)
    queue = deque(range(len(problem.nodes)))
    waiting = set(queue)
    while queue and time.monotonic() < deadline:
        v = queue.popleft()
        waiting.discard(v)
        if search.shrink(v):
            again = sorted(search.neighbours(v) - waiting)
            queue.extend(again)
            waiting.update(again)
    return restrict(problem, search.keep)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.table = problem, row_table(problem)
        self.signatures = Signatures(self.table)
        self.known: dict[int, _Local] = {}
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
        local = self._local(v)
        differences: dict[tuple[int, bytes], FloatArray] = {}
        for base, signature in zip(local.base, local.signatures, strict=True):
            cost = np.where(node.allowed, node.cost_s if base else 0.0, np.inf)
            cost = cost + local.node.weighted(signature) if len(local.node.rows) else cost
            worst = _difference(cost[kept, None])
            for e, terms in zip(self.at[v], local.edges, strict=True):
                key = e, np.append(signature[terms.rows], base).tobytes()
                if key not in differences:
                    edge = self.problem.edges[e]
                    lines = np.where(np.isfinite(edge.cost_s), edge.cost_s if base else 0.0, np.inf)
                    lines = lines + terms.weighted(signature) if len(terms.rows) else lines
                    lines = lines if v == edge.source else lines.T
                    differences[key] = _difference(lines[kept][:, self.keep[edge.source + edge.target - v]])
                with np.errstate(invalid="ignore"):  # inf - inf: two forbidden strategies do not replace each other
                    worst = worst + differences[key]
            better &= worst <= 0
            if better.sum() == len(kept):
                break
        return better

    def _local(self, v: int) -> _Local:
        """The rows that v and its edges have seconds in, by group, and how often base costs and groups count together.

        Each counts alone where the signatures are too many to list.
        """
        if v not in self.known:
            own, near = self.table.nodes[v], [self.table.edges[e] for e in self.at[v]]
            parts: dict[int, list[tuple[int, bytes]]] = {}
            for e, terms in zip((-1, *self.at[v]), (own, *near), strict=True):
                for row, seconds in zip(terms.rows.tolist(), terms.seconds, strict=True):
                    parts.setdefault(row, []).append((e, seconds.tobytes()))
            # Rows with the same seconds everywhere around v are one group, and its first row stands for it.
            groups: dict[tuple[tuple[int, bytes], ...], int] = {}
            group = {row: groups.setdefault(tuple(parts[row]), len(groups)) for row in sorted(parts)}
            first = {group[row]: row for row in reversed(group)}
            found = self.signatures.of(group)
            base = [1.0] * len(found) if found else [1.0, *[0.0] * len(groups)]
            lines = np.array(found) if found else np.vstack([np.zeros(len(groups)), np.eye(len(groups))])
            at = {row: number for number, row in first.items()}
            node, *edges = (_chosen(terms, at) for terms in (own, *near))
            self.known[v] = _Local(node, edges, base, lines)
        return self.known[v]


@dataclass(frozen=True, eq=False)
class _Local:
    """Terms of a node and of each of its edges, with groups in place of rows, and all signatures of the groups."""

    node: Terms
    edges: list[Terms]
    base: list[float]
    signatures: FloatArray


def _chosen(terms: Terms, at: Mapping[int, int]) -> Terms:
    """Only the rows in `at`, renumbered."""
    place = [i for i, row in enumerate(terms.rows.tolist()) if row in at]
    return Terms(np.array([at[int(terms.rows[i])] for i in place], dtype=np.intp), terms.seconds[place])


def _difference(lines: FloatArray) -> FloatArray:
    """max over k of lines[p, k] - lines[q, k]; pairs that q may not form do not count."""
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isfinite(lines)[None], lines[:, None] - lines[None], -np.inf)
    result: FloatArray = difference.max(axis=2)
    return result
