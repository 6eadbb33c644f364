"""Messages bound every choice from below, and are exact on trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parplan.planner.solver.problem import Problem
from parplan.planner.solver.reductions.presolve import merge_parallel_edges
from parplan.planner.solver.wide.arrays import Arrays
from parplan.planner.solver.wide.messages import Messages
from tests.every_case import every_case
from tests.planner.oracle import objectives
from tests.planner.solver.one_to_one import compiler_problem


def _unlimited(seed: int, extra: float) -> Problem:
    problem = replace(compiler_problem(seed, nodes=7, extra=extra, share=0.0), limits=(np.inf,))
    return merge_parallel_edges(problem).problem


@every_case("seed", range(60))
def test_bound_every_choice(seed: int) -> None:
    problem = _unlimited(seed, extra=1.5)
    costs = objectives(problem).reshape(problem.sizes)
    arrays = Arrays(problem)
    messages = Messages(arrays)
    before = -np.inf
    for _ in range(30):
        found = messages.sweep(arrays.cost)
        assert before - 1e-9 <= found.bound <= costs.min() + 1e-9
        before = found.bound
        for v, marginals in enumerate(np.split(found.marginals, arrays.start[1:-1])):
            others = tuple(u for u in range(len(problem.nodes)) if u != v)
            assert (marginals <= costs.min(axis=others) + 1e-9).all()
    choice = messages.decode(arrays.cost)
    assert arrays.total(choice) == costs[tuple(choice)]


@every_case("seed", range(20))
def test_are_exact_on_trees(seed: int) -> None:
    problem = _unlimited(seed, extra=0.0)
    costs, arrays = objectives(problem), Arrays(problem)
    messages = Messages(arrays)
    for _ in range(40):
        found = messages.sweep(arrays.cost)
    assert found.bound == pytest.approx(costs.min())
