"""Elimination against every choice, and the size of its tables where forbidden pairs leave few combinations."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.instances import random_problem
from parplan.planner.solver.elimination import classes_of, plant
from parplan.planner.solver.problem import Edge, Node, Problem, objective
from parplan.planner.solver.rows import row_table
from tests.every_case import every_case


def _solved(problem: Problem) -> tuple[float, list[int], list[np.ndarray[tuple[int], np.dtype[np.float64]]]]:
    """The optimum of node and edge costs, its choice, and the least cost of all choices with each strategy."""
    classes = classes_of(row_table(problem))
    tree = plant(problem, classes)
    assert tree is not None
    costs = [own.least(node.cost_s) for own, node in zip(classes, problem.nodes, strict=True)]
    edges = [e.cost_s[np.ix_(classes[e.source].first, classes[e.target].first)] for e in problem.edges]
    tables = tree.upward(costs, edges)
    picked = zip(classes, problem.nodes, tree.choice(tables), strict=True)
    choice = [own.cheapest(node.cost_s, k) for own, node, k in picked]
    found = zip(classes, tree.marginals(tables), problem.nodes, costs, strict=True)
    return tables.value, choice, [(best - low)[own.of] + node.cost_s for own, best, node, low in found]


@every_case("seed", range(40))
def test_every_choice_that_uses_a_strategy_costs_at_least_its_marginal(seed: int) -> None:
    drawn = random_problem(np.random.default_rng([71, seed]))
    nodes = tuple(Node(node.name, np.minimum(node.cost_s, 5.0)) for node in drawn.nodes)
    problem = replace(drawn, nodes=nodes, linear=(), maxima=())
    seconds = {choice: objective(problem, choice) for choice in product(*map(range, problem.sizes))}
    value, choice, marginals = _solved(problem)
    least = min(seconds.values())
    assert value == pytest.approx(least)
    if np.isfinite(least):
        assert seconds[tuple(choice)] == pytest.approx(least)
        for v, own in enumerate(marginals):
            for k, marginal in enumerate(own):
                assert marginal == pytest.approx(min(s for picked, s in seconds.items() if picked[v] == k))


def test_layers_that_follow_one_decision_are_eliminated_however_many_it_has() -> None:
    """Two rows of layers on 16 placements, each with 3 strategies of its own per layer, that end in one layer."""
    rng, placements, each, deep = np.random.default_rng(1), 16, 3, 5
    follow = np.where(np.repeat(np.eye(placements), each, axis=0) > 0, 0.0, np.inf)
    size, last = placements * each, 2 * deep
    nodes = [Node(f"layer{v}", rng.random(size)) for v in range(2 * deep + 1)] + [
        Node("placement", np.zeros(placements))
    ]
    edges = [Edge(v, v + 1, rng.random((size, size))) for v in range(2 * deep) if v != deep - 1]
    edges += [Edge(deep - 1, last, rng.random((size, size)))]
    problem = Problem(tuple(nodes), (*edges, *(Edge(v, last + 1, follow) for v in range(last + 1))))
    tree = plant(problem, classes_of(row_table(problem)))
    assert tree is not None
    assert max(len(bucket.own) for bucket in tree.buckets) <= placements * each**3
    value, choice, _ = _solved(problem)
    fixed = []
    for k in range(placements):
        own = slice(k * each, (k + 1) * each)
        own_nodes = tuple(Node(node.name, node.cost_s[own]) for node in nodes[:-1])
        fixed.append(_solved(Problem(own_nodes, tuple(replace(e, cost_s=e.cost_s[own, own]) for e in edges)))[0])
    assert value == pytest.approx(min(fixed))
    assert objective(problem, choice) == pytest.approx(value)
