"""The normal form is the same function of the choice, and short where rows are end times along a step."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from benchmarks.instances import EdgePhases, NodePhases, chain, network, one_pass, random_problem
from benchmarks.steps import passes
from parplan.planner.solver.problem import Maximum, Node, Problem, Row, evaluate
from parplan.planner.solver.reductions.normal import normalise
from tests.every_case import every_case


def test_every_choice_costs_the_same() -> None:
    for draw in range(150):
        rng = np.random.default_rng([31, draw])
        problem = random_problem(rng)
        normal = normalise(problem).problem
        for _ in range(5):
            choice = [int(rng.integers(size)) for size in problem.sizes]
            before, after = evaluate(problem, choice).objective, evaluate(normal, choice).objective
            assert after == pytest.approx(before, rel=1e-12, abs=1e-12)


def test_rows_of_one_pass_are_short() -> None:
    """One maximum per node is left, with the times of at most two nodes and the edges between them."""
    rng = np.random.default_rng(0)
    nodes = [NodePhases(f"n{v}", *rng.random((3, 4))) for v in range(30)]
    edges = [EdgePhases(a, b, *rng.random((2, 4, 4))) for a, b in pairwise(range(30))]
    normal = normalise(one_pass(nodes, edges)).problem
    assert len(normal.maxima) <= 30
    rows = [row for maximum in normal.maxima for row in maximum.rows]
    assert max(len(row.nodes) + len(row.edges) for row in rows) <= 3
    assert sum(row.constant_s == 0 and not row.nodes and not row.edges for row in rows) >= 28


def test_what_every_row_uses_moves_up() -> None:
    """A pass inside the backward counts in every end time: it becomes a maximum with a weight of its own."""
    normal = normalise(passes(chain(6, 1), 4, 1)).problem
    assert sorted(maximum.weight for maximum in normal.maxima if maximum.weight) == [1, 3, 3]


def test_maxima_that_nothing_uses_and_rows_that_never_count_are_gone() -> None:
    node = Node("n", np.array([1.0, 2.0]))
    unused = Maximum("unused", (Row({0: np.array([1.0, 5.0])}), Row(constant_s=2.0)))
    lower = Maximum("lower", (Row({0: np.array([1.0, 5.0])}), Row({0: np.array([0.5, 5.0])}), Row(constant_s=0.5)), 2.0)
    normal = normalise(Problem((node,), maxima=(unused, lower))).problem
    assert normal.maxima == ()
    assert normal.nodes[0].cost_s.tolist() == [3.0, 12.0]


def test_costs_below_zero_leave_a_constant() -> None:
    problem = Problem(
        (Node("n", np.array([1.0, 2.0])),), maxima=(Maximum("m", (Row({0: np.array([-3.0, 1.0])}),), 1.0),)
    )
    normal = normalise(problem).problem
    assert normal.nodes[0].cost_s.tolist() == [0.0, 5.0]
    assert [evaluate(normal, [k]).objective for k in range(2)] == [-2.0, 3.0]


def test_a_network_keeps_no_single_rows() -> None:
    normal = normalise(network(chain(12, seed=0), devices=4, seed=0)).problem
    assert all(len(maximum.rows) > 1 for maximum in normal.maxima)


def test_equal_maxima_are_one() -> None:
    """As those of two devices that every choice left uses alike."""
    nodes = tuple(Node(name, np.zeros(2)) for name in "ab")
    rows = Row({0: np.array([1.0, 5.0])}), Row({1: np.array([4.0, 2.0])})
    ends = Maximum("one", rows), Maximum("other", rows)
    later = tuple(Maximum("end", (Row(maxima={m: 1.0}), Row(constant_s=3.0)), 1.0) for m in range(2))
    problem = Problem(nodes, maxima=(*ends, *later))
    normal = normalise(problem).problem
    assert [maximum.name for maximum in normal.maxima] == ["one", "end", "constant"]
    for choice in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert evaluate(normal, choice).objective == evaluate(problem, choice).objective


@every_case("seed", range(20))
def test_periods_that_are_alike_count_as_often_as_they_are(seed: int) -> None:
    """Each period waits for the one before and adds the later of the same two ends: T has that maximum many times."""
    rng = np.random.default_rng([37, seed])
    nodes = tuple(Node(name, rng.random(3)) for name in "abc")
    ends = [{v: rng.integers(1, 9, 3).astype(float)} for v in range(3)]
    maxima = [Maximum("period 0", tuple(Row(end) for end in ends))]
    for period in range(1, int(rng.integers(2, 6))):
        maxima.append(Maximum(f"period {period}", tuple(Row(end, maxima={period - 1: 1.0}) for end in ends)))
    maxima[-1] = Maximum(maxima[-1].name, maxima[-1].rows, 1.0)
    problem = Problem(nodes, maxima=tuple(maxima))
    normal = normalise(problem).problem
    for choice in product(range(3), repeat=3):
        expected = evaluate(problem, list(choice)).objective
        assert evaluate(normal, list(choice)).objective == pytest.approx(expected, rel=1e-12)
