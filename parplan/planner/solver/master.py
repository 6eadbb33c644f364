"""The best prices by cutting planes: a linear program over multiplicities of rows, with a cut per choice met.

The multiplicities of all selections of rows, and what lies between them, are the flows from the maxima with a weight
down to the rows: a maximum is reached by its weight and by the rows above that use it, and its rows share that. For one
choice the priced costs are linear in them and in the prices of limits, so every choice met is a cut, and the program's
optimum is an upper bound on what any prices reach. Points between the best one and the optimum are tried (in-out
separation), as optima of few cuts jump about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from parplan.planner.solver.problem import FloatArray
from parplan.planner.solver.relaxation import Priced, Prices, Relaxation

__all__ = ["Master"]

TOWARDS = 0.4
"""How far a trial point lies from the best point to the optimum of the cuts."""

MOST = 1e6
"""The highest multiplicity of a row."""

FARTHEST = 4.0
"""The highest price of a limit's largest amount, in best known T."""

PIVOTS = 20_000
"""Iterations after which a program is given up: it takes hundreds, but GLOP may walk in circles for ever."""

CONVERGED = 1e-3
"""The share of the gap between best bound and best choice that better prices could still close when the search ends."""


class Master:
    """The linear program: maximise the bound over flows and prices of limits, under the cuts of the choices met.

    Seconds count in `unit`s of about T.
    """

    def __init__(self, relaxation: Relaxation, unit: float) -> None:
        from ortools.linear_solver import pywraplp

        self.relaxation, self.unit, table = relaxation, unit, relaxation.table
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        # Seconds count in units of about 1.
        self.solver.SetSolverSpecificParametersAsString(f"use_scaling: false max_number_of_iterations: {PIVOTS}")
        infinity = self.solver.infinity()
        self.bound = self.solver.NumVar(-infinity, infinity, "")
        # Every variable has bounds, or GLOP takes some of these programs for unbounded ones.
        reach = [maximum.weight for maximum in table.problem.maxima]
        for m in range(len(reach) - 1, -1, -1):
            factors: dict[int, float] = {}
            for uses in table.uses[table.first[m] : table.first[m + 1]]:
                for other, factor in uses:
                    factors[other] = max(factor, factors.get(other, 0.0))
            for other, factor in factors.items():
                reach[other] = min(reach[other] + factor * reach[m], MOST)
        self.rows = [self.solver.NumVar(0, reach[m], "") for m in table.owner]
        # Prices of limits, in seconds per largest amount: the limit, its side, and the price.
        largest = [max((float(abs(c).max()) for c in row.terms.values()), default=0.0) for row in relaxation.rows]
        self.scale = np.maximum(largest, 1.0)
        self.limits: list[tuple[int, float, pywraplp.Variable]] = []
        for r, limit in enumerate(relaxation.rows):
            if np.isfinite(limit.high):
                self.limits.append((r, limit.high, self.solver.NumVar(0, infinity, "")))
            if np.isfinite(limit.low):
                self.limits.append((r, limit.low, self.solver.NumVar(-infinity, 0, "")))
        for m, maximum in enumerate(table.problem.maxima):
            shared = self.solver.Constraint(maximum.weight, maximum.weight)
            for row in range(table.first[m], table.first[m + 1]):
                shared.SetCoefficient(self.rows[row], 1.0)
            for user in table.users[m]:
                for row in range(table.first[user], table.first[user + 1]):
                    for other, factor in table.uses[row]:
                        if other == m:
                            shared.SetCoefficient(self.rows[row], -factor)
        self.cuts: list[tuple[Sequence[int], pywraplp.Constraint]] = []
        self.solver.Objective().SetCoefficient(self.bound, 1)
        self.solver.Objective().SetMaximization()

    def cut(self, choice: Sequence[int]) -> None:
        """Add what a choice says of all prices."""
        base, seconds, loads = self.relaxation.measure(choice)
        cut = self.solver.Constraint(-self.solver.infinity(), base / self.unit)
        self.cuts.append((choice, cut))
        cut.SetCoefficient(self.bound, 1.0)
        for row in np.flatnonzero(abs(seconds) > 1e-9 * self.unit).tolist():
            cut.SetCoefficient(self.rows[row], -float(seconds[row]) / self.unit)
        for r, limit, price in self.limits:
            cut.SetCoefficient(price, -float(loads[r] - limit) / float(self.scale[r]))

    def climb(
        self, best: Priced, target: float, steps: int, seen: Callable[[Priced], float], deadline: float
    ) -> Priced:
        """The best-priced point after `steps` at most, from one with finite value; `seen` as in relaxation.climb."""
        # Prices of limits would run away while there are few cuts.
        self.bound.SetBounds(best.value / self.unit - 1, max(target, best.value) / self.unit + 1)
        for _, _, price in self.limits:
            price.SetBounds(max(price.lb(), -FARTHEST), min(price.ub(), FARTHEST))
        for _ in range(steps):
            if self.solver.Solve() != 0 or time.monotonic() > deadline:
                break
            possible = self.solver.Objective().Value() * self.unit
            if possible - best.value <= CONVERGED * (target - best.value) or target - best.value <= 1e-9 * abs(target):
                break
            rows = np.array([variable.solution_value() for variable in self.rows])
            limits = np.zeros(len(self.scale))
            for r, _, price in self.limits:
                limits[r] += price.solution_value() * self.unit / self.scale[r]
            now = best.prices
            rows, limits = now.rows + TOWARDS * (rows - now.rows), now.limits + TOWARDS * (limits - now.limits)
            point = self.relaxation.at(Prices(self._flow(rows), limits))
            target = min(target, seen(point))
            self.cut(point.choice)
            best = point if point.value > best.value else best
        return best

    def mean(self) -> list[tuple[float, Sequence[int]]]:
        """Choices with the shares that make up the mean whose T the program's optimum is."""
        if self.solver.Solve() != 0:
            return []
        shares = ((cut.dual_value(), choice) for choice, cut in self.cuts)
        return [(share, choice) for share, choice in shares if share > 0]

    def _flow(self, rows: FloatArray) -> FloatArray:
        """The nearest true flow to one that rounding has moved: shares of each maximum, from the top down."""
        table = self.relaxation.table
        reach = np.array([maximum.weight for maximum in table.problem.maxima])
        result: FloatArray = np.maximum(rows, 0.0)
        for m in range(len(reach) - 1, -1, -1):
            own = slice(table.first[m], table.first[m + 1])
            total = float(result[own].sum())
            result[own] = result[own] * (reach[m] / total) if total > 0 else reach[m] / (own.stop - own.start)
            for row in range(own.start, own.stop):
                for other, factor in table.uses[row]:
                    reach[other] += factor * result[row]
        return result
