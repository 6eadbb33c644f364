"""What a choice costs and breaks, on problems small enough to work out by hand, and against a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.instances import EdgePhases, NodePhases, chain, one_pass, random_problem
from benchmarks.steps import on_blocks
from parplan.errors import ParplanError
from parplan.planner.solver.problem import (
    Edge,
    Linear,
    Maximum,
    Node,
    Problem,
    Row,
    Usage,
    evaluate,
    objective,
    objectives_at,
    restrict,
)
from tests.planner.oracle import objectives


def _array(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def _phases(ahead: float = 0.0, back: float = 0.0, tail: float = 0.0, name: str = "n") -> NodePhases:
    return NodePhases(name, _array(ahead), _array(back), _array(tail))


def test_sums_and_overlap_by_hand() -> None:
    """Backward ends at 1 + 2 + 0.5; the reduction of node 1 starts at 2 and takes 5, then node 0's takes 1."""
    edge = EdgePhases(0, 1, np.array([[0.25]]), np.array([[0.5]]))
    found = evaluate(one_pass((_phases(3, 1, 1), _phases(4, 2, 5)), (edge,)), [0, 0])
    assert list(found.maxima) == [2, 2 + 5, 3.5, 8, 8]
    assert found.objective == 7.25 + 8


def _clock(nodes: list[NodePhases], edges: list[EdgePhases]) -> float:
    """Play the step: forward, then backward with a link that reduces gradients in order as they get ready."""
    now = link = sum(n.forward_s[0] for n in nodes) + sum(e.forward_s[0, 0] for e in edges)
    for v in reversed(range(len(nodes))):
        now += nodes[v].backward_s[0]
        if nodes[v].reduction_s[0] > 0:
            link = max(link, now) + nodes[v].reduction_s[0]
        now += sum(e.backward_s[0, 0] for e in edges if e.target == v)
    return float(max(now, link))


def test_overlap_is_what_a_clock_shows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 7))
        nodes = [_phases(*rng.choice([0.0, 1.0, 1.5, 4.0], 3).tolist()) for _ in range(count)]
        pairs = [(a, b) for b in range(count) for a in range(b) if rng.random() < 0.4]
        edges = [EdgePhases(a, b, *rng.random((2, 1, 1))) for a, b in pairs]
        found = evaluate(one_pass(nodes, edges), [0] * count)
        assert found.objective == pytest.approx(_clock(nodes, edges), rel=1e-12)


def test_maxima_by_hand() -> None:
    """An edge term, a factor, a constant, a discount below 0, and a maximum that only a later one uses."""
    nodes = (Node("a", _array(1, 2)), Node("b", _array(4, 8)))
    inner = Maximum("inner", (Row({0: _array(3, -5)}), Row(edges={0: _array(0, 7).reshape(2, 1) + np.zeros((2, 2))})))
    outer = Maximum("outer", (Row({1: _array(1, 1)}, {}, {0: 2.0}, 0.25), Row(constant_s=9)), 3.0)
    problem = Problem(nodes, (Edge(0, 1, np.full((2, 2), 0.5)),), maxima=(inner, outer))
    assert evaluate(problem, [0, 0]).maxima == (3, 9)
    assert evaluate(problem, [0, 0]).objective == 5.5 + 27
    assert evaluate(problem, [1, 1]).maxima == (7, 15.25)
    assert evaluate(problem, [1, 1]).objective == 10.5 + 45.75


def test_restricting_and_lifting_keeps_what_a_choice_costs() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        problem = random_problem(rng)
        keep = [np.arange(size) != rng.integers(size + 1) for size in problem.sizes]
        keep = [mask if mask.any() else ~mask for mask in keep]
        smaller = restrict(problem, keep)
        choice = [int(rng.integers(size)) for size in smaller.problem.sizes]
        found, truth = evaluate(smaller.problem, choice), evaluate(problem, smaller.lift(choice))
        assert (found.objective, found.maxima, found.peaks) == (truth.objective, truth.maxima, truth.peaks)
        assert found.feasible == truth.feasible


def test_all_choices_at_once_cost_and_break_what_each_alone_does() -> None:
    rng, seen = np.random.default_rng(1), set()
    for _ in range(60):
        problem = random_problem(rng, most=4)
        one_by_one = [evaluate(problem, choice) for choice in np.ndindex(*problem.sizes)]
        wanted = [found.objective if found.feasible else np.inf for found in one_by_one]
        assert objectives(problem) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        seen |= {(found.feasible, bool(np.isfinite(found.objective))) for found in one_by_one}
    assert len(seen) == 3


@pytest.mark.parametrize("seed", range(6))
def test_all_strategies_of_nodes_cost_what_each_alone_does(seed: int) -> None:
    problem, rng = on_blocks(chain(6, seed), 2, seed), np.random.default_rng(seed)
    choice = [int(rng.integers(size)) for size in problem.sizes]
    first = int(rng.integers(len(choice)))
    alike = [v for v, size in enumerate(problem.sizes) if size == problem.sizes[first]]
    for nodes in ([first], alike):
        every = [np.arange(problem.sizes[first]) if v in nodes else own for v, own in enumerate(choice)]
        changed = [[k if v in nodes else own for v, own in enumerate(choice)] for k in range(problem.sizes[first])]
        assert objectives_at(problem, every) == pytest.approx([objective(problem, c) for c in changed])


def test_peaks_count_what_is_live_together() -> None:
    spans = [(0, 2, 10.0), (1, 3, 5.5), (2, 4, 7.0), (3, 3, 99.0)]
    nodes = tuple(Node(f"n{i}", _array(0.0), (Usage(0, a, b, _array(c)),)) for i, (a, b, c) in enumerate(spans))
    found = evaluate(Problem(nodes, (), (15.0,), (), ("device 0",)), [0, 0, 0, 0])
    assert found.peaks == (16.0,)  # 10 + 5.5 rounded up to whole bytes
    assert found.violations == ("device 0: 16 bytes exceed 15",)


def test_violations_name_what_is_broken() -> None:
    nodes = tuple(Node(name, _array(0, np.inf)) for name in ("a", "b"))
    edge = Edge(0, 1, np.array([[0, np.inf], [0, 0]]))
    problem = Problem(nodes, (edge,), (), (Linear("equal", {0: _array(1, 2), 1: _array(-1, -2)}, 0, 0),))
    assert evaluate(problem, [0, 0]).feasible
    broken = evaluate(problem, [0, 1])
    assert broken.objective == np.inf
    assert [text.split(":")[0] for text in broken.violations] == ["b", "a -> b", "equal"]


ONE = Node("n", _array(0.0))
BAD: dict[str, Callable[[], object]] = {
    "costs must be numbers >= 0": lambda: Node("n", _array(-1)),
    "give one count": lambda: Node("n", _array(1, 2), (Usage(0, 0, 1, _array(1)),)),
    "source must come before": lambda: Edge(1, 1, np.zeros((1, 1))),
    "do not fit its nodes' strategies": lambda: Problem((ONE,), (), (), (Linear("l", {0: _array(1, 2)}),)),
    "do not fit its nodes": lambda: Problem((ONE, ONE), (Edge(0, 1, np.zeros((1, 2))),)),
    "without a limit": lambda: Problem((replace(ONE, usages=(Usage(0, 0, 1, _array(1)),)),)),
    "whole numbers": lambda: Linear("l", {0: _array(0.5)}),
    "does not fit a problem of 1": lambda: evaluate(Problem((ONE,)), [0, 0]),
    "maximum m: a row does not fit": lambda: Problem((ONE,), maxima=(Maximum("m", (Row({0: _array(1, 2)}),)),)),
    "maxima before its own": lambda: Problem((ONE,), maxima=(Maximum("m", (Row(maxima={0: 1.0}),)),)),
    "factors of other maxima must be": lambda: Row(maxima={0: -1.0}),
    "seconds must be finite": lambda: Row({0: _array(np.inf)}),
    "needs a row": lambda: Maximum("m", ()),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses_what_makes_no_sense(message: str) -> None:
    with pytest.raises(ParplanError, match=message):
        BAD[message]()
