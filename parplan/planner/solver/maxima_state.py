"""The maxima at one choice, kept up to date while the choice changes, and bounds on what a change makes of them.

A selection of rows that was the largest at some choice bounds T below at every other one. A few of them tell at once
that most changes of one node help nothing; only the rest is worked out, along the maxima that the change reaches.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from parplan.planner.solver.problem import FloatArray
from parplan.planner.solver.rows import RowTable

__all__ = ["MaximaState"]

KEPT = 12
"""Selections of rows that are kept to bound changes with."""

Changes = Mapping[int, FloatArray]
"""Per row, by how many seconds each of several changes raises its own sum."""


class MaximaState:
    """Own seconds of all rows and values of all maxima at a choice, and the latest critical selections."""

    def __init__(self, table: RowTable, choice: Sequence[int]) -> None:
        self.table = table
        self.weights = np.array([maximum.weight for maximum in table.problem.maxima])
        self.seconds = table.seconds(choice)
        self.values = table.maxima(self.seconds)[0].tolist()
        self.selections: list[FloatArray] = []
        self._keep(self.seconds)

    def least(self, changes: Changes) -> FloatArray:
        """A lower bound on what each change adds to the weighted sum of maxima."""
        lines = np.array(self.selections)
        now = float(self.weights @ self.values)
        added = lines[:, list(changes)] @ np.array(list(changes.values()))
        result: FloatArray = (added + (lines @ self.seconds - now)[:, None]).max(axis=0)
        return result

    def added(self, changes: Changes) -> FloatArray:
        """Seconds that each change adds to the weighted sum of maxima."""
        total: FloatArray = np.zeros(len(next(iter(changes.values()))))
        for m, value in self._changed(changes).items():
            if self.weights[m] > 0:
                total = total + self.weights[m] * (value - self.values[m])
        return total

    def reject(self, changes: Changes, which: int) -> None:
        """Remember the selection that makes a change too long, to tell sooner the next time."""
        seconds = self.seconds.copy()
        for row, change in changes.items():
            seconds[row] += change[which]
        self._keep(seconds)

    def move(self, changes: Changes, which: int) -> None:
        """Make a change."""
        for m, value in self._changed({row: change[[which]] for row, change in changes.items()}).items():
            self.values[m] = float(value[0])
        for row, change in changes.items():
            self.seconds[row] += change[which]
        self._keep(self.seconds)

    def _changed(self, changes: Changes) -> dict[int, FloatArray]:
        """The new values of the maxima that any of the changes moves."""
        table, found = self.table, dict[int, FloatArray]()
        queue = sorted({table.owner[row] for row in changes})
        waiting = set(queue)
        while queue:
            m = heapq.heappop(queue)
            best: FloatArray | float = -np.inf
            for row in range(table.first[m], table.first[m + 1]):
                value: FloatArray | float = self.seconds[row] + changes[row] if row in changes else self.seconds[row]
                for other, factor in table.uses[row]:
                    value = value + factor * (found[other] if other in found else self.values[other])
                best = np.maximum(best, value)
            if (best != self.values[m]).any():
                found[m] = np.broadcast_to(best, (len(next(iter(changes.values()))),))
                for user in table.users[m]:
                    if user not in waiting:
                        waiting.add(user)
                        heapq.heappush(queue, user)
        return found

    def _keep(self, seconds: FloatArray) -> None:
        self.selections = [*self.selections[-KEPT + 1 :], self.table.critical(seconds).sum(axis=0)]
