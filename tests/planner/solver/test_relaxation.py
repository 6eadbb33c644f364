"""Bounds from prices: true at any prices, and by cutting planes as high as any prices reach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.instances import chain, random_problem
from benchmarks.steps import branches, on_blocks
from parplan.planner.solver.limits import some_rows
from parplan.planner.solver.master import Master
from parplan.planner.solver.maxima_state import MaximaState
from parplan.planner.solver.problem import Problem
from parplan.planner.solver.reductions.presolve import presolve
from parplan.planner.solver.relaxation import Priced, Relaxation, climb, relax
from parplan.planner.solver.rows import row_table
from parplan.planner.solver.solve import solve
from tests.planner.oracle import brute_force, objectives

ALL = 10**9


def _climbed(relaxation: Relaxation, target: float, steps: int, cuts: int) -> tuple[Priced, Priced]:
    met: list[list[int]] = []

    def seen(point: Priced) -> float:
        met.append(point.choice)
        return target

    first = climb(relaxation, relaxation.start(), target, steps, seen)
    master = Master(relaxation, abs(target) or 1.0)
    for choice in met:
        master.cut(choice)
    return first, master.climb(first, target, cuts, seen, np.inf)


def test_bounds_are_below_every_choice() -> None:
    improved = 0
    for draw in range(80):
        problem = random_problem(np.random.default_rng([51, draw]))
        reduced = presolve(problem)
        truth = brute_force(problem).objective
        if reduced is None or not np.isfinite(truth):
            continue
        relaxation = relax(reduced.problem, some_rows(reduced.problem, ALL))
        assert relaxation is not None
        first, best = _climbed(relaxation, truth, 5, 40)
        assert first.value <= best.value <= truth + 1e-9 * abs(truth) + 1e-12
        improved += best.value > first.value
        at = relaxation.marginals(best.prices)
        assert min(values.min() for values in at) == pytest.approx(best.value, rel=1e-9, abs=1e-9)
    assert improved > 3


LARGE: list[Callable[[], Problem]] = [lambda: on_blocks(chain(10, 1), 4, 1), lambda: branches(2, 2, 2, 4, 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", LARGE)
def test_cutting_planes_reach_what_many_subgradient_steps_do(make: Callable[[], Problem]) -> None:
    reduced = presolve(make())
    assert reduced is not None
    relaxation = relax(reduced.problem, some_rows(reduced.problem, ALL))
    assert relaxation is not None
    target = solve(make(), 60, workers=1).objective
    few, best = _climbed(relaxation, target, 20, 80)
    many, _ = _climbed(relaxation, target, 600, 0)
    assert best.value >= many.value * (1 - 1e-3)
    assert best.value > few.value


def test_changes_of_maxima_are_exact_and_bounded() -> None:
    for draw in range(100):
        rng = np.random.default_rng([61, draw])
        problem = random_problem(rng)
        table = row_table(problem)
        if not problem.maxima:
            continue
        state = MaximaState(table, [0] * len(problem.nodes))

        def weighted(seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
            values = table.maxima(seconds)[0]  # noqa: B023
            return float(sum(m.weight * value for m, value in zip(problem.maxima, values, strict=True)))  # noqa: B023

        for _ in range(4):
            rows = rng.choice(len(table.owner), int(rng.integers(1, len(table.owner) + 1)), replace=False).tolist()
            changes = {row: rng.normal(size=3) for row in rows}
            truth = []
            for k in range(3):
                seconds = state.seconds.copy()
                for row, change in changes.items():
                    seconds[row] += change[k]
                truth.append(weighted(seconds) - weighted(state.seconds))
            assert state.added(changes) == pytest.approx(truth, rel=1e-9, abs=1e-9)
            assert (state.least(changes) <= np.array(truth) + 1e-9).all()
            state.reject(changes, 0)
            assert state.least(changes)[0] == pytest.approx(truth[0], rel=1e-9, abs=1e-9)
            state.move(changes, 1)
            assert weighted(state.seconds) == pytest.approx(float(state.weights @ state.values), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", ["blocks", "branches"])
def test_the_choices_below_a_cutoff_are_all_of_them(kind: str) -> None:
    for seed in range(8):
        problem = (
            on_blocks(chain(4, seed), 2, seed, limit=0.8, bandwidth=1e9)
            if kind == "blocks"
            else branches(1, 2, 1, 2, seed)
        )
        relaxation = relax(problem, some_rows(problem, 10**6))
        assert relaxation is not None
        truth = objectives(problem).ravel()
        feasible = np.sort(truth[np.isfinite(truth)])
        if not len(feasible):
            continue
        for cutoff in (feasible[0], feasible[len(feasible) // 3] * (1 + 1e-9), 1.1 * feasible[-1]):
            found = relaxation.below(relaxation.start(), cutoff)
            assert found is not None
            choices, seconds = found
            assert len(seconds) == np.count_nonzero(truth < cutoff)
            assert seconds == pytest.approx(np.sort(truth[truth < cutoff]))
            assert len(np.unique(choices, axis=0)) == len(choices)
            assert truth[np.ravel_multi_index(tuple(choices.T), problem.sizes)] == pytest.approx(seconds)
