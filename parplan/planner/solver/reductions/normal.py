"""The normal form of maxima: what every selection of rows shares moves out of them, into the costs of nodes and edges.

A maximum of one row is a sum. Every other maximum M is written as M' + L, with L a sum that one of its rows contains:
M' compares differences only, which are short where rows are end times along the step (all that both ran after cancels),
and L moves to where M is used. The same holds for maxima that all rows of M use. Rows that another row of the same
maximum is never below are dropped. Exact: T stays the same function of the choice, up to float rounding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parplan.planner.solver.problem import Edge, FloatArray, Mask, Maximum, Problem, Reduced, Row

__all__ = ["normalise"]

COMPARED = 8
"""Rows of a maximum up to which each is compared with each."""

ROUNDING = 1e-14
"""Seconds that are left of a difference, relative to what was taken away, below which it is 0."""

TERMS = 50
"""Terms of all rows of a maximum above which only their ranges are compared."""


def normalise(problem: Problem, deadline: float = np.inf) -> Reduced:
    """The same problem with maxima in normal form; as it is if the time is up before that is done."""
    if not problem.maxima:
        return Reduced(problem)
    normal = _Normal(problem)
    for maximum in problem.maxima:
        if time.monotonic() > deadline:
            return Reduced(problem)
        normal.values.append(normal.value(maximum))
    return Reduced(normal.problem_of())


@dataclass(eq=False)
class _Sum:
    """Seconds of nodes, edges and a constant, plus multiples of shared sums (`shared`) and of new maxima."""

    nodes: dict[int, FloatArray] = field(default_factory=dict)
    edges: dict[int, FloatArray] = field(default_factory=dict)
    constant: float = 0.0
    shared: dict[int, float] = field(default_factory=dict)
    maxima: dict[int, float] = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """Whether it is a constant."""
        return not (self.nodes or self.edges or self.maxima)

    @property
    def key(self) -> object:
        """Equal for sums of the same terms."""
        nodes, edges = (frozenset((v, s.tobytes()) for v, s in own.items()) for own in (self.nodes, self.edges))
        return nodes, edges, self.constant, frozenset(self.maxima.items())

    def add(self, other: _Sum, factor: float = 1.0) -> None:
        for own, more in ((self.nodes, other.nodes), (self.edges, other.edges)):
            for key, seconds in more.items():
                if key in own:
                    summed = own[key] + factor * seconds
                    # What cancels is 0, not the rounding that is left.
                    own[key] = np.where(abs(summed) > ROUNDING * abs(seconds).max(), summed, 0.0)
                    if not own[key].any():
                        del own[key]
                else:
                    own[key] = factor * seconds
        self.constant += factor * other.constant
        _add_multiples(self.shared, other.shared, factor)
        _add_multiples(self.maxima, other.maxima, factor)


def _add_multiples(own: dict[int, float], more: Mapping[int, float], factor: float) -> None:
    for key, value in more.items():
        own[key] = own.get(key, 0.0) + factor * value
        if own[key] == 0:
            del own[key]


class _Normal:
    """The maxima so far: `values` of the given ones in terms of shared sums and new maxima, with their ranges."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.values: list[_Sum] = []
        self.shared: list[_Sum] = []
        self.maxima: list[tuple[str, list[_Sum]]] = []
        self.ranges: list[tuple[float, float]] = []
        self.known: dict[frozenset[object], int] = {}  # the place of a maximum with these rows
        # Which strategies and pairs are allowed; True where all are.
        self.allowed: list[Mask | bool] = [bool(node.allowed.all()) or node.allowed for node in problem.nodes]
        pairs = (np.isfinite(edge.cost_s) for edge in problem.edges)
        self.pairs: list[Mask | bool] = [bool(finite.all()) or finite for finite in pairs]

    def value(self, maximum: Maximum) -> _Sum:
        """A given maximum as a multiple of a shared sum and of new maxima."""
        rows = [self._sum(row) for row in maximum.rows]
        if len(rows) == 1:
            return self._alone(rows[0])
        # The reference: the shared sums of the row with the fewest maxima, of those the last.
        reference = min(rows, key=lambda row: (len(row.maxima), -max(row.shared, default=-1)))
        common = _Sum(shared=dict(reference.shared), constant=reference.constant)
        for name in ("nodes", "edges"):
            for key, seconds in getattr(reference, name).items():
                others = (getattr(row, name) for row in rows if row is not reference)
                if all(key in other and np.array_equal(other[key], seconds) for other in others):
                    getattr(common, name)[key] = seconds
        for key in reference.maxima:
            common.maxima[key] = min(row.maxima.get(key, 0.0) for row in rows)
        differences = []
        for row in rows:
            differences.append(_Sum(dict(row.nodes), dict(row.edges), row.constant, dict(row.shared), dict(row.maxima)))
            differences[-1].add(common, -1.0)
            self._expand(differences[-1])
        ranges = [self._range(row) for row in differences]
        kept = self._undominated(differences, ranges)
        if len(kept) == 1:
            return self._alone(rows[kept[0]])
        raised = [self._raised(differences[r], ranges[r], max(ranges[o][0] for o in kept if o != r)) for r in kept]
        place = self.known.setdefault(frozenset(differences[r].key for r in kept), len(self.maxima))
        if place == len(self.maxima):
            self.ranges.append((max(low for low, _ in raised), max(high for _, high in raised)))
            self.maxima.append((maximum.name, [differences[r] for r in kept]))
        common.maxima[place] = common.maxima.get(place, 0.0) + 1.0  # the rows may have it in common already
        return self._alone(common)

    def _sum(self, row: Row) -> _Sum:
        """A given row, with the maxima that it uses replaced by their values."""
        finite = ((e, self.pairs[e], seconds) for e, seconds in row.edges.items())
        edges = {e: seconds if every is True else np.where(every, seconds, 0.0) for e, every, seconds in finite}
        total = _Sum(dict(row.nodes), edges, row.constant_s)
        for m, factor in row.maxima.items():
            total.add(self.values[m], factor)
        return total

    def _alone(self, total: _Sum) -> _Sum:
        """A sum by itself: all but its maxima becomes one shared sum."""
        if not total.nodes and not total.edges and not total.constant:
            return total
        self.shared.append(replace(total, maxima={}))
        return _Sum(shared={len(self.shared) - 1: 1.0}, maxima=total.maxima)

    def _expand(self, total: _Sum) -> None:
        """Write out the shared sums, the latest first, so that what two of them have in common cancels early."""
        while total.shared:
            key = max(total.shared)
            factor = total.shared.pop(key)
            total.add(self.shared[key], factor)

    def _undominated(self, rows: Sequence[_Sum], ranges: Sequence[tuple[float, float]]) -> list[int]:
        """The rows that can be the largest; of equals, the first."""
        lows = [low for low, _ in ranges]
        first = lows.index(max(lows))
        kept = [r for r, (_, high) in enumerate(ranges) if high > lows[first] or r == first]
        if sum(len(row.nodes) + len(row.edges) for row in rows) > TERMS:
            return kept
        for r in kept[::-1]:
            others = kept if len(rows) <= COMPARED else kept[:1]
            for other in others:
                if other == r or rows[r].fixed or rows[other].fixed:  # ranges have compared what is constant
                    continue
                difference = _Sum(dict(rows[r].nodes), dict(rows[r].edges), rows[r].constant, {}, dict(rows[r].maxima))
                difference.add(rows[other], -1.0)
                if self._range(difference)[1] <= 0:
                    kept.remove(r)
                    break
        return kept

    def _raised(self, row: _Sum, own: tuple[float, float], lowest: float) -> tuple[float, float]:
        """The range of a row after seconds below any use are raised: those that leave it under the least of another.

        Rows that a large discount takes out for some strategies bound nothing where strategies are mixed, the less the
        larger the discount is.
        """
        high = own[1]
        for v, seconds in row.nodes.items():
            allowed = self.allowed[v]
            largest = seconds[allowed].max(initial=-np.inf)
            short = lowest - (high - largest + seconds)
            if (short[allowed] > 0).any():
                row.nodes[v] = seconds + np.where(allowed, np.maximum(short, 0.0), 0.0)
                high += row.nodes[v][allowed].max() - largest
                own = -np.inf, high
        return self._range(row) if own[0] == -np.inf else own

    def _range(self, total: _Sum) -> tuple[float, float]:
        """The least and the largest that a sum without shared ones can be, whatever fits together."""
        low = high = total.constant
        own = [seconds[self.allowed[v]] for v, seconds in total.nodes.items()]
        own += [seconds[self.pairs[e]] for e, seconds in total.edges.items()]
        for allowed in own:
            if allowed.size:
                low, high = low + allowed.min(), high + allowed.max()
        for m, factor in total.maxima.items():
            ends = sorted(factor * end for end in self.ranges[m])
            low, high = low + ends[0], high + ends[1]
        return float(low), float(high)

    def problem_of(self) -> Problem:
        """The problem with the new maxima, those that T depends on, and the new costs."""
        total = _Sum()
        for value, maximum in zip(self.values, self.problem.maxima, strict=True):
            if maximum.weight > 0:
                total.add(value, maximum.weight)
        self._expand(total)
        used = set(total.maxima)
        for m in range(len(self.maxima) - 1, -1, -1):
            if m in used:
                used.update(*(row.maxima for row in self.maxima[m][1]))
        place = {m: new for new, m in enumerate(sorted(used))}
        maxima = []
        for m in place:
            name, rows = self.maxima[m]
            new = tuple(Row(r.nodes, r.edges, {place[k]: f for k, f in r.maxima.items()}, r.constant) for r in rows)
            maxima.append(Maximum(name, new, total.maxima.get(m, 0.0)))
        # Costs of nodes and edges are >= 0: what is below moves into the constant, a maximum of its own.
        nodes, edges, constant = list(self.problem.nodes), list(self.problem.edges), total.constant
        for v, seconds in total.nodes.items():
            cost = nodes[v].cost_s + seconds
            below = min(0.0, float(cost.min()))
            nodes[v], constant = replace(nodes[v], cost_s=cost - below), constant + below
        for e, seconds in total.edges.items():
            cost = edges[e].cost_s + seconds
            below = min(0.0, float(cost.min()))
            edges[e], constant = Edge(edges[e].source, edges[e].target, cost - below), constant + below
        if constant:
            maxima.append(Maximum("constant", (Row(constant_s=constant),), 1.0))
        return replace(self.problem, nodes=tuple(nodes), edges=tuple(edges), maxima=tuple(maxima))
