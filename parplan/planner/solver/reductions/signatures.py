"""Signatures: how often some rows can count in T together, over all selections of one row per maximum.

T is the largest of one linear function per selection. For one node only the multiplicities of the rows that it or its
edges have seconds in matter, and those are few: along a chain of maxima, a prefix or a suffix of them counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from parplan.planner.solver.rows import RowTable

__all__ = ["Signatures"]

MOST = 64
"""Signatures above which none are listed."""

Signature = tuple[float, ...]


class Signatures:
    """The uses of maxima by each other, made ready for questions about some rows.

    A link is a maximum without weight whose rows use nothing, or one and the same other maximum once: links that follow
    each other are a chain, which is passed in one step where none of its own rows is asked for.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table
        count = len(table.first) - 1
        self.owner = [m for m in range(count) for _ in range(table.first[m], table.first[m + 1])]
        self.weight = [maximum.weight for maximum in table.problem.maxima]
        self.users: list[list[int]] = [[] for _ in range(count)]
        below: list[set[tuple[int, float]]] = [set() for _ in range(count)]
        for row, uses in enumerate(table.uses):
            for other, _ in uses:
                if self.owner[row] not in self.users[other]:
                    self.users[other].append(self.owner[row])
            below[self.owner[row]].update(uses)
        # Going up from each maximum: the last link of the chain above it, and how many of these links have a row that
        # uses nothing.
        self.end, self.exits = list(range(count)), [0] * count
        self.below = [next(iter(uses))[0] if len(uses) == 1 else -1 for uses in below]
        for m in range(count - 1, -1, -1):
            if len(self.users[m]) == 1 and self.weight[self.users[m][0]] == 0 and len(below[self.users[m][0]]) == 1:
                link = self.users[m][0]
                rows = table.uses[table.first[link] : table.first[link + 1]]
                if below[link] == {(m, 1.0)}:
                    self.end[m], self.exits[m] = self.end[link], self.exits[link] + (not all(rows))

    def of(self, rows: Sequence[int]) -> list[Signature] | None:
        """All multiplicities that `rows` can have together; None if they are too many to list."""
        place = {row: i for i, row in enumerate(rows)}
        nothing: frozenset[Signature] = frozenset([(0.0,) * len(rows)])
        asked = {self.owner[row] for row in rows}
        found: dict[int, frozenset[Signature]] = {}
        queue = sorted(asked)
        waiting = set(queue)
        result = nothing
        while queue:
            m = heapq.heappop(queue)
            total: set[Signature] = set()
            for row in range(self.table.first[m], self.table.first[m + 1]):
                one = nothing
                for other, factor in self.table.uses[row]:
                    one = _sums(one, found.get(other, nothing), factor)
                    if len(one) > MOST:
                        return None
                if row in place:
                    i = place[row]
                    one = frozenset((*s[:i], s[i] + 1.0, *s[i + 1 :]) for s in one)
                total |= one
            found[m] = frozenset(total)
            if self.weight[m] > 0:
                result = _sums(result, found[m], self.weight[m])
            if len(total) > MOST or len(result) > MOST:
                return None
            # On, past the links of which no row is asked for.
            ahead = [a for a in asked if a > m and self.end[a] == self.end[m] and self.below[a] >= m]
            last = self.below[min(ahead)] if ahead else self.end[m]
            if last != m:
                found[last] = found[m] | (nothing if self.exits[m] > self.exits[last] else frozenset())
            for user in self.users[last]:
                if user not in waiting:
                    waiting.add(user)
                    heapq.heappush(queue, user)
        return sorted(result)


def _sums(first: frozenset[Signature], second: frozenset[Signature], factor: float) -> frozenset[Signature]:
    """Every one of the first plus the factor times every one of the second."""
    if all(len(s) == 0 or not any(s) for s in second):
        return first
    return frozenset(tuple(a + factor * b for a, b in zip(s, t, strict=True)) for s in first for t in second)
