"""Joins keep the optimum with everything that a problem can hold, and leave no one-to-one edge."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.instances import random_problem
from parplan.planner.solver.problem import Edge, Node, Problem, Usage, evaluate
from parplan.planner.solver.reductions.joins import join
from tests.every_case import every_case
from tests.planner.oracle import brute_force
from tests.planner.solver.one_to_one import compiler_problem, with_one_to_one_edges


@every_case("seed", range(200))
def test_keep_the_optimum(seed: int) -> None:
    """Memory, constraints and maxima too: whatever is lifted costs and holds the same as what was joined."""
    problem = compiler_problem(seed, nodes=7)
    if seed % 2:
        problem = with_one_to_one_edges(random_problem(np.random.default_rng(seed), most=5), seed)
    truth, reduced = brute_force(problem), join(problem)
    found = None if reduced is None else brute_force(reduced.problem)
    if found is None or found.choice is None:
        assert truth.choice is None
        return
    assert reduced is not None
    assert found.objective == pytest.approx(truth.objective, rel=1e-12, abs=1e-12)
    joined, lifted = evaluate(reduced.problem, found.choice), evaluate(problem, reduced.lift(found.choice))
    assert lifted.feasible
    assert lifted.objective == pytest.approx(joined.objective, rel=1e-12, abs=1e-12)
    assert lifted.peaks == pytest.approx(joined.peaks)
    assert lifted.maxima == pytest.approx(joined.maxima, rel=1e-12, abs=1e-12)


@every_case("seed", range(20))
def test_leave_no_one_to_one_edge(seed: int) -> None:
    reduced = join(compiler_problem(seed, nodes=60, most=5, share=0.7))
    if reduced is None:
        return
    problem = reduced.problem
    assert len(problem.nodes) < 60
    assert sum(node.size == 1 for node in problem.nodes) <= 1
    for edge in problem.edges:
        finite = np.isfinite(edge.cost_s)
        assert min(finite.shape) > 1
        assert finite.sum(axis=0).max() > 1 or finite.sum(axis=1).max() > 1
    assert join(problem).problem is problem  # type: ignore[union-attr]


def test_a_chain_of_equal_shardings_is_one_node() -> None:
    swap = np.array([[np.inf, 1.0], [2.0, np.inf]])
    nodes = tuple(Node(f"n{v}", np.array([v, 10.0 * v]), (Usage(0, v, v + 2, np.array([4.0, 1.0])),)) for v in range(4))
    reduced = join(Problem(nodes, tuple(Edge(v, v + 1, swap) for v in range(3)), (100.0,)))
    assert reduced is not None
    (node,) = reduced.problem.nodes
    assert node.cost_s.tolist() == [0 + 1 + 10 + 2 + 2 + 1 + 30, 0 + 2 + 1 + 1 + 20 + 2 + 3]
    assert [usage.amounts.tolist() for usage in node.usages] == [[4, 1], [1, 4], [4, 1], [1, 4]]
    assert [reduced.lift([k]) for k in (0, 1)] == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_no_partner_at_all_is_infeasible() -> None:
    first, second = np.array([[0.0, np.inf], [np.inf, 0.0]]), np.array([[np.inf, 0.0], [0.0, np.inf]])
    nodes = (Node("a", np.ones(2)), Node("b", np.ones(2)))
    assert join(Problem(nodes, (Edge(0, 1, first), Edge(0, 1, second)))) is None
