"""Arrays say the same of every choice as `evaluate`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.instances import random_problem
from parplan.planner.solver.problem import evaluate
from parplan.planner.solver.wide.arrays import Arrays
from parplan.planner.solver.wide.assignment import Assignment
from tests.every_case import every_case
from tests.planner.solver.one_to_one import compiler_problem


@every_case("seed", range(40))
def test_loads_and_limits(seed: int) -> None:
    """A choice exceeds a limit, or breaks a linear constraint, exactly if its excess says so."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, most=6) if seed % 2 else compiler_problem(seed, nodes=12, most=5)
    arrays = Arrays(problem)
    for _ in range(20):
        choice = rng.integers(0, arrays.size)
        found = evaluate(problem, choice.tolist())
        broken = [text for text in found.violations if "bytes exceed" in text or "is not in" in text]
        excess = arrays.memory.loads(choice) - arrays.memory.capacity
        assert (excess.max(initial=-1.0) > 1e-6) == bool(broken)


@every_case("seed", range(20))
def test_costs_of_single_changes(seed: int) -> None:
    problem = compiler_problem(seed, nodes=12, most=5, share=0.0)
    arrays, rng = Arrays(problem), np.random.default_rng(seed)
    assignment = Assignment(arrays, rng.integers(0, arrays.size))
    assert arrays.total(assignment.choice) == evaluate(problem, assignment.choice.tolist()).objective
    before = assignment.choice.copy()
    assignment.descend()
    assert (assignment.choice != before).any()
    assert assignment.costs == pytest.approx(arrays.conditional(assignment.choice))
    assert assignment.excess == pytest.approx(arrays.memory.loads(assignment.choice) - arrays.memory.capacity)
    for v in range(len(problem.nodes)):
        for k in range(problem.nodes[v].size):
            changed = assignment.choice.copy()
            changed[v] = k
            gain = assignment.costs[arrays.start[v] + k] - assignment.costs[arrays.start[v] + assignment.choice[v]]
            assert gain == pytest.approx(arrays.total(changed) - arrays.total(assignment.choice))
