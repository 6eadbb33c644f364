"""What a choice costs and breaks, on problems small enough to work out by hand, and against a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.instances import random_problem
from parplan.errors import ParplanError
from parplan.planner.solver.problem import Edge, Linear, Node, Problem, Usage, evaluate
from tests.planner.oracle import objectives


def _array(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def _node(ahead: float = 0.0, back: float = 0.0, tail: float = 0.0, name: str = "n") -> Node:
    return Node(name, _array(ahead), _array(back), _array(tail))


def test_sums_and_overlap_by_hand() -> None:
    """Backward ends at 1 + 2 + 0.5; the reduction of node 1 starts at 2 and takes 5, then node 0's takes 1."""
    nodes = (_node(3, 1, 1), _node(4, 2, 5))
    edge = Edge(0, 1, np.array([[0.25]]), np.array([[0.5]]))
    found = evaluate(Problem(nodes, (edge,)), [0, 0])
    assert (found.forward_s, found.backward_s) == (7.25, 3.5)
    assert found.exposed_s == (2 + 5 + 1) - 3.5
    assert found.objective == 7.25 + 8


def _clock(problem: Problem, choice: list[int]) -> float:
    """Play the step: forward, then backward with a link that reduces gradients in order as they get ready."""
    now = sum(n.forward_s[k] for n, k in zip(problem.nodes, choice, strict=True))
    now += sum(e.forward_s[choice[e.source], choice[e.target]] for e in problem.edges)
    link = now
    for v in reversed(range(len(problem.nodes))):
        now += problem.nodes[v].backward_s[choice[v]]
        if problem.nodes[v].reduction_s[choice[v]] > 0:
            link = max(link, now) + problem.nodes[v].reduction_s[choice[v]]
        now += sum(e.backward_s[choice[e.source], choice[v]] for e in problem.edges if e.target == v)
    return float(max(now, link))


def test_overlap_is_what_a_clock_shows() -> None:
    rng, compared = np.random.default_rng(0), 0
    for _ in range(300):
        problem = random_problem(rng)
        choice = [int(rng.integers(size)) for size in problem.sizes]
        found = evaluate(problem, choice)
        if np.isfinite(found.objective):
            compared += 1
            assert found.objective == pytest.approx(_clock(problem, choice), rel=1e-12, abs=1e-12)
    assert compared > 100


def test_all_choices_at_once_cost_and_break_what_each_alone_does() -> None:
    rng, seen = np.random.default_rng(1), set()
    for _ in range(60):
        problem = random_problem(rng, most=4)
        one_by_one = [evaluate(problem, choice) for choice in np.ndindex(*problem.sizes)]
        wanted = [found.objective if found.feasible else np.inf for found in one_by_one]
        assert objectives(problem) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        seen |= {(found.feasible, bool(np.isfinite(found.objective))) for found in one_by_one}
    assert len(seen) == 3


def test_peaks_count_what_is_live_together() -> None:
    spans = [(0, 2, 10.0), (1, 3, 5.5), (2, 4, 7.0), (3, 3, 99.0)]
    zero = _array(0.0)
    nodes = tuple(Node(f"n{i}", zero, zero, zero, (Usage(0, a, b, _array(c)),)) for i, (a, b, c) in enumerate(spans))
    found = evaluate(Problem(nodes, (), (15.0,), (), ("device 0",)), [0, 0, 0, 0])
    assert found.peaks == (16.0,)  # 10 + 5.5 rounded up to whole bytes
    assert found.violations == ("device 0: 16 bytes exceed 15",)


def test_violations_name_what_is_broken() -> None:
    nodes = tuple(Node(name, _array(0, np.inf), _array(0, 0), _array(0, 0)) for name in ("a", "b"))
    edge = Edge(0, 1, np.array([[0, np.inf], [0, 0]]), np.zeros((2, 2)))
    problem = Problem(nodes, (edge,), (), (Linear("equal", {0: _array(1, 2), 1: _array(-1, -2)}, 0, 0),))
    assert evaluate(problem, [0, 0]).feasible
    broken = evaluate(problem, [0, 1])
    assert broken.objective == np.inf
    assert [text.split(":")[0] for text in broken.violations] == ["b", "a -> b", "equal"]


BAD: dict[str, Callable[[], object]] = {
    "costs must be numbers >= 0": lambda: _node(-1),
    "give one count": lambda: Node("n", _array(1, 2), _array(1), _array(1)),
    "source must come before": lambda: Edge(1, 1, np.zeros((1, 1)), np.zeros((1, 1))),
    "do not fit its nodes' strategies": lambda: Problem((_node(),), (), (), (Linear("l", {0: _array(1, 2)}),)),
    "do not fit its nodes": lambda: Problem((_node(), _node()), (Edge(0, 1, np.zeros((1, 2)), np.zeros((1, 2))),)),
    "without a limit": lambda: Problem((replace(_node(), usages=(Usage(0, 0, 1, _array(1)),)),)),
    "whole numbers": lambda: Linear("l", {0: _array(0.5)}),
    "does not fit a problem of 1": lambda: evaluate(Problem((_node(),)), [0, 0]),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses_what_makes_no_sense(message: str) -> None:
    with pytest.raises(ParplanError, match=message):
        BAD[message]()
