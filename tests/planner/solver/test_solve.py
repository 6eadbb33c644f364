"""The whole solver: brute force, proofs on networks, what it says when nothing fits, public instances."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.instances import EdgePhases, NodePhases, chain, network, one_pass, random_problem, residual
from benchmarks.iopddl import read
from parplan.planner.solver.problem import Cause, Edge, Linear, Node, Problem, Status, Usage, evaluate, objective
from parplan.planner.solver.solve import GAP, solve
from tests.planner.oracle import brute_force


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_brute_force(seed: int) -> None:
    statuses = []
    for draw in range(60):
        problem = random_problem(np.random.default_rng([seed, draw]))
        truth, found = brute_force(problem), solve(problem, 20, workers=1)
        statuses.append(found.status)
        if truth.choice is None:
            assert found.status is Status.INFEASIBLE
            assert found.infeasibility is not None
            continue
        assert found.status is Status.OPTIMAL or abs(truth.objective) < 1e-9
        assert found.choice is not None
        assert evaluate(problem, found.choice).feasible
        assert found.objective == pytest.approx(truth.objective, rel=GAP, abs=1e-12)
        assert found.bound <= truth.objective + 1e-9 * abs(truth.objective) + 1e-12
    assert set(statuses) >= {Status.OPTIMAL, Status.INFEASIBLE}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("better", [1e-9, 0.02, 0.2])
def test_from_a_choice_on_what_is_much_better_is_found(better: float) -> None:
    """From the best choice and from a bad one: how much better none is, the bound says."""
    for draw in range(40):
        rng = np.random.default_rng([11, draw])
        problem = random_problem(rng)
        truth = brute_force(problem)
        if truth.choice is None or truth.objective <= 0:
            continue
        choices = [truth.choice, *(tuple(int(rng.integers(size)) for size in problem.sizes) for _ in range(20))]
        feasible = [one for one in choices if evaluate(problem, one).feasible]
        for hint in (feasible[0], max(feasible, key=lambda one: objective(problem, one))):
            found = solve(problem, 20, workers=1, hint=hint, better=better)
            assert found.choice is not None
            assert evaluate(problem, found.choice).feasible
            assert found.objective * (1 - better) <= truth.objective * (1 + GAP)
            assert found.bound <= truth.objective * (1 + 1e-9) + 1e-12
            assert found.bound >= found.objective * (1 - better) * (1 - GAP)


@pytest.mark.parametrize("bandwidth", [10e9, 0.5e9])
@pytest.mark.parametrize("limit", [0.7, 0.15])
def test_proves_a_chain(limit: float, bandwidth: float) -> None:
    problem = network(chain(22, seed=2), devices=8, seed=2, limit=limit, bandwidth=bandwidth)
    found = solve(problem, 120, workers=1)
    assert found.status is Status.OPTIMAL
    assert found.choice is not None
    assert evaluate(problem, found.choice).objective == found.objective


@pytest.mark.full
def test_proves_a_residual_network_and_repeats_itself() -> None:
    problem = network(residual(16, seed=1), devices=8, seed=2)
    first, second = solve(problem, 120), solve(problem, 120)
    assert first.status is Status.OPTIMAL
    assert first.choice == second.choice


def test_a_bound_stays_below_every_choice() -> None:
    problem = network(residual(2, seed=5), devices=8, seed=5, limit=0.3)
    found = solve(problem, 60, workers=1)
    rng = np.random.default_rng(0)
    for _ in range(500):
        choice = [int(rng.integers(size)) for size in problem.sizes]
        value = evaluate(problem, choice)
        assert not value.feasible or value.objective >= found.bound


def test_progress_is_monotone_and_ends_proven() -> None:
    seen: list[list[float]] = []
    found = solve(network(chain(22, seed=2), 8, seed=2), 60, 1, on_progress=lambda *pair: seen.append(list(pair)))
    objectives, bounds = zip(*seen, strict=True)
    assert list(objectives) == sorted(objectives, reverse=True)
    assert list(bounds) == sorted(bounds)
    assert objectives[-1] == pytest.approx(found.objective, rel=1e-6)


def test_out_of_time_keeps_the_best_choice_with_its_gap() -> None:
    problem = network(residual(6, seed=1), devices=8, seed=1)
    hint = [0] * len(problem.nodes)
    assert evaluate(problem, hint).objective > 0
    found = solve(problem, 0.0, workers=1, hint=hint)
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert found.choice is not None
    assert found.gap == pytest.approx((found.objective - found.bound) / found.objective)


def test_of_equal_strategies_the_lowest() -> None:
    costs = np.array([2.0, 1.0, 1.0])
    nodes = tuple(Node(f"n{i}", costs) for i in range(4))
    edges = tuple(Edge(i, i + 1, 1 - np.eye(3)) for i in range(3))
    assert solve(Problem(nodes, edges), workers=1).choice == (1, 1, 1, 1)


def test_a_node_with_many_readers_is_solved() -> None:
    """A value that 70 layers read, each with one way to run: as many neighbours as an array cannot have dimensions."""
    readers = [NodePhases(f"reader{v}", np.ones(1), np.ones(1), np.full(1, 0.5)) for v in range(70)]
    problem = one_pass(
        (NodePhases("source", np.ones(3), np.array([3.0, 2.0, 4.0]), np.full(3, 0.5)), *readers),
        tuple(EdgePhases(0, v, np.array([[1.0], [2.0], [1.0]]) * (v % 3), np.zeros((3, 1))) for v in range(1, 71)),
    )
    found = solve(problem, workers=1)
    assert found.status is Status.OPTIMAL
    assert found.objective == min(objective(problem, (k, *[0] * 70)) for k in range(3))


def _star(rng: np.random.Generator, ends: int, source: int, others: int) -> Problem:
    """A node that `ends` others read, whose backward comes before its own, with their gradients reduced beside it."""
    trunk = NodePhases("trunk", *rng.random((3, source)))
    heads = [NodePhases(f"head{v}", *rng.random((3, others))) for v in range(ends)]
    edges = [EdgePhases(0, v, *rng.random((2, source, others))) for v in range(1, ends + 1)]
    return one_pass((trunk, *heads), edges)


@pytest.mark.full
@pytest.mark.parametrize(("ends", "source", "others"), [(70, 4, 3), (500, 3, 2)])
def test_a_trunk_with_many_heads_is_proven(ends: int, source: int, others: int) -> None:
    """More neighbours than an array has dimensions, with several strategies each."""
    problem = _star(np.random.default_rng(3), ends, source, others)
    found = solve(problem, 60, workers=1)
    assert found.status is Status.OPTIMAL
    assert found.choice is not None
    assert evaluate(problem, found.choice).objective == pytest.approx(found.objective)


def test_a_node_that_reads_many_is_proven() -> None:
    rng = np.random.default_rng(4)
    nodes = [NodePhases(f"n{v}", *rng.random((3, 1 + v % 3))) for v in range(90)]
    edges = [EdgePhases(v, 89, *rng.random((2, nodes[v].forward_s.size, nodes[89].forward_s.size))) for v in range(89)]
    assert solve(one_pass(nodes, edges), 60, workers=1).status is Status.OPTIMAL


def _nodes(count: int, usages: tuple[tuple[Usage, ...], ...] | None = None) -> tuple[Node, ...]:
    return tuple(Node(f"n{i}", np.zeros(2), usages[i] if usages else ()) for i in range(count))


def _differ(a: int, b: int) -> Edge:
    return Edge(a, b, np.where(np.eye(2) > 0, np.inf, 0.0))


def test_names_a_node_without_a_strategy() -> None:
    bad = Node("bad", np.array([np.inf]))
    found = solve(Problem((*_nodes(1), bad)), workers=1)
    assert found.status is Status.INFEASIBLE
    assert found.infeasibility is not None
    assert (found.infeasibility.cause, found.infeasibility.names) == (Cause.STRATEGY, ("bad",))


def test_names_an_edge_without_a_pair() -> None:
    edge = Edge(0, 1, np.full((2, 2), np.inf))
    found = solve(Problem(_nodes(2), (edge,)), workers=1)
    assert found.infeasibility is not None
    assert (found.infeasibility.cause, found.infeasibility.names) == (Cause.EDGE, ("n0", "n1"))


def test_names_one_edge_of_a_cycle_that_cannot_be() -> None:
    """Three nodes that must all differ, with two strategies each."""
    found = solve(Problem(_nodes(3), (_differ(0, 1), _differ(1, 2), _differ(0, 2))), workers=1)
    assert found.infeasibility is not None
    assert found.infeasibility.cause is Cause.EDGE
    assert len(found.infeasibility.names) == 2


def test_names_linear_constraints_that_clash() -> None:
    one, rule = np.array([0.0, 1.0]), np.array([0.0, 3.0])
    rows = (
        Linear("innocent", {0: one, 1: one, 2: one}, 0, 3),
        Linear("at least two", {0: one, 1: one, 2: one}, 2, np.inf),
        Linear("at most one", {0: rule, 1: rule, 2: rule}, -np.inf, 5),
    )
    found = solve(Problem(_nodes(3), (), (), rows), workers=1)
    assert found.infeasibility is not None
    assert found.infeasibility.cause is Cause.LINEAR
    assert found.infeasibility.names == ("at least two", "at most one")


def test_says_where_memory_is_missing_and_how_much() -> None:
    big, small = np.array([70.0, 60.0]), np.array([30.0, 40.0])
    usages = ((Usage(0, 0, 9, big),), (Usage(0, 4, 5, small),), (Usage(0, 6, 7, np.array([5.0, 5.0])),))
    edge = Edge(0, 1, np.array([[0, 0], [np.inf, 0.0]]))
    found = solve(Problem(_nodes(3, usages), (edge,), (75.0,), (), ("device 3",)), workers=1)
    cause = found.infeasibility
    assert cause is not None
    assert (cause.cause, cause.resource, cause.time, cause.missing) == (Cause.MEMORY, 0, 4, 25)
    assert cause.names == ("n0", "n1")
    assert sum(cause.amounts) == 100
    assert "device 3" in cause.message


def test_the_nearest_choice_spreads_what_is_missing() -> None:
    """All on one device lack 50 bytes there, spread over both 30 on each: limits 30 bytes higher are enough."""
    on_one, half = np.array([110.0, 90.0]), np.array([0.0, 90.0])
    usages = (Usage(0, 0, 9, on_one), Usage(1, 0, 9, half))
    found = solve(Problem((Node("n", np.zeros(2), usages),), (), (60.0, 60.0), (), ("device 0", "device 1")), workers=1)
    cause = found.infeasibility
    assert cause is not None
    assert (cause.cause, cause.missing) == (Cause.MEMORY, 30)


def test_says_when_all_memories_together_are_too_small() -> None:
    """Each node fits on either device, any two on both, three do not."""
    usages = tuple((Usage(0, 0, 9, np.array([60.0, 0.0])), Usage(1, 0, 9, np.array([0.0, 60.0]))) for _ in range(3))
    found = solve(Problem(_nodes(3, usages), (), (80.0, 80.0)), workers=1)
    cause = found.infeasibility
    assert cause is not None
    assert (cause.cause, cause.resource, cause.missing) == (Cause.MEMORY, None, 20)
    assert cause.names == ("n0", "n1", "n2")


def test_a_network_that_does_not_fit_names_the_memory() -> None:
    problem = network(residual(4, seed=1), devices=4, seed=1, limit=0.05)
    found = solve(problem, 60, workers=1)
    assert found.status is Status.INFEASIBLE
    assert found.infeasibility is not None
    assert found.infeasibility.cause is Cause.MEMORY
    assert found.infeasibility.missing > 0


def test_the_solver_is_not_loaded_by_the_data() -> None:
    code = "import sys, parplan.planner.solver.solve; sys.exit('ortools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reads_and_solves_the_public_format(tmp_path: Path) -> None:
    text = {
        "problem": {
            "name": "tiny",
            "nodes": {
                "intervals": [[0, 2], [1, 3], [0, 0]],
                "costs": [[1, 5], [2, 3], [0, 10**18]],
                "usages": [[9, 1], [8, 4], [0, 0]],
            },
            "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[0, 7, 2, 10**18], [0, 4, 10**18, 0]]},
            "usage_limit": 10,
        }
    }
    path = tmp_path / "tiny-T.json.gz"
    path.write_bytes(gzip.compress(json.dumps(text).encode()))
    problem = read(path)
    found, truth = solve(problem, workers=1), brute_force(problem)
    assert found.choice == truth.choice == (1, 0, 0)
    assert (found.objective, found.bound, found.status) == (9, 9, Status.OPTIMAL)


@pytest.mark.skipif("PARPLAN_IOPDDL" not in os.environ, reason="PARPLAN_IOPDDL names no folder of instances")
def test_a_public_instance_is_proven() -> None:
    problem = read(Path(os.environ["PARPLAN_IOPDDL"]) / "asplos-2025-iopddl-G.json.gz")
    found = solve(problem, 60)
    assert found.choice is not None
    assert evaluate(problem, found.choice).feasible
    assert found.status is Status.OPTIMAL
    assert found.objective == 217_039
