"""The integer program alone, against brute force; rounding, cut-offs, memory that cannot fit, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from ortools.sat.python import cp_model

from benchmarks.instances import network, random_problem, residual
from parplan.errors import ParplanError
from parplan.planner.solver.cpsat import least_excess, resolution, search
from parplan.planner.solver.limits import some_rows
from parplan.planner.solver.problem import Edge, Node, Problem, Status, evaluate
from parplan.planner.solver.reductions.presolve import drop_forbidden
from tests.planner.oracle import brute_force

ALL = 10**9
NEVER = 1e9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_brute_force(seed: int) -> None:
    for draw in range(30):
        reduced = drop_forbidden(random_problem(np.random.default_rng([9, seed, draw])))
        if reduced is None:
            continue
        problem, truth = reduced.problem, brute_force(reduced.problem)
        found = search(problem, some_rows(problem, ALL), NEVER, 1, target=5.0)
        assert found.status is (Status.INFEASIBLE if truth.choice is None else Status.OPTIMAL)
        if found.choice is not None:
            value = evaluate(problem, found.choice)
            assert value.feasible
            assert value.objective == pytest.approx(truth.objective, rel=1e-7, abs=1e-7)
            assert found.bound <= truth.objective


def _pair(values: list[float]) -> Problem:
    nodes = (Node("a", np.array(values)), Node("b", np.zeros(len(values))))
    cost = np.arange(1.0, 1 + len(values) ** 2).reshape(len(values), -1)
    return Problem(nodes, (Edge(0, 1, cost),))


def test_whole_costs_are_not_rounded() -> None:
    assert resolution(_pair([10.0, 2.0]), 1.0).error == 0
    third = resolution(_pair([1 / 3, 2.0]), 2.0)
    assert 0 < third.error <= 1e-8 * 2.0
    assert third.unit > 0


def test_a_cut_off_below_the_optimum_proves_it() -> None:
    problem = _pair([5.0, 0.0])
    assert brute_force(problem).objective == 3
    assert search(problem, [], NEVER, 1, target=3.0, cutoff=3.0).status is Status.OPTIMAL
    assert search(problem, [], NEVER, 1, target=3.0, cutoff=2.5).status is Status.INFEASIBLE


def test_two_workers_give_the_same_choice_each_time() -> None:
    problem = network(residual(1, seed=3), devices=4, seed=3)
    reduced = drop_forbidden(problem)
    assert reduced is not None
    rows = some_rows(reduced.problem, ALL)
    first, second = (search(reduced.problem, rows, NEVER, 2, target=0.1) for _ in range(2))
    assert first.status is Status.OPTIMAL
    assert first.choice == second.choice


def test_progress_ends_at_the_optimum() -> None:
    problem = network(residual(1, seed=3), devices=2, seed=3)
    seen: list[float] = []
    found = search(problem, [], NEVER, 1, target=0.1, on_progress=lambda objective, bound: seen.append(objective))
    assert found.choice is not None
    assert seen[-1] == pytest.approx(evaluate(problem, found.choice).objective, rel=1e-7)


def test_least_excess_is_the_least() -> None:
    for draw in range(40):
        problem = random_problem(np.random.default_rng([5, draw]), most=4)
        tight = Problem(tuple(_allowed(node) for node in problem.nodes), (), (2.0, 3.0))
        found = least_excess(tight, some_rows(_with(tight, problem), ALL), NEVER, 1)
        peaks = [evaluate(_with(tight, problem), choice).peaks for choice in np.ndindex(*tight.sizes)]
        least = min(max(a - 2.0, b - 3.0, 0.0) for a, b in peaks)
        assert found.bound == least


def _allowed(node: Node) -> Node:
    return Node(node.name, np.zeros(node.size), node.usages)


def _with(tight: Problem, problem: Problem) -> Problem:
    return Problem(tight.nodes, (), tight.limits)


INTERRUPTED = """
import sys, time
from benchmarks.instances import network, residual
from parplan.planner.solver.cpsat import search
problem = network(residual(6, seed=1), devices=8, seed=1)
def told(objective, bound):
    print("running", flush=True)
try:
    search(problem, [], time.monotonic() + 300, 1, 0.1, on_progress=told)
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.full
def test_control_c_stops_the_search() -> None:
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    child.stdout.read()
    child.stdout.close()
    assert child.wait(timeout=60) == 77


def test_an_error_in_the_solvers_thread_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*_: object) -> int:
        raise MemoryError("no room for the model")

    monkeypatch.setattr(cp_model.CpSolver, "solve", solve)
    with pytest.raises(MemoryError, match="no room for the model"):
        search(_pair([5.0, 0.0]), [], NEVER, 1, target=3.0)


def test_a_problem_that_the_solver_calls_invalid_is_no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: cp_model.MODEL_INVALID)
    with pytest.raises(ParplanError, match="refused the problem as invalid"):
        search(_pair([5.0, 0.0]), [], NEVER, 1, target=3.0)
