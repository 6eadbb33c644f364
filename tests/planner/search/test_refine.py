"""Plans in passes are improved and explained on their own clock, the same on any machine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import Stage, stages
from parplan.pins import parse_pin
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.search.context import Case, fits, plain
from parplan.planner.search.refine import _Polish, polished
from parplan.planner.search.select import Solved, solved
from parplan.planner.search_space.pin_constraints import Pinned, pinned
from parplan.planner.search_space.pin_search import pin_questions
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.simulator import EFFORT, Effort, StepSimulator
from tests.planner.graphs import perceptron
from tests.planner.simulation.test_timeline import alexnet, hybrid

FREE = Pinned((), {}, {})


def case_of(graph: LayerGraph, cluster: Cluster) -> Case:
    return Case.of(
        graph, cluster, RooflineCosts(graph, cluster, optimizer="momentum"), PlanRequest(optimizer="momentum")
    )


def prices(case: Case) -> Solved:
    return solved(case, pin_questions((), case.graph, case.cluster))


def worse(devices: int) -> Plan:
    """The usual plan with a dropout in replicas between layers in shards."""
    plan = hybrid(devices, Scheme.INTERLEAVE)
    return replace(plan, layers={**plan.layers, "drop6": Strategy(devices, devices=tuple(range(devices)))})


@pytest.mark.parametrize("devices", [2, 4])
def test_a_plan_in_passes_is_improved_by_the_clock(devices: int) -> None:
    case = case_of(alexnet(128 * devices), cluster_preset("k20", devices))
    start = worse(devices)
    better = polished(case, prices(case).formulation, start, FREE, Effort())
    own_s = StepSimulator(case.graph, case.cluster, case.costs).step_s(better)
    assert own_s < case.player.step_s(start)
    # What is in front of the boundary is left as it is.
    front = stages(case.graph, start.layers, start.scheme).layers(Stage.BEFORE)
    assert {name: better.layers[name] for name in front} == {name: start.layers[name] for name in front}
    check(better, case.graph)
    assert fits(case.graph, case.cluster, case.costs, plain(better))


def test_pinned_layers_are_not_changed() -> None:
    case = case_of(alexnet(256), cluster_preset("k20", 2))
    asked = [parse_pin("drop6=replicas:2"), parse_pin("fc*=shards:2 axis:out-features")]
    pins = pinned(asked, case.graph, case.cluster)
    better = polished(case, prices(case).formulation, worse(2), pins, Effort())
    assert pins.kept_by(better.layers)
    assert better.layers["drop6"].replicas == 2


def test_a_plan_in_one_pass_is_the_solvers() -> None:
    case = case_of(perceptron(), cluster_preset("k20", 2))
    first = prices(case)
    assert polished(case, first.formulation, first.plan, FREE, Effort()) is first.plan


def test_without_effort_nothing_changes_and_nothing_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking what could be tried takes longer than trying it, in a deep network."""
    case = case_of(alexnet(256), cluster_preset("k20", 2))
    formulation, ranked = prices(case).formulation, list[str]()

    def changes(polish: _Polish, choice: tuple[int, ...], name: str) -> list[tuple[int, ...]]:
        ranked.append(name)
        return []

    monkeypatch.setattr(_Polish, "changes", changes)
    assert polished(case, formulation, worse(2), FREE, Effort(0)) == worse(2)
    assert ranked == []


def test_effort_counts_what_is_known_already() -> None:
    """So what one search finds does not depend on what others have played."""
    case = case_of(perceptron(), cluster_preset("k20", 2))
    plan, effort = prices(case).plan, Effort()
    first = case.player.within(plan, effort)
    assert first is not None
    assert case.player.within(plan, effort) == first
    assert effort.left == EFFORT - 2 * first.parts


def test_reasons_behind_the_boundary_are_of_the_clock_and_none_is_below_zero_unexplained() -> None:
    graph, cluster = alexnet(512), cluster_preset("k20", 4)
    costs = RooflineCosts(graph, cluster, optimizer="momentum")
    decision = decide(graph, cluster, costs, PlanRequest(optimizer="momentum"))
    assert decision.plan.scheme is Scheme.INTERLEAVE
    assert all(facts.why for facts in decision.layers)
    assert not [facts.why for facts in decision.layers if re.search(r": -[^;]*$", facts.why)]
    why = next(facts.why for facts in decision.layers if facts.name == "fc7")
    found = re.match(r"(?:(\d+) replicas x )?(\d+) shards of (\S+): \+([\d.]+) (ms|µs)", why)
    assert found, why
    replicas, shards = int(found[1] or 1), int(found[2])
    other = Strategy(replicas, shards, found[3], decision.plan.layers["fc7"].devices[: replicas * shards])
    cost_s = float(found[4]) * (1e-3 if found[5] == "ms" else 1e-6)
    changed = replace(decision.plan, layers={**decision.plan.layers, "fc7": other})
    step_s = StepSimulator(graph, cluster, costs).step_s(changed)
    assert step_s - decision.prediction.step_s == pytest.approx(cost_s, abs=6e-6)


def test_a_given_plan_is_told_what_is_faster() -> None:
    graph, cluster = alexnet(256), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster, optimizer="momentum")
    decision = decide(graph, cluster, costs, PlanRequest(optimizer="momentum", plan=worse(2)))
    assert decision.plan == worse(2)
    why = next(facts.why for facts in decision.layers if facts.name == "drop6")
    assert re.search(r": -[\d.]+ (ms|µs), .*; the plan is as given$", why)


def test_the_plan_does_not_hang_on_the_time_limit() -> None:
    graph, cluster = alexnet(256), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster)
    plans = [decide(graph, cluster, costs, PlanRequest(time_limit_s=limit_s)).plan for limit_s in (30.0, 300.0)]
    assert plans[0] == plans[1]
