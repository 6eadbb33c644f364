"""Signatures: how often some rows can count in T together, over all selections of one row per maximum.

T is the largest of one linear function per selection. For one node only the multiplicities of the rows that it or its
edges have seconds in matter, and those are few: along a chain of maxima, a prefix or a suffix of them counts.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping

from parplan.planner.solver.rows import RowTable

__all__ = ["Signatures"]

MOST = 128
"""Signatures above which none are listed."""

EFFORT = 5_000
"""Signatures met on the way up the maxima above which none are listed."""

Signature = tuple[float, ...]


class Signatures:
    """The uses of maxima by each other, made ready for questions about some rows.

    A link is a maximum without weight whose rows use nothing, or one and the same other maximum once: links that follow
    each other are a chain, which is passed in one step where none of its own rows is asked for.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table
        count = len(table.first) - 1
        self.weight = [maximum.weight for maximum in table.problem.maxima]
        below: list[set[tuple[int, float]]] = [set() for _ in range(count)]
        for row, uses in enumerate(table.uses):
            below[table.owner[row]].update(uses)
        # Going up from each maximum: the last link of the chain above it, and how many of these links have a row that
        # uses nothing.
        self.end, self.exits = list(range(count)), [0] * count
        self.below = [next(iter(uses))[0] if len(uses) == 1 else -1 for uses in below]
        for m in range(count - 1, -1, -1):
            if (
                len(self.table.users[m]) == 1
                and self.weight[self.table.users[m][0]] == 0
                and len(below[self.table.users[m][0]]) == 1
            ):
                link = self.table.users[m][0]
                rows = table.uses[table.first[link] : table.first[link + 1]]
                if below[link] == {(m, 1.0)}:
                    self.end[m], self.exits[m] = self.end[link], self.exits[link] + (not all(rows))

    def of(self, place: Mapping[int, int]) -> list[Signature] | None:
        """All multiplicities that groups of rows can have together; None if they are too many to list.

        Each use of a maximum selects for itself, which adds some that lie between those of selections.

        Args:
            place: the group of every row that is asked for; a group's multiplicity is the sum of its rows'.
        """
        nothing: frozenset[Signature] = frozenset([(0.0,) * (1 + max(place.values(), default=-1))])
        needed = {self.table.owner[row] for row in place}
        links: dict[int, list[int]] = {}
        for m in sorted(needed):
            links.setdefault(self.end[m], []).append(m)
        found: dict[int, frozenset[Signature]] = {}
        queue = sorted(needed)
        waiting = set(queue)
        result, effort = nothing, 0
        while queue:
            m = heapq.heappop(queue)
            total: set[Signature] = set()
            for row in range(self.table.first[m], self.table.first[m + 1]):
                one = nothing
                for other, factor in self.table.uses[row]:
                    one = _sums(one, found.get(other, nothing), factor, nothing)
                    if len(one) > MOST:
                        return None
                if row in place:
                    i = place[row]
                    one = frozenset((*s[:i], s[i] + 1.0, *s[i + 1 :]) for s in one)
                total |= one
            found[m] = nothing if total == nothing else frozenset(total)
            if self.weight[m] > 0:
                result = _sums(result, found[m], self.weight[m], nothing)
            if len(total) > MOST or len(result) > MOST:
                return None
            # On, past the links of which no row is asked for.
            chain = links.get(self.end[m], [])
            ahead = bisect_right(chain, m)
            last = self.below[chain[ahead]] if ahead < len(chain) else self.end[m]
            if last != m:
                found[last] = found[m] | (nothing if self.exits[m] > self.exits[last] else frozenset())
            effort += len(total)
            if effort > EFFORT:
                return None
            for user in self.table.users[last]:
                if user not in waiting:
                    waiting.add(user)
                    heapq.heappush(queue, user)
        return sorted(result)


def _sums(
    first: frozenset[Signature], second: frozenset[Signature], factor: float, nothing: frozenset[Signature]
) -> frozenset[Signature]:
    """Every one of the first plus the factor times every one of the second."""
    if second is nothing:
        return first
    if first is nothing and factor == 1:
        return second
    return frozenset(tuple(a + factor * b for a, b in zip(s, t, strict=True)) for s in first for t in second)
