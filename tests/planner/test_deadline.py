"""All searches of a decision together keep to the time that was asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest

from benchmarks.instances import network, residual
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan
from parplan.planner import decide as decide_module
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.search import context as case_module
from parplan.planner.search import select as choosing
from parplan.planner.search.context import Deadline
from parplan.planner.search.select import ShapeSearch
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.solver.problem import Problem, Solution, Status
from parplan.planner.solver.solve import solve
from tests.planner.graphs import perceptron

LIMIT_S = 60.0


class Clock:
    """A clock that only solving moves."""

    def __init__(self) -> None:
        self.now_s, self.limits_s = 0.0, list[float]()

    def solve(self, problem: Problem, time_limit_s: float, **options: object) -> Solution:
        """The best choice, after all the time there was."""
        self.limits_s.append(time_limit_s)
        self.now_s += time_limit_s
        return replace(solve(problem, 60.0), status=Status.FEASIBLE)


def test_solves_that_all_take_their_whole_time_keep_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that never fits is solved for again and again."""
    clock = Clock()
    graph, cluster = perceptron(), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster)
    monkeypatch.setattr(costs, "peaks", lambda layers: tuple(repeat(2 * cluster.devices[0].memory_bytes, 2)))
    monkeypatch.setattr(choosing, "solve", clock.solve)
    monkeypatch.setattr(decide_module, "solve", clock.solve)
    monkeypatch.setattr(case_module, "now_s", lambda: clock.now_s)
    with pytest.raises(InfeasiblePlan, match="no plan was found that fits with its transfers"):
        decide(graph, cluster, costs, PlanRequest(time_limit_s=LIMIT_S))
    assert len(clock.limits_s) >= 4
    assert clock.limits_s[0] > LIMIT_S / 2
    assert LIMIT_S / 2 < clock.now_s <= 1.3 * LIMIT_S


def test_a_deadline_gives_parts_and_a_little_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0]
    monkeypatch.setattr(case_module, "now_s", lambda: times[0])
    deadline = Deadline(10.0)
    assert deadline.part_s(0.5) == 5.0
    times[0] = 8.0
    assert deadline.part_s(0.5) == 1.0
    deadline.extend(4.0)
    assert deadline.part_s(0.5) == 3.0
    times[0] = 20.0
    assert deadline.left_s() == 0.0
    assert deadline.part_s(0.5) == Deadline.LEAST * 10.0


@pytest.mark.parametrize(("limit_s", "hit"), [(0.0, True), (300.0, False)])
def test_a_solve_that_its_limit_ended_is_told(limit_s: float, hit: bool) -> None:
    deadline = Deadline(10.0)
    assert deadline.watched(solve(network(residual(4, seed=1), devices=4, seed=1), limit_s)).limited == hit
    assert deadline.hit == hit


@pytest.mark.full
@pytest.mark.parametrize("devices", [4, 16])
def test_nothing_is_formulated_after_the_limit(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that are left out are neither called covered nor above the bound, which is the least work."""
    shapes = list[Shape]()
    formulated = ShapeSearch.formulation

    def formulation(self: ShapeSearch, shape: Shape, *rest: Any, **more: Any) -> Formulation | None:
        shapes.append(shape)
        return formulated(self, shape, *rest, **more)

    monkeypatch.setattr(ShapeSearch, "formulation", formulation)
    graph, cluster = perceptron(), cluster_preset("k20", devices)
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(time_limit_s=0.0))
    assert {shape.passes for shape in shapes} == {1}
    assert not any(shape.homes or shape.anywhere for shape in shapes)
    assert decision.proof.status == "FEASIBLE"
    assert set(decision.proof.covered) == {"gather"}
    assert any("time limit of 0 s ended a search" in note for note in decision.notes)
    best = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest()).proof
    assert best.status == "OPTIMAL"
    assert 0 < decision.proof.bound <= best.objective * (1 + 1e-9)
    assert decision.proof.gap == pytest.approx(1 - decision.proof.bound / decision.proof.objective)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [4, 16])
def test_a_limit_ends_the_formulation_of_a_shape(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = Clock(), list[Shape]()

    def late(*args: Any, shape: Shape, **options: Any) -> Formulation:
        clock.now_s += 2 * LIMIT_S * (shape.passes > 1)
        found = formulate(*args, shape=shape, **options)
        done.append(shape)
        return found

    monkeypatch.setattr("parplan.planner.search.formulations.formulate", late)
    monkeypatch.setattr(case_module, "now_s", lambda: clock.now_s)
    graph, cluster = perceptron(), cluster_preset("k20", devices)
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(time_limit_s=LIMIT_S))
    assert clock.now_s > 0
    assert {shape.passes for shape in done} == {1}
    assert decision.proof.status == "FEASIBLE"
    assert set(decision.proof.covered) == {"gather"}
    assert any("time limit of 60 s ended a search" in note for note in decision.notes)
