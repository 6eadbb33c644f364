"""Fold away nodes that only add: a node with at most two neighbours leaves its best cost per pair of them.

Exact because a folded node holds no memory, is in no linear constraint, has no gradient reduction, and comes after the
last node that has one: every overlap row P_i that can be the largest has i before it, so its `backward_s` and that of
its edges is in B_i of all of them, exactly as `forward_s` is in F. One number then stands for both, and the minimum
over its strategies is the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import Edge, FloatArray, Problem, Reduced

__all__ = ["fold", "foldable"]

MAX_PRODUCT = 2_000_000
"""Largest min-plus product formed (strategies of the node times those of its neighbours)."""


@dataclass(frozen=True, eq=False)
class _Fold:
    """A node that is gone: its best strategy per strategies of its neighbours."""

    node: int
    neighbours: tuple[int, ...]
    best: NDArray[np.intp]


def foldable(problem: Problem) -> set[int]:
    """The nodes that only add (see the module), whatever their degree."""
    last_reduced = max((v for v, node in enumerate(problem.nodes) if node.reduction_s[node.allowed].any()), default=-1)
    bound = {v for row in problem.linear for v in row.terms}
    return {v for v, node in enumerate(problem.nodes) if v > last_reduced and v not in bound and not node.usages}


def fold(problem: Problem) -> Reduced:
    """Without foldable nodes of at most two neighbours. The last node standing is kept."""
    graph = _Graph(problem)
    queue = sorted(graph.free, reverse=True)
    while queue:
        queue.extend(graph.eliminate(queue.pop()))
    return graph.reduced() if graph.folds else Reduced(problem)


class _Graph:
    """The problem while nodes are taken out of it; edges carry one matrix where a fold made them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free = foldable(problem)
        self.nodes = dict(enumerate(problem.nodes))
        self.edges: dict[tuple[int, int], Edge] = {}
        self.near: dict[int, set[int]] = {v: set() for v in self.nodes}
        self.folds: list[_Fold] = []
        for edge in problem.edges:
            self._add_edge(edge)

    def eliminate(self, v: int) -> list[int]:
        """Fold v if it can be; the neighbours that may have become foldable."""
        near = tuple(sorted(self.near[v])) if v in self.nodes else ()
        sizes = [self.nodes[u].size for u in near]
        if v not in self.nodes or len(near) > 2 or len(self.nodes) == 1:
            return []
        if self.nodes[v].size * int(np.prod(sizes)) > MAX_PRODUCT:
            return []
        node = self.nodes[v]
        table: FloatArray = (node.forward_s + node.backward_s).reshape(-1, *[1] * len(near))
        for axis, u in enumerate(near):
            edge = self.edges[min(u, v), max(u, v)]
            cost = edge.forward_s + edge.backward_s
            shape = [node.size, *[1] * len(near)]
            shape[axis + 1] = self.nodes[u].size
            table = table + (cost if u > v else cost.T).reshape(shape)
        self.folds.append(_Fold(v, near, table.argmin(axis=0)))
        del self.nodes[v]
        for u in self.near.pop(v):
            self.near[u].discard(v)
            del self.edges[min(u, v), max(u, v)]
        cost = table.min(axis=0)
        if len(near) == 2:
            self._add_edge(Edge(near[0], near[1], cost, np.zeros_like(cost)))
        else:
            u = near[0] if near else min(self.nodes)
            self.nodes[u] = replace(self.nodes[u], forward_s=self.nodes[u].forward_s + cost)
        return sorted(set(near) & self.free, reverse=True)

    def _add_edge(self, edge: Edge) -> None:
        key = edge.source, edge.target
        other = self.edges.get(key)
        self.edges[key] = (
            edge if other is None else Edge(*key, other.forward_s + edge.forward_s, other.backward_s + edge.backward_s)
        )
        self.near[edge.source].add(edge.target)
        self.near[edge.target].add(edge.source)

    def reduced(self) -> Reduced:
        """The problem of the nodes left, renumbered in order."""
        order, folds, count = sorted(self.nodes), self.folds, len(self.problem.nodes)
        place = {old: new for new, old in enumerate(order)}
        edges = tuple(
            Edge(place[e.source], place[e.target], e.forward_s, e.backward_s) for _, e in sorted(self.edges.items())
        )
        linear = tuple(
            replace(row, terms={place[v]: values for v, values in row.terms.items()}) for row in self.problem.linear
        )

        def lift(choice: Sequence[int]) -> list[int]:
            picked = dict(zip(order, choice, strict=True))
            for step in reversed(folds):
                picked[step.node] = int(step.best[tuple(picked[u] for u in step.neighbours)])
            return [picked[v] for v in range(count)]

        nodes = tuple(self.nodes[v] for v in order)
        return Reduced(replace(self.problem, nodes=nodes, edges=edges, linear=linear), lift)
