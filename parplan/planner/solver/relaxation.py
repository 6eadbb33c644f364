"""A bound, and often the proof, without any search: price maxima and limits, and solve what is left exactly.

T is the largest of the linear functions that selections of one row per maximum stand for (see rows), so it is at least
their mean with any portions >= 0 that add up to 1; every limit can be priced likewise. For fixed prices the problem is
a sum over nodes and edges, which elimination.py minimises exactly: a true lower bound on T. Prices climb by projected
subgradients (Polyak's step towards the best known T) where the selections are few enough to list them; master.py finds
better ones in either case. Every choice met on the way is a candidate. With the best prices, a strategy whose best
choice of all costs as much as the best known one is out: the search then gets what little is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.elimination import Classes, Ints, Tables, Tree, classes_of, plant, runs
from parplan.planner.solver.limits import LimitRow
from parplan.planner.solver.problem import FloatArray, Problem
from parplan.planner.solver.rows import RowTable, Terms, row_table

__all__ = ["Priced", "Prices", "Relaxation", "climb", "relax"]

PATIENCE = 6
"""Steps without a better bound after which the step is halved."""

STARTS = 4
"""Selections tried for the start: each is critical at the best choice for the one before."""

LISTED_CELLS, AT_ONCE = 4_000_000, 20_000
"""Strategies in a list of choices up to which it is made, and choices of which T is worked out at once."""

ENUMERATED = 100_000
"""Selections of a maximum times rows up to which all are listed."""


@dataclass(frozen=True, eq=False)
class Prices:
    """One multiplicity per row of the maxima (those of a selection, or between several), and one price per limit.

    A price is > 0 for the high side of its limit, < 0 for its low. `portions` are those of the selections that make up
    the multiplicities (>= 0, sum 1 for every maximum with a weight), if they are listed and known.
    """

    rows: FloatArray
    limits: FloatArray
    portions: FloatArray | None = None


@dataclass(frozen=True, eq=False)
class Priced:
    """The relaxation at some prices: its value is a lower bound on T, and `objective` T of the choice.

    `seconds` are the rows' own seconds at the choice, `loads` the sums of the limits.
    """

    prices: Prices
    value: float
    choice: list[int]
    objective: float
    seconds: FloatArray
    loads: FloatArray


@dataclass(frozen=True, eq=False)
class Selections:
    """All selections of rows: the multiplicities of all rows through one maximum with a weight, `top`."""

    top: NDArray[np.intp]
    multiplicity: FloatArray

    @staticmethod
    def of(table: RowTable) -> Selections | None:
        """Those of a problem; None where they are too many."""
        counts, rows = table.selections(), len(table.constant)
        if any(counts[top] * (1 + rows) > ENUMERATED for top in table.tops):
            return None
        lines = [table.all_multiplicities(top) for top in table.tops]
        tops = np.repeat(np.array(table.tops, dtype=np.intp), [len(own) for own in lines])
        return Selections(tops, np.vstack([np.zeros((0, rows)), *lines]))


@dataclass(frozen=True, eq=False)
class _Costs:
    """Node costs per strategy and per class, edge costs per pair of classes, and a constant, at some prices."""

    node: list[FloatArray]
    node_class: list[FloatArray]
    edge: list[FloatArray]
    constant: float


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A problem made ready for pricing; `edges` are base costs and row terms per pair of classes."""

    problem: Problem
    tree: Tree
    classes: list[Classes]
    edges: list[tuple[FloatArray, Terms]]
    table: RowTable
    selections: Selections | None
    rows: list[LimitRow]

    def start(self) -> Prices:
        """No prices for limits, and the selections that matter at the cheapest choice by base costs."""
        none = np.zeros(len(self.rows))
        choice = self._solved(np.zeros(len(self.table.constant)), none)[1]
        best = None
        for _ in range(STARTS):
            lines = self.table.critical(self.table.seconds(choice))
            value, choice = self._solved(lines.sum(axis=0), none)
            if best is None or value > best[0]:
                best = value, lines
        assert best is not None
        lines, portions = best[1], None
        if self.selections is not None:
            listed = self.selections.multiplicity
            portions = sum(((listed == line).all(axis=1) for line in lines), np.zeros(len(listed)))
        return Prices(lines.sum(axis=0), none, portions)

    def at(self, prices: Prices) -> Priced:
        """Solve at `prices`."""
        value, choice = self._solved(prices.rows, prices.limits)
        base, seconds, loads = self.measure(choice)
        values = self.table.maxima(seconds)[0]
        weights = np.array([maximum.weight for maximum in self.problem.maxima])
        return Priced(prices, value, choice, base + float(weights @ values), seconds, loads)

    def measure(self, choice: Sequence[int]) -> tuple[float, FloatArray, FloatArray]:
        """Base costs of a choice, the own seconds of all rows, and the sums of all limits."""
        base = sum(float(node.cost_s[k]) for node, k in zip(self.problem.nodes, choice, strict=True))
        base += sum(float(edge.cost_s[choice[edge.source], choice[edge.target]]) for edge in self.problem.edges)
        loads = [float(sum(values[choice[v]] for v, values in row.terms.items())) for row in self.rows]
        return base, self.table.seconds(choice), np.array(loads)

    def marginals(self, prices: Prices) -> list[FloatArray]:
        """Per node and strategy, a lower bound on T of every choice that uses it."""
        costs = self._costs(prices.rows, prices.limits)
        tables: Tables = self.tree.upward(costs.node_class, costs.edge)
        found = self.tree.marginals(tables)
        result = []
        for c, best, cost, low in zip(self.classes, found, costs.node, costs.node_class, strict=True):
            rest = np.subtract(best, low, out=np.full_like(best, np.inf), where=np.isfinite(low))
            result.append(rest[c.of] + cost + costs.constant)
        return result

    def below(self, prices: Prices, cutoff: float) -> tuple[Ints, FloatArray] | None:
        """All choices with T below `cutoff` that meet the limits, the fastest first, and their T.

        Shapes (choices, nodes) and (choices,). None where too many cost less than `cutoff` at `prices` alone.
        """
        costs = self._costs(prices.rows, prices.limits)
        found = self.tree.below(self.tree.upward(costs.node_class, costs.edge), cutoff - costs.constant, LISTED_CELLS)
        if found is None:
            return None
        picked, cost = found
        for v, own in enumerate(self.classes):  # of a class, every strategy that is not too much dearer than its first
            members = np.argsort(own.of, kind="stable")
            ends = np.cumsum(np.bincount(own.of))
            first, last = np.append(0, ends)[picked[:, v]], ends[picked[:, v]]
            if (last - first).sum() * len(self.classes) > LISTED_CELLS:
                return None
            kept, places = runs(first, last)
            strategy = members[places]
            whole = cost[kept] + costs.node[v][strategy] - costs.node_class[v][own.of[strategy]]
            less = whole < cutoff - costs.constant
            picked, cost = picked[kept[less]], whole[less]
            picked[:, v] = strategy[less]
        for row in self.rows:
            loads = sum((values[picked[:, v]] for v, values in row.terms.items()), np.zeros(len(picked)))
            picked = picked[(row.low <= loads) & (loads <= row.high)]
        parts = np.split(picked, range(AT_ONCE, len(picked), AT_ONCE))
        seconds = np.concatenate([self.table.objectives(part) for part in parts])
        order = np.argsort(seconds, kind="stable")[: int((seconds < cutoff).sum())]
        return picked[order], seconds[order]

    def _solved(self, multiplicity: FloatArray, limits: FloatArray) -> tuple[float, list[int]]:
        costs = self._costs(multiplicity, limits)
        tables = self.tree.upward(costs.node_class, costs.edge)
        picked = self.tree.choice(tables)
        choice = [c.cheapest(cost, k) for c, cost, k in zip(self.classes, costs.node, picked, strict=True)]
        return tables.value + costs.constant, choice

    def _costs(self, multiplicity: FloatArray, limits: FloatArray) -> _Costs:
        node = [
            n.cost_s + terms.weighted(multiplicity) if len(terms.rows) else n.cost_s
            for n, terms in zip(self.problem.nodes, self.table.nodes, strict=True)
        ]
        constant = float(multiplicity @ self.table.constant)
        for row, price in zip(self.rows, limits, strict=True):
            if price != 0:
                constant -= float(price) * (row.high if price > 0 else row.low)
                for v, values in row.terms.items():
                    node[v] = node[v] + price * values
        edge = [cost + terms.weighted(multiplicity) if len(terms.rows) else cost for cost, terms in self.edges]
        return _Costs(node, [c.least(cost) for c, cost in zip(self.classes, node, strict=True)], edge, constant)


def relax(problem: Problem, rows: Sequence[LimitRow], earlier: Relaxation | None = None) -> Relaxation | None:
    """The relaxation of a presolved problem with the limits `rows`; None if its graph is too wide.

    `earlier` is one of the same problem with other limits.
    """
    table = row_table(problem) if earlier is None else earlier.table
    classes = classes_of(table)
    tree = plant(problem, classes)
    if tree is None:
        return None
    edges = []
    for edge, terms in zip(problem.edges, table.edges, strict=True):
        s, t = classes[edge.source].first, classes[edge.target].first
        edges.append((edge.cost_s[np.ix_(s, t)], Terms(terms.rows, np.ascontiguousarray(terms.seconds[:, s][:, :, t]))))
    selections = Selections.of(table) if earlier is None else earlier.selections
    return Relaxation(problem, tree, classes, edges, table, selections, list(rows))


def climb(
    relaxation: Relaxation,
    start: Prices,
    target: float,
    steps: int,
    seen: Callable[[Priced], float],
    deadline: float = np.inf,
) -> Priced:
    """The best-priced point of `steps` subgradient steps; `seen` takes each point and returns the best known T.

    Stops early at a proof, when no step helps, or when `time.monotonic()` passes `deadline`.

    Args:
        start: with portions of the selections.
    """
    listed, tops = relaxation.selections, relaxation.table.tops
    assert listed is not None
    best = point = relaxation.at(start)
    if not np.isfinite(point.value):
        return best
    target, step, waited = min(target, seen(point)), 1.0, 0
    largest = [max((float(abs(c).max()) for c in row.terms.values()), default=0.0) for row in relaxation.rows]
    high, low = (np.array([getattr(row, side) for row in relaxation.rows]) for side in ("high", "low"))
    for _ in range(steps):
        prices = point.prices
        assert prices.portions is not None
        portions = prices.portions.copy()
        gain = listed.multiplicity @ point.seconds
        for m in tops:
            own = listed.top == m
            gain[own] -= gain[own] @ portions[own]
        gain = np.where((portions > 0) | (gain > 0), gain, 0.0)
        # The excess of every limit over its bound; negative slack only where the limit has a price already.
        over, under = point.loads > high, point.loads < low
        excess = np.where((prices.limits > 0) | over, point.loads - np.where(np.isfinite(high), high, 0.0), 0.0)
        excess = np.where((prices.limits < 0) | under, point.loads - np.where(np.isfinite(low), low, 0.0), excess)
        # Brings the limits' units to seconds, so that one step length suits all prices.
        scale = abs(target) / np.maximum(largest, 1.0)
        excess = excess * scale
        norm = float((gain**2).sum() + (excess**2).sum())
        if norm == 0:
            break
        length = step * max(target - point.value, 1e-9 * abs(target)) / norm
        moved = prices.limits + length * excess * scale
        crossed = moved * prices.limits < 0
        for m in tops:
            own = listed.top == m
            portions[own] = _onto_simplex(portions[own] + length * gain[own])
        rows = portions @ listed.multiplicity
        point = relaxation.at(Prices(rows, np.where(crossed, 0.0, moved), portions))
        target = min(target, seen(point))
        waited = 0 if point.value > best.value + 1e-7 * abs(best.value) else waited + 1
        best = point if point.value > best.value else best
        if target - best.value <= 1e-9 * abs(target) or step < 1e-2 or time.monotonic() > deadline:
            break
        if waited == PATIENCE:
            point, step, waited = best, step / 2, 0
    return best


def _onto_simplex(weights: FloatArray) -> FloatArray:
    """The nearest point with weights >= 0 and sum 1."""
    ordered = np.sort(weights)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(weights) + 1)
    shift = excess[np.flatnonzero(ordered > excess)[-1]]
    result: FloatArray = np.maximum(weights - shift, 0.0)
    return result
