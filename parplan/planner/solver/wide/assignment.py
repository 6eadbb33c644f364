"""A choice with all single changes priced: repair of exceeded limits at the worst moment, and descent within limits.

Costs of every strategy of every node, with all other nodes as they are, are kept up to date; a change touches the
node's neighbours and the points at which it holds memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from parplan.planner.solver.problem import FloatArray
from parplan.planner.solver.wide.arrays import Arrays, Ints, ragged

__all__ = ["Assignment"]

TRIED = 40
"""Changes that are tried, the cheapest per byte first, to hold less at the worst moment."""


@dataclass(frozen=True, eq=False)
class _Change:
    """Bytes that a change adds at the points [first, last)."""

    first: int
    last: int
    added: FloatArray | float


class Assignment:
    """A strategy per node; `excess` is by how much each point's limit is exceeded, below 0 where there is room."""

    def __init__(self, arrays: Arrays, choice: Ints) -> None:
        self.arrays = arrays
        self.choice = choice.copy()
        self.costs = arrays.conditional(choice)
        self.excess = arrays.memory.loads(choice) - arrays.memory.capacity

    @property
    def fits(self) -> bool:
        """Whether no limit is exceeded."""
        return float(self.excess.max(initial=0.0)) <= 0

    def descend(self, deadline: float = np.inf) -> None:
        """Changes of one node each that cost less and break no limit further, the largest gain first, until none is."""
        a = self.arrays
        moved = True
        while moved and time.monotonic() < deadline:
            moved = False
            now = self.costs[a.start[:-1] + self.choice]
            gain = self.costs - now[a.node]
            slots = np.flatnonzero(gain < -1e-9 * np.abs(now[a.node]))
            for slot in slots[np.argsort(gain[slots], kind="stable")].tolist():
                v = int(a.node[slot])
                start = int(a.start[v])
                if self.costs[slot] < self.costs[start + self.choice[v]] * (1 - 1e-12):
                    change = self._change(v, slot - start)
                    if change is None or not self._breaks(change):
                        self._move(v, slot - start, change)
                        moved = True

    def repair(self, prices: FloatArray, deadline: float = np.inf) -> bool:
        """Changes at the worst moment, the cheapest per byte first, until all limits hold; False if none helps.

        Args:
            prices: seconds per slot for the memory that it holds, so that other full moments are spared.
        """
        a, m = self.arrays, self.arrays.memory
        while not self.fits:
            # Points of several memories compare by their share of the limit.
            worst = int((self.excess / m.limit).argmax())
            live = np.flatnonzero((m.first <= worst) & (m.last > worst))
            sizes = a.size[m.node[live]]
            held = ragged(m.start[live], sizes)
            relief = np.repeat(m.amounts[m.start[live] + self.choice[m.node[live]]], sizes) - m.amounts[held]
            freed = np.bincount(m.slot[held], relief, len(a.cost))
            slots = np.flatnonzero(freed > 0)
            now = a.start[:-1] + self.choice
            cost = self.costs[slots] + prices[slots] - (self.costs[now] + prices[now])[a.node[slots]]
            per_byte = np.where(cost > 0, cost / np.minimum(freed[slots], self.excess[worst]), cost)
            for slot in slots[np.argsort(per_byte, kind="stable")[:TRIED]].tolist():
                v = int(a.node[slot])
                change = self._change(v, slot - int(a.start[v]))
                if change is not None and self._exceeds_less(change):
                    self._move(v, slot - int(a.start[v]), change)
                    break
            else:
                return False
            if time.monotonic() > deadline:
                return False
        return True

    def _change(self, v: int, strategy: int) -> _Change | None:
        """Effect on memory of another strategy of v; None if it holds none."""
        m = self.arrays.memory
        low, high = self.arrays.usages[v], self.arrays.usages[v + 1]
        if low == high:
            return None
        start, first, last = m.start[low:high], m.first[low:high], m.last[low:high]
        added = m.amounts[start + strategy] - m.amounts[start + self.choice[v]]
        if high - low == 1:
            return _Change(int(first[0]), int(last[0]), float(added[0]))
        low, high = int(first.min()), int(last.max())
        steps = np.bincount(first - low, added, high - low + 1) - np.bincount(last - low, added, high - low + 1)
        return _Change(low, high, np.cumsum(steps)[:-1])

    def _breaks(self, change: _Change) -> bool:
        before = self.excess[change.first : change.last]
        return bool((before + change.added > np.maximum(before, 0.0)).any())

    def _exceeds_less(self, change: _Change) -> bool:
        limit = self.arrays.memory.limit[change.first : change.last]
        before = self.excess[change.first : change.last] / limit
        return float(np.maximum(before + change.added / limit, 0.0).sum()) < float(np.maximum(before, 0.0).sum())

    def _move(self, v: int, strategy: int, change: _Change | None) -> None:
        if change is not None:
            self.excess[change.first : change.last] += change.added
        before = self.choice[v]
        for start, end, pairs in self.arrays.sides[v]:
            self.costs[start:end] += pairs[strategy] - pairs[before]
        self.choice[v] = strategy
