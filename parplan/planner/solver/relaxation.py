"""A bound, and often the proof, without any search: price the coupling constraints and solve what is left exactly.

T = F + B + max(0, max_i P_i) is the largest, over weights w >= 0 with sum <= 1, of F + B + sum_i w_i P_i; every limit
can be priced likewise. For fixed prices the problem is a sum over nodes and edges, which elimination.py minimises
exactly: a true lower bound on T. Prices climb by projected subgradients (Polyak's step towards the best known T).
Every choice met on the way is a candidate. With the best prices, a strategy whose best choice of all costs as much as
the best known one is out: the search then gets what little is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parplan.planner.solver.elimination import Classes, Tables, Tree, classes_of, edge_costs, plant
from parplan.planner.solver.limits import Row
from parplan.planner.solver.problem import FloatArray, Problem, phases

__all__ = ["Priced", "Prices", "Relaxation", "climb", "relax"]

PATIENCE = 6
"""Steps without a better bound after which the step is halved."""


@dataclass(frozen=True, eq=False)
class Prices:
    """One weight per overlap row (>= 0, sum <= 1), one price per limit (> 0 for its high side, < 0 for its low)."""

    overlap: FloatArray
    limits: FloatArray


@dataclass(frozen=True, eq=False)
class Priced:
    """The relaxation at some prices: its value is a lower bound on T; `slope` is its supergradient."""

    prices: Prices
    value: float
    choice: list[int]
    slope: Prices


@dataclass(frozen=True, eq=False)
class _Costs:
    """Node costs per strategy and per class, edge costs per pair of classes, and a constant, at some prices."""

    node: list[FloatArray]
    node_class: list[FloatArray]
    edge: list[FloatArray]
    constant: float


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A problem made ready for pricing. Overlap rows belong to `reduced`, the nodes that may have a reduction."""

    problem: Problem
    tree: Tree
    classes: list[Classes]
    forward_s: list[FloatArray]
    backward_s: list[FloatArray]
    reduced: list[int]
    rows: list[Row]

    def start(self) -> Prices:
        """No prices."""
        return Prices(np.zeros(len(self.reduced)), np.zeros(len(self.rows)))

    def at(self, prices: Prices) -> Priced:
        """Solve at `prices`."""
        costs = self._costs(prices)
        tables = self.tree.upward(costs.node_class, costs.edge)
        picked = self.tree.choice(tables)
        choice = [c.cheapest(cost, k) for c, cost, k in zip(self.classes, costs.node, picked, strict=True)]
        # The excess of every row over its bound at the choice; negative slack only where the row has a price already.
        limits = np.zeros(len(self.rows))
        for r, (row, price) in enumerate(zip(self.rows, prices.limits, strict=True)):
            total = float(sum(values[choice[v]] for v, values in row.terms.items()))
            if price > 0 or total > row.high:
                limits[r] = total - row.high
            elif price < 0 or total < row.low:
                limits[r] = total - row.low
        slope = Prices(phases(self.problem, choice).rows[self.reduced], limits)
        return Priced(prices, tables.value + costs.constant, choice, slope)

    def marginals(self, prices: Prices) -> list[FloatArray]:
        """Per node and strategy, a lower bound on T of every choice that uses it."""
        costs = self._costs(prices)
        tables: Tables = self.tree.upward(costs.node_class, costs.edge)
        found = self.tree.marginals(tables)
        triples = zip(self.classes, found, costs.node, costs.node_class, strict=True)
        return [(best - low)[c.of] + cost + costs.constant for c, best, cost, low in triples]

    def _costs(self, prices: Prices) -> _Costs:
        nodes = self.problem.nodes
        weight = np.zeros(len(nodes) + 1)
        weight[self.reduced] = prices.overlap
        reduction_weight = np.cumsum(weight[::-1])[::-1]
        node = [
            n.forward_s + (1 - reduction_weight[v + 1]) * n.backward_s + reduction_weight[v] * n.reduction_s
            for v, n in enumerate(nodes)
        ]
        constant = 0.0
        for row, price in zip(self.rows, prices.limits, strict=True):
            if price != 0:
                constant -= float(price) * (row.high if price > 0 else row.low)
                for v, values in row.terms.items():
                    node[v] = node[v] + price * values
        pairs = zip(self.problem.edges, self.forward_s, self.backward_s, strict=True)
        edge = [forward + (1 - reduction_weight[e.target]) * backward for e, forward, backward in pairs]
        return _Costs(node, [c.least(cost) for c, cost in zip(self.classes, node, strict=True)], edge, constant)


def relax(problem: Problem, rows: Sequence[Row]) -> Relaxation | None:
    """The relaxation of a presolved problem with the limits `rows`; None if its graph is too wide."""
    classes = classes_of(problem)
    tree = plant(problem, [len(c.first) for c in classes])
    if tree is None:
        return None
    costs = [edge_costs(edge) for edge in problem.edges]
    places = [np.ix_(classes[e.source].first, classes[e.target].first) for e in problem.edges]
    forward = [cost[0][place] for cost, place in zip(costs, places, strict=True)]
    backward = [cost[1][place] for cost, place in zip(costs, places, strict=True)]
    reduced = [v for v, node in enumerate(problem.nodes) if node.reduction_s.any()]
    return Relaxation(problem, tree, classes, forward, backward, reduced, list(rows))


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
    """
    best = point = relaxation.at(start)
    if not np.isfinite(point.value):
        return best
    target, step, waited = min(target, seen(point)), 1.0, 0
    largest = [max((float(abs(c).max()) for c in row.terms.values()), default=0.0) for row in relaxation.rows]
    for _ in range(steps):
        prices, slope = point.prices, point.slope
        # Brings the limits' units to seconds, so that one step length suits all prices.
        scale = target / np.maximum(largest, 1.0)
        overlap = np.where((prices.overlap > 0) | (slope.overlap > 0), slope.overlap, 0.0)
        limits = slope.limits * scale
        norm = float((overlap**2).sum() + (limits**2).sum())
        if norm == 0:
            break
        length = step * max(target - point.value, 1e-9 * abs(target)) / norm
        moved = prices.limits + length * limits * scale
        crossed = moved * prices.limits < 0
        point = relaxation.at(Prices(_onto_simplex(prices.overlap + length * overlap), np.where(crossed, 0.0, moved)))
        target = min(target, seen(point))
        waited = 0 if point.value > best.value + 1e-7 * abs(best.value) else waited + 1
        best = point if point.value > best.value else best
        if target - best.value <= 1e-9 * abs(target) or step < 1e-2 or time.monotonic() > deadline:
            break
        if waited == PATIENCE:
            point, step, waited = best, step / 2, 0
    return best


def _onto_simplex(weights: FloatArray) -> FloatArray:
    """The nearest point with weights >= 0 and sum <= 1."""
    clipped: FloatArray = np.maximum(weights, 0.0)
    if clipped.sum() <= 1:
        return clipped
    ordered = np.sort(weights)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(weights) + 1)
    shift = excess[np.flatnonzero(ordered > excess)[-1]]
    result: FloatArray = np.maximum(weights - shift, 0.0)
    return result
