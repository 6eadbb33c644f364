"""The one shape of every reduction: a smaller problem and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parplan.planner.problem import Edge, Node, Problem, Usage

__all__ = ["Mask", "Reduced", "restrict"]

Mask = NDArray[np.bool_]


def _same(choice: Sequence[int]) -> list[int]:
    return list(choice)


@dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller problem, and what turns a choice for it into a choice for the problem it came from."""

    problem: Problem
    lift: Callable[[Sequence[int]], list[int]] = _same

    def then(self, step: Callable[[Problem], Reduced | None]) -> Reduced | None:
        """Reduce further; None (no choice is feasible) passes through."""
        after = step(self.problem)
        if after is None or after.problem is self.problem:
            return after and self
        outer, inner = self.lift, after.lift
        return Reduced(after.problem, lambda choice: outer(inner(choice)))


def restrict(problem: Problem, keep: Sequence[Mask]) -> Reduced:
    """Only the strategies where `keep[node]` is true; at least one per node must be."""
    if all(mask.all() for mask in keep):
        return Reduced(problem)
    index = [np.flatnonzero(mask) for mask in keep]
    nodes = tuple(_take_node(node, kept) for node, kept in zip(problem.nodes, index, strict=True))
    edges = tuple(_take_edge(edge, index[edge.source], index[edge.target]) for edge in problem.edges)
    linear = tuple(replace(row, terms={v: c[index[v]] for v, c in row.terms.items()}) for row in problem.linear)
    smaller = replace(problem, nodes=nodes, edges=edges, linear=linear)
    return Reduced(smaller, lambda choice: [int(kept[k]) for kept, k in zip(index, choice, strict=True)])


def _take_node(node: Node, kept: NDArray[np.intp]) -> Node:
    if len(kept) == node.size:
        return node
    usages = tuple(Usage(u.resource, u.start, u.end, u.amounts[kept]) for u in node.usages)
    return Node(node.name, node.ahead[kept], node.back[kept], node.tail[kept], usages)


def _take_edge(edge: Edge, source: NDArray[np.intp], target: NDArray[np.intp]) -> Edge:
    if (len(source), len(target)) == edge.ahead.shape:
        return edge
    pairs = np.ix_(source, target)
    return Edge(edge.source, edge.target, edge.ahead[pairs], edge.back[pairs])
