"""Changes of the step by one layer's other options, every other layer left as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.step_time import edge_totals, node_totals
from parplan.planner.solver.problem import changed_objectives, objective

__all__ = ["Change", "WhatIf"]


@dataclass(frozen=True)
class Change:
    """Seconds the step would take longer (negative: less) with another option, by part."""

    strategy: int
    compute_s: float
    transfer_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """Seconds the whole step would take longer."""
        return self.compute_s + self.transfer_s + self.exposed_s


class WhatIf:
    """Alternatives to one choice of a formulation."""

    def __init__(self, formulation: Formulation, choice: Sequence[int]) -> None:
        self._problem, self._parts = formulation.problem, formulation.parts
        self._choice = tuple(choice)
        self._now_s = objective(self._problem, choice)

    def changes(self, index: int) -> list[Change]:
        """Every other allowed option of node `index`, the best first; what is neither compute nor moved is exposed."""
        now = self._choice[index]
        total_s = changed_objectives(self._problem, self._choice, index) - self._now_s
        compute_s = node_totals(self._parts, index)
        moved_s = np.zeros(len(compute_s))
        for edge in self._parts.edges:
            if edge.source == index:
                moved_s = moved_s + edge_totals(self._parts, edge)[:, self._choice[edge.target]]
            elif edge.target == index:
                moved_s = moved_s + edge_totals(self._parts, edge)[self._choice[edge.source]]
        compute_s, moved_s = compute_s - compute_s[now], moved_s - moved_s[now]
        found = [
            Change(k, float(compute_s[k]), float(moved_s[k]), float(total_s[k] - compute_s[k] - moved_s[k]))
            for k in range(len(total_s))
            if k != now and np.isfinite(total_s[k])
        ]
        return sorted(found, key=lambda change: (change.total_s, change.strategy))
