"""Fold away nodes that only add: a node with at most two neighbours leaves its best cost per pair of them.

Exact because a folded node holds no memory, is in no linear constraint, and neither it nor an edge of it is in a row of
a maximum: its best cost per pair of neighbours is then all that the rest of the problem sees of it.
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
    bound = {v for row in problem.linear for v in row.terms}
    for maximum in problem.maxima:
        for row in maximum.rows:
            bound.update(row.nodes)
            for e in row.edges:
                bound |= {problem.edges[e].source, problem.edges[e].target}
    return {v for v, node in enumerate(problem.nodes) if v not in bound and not node.usages}


def fold(problem: Problem) -> Reduced:
    """Without foldable nodes of at most two neighbours. The last node standing is kept."""
    graph = _Graph(problem)
    queue = sorted(graph.free, reverse=True)
    while queue:
        queue.extend(graph.eliminate(queue.pop()))
    return graph.reduced() if graph.folds else Reduced(problem)


class _Graph:
    """The problem while nodes are taken out of it; `index` is the place of an edge that rows may have terms of."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free = foldable(problem)
        self.nodes = dict(enumerate(problem.nodes))
        self.edges: dict[tuple[int, int], list[int]] = {}
        self.near: dict[int, set[int]] = {v: set() for v in self.nodes}
        self.costs: list[Edge | None] = []
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
        table: FloatArray = node.cost_s.reshape(-1, *[1] * len(near))
        for axis, u in enumerate(near):
            shape = [node.size, *[1] * len(near)]
            shape[axis + 1] = self.nodes[u].size
            for index in self.edges.pop((min(u, v), max(u, v))):
                edge = self.costs[index]
                assert edge is not None
                table = table + (edge.cost_s if u > v else edge.cost_s.T).reshape(shape)
                self.costs[index] = None
            self.near[u].discard(v)
        self.folds.append(_Fold(v, near, table.argmin(axis=0)))
        del self.nodes[v], self.near[v]
        cost = table.min(axis=0)
        if len(near) == 2:
            self._add_edge(Edge(near[0], near[1], cost))
        else:
            u = near[0] if near else min(self.nodes)
            self.nodes[u] = replace(self.nodes[u], cost_s=self.nodes[u].cost_s + cost)
        return sorted(set(near) & self.free, reverse=True)

    def _add_edge(self, edge: Edge) -> None:
        self.edges.setdefault((edge.source, edge.target), []).append(len(self.costs))
        self.costs.append(edge)
        self.near[edge.source].add(edge.target)
        self.near[edge.target].add(edge.source)

    def reduced(self) -> Reduced:
        """The problem of the nodes left, renumbered in order."""
        order, folds, count = sorted(self.nodes), self.folds, len(self.problem.nodes)
        place = {old: new for new, old in enumerate(order)}
        left = {index: edge for index, edge in enumerate(self.costs) if edge is not None}
        new = {index: e for e, index in enumerate(left)}
        edges = tuple(Edge(place[edge.source], place[edge.target], edge.cost_s) for edge in left.values())
        linear = tuple(
            replace(row, terms={place[v]: values for v, values in row.terms.items()}) for row in self.problem.linear
        )
        maxima = tuple(
            replace(
                maximum,
                rows=tuple(
                    replace(
                        row,
                        nodes={place[v]: values for v, values in row.nodes.items()},
                        edges={new[e]: values for e, values in row.edges.items()},
                    )
                    for row in maximum.rows
                ),
            )
            for maximum in self.problem.maxima
        )

        def lift(choice: Sequence[int]) -> list[int]:
            picked = dict(zip(order, choice, strict=True))
            for step in reversed(folds):
                picked[step.node] = int(step.best[tuple(picked[u] for u in step.neighbours)])
            return [picked[v] for v in range(count)]

        nodes = tuple(self.nodes[v] for v in order)
        return Reduced(replace(self.problem, nodes=nodes, edges=edges, linear=linear, maxima=maxima), lift)
