"""Changes of the step by one layer's other strategies, every other layer left as it is.

Each alternative changes one node and its edges, so the objective is recomputed from the parts of the
chosen plan instead of from scratch: a report for hundreds of layers asks thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.planner.solver.problem import Edge, Problem, phases

__all__ = ["Change", "WhatIf"]


@dataclass(frozen=True)
class Change:
    """Seconds the step would take longer (negative: less) with another strategy, by part."""

    strategy: int
    compute_s: float
    transfer_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """Seconds the whole step would take longer."""
        return self.compute_s + self.transfer_s + self.exposed_s


class WhatIf:
    """Alternatives to one choice of a problem."""

    def __init__(self, problem: Problem, choice: Sequence[int]) -> None:
        self._problem = problem
        self._choice = tuple(choice)
        self._touching: list[list[Edge]] = [[] for _ in problem.nodes]
        for edge in problem.edges:
            self._touching[edge.source].append(edge)
            self._touching[edge.target].append(edge)
        self._phases = phases(problem, choice)

    def changes(self, index: int) -> list[Change]:
        """Every other allowed strategy of node `index`, the best first."""
        node, now = self._problem.nodes[index], self._choice[index]
        found = []
        for strategy in range(node.size):
            if strategy == now or not node.allowed[strategy]:
                continue
            known = self._phases
            backward, arriving, reduction = known.backward_s.copy(), known.arriving_s.copy(), known.reduction_s.copy()
            backward[index], reduction[index] = node.backward_s[strategy], node.reduction_s[strategy]
            moved = 0.0
            for edge in self._touching[index]:
                old, new = self._pair(edge), self._pair(edge, index, strategy)
                moved += float(edge.forward_s[new] + edge.backward_s[new] - edge.forward_s[old] - edge.backward_s[old])
                arriving[edge.target] += edge.backward_s[new] - edge.backward_s[old]
            if np.isfinite(moved):
                compute = node.forward_s[strategy] + node.backward_s[strategy] - node.forward_s[now]
                compute -= node.backward_s[now]
                other = replace(known, backward_s=backward, arriving_s=arriving, reduction_s=reduction)
                found.append(Change(strategy, float(compute), moved, other.exposed_s - known.exposed_s))
        return sorted((c for c in found if np.isfinite(c.total_s)), key=lambda c: (c.total_s, c.strategy))

    def _pair(self, edge: Edge, index: int = -1, strategy: int = 0) -> tuple[int, int]:
        source = strategy if edge.source == index else self._choice[edge.source]
        target = strategy if edge.target == index else self._choice[edge.target]
        return source, target
