"""The search for wide problems against brute force, and end to end with elimination taken away."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.instances import random_problem
from parplan.planner.solver import elimination
from parplan.planner.solver.problem import Edge, FloatArray, Maximum, Node, Problem, Row, Status, Usage, evaluate
from parplan.planner.solver.reductions.presolve import presolve
from parplan.planner.solver.solve import GAP, solve
from parplan.planner.solver.wide.search import FIRST, _Search, improve
from tests.every_case import every_case
from tests.planner.oracle import brute_force
from tests.planner.solver.one_to_one import compiler_problem, with_one_to_one_edges


class Listener:
    """The choices and bounds that a search tells."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices: list[list[int]] = []
        self.objective, self.bound = np.inf, -np.inf

    def offer(self, choice: Sequence[int]) -> float:
        found = evaluate(self.problem, choice)
        assert found.feasible
        self.choices.append(list(choice))
        self.objective = min(self.objective, found.objective)
        return self.objective

    def raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def improve(self, rounds: float = 1, deadline: float = np.inf) -> list[FloatArray]:
        marginals, self.hurried = improve(self.problem, self.offer, self.raise_bound, rounds, deadline)
        return marginals


@every_case("seed", range(30))
def test_bound_and_choices_against_brute_force(seed: int) -> None:
    """Tight memory: what the bounds cut off is never better than the best choice."""
    reduced = presolve(compiler_problem(seed, nodes=10, extra=1.0))
    if reduced is None:
        return
    problem = reduced.problem
    truth, listener = brute_force(problem), Listener(problem)
    marginals = listener.improve()
    assert listener.bound <= truth.objective
    assert listener.objective >= truth.objective - 1e-9
    if truth.choice is not None:
        assert all(lower[k] <= truth.objective for lower, k in zip(marginals, truth.choice, strict=True))


def test_most_small_problems_are_solved() -> None:
    found, count = 0, 0
    for seed in range(40):
        reduced = presolve(compiler_problem(seed, nodes=12, extra=1.0, share=0.2))
        truth = None if reduced is None else brute_force(reduced.problem)
        if reduced is None or truth is None or truth.choice is None:
            continue
        listener = Listener(reduced.problem)
        listener.improve()
        count += 1
        found += listener.objective == truth.objective
    assert count > 20
    assert found >= 0.9 * count


@pytest.mark.parametrize("seed", range(25))
def test_agrees_with_brute_force_without_elimination(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, constraints, maxima and one-to-one edges, in the whole solver."""
    monkeypatch.setattr(elimination, "MAX_TABLE", 1)
    problem = compiler_problem(seed, nodes=8)
    if seed % 2:
        problem = with_one_to_one_edges(random_problem(np.random.default_rng(seed), most=6), seed)
    truth, found = brute_force(problem), solve(problem, 60, workers=1)
    if truth.choice is None:
        assert found.status is Status.INFEASIBLE
        return
    assert found.status is Status.OPTIMAL
    assert found.choice is not None
    assert evaluate(problem, found.choice).feasible
    assert found.objective == pytest.approx(truth.objective, rel=GAP, abs=1e-12)
    assert found.bound <= truth.objective * (1 + 1e-9) + 1e-12


def test_a_larger_problem_is_the_same_every_time() -> None:
    reduced = presolve(compiler_problem(5, nodes=60, most=8, share=0.1))
    assert reduced is not None
    first, second = Listener(reduced.problem), Listener(reduced.problem)
    marginals = [listener.improve() for listener in (first, second)]
    assert first.choices
    assert first.choices == second.choices
    assert first.bound == second.bound
    assert not first.hurried
    assert all(np.array_equal(a, b) for a, b in zip(*marginals, strict=True))


def test_nothing_is_done_after_the_deadline() -> None:
    reduced = presolve(compiler_problem(5, nodes=60, most=8, share=0.1))
    assert reduced is not None
    listener = Listener(reduced.problem)
    listener.improve(rounds=np.inf, deadline=time.monotonic())
    assert not listener.choices


@pytest.mark.full
def test_ends_when_half_of_the_strategies_are_out() -> None:
    """A strategy far too slow in every node: what is left is solved as a smaller problem, not searched any longer."""
    rng = np.random.default_rng(3)
    nodes = tuple(Node(f"n{v}", np.append(rng.integers(0, 4, 2), [1e6, 2e6, 3e6]).astype(float)) for v in range(9))
    edges = tuple(Edge(u, v, rng.integers(0, 9, (5, 5)).astype(float)) for v in range(9) for u in range(v))
    problem = Problem(nodes, edges)
    truth, listener = brute_force(problem), Listener(problem)
    marginals = listener.improve(rounds=np.inf)
    assert all((lower >= listener.objective)[2:].all() for lower in marginals)
    assert truth.choice is not None
    assert all(lower[k] <= truth.objective for lower, k in zip(marginals, truth.choice, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limited", [False, True])
def test_a_climb_ends_when_nothing_moves(limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without limits prices stand still: one more climb, when the maximum has the rows of a better choice."""
    rng = np.random.default_rng(2)
    held = (Usage(0, 0, 1, np.arange(4.0)[::-1].copy()),) if limited else ()
    nodes = tuple(Node(f"n{v}", np.arange(4) + rng.random(4), held) for v in range(9))
    edges = tuple(Edge(u, v, rng.integers(0, 9, (4, 4)).astype(float)) for v in range(9) for u in range(v))
    rows = tuple(Row({v: rng.random(4) for v in part}) for part in (range(5), range(5, 9)))
    problem = Problem(nodes, edges, limits=(9.0,) * limited, maxima=(Maximum("either", rows, 1.0),))
    passes: list[None] = []
    climbs: list[int] = []
    sweep, climb = _Search.sweep, _Search.climb

    def swept(self: _Search, costs: FloatArray) -> None:
        passes.append(None)
        sweep(self, costs)

    monkeypatch.setattr(_Search, "sweep", swept)

    def climbed(self: _Search, number: int) -> bool:
        climbs.append(number)
        return climb(self, number)

    monkeypatch.setattr(_Search, "climb", climbed)
    listener = Listener(problem)
    listener.improve()
    assert (len(passes) < FIRST) is not limited
    climbs.clear()
    listener.improve(rounds=9)
    assert climbs == list(range(len(climbs)))
    assert len(climbs) < (9 if limited else 3)  # a proof, and nothing moves; when it does not depends on rounding
    assert listener.bound <= brute_force(problem).objective


@pytest.mark.full
def test_a_clique_too_wide_for_elimination() -> None:
    rng = np.random.default_rng(1)
    nodes = tuple(Node(f"n{v}", rng.integers(0, 9, 6).astype(float)) for v in range(10))
    edges = tuple(Edge(u, v, rng.integers(0, 9, (6, 6)).astype(float)) for v in range(10) for u in range(v))
    problem = Problem(nodes, edges)
    found = solve(problem, 5, workers=1)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.choice is not None
    assert found.bound <= found.objective == evaluate(problem, found.choice).objective
