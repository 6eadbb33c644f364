"""Each reduction keeps the optimum, on hundreds of random problems against brute force."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from benchmarks.instances import NodePhases, chain, network, one_pass, random_problem
from parplan.planner.solver.infeasible import overfull
from parplan.planner.solver.limits import memory_rows
from parplan.planner.solver.problem import Edge, Node, Problem, Reduced, Usage, evaluate
from parplan.planner.solver.reductions.presolve import (
    drop_dominated,
    drop_forbidden,
    drop_loose,
    fold,
    join,
    merge_parallel_edges,
    normalise,
    pair_linear,
    presolve,
)
from tests.planner.oracle import Optimum, brute_force

Step = Callable[[Problem], Reduced | None]


STEPS: list[Step] = [
    pair_linear,
    join,
    merge_parallel_edges,
    drop_forbidden,
    drop_loose,
    drop_dominated,
    fold,
    normalise,
    presolve,
]


@cache
def _case(seed: int, draw: int) -> tuple[Problem, Optimum]:
    problem = random_problem(np.random.default_rng([seed, draw]), most=5)
    return problem, brute_force(problem)


@pytest.mark.sampled(19)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step", STEPS)
def test_keeps_the_optimum(step: Step, seed: int) -> None:
    for draw in range(50):
        problem, truth = _case(seed, draw)
        reduced = step(problem)
        found = None if reduced is None else brute_force(reduced.problem)
        if found is None or found.choice is None:
            assert truth.choice is None
            continue
        assert reduced is not None
        lifted = evaluate(problem, reduced.lift(found.choice))
        assert lifted.feasible
        assert lifted.objective == pytest.approx(truth.objective, rel=1e-12, abs=1e-12)
        assert found.objective == pytest.approx(truth.objective, rel=1e-12, abs=1e-12)


def _phases(name: str, ahead: list[float], back: list[float], reduction: list[float]) -> NodePhases:
    return NodePhases(name, np.array(ahead), np.array(back), np.array(reduction))


def test_every_reduction_reduces_something() -> None:
    counts = np.zeros(4)
    for draw in range(100):
        problem = random_problem(np.random.default_rng(draw))
        allowed = drop_forbidden(problem)
        if allowed is None:
            continue
        before = allowed.problem
        counts[0] += sum(before.sizes) < sum(problem.sizes)
        counts[1] += sum(drop_dominated(before).problem.sizes) < sum(before.sizes)
        counts[2] += len(fold(normalise(before).problem).problem.nodes) < len(before.nodes)
        counts[3] += drop_loose(before).problem is not before
    assert (counts > 10).all()


def test_dominance_sees_the_overlap() -> None:
    """Backward time that hides the reduction of a later layer costs nothing there, a tail does."""
    first = _phases("first", [0.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    last = _phases("last", [4.0, 0.0], [0.0, 0.0], [0.0, 5.0])
    assert _sizes(one_pass((first, last))) == [1, 2]
    slower = _phases("first", [0.0, 0.0], [1.0, 0.0], [0.0, 0.5])
    assert _sizes(one_pass((slower, last))) == [2, 2]
    # Where the reduction is always longer than the backward beside it, only the tail counts.
    long = _phases("last", [0.0], [0.0], [5.0])
    assert _sizes(one_pass((slower, long))) == [1, 1]


def _sizes(problem: Problem) -> list[int]:
    return drop_dominated(normalise(problem).problem).problem.sizes


def test_only_maximal_live_sets_that_can_bind() -> None:
    spans = [(0, 4, 3.0), (1, 2, 3.0), (2, 3, 1.0), (5, 6, 9.0)]
    nodes = tuple(Node(f"n{i}", [0.0, 1.0], (Usage(0, a, b, [0.0, c]),)) for i, (a, b, c) in enumerate(spans))  # type: ignore[arg-type]
    rows = memory_rows(Problem(nodes, (), (5.0,)))
    assert [(row.time, sorted(row.terms)) for row in rows] == [(1, [0, 1]), (5, [3])]


def test_a_chain_without_limits_folds_to_one_node() -> None:
    nodes = tuple(Node(f"n{i}", np.array([1.0, 2.0])) for i in range(10))
    cost = np.array([[0.0, 3.0], [3.0, 0.0]])
    edges = tuple(Edge(i, i + 1, cost) for i in range(9))
    assert len(fold(Problem(nodes, edges)).problem.nodes) == 1


def _placements(rng: np.random.Generator) -> Problem:
    """Nodes that go on one of two devices, or half on each; some pairs forbidden."""
    zeros, nodes = np.zeros(3), []
    for v in range(int(rng.integers(2, 6))):
        size, end = float(2 * rng.integers(8, 20)), v + int(rng.integers(1, 6))
        places = (np.array([size, 0, size / 2]), np.array([0, size, size / 2]))
        nodes.append(Node(f"n{v}", zeros, tuple(Usage(d, v, end, a) for d, a in enumerate(places))))
    blocked = [np.where(rng.random((3, 3)) < 0.4, np.inf, 0.0) for _ in nodes[1:]]
    edges = tuple(Edge(v, v + 1, cost) for v, cost in enumerate(blocked))
    return Problem(tuple(nodes), edges, (float(rng.integers(16, 60)), float(rng.integers(16, 60))))


@pytest.mark.full
def test_overfull_is_only_claimed_where_nothing_fits() -> None:
    claims = []
    for draw in range(200):
        allowed = drop_forbidden(_placements(np.random.default_rng([7, draw])))
        if allowed is not None:
            claims.append(overfull(allowed.problem, np.inf, lambda choice: None))
            assert not claims[-1] or brute_force(allowed.problem).choice is None
    assert 5 <= sum(claims) < len(claims)


def test_presolve_shrinks_a_network() -> None:
    problem = network(chain(12, seed=0), devices=4, seed=0)
    reduced = presolve(problem)
    assert reduced is not None
    assert sum(reduced.problem.sizes) < sum(problem.sizes)
