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
        place = formulation.layers
        groups = formulation.fold.alike if formulation.fold is not None else ()
        self._alike = {place[name]: tuple(place[one] for one in group) for group in groups for name in group}

    def alike(self, index: int) -> tuple[int, ...]:
        """The nodes that have one option with node `index`: copies of a layer in repeated blocks."""
        return self._alike.get(index, (index,))

    def _changed(self, nodes: Sequence[int], option: int) -> list[int]:
        tried = [*self._choice]
        for node in nodes:
            tried[node] = option
        return tried

    def changes(self, index: int) -> list[Change]:
        """Every other allowed option of node `index` and those alike, the best first.

        What is neither compute nor moved is exposed.
        """
        now, alike = self._choice[index], self.alike(index)
        if len(alike) == 1:
            total_s = changed_objectives(self._problem, self._choice, index) - self._now_s
        else:
            total_s = np.array(
                [objective(self._problem, self._changed(alike, k)) for k in range(self._problem.sizes[index])]
            )
            total_s = total_s - self._now_s
        compute_s = np.sum([node_totals(self._parts, node) for node in alike], axis=0)
        moved_s = np.zeros(len(compute_s))
        for edge in self._parts.edges:
            if edge.source in alike and edge.target in alike:
                moved_s = moved_s + np.diagonal(edge_totals(self._parts, edge))
            elif edge.source in alike:
                moved_s = moved_s + edge_totals(self._parts, edge)[:, self._choice[edge.target]]
            elif edge.target in alike:
                moved_s = moved_s + edge_totals(self._parts, edge)[self._choice[edge.source]]
        compute_s, moved_s = compute_s - compute_s[now], moved_s - moved_s[now]
        found = [
            Change(k, float(compute_s[k]), float(moved_s[k]), float(total_s[k] - compute_s[k] - moved_s[k]))
            for k in range(len(total_s))
            if k != now and np.isfinite(total_s[k])
        ]
        return sorted(found, key=lambda change: (change.total_s, change.strategy))
