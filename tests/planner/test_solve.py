"""The whole solver against brute force, and on problems of the shape of real networks."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.instances import chain, network, random_problem, residual
from parplan.planner.problem import Status, evaluate
from parplan.planner.solve import solve
from tests.planner.oracle import brute_force


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_brute_force(seed: int) -> None:
    for draw in range(50):
        problem = random_problem(np.random.default_rng([seed, draw]))
        truth, found = brute_force(problem), solve(problem, 20, workers=1)
        if truth.choice is None:
            assert found.status is Status.INFEASIBLE
            assert found.infeasibility is not None
            continue
        assert found.status is Status.OPTIMAL
        assert found.choice is not None
        assert evaluate(problem, found.choice).feasible
        assert found.objective == pytest.approx(truth.objective, rel=1e-6, abs=1e-12)
        assert found.bound <= truth.objective * (1 + 1e-9)
