"""Problems of the shapes that plans of a step give: against brute force, and proven at sizes that networks have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.instances import chain, residual
from benchmarks.steps import branches, on_blocks, passes
from parplan.planner.solver import solve as solver
from parplan.planner.solver.problem import Edge, Maximum, Node, Problem, Row, Status, evaluate
from parplan.planner.solver.solve import GAP, solve
from tests.planner.oracle import brute_force

SMALL: dict[str, Callable[[int], Problem]] = {
    "passes": lambda seed: passes(
        chain(4, seed), 2, seed, limit=0.7 - 0.1 * (seed % 5), bandwidth=10.0 ** (8 + seed % 3)
    ),
    "blocks": lambda seed: on_blocks(
        chain(5, seed), 2, seed, limit=0.9 - 0.1 * (seed % 5), bandwidth=10.0 ** (8 + seed % 3)
    ),
    "numbered blocks": lambda seed: on_blocks(chain(3, seed), 4, seed, numbered=True, bandwidth=10.0 ** (8 + seed % 3)),
    "branches": lambda seed: branches(1 + seed % 2, 2, 1, 2, seed) if seed % 4 != 3 else branches(1, 2, 2, 2, seed),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("start", [0, *(pytest.param(100 * i, marks=pytest.mark.full) for i in range(1, 3))])
def test_agrees_with_brute_force(kind: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(start, start + (8 if start == 0 else 50)):
        problem = SMALL[kind](seed)
        monkeypatch.setattr(solver, "LISTED", 1e12 if seed % 2 else 0.0)  # choices are listed, or searched by CP-SAT
        truth, found = brute_force(problem), solve(problem, 60, workers=1)
        if truth.choice is None:
            assert found.status is Status.INFEASIBLE
            continue
        # Discounts of devices that are not used are large numbers: rounding may leave a little of the bound.
        assert found.status is Status.OPTIMAL or found.gap < 1e-5
        assert found.choice is not None
        assert evaluate(problem, found.choice).feasible
        assert found.objective == pytest.approx(truth.objective, rel=GAP)
        assert found.bound <= truth.objective * (1 + 1e-9)


@pytest.mark.full
def test_a_cutoff_is_met_or_said_to_be_out_of_reach() -> None:
    for seed in range(12):
        problem = SMALL["blocks"](seed)
        truth = brute_force(problem).objective
        if not np.isfinite(truth):
            continue
        below, above = solve(problem, 60, workers=1, cutoff=truth), solve(problem, 60, workers=1, cutoff=truth * 1.01)
        assert (below.status, below.choice) == (Status.INFEASIBLE, None)
        assert above.status is Status.OPTIMAL
        assert above.objective == pytest.approx(truth, rel=GAP)


@pytest.mark.full
def test_a_refutation_ends_with_a_choice_clearly_below_the_cutoff() -> None:
    bounds = []
    for seed in range(12):
        problem = SMALL["branches"](seed)
        truth = brute_force(problem).objective
        none, near, some = (
            solve(problem, 60, workers=1, cutoff=factor * truth, refute=True) for factor in (1, 1.005, 1.5)
        )
        assert (none.status, none.choice) == (Status.INFEASIBLE, None)
        assert near.status is Status.OPTIMAL  # a bound within the tolerance is worth its effort
        assert near.bound == pytest.approx(truth, rel=GAP)
        assert some.choice is not None
        assert some.bound <= truth * (1 + 1e-9) <= some.objective * (1 + 1e-9) < 1.5 * truth
        bounds.append(some.bound / truth)
    assert min(bounds) < 1 - 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["blocks", "branches", "passes"])
def test_rows_that_a_refutation_leaves_out_deny_no_choice(kind: str) -> None:
    for seed in range(12):
        problem = SMALL[kind](seed)
        truth = brute_force(problem).objective
        for factor in (1.001, 1.05) if np.isfinite(truth) else ():
            found = solve(problem, 60, workers=1, cutoff=factor * truth, refute=True)
            assert found.status is not Status.INFEASIBLE
            assert found.bound <= truth * (1 + 1e-9)
            assert found.choice is None or found.objective < factor * truth


def _placed(seed: int) -> Problem:
    """Two phases of three layers, each on 2 placements with 2 strategies of its own: the longest of 3 lanes counts."""
    rng, lanes = np.random.default_rng([81, seed]), 3
    nodes = [*(Node(f"layer{v}", np.zeros(4)) for v in range(6)), *(Node("placement", np.zeros(2)) for _ in range(2))]
    follow = np.where(np.repeat(np.eye(2), 2, axis=0) > 0, 0.0, np.inf)
    edges = [Edge(v, v + 1, rng.integers(0, 5, (4, 4)).astype(float)) for v in range(5)]
    edges += [Edge(v, 6 + v // 3, follow) for v in range(6)]
    maxima = []
    for first in (0, 3):
        seconds = [rng.integers(0, 20, (lanes, 4)) * rng.integers(0, 2, (lanes, 4)) for _ in range(3)]
        rows = tuple(Row({first + v: seconds[v][lane].astype(float) for v in range(3)}) for lane in range(lanes))
        maxima.append(Maximum("phase", rows, 1.0))
    return Problem(tuple(nodes), tuple(edges), maxima=tuple(maxima))


@pytest.mark.full
def test_branching_on_what_others_follow_agrees_with_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    branched, branch = 0, solver._Run.branch

    def counted(*arguments: Any) -> bool:
        nonlocal branched
        branched += 1
        return branch(*arguments)

    monkeypatch.setattr(solver._Run, "branch", counted)
    for seed in range(15):
        problem = _placed(seed)
        truth, found = brute_force(problem), solve(problem, 60, workers=1)
        assert found.status is Status.OPTIMAL
        assert found.objective == pytest.approx(truth.objective, rel=GAP)
        assert found.bound <= truth.objective * (1 + 1e-9)
        below = solve(problem, 60, workers=1, cutoff=truth.objective)
        assert (below.status, below.choice) == (Status.INFEASIBLE, None)
    assert branched > 10


LARGE: dict[str, Callable[[], Problem]] = {
    "passes of a chain": lambda: passes(chain(22, 2), 8, 2),
    "passes of a residual network": lambda: passes(residual(8, 1), 4, 2),
    "a chain on blocks": lambda: on_blocks(chain(22, 1), 4, 1),
    "branches": lambda: branches(2, 2, 3, 2, 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", LARGE)
def test_proves_steps_of_networks(kind: str) -> None:
    problem = LARGE[kind]()
    first, second = (solve(problem, 120, workers=2) for _ in range(2))
    assert first.status is Status.OPTIMAL
    assert first.choice == second.choice
