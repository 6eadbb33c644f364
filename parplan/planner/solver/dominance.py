"""Dominance of strategies: drops those that another strategy of the same node can always replace at no cost.

Exact with overlap: T is the largest of F + B and the rows F + B_m + sum_{j<=m} reduction_j (see problem), and
replacing q by p never raises T if it raises no row. Row m counts node v's `backward_s` if v >= m, its `reduction_s` if
v <= m, and an edge's `backward_s` if its target is > m; F + B counts every `backward_s` and no `reduction_s`. So there
are a few different rows per node only, and in each the worst case over a neighbour's strategies is the largest
difference of two lines of the edge matrix.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from parplan.planner.solver.problem import Edge, FloatArray, Mask, Problem

__all__ = ["undominated"]

MAX_COMPARISONS = 4_000_000
"""Pairs of strategies times neighbours' strategies above which a node is left alone."""


@dataclass(frozen=True)
class _Scenario:
    """The costs around a node that one kind of overlap row counts."""

    backward: bool
    reduction: bool
    edges_backward: tuple[bool, ...]


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
        self.problem = problem
        self.keep: list[Mask] = [np.ones(node.size, dtype=np.bool_) for node in problem.nodes]
        self.at: list[list[Edge]] = [[] for _ in problem.nodes]
        self.rows: list[list[FloatArray]] = [[u.amounts for u in node.usages] for node in problem.nodes]
        self.reduced = [v for v, node in enumerate(problem.nodes) if node.reduction_s[node.allowed].any()]
        for edge in problem.edges:
            self.at[edge.source].append(edge)
            self.at[edge.target].append(edge)
        for row in problem.linear:
            for v, values in row.terms.items():
                self.rows[v] += [values] if np.isfinite(row.high) else []
                self.rows[v] += [-values] if np.isfinite(row.low) else []

    def neighbours(self, v: int) -> set[int]:
        return {edge.source + edge.target - v for edge in self.at[v]}

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
        differences = [self._differences(edge, v, kept) for edge in self.at[v]]
        targets = [edge.target for edge in self.at[v]]
        scenarios = {_Scenario(v >= m, v <= m, tuple(target > m for target in targets)) for m in self.reduced}
        for scenario in {_Scenario(True, False, (True,) * len(targets)), *scenarios}:
            cost = (
                node.forward_s
                + (node.backward_s if scenario.backward else 0.0)
                + (node.reduction_s if scenario.reduction else 0.0)
            )
            cost = np.where(node.allowed, cost, np.inf)[kept]
            counted = [pair[yes] for pair, yes in zip(differences, scenario.edges_backward, strict=True)]
            with np.errstate(invalid="ignore"):  # inf - inf: two forbidden strategies do not replace each other
                better &= sum(counted, cost[:, None] - cost) <= 0
        return better

    def _differences(self, edge: Edge, v: int, kept: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[FloatArray]:
        """The most that p costs above q on an edge: without its backward, and with it."""
        other = self.keep[edge.source + edge.target - v]
        forward, backward = (
            (edge.forward_s, edge.backward_s) if v == edge.source else (edge.forward_s.T, edge.backward_s.T)
        )
        forward, backward = forward[kept][:, other], backward[kept][:, other]
        forward = np.where(np.isfinite(backward), forward, np.inf)
        without = _largest_difference(forward)
        return [without, _largest_difference(forward + backward) if backward.any() else without]


def _largest_difference(lines: FloatArray) -> FloatArray:
    """max over k of lines[p, k] - lines[q, k]; pairs that q may not form do not count."""
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isfinite(lines)[None], lines[:, None] - lines[None], -np.inf)
    result: FloatArray = difference.max(axis=2)
    return result
