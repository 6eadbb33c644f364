"""From the solver's plan to the one that is taken: it fits, keeps the rules, and is the same on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decide import PlanRequest, decide, estimate
from parplan.planner.decision import Baseline
from parplan.planner.search import branch_search as worth
from parplan.planner.search import context as case_module
from parplan.planner.search.branch_search import worthwhile
from parplan.planner.search.branches import sections
from parplan.planner.search.context import Case
from parplan.planner.search.select import Solved, solved, taken
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import pin_questions
from parplan.planner.simulation import simulator as player
from parplan.planner.simulation.timeline import simulate
from tests.planner.branches import pair
from tests.planner.simulation.test_timeline import alexnet, hybrid

FREE = Pinned((), {}, {})
BRIEFLY = 0.01


def case_of(request: PlanRequest, devices: int = 2) -> Case:
    graph, cluster = alexnet(128 * devices), cluster_preset("k20", devices)
    return Case.of(graph, cluster, RooflineCosts(graph, cluster, optimizer="momentum"), request)


def in_one_pass(case: Case) -> Solved:
    return solved(case, pin_questions((), case.graph, case.cluster))


def rival(plan: Plan) -> Baseline:
    return Baseline("cuda-convnet2's hybrid", 1.0, 1, True, plan=plan)


def test_a_faster_plan_that_does_not_fit_with_its_transfers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(PlanRequest(), devices=4)
    first = in_one_pass(case)
    usual = hybrid(4, Scheme.GATHER)
    assert taken(case, first, FREE, [rival(usual)], BRIEFLY).plan.layers != first.plan.layers
    full = [device.memory_bytes for device in case.cluster.devices]
    twice = [2 * size for size in full]
    monkeypatch.setattr(case.costs, "peaks", lambda layers: full if layers == first.plan.layers else twice)
    assert taken(case, first, FREE, [rival(usual)], BRIEFLY).plan.layers == first.plan.layers


def test_a_plan_that_fits_is_taken_before_a_faster_one_of_the_solver_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of(PlanRequest())
    first = in_one_pass(case)
    usual = hybrid(2, Scheme.GATHER)
    full = [device.memory_bytes for device in case.cluster.devices]
    twice = [2 * size for size in full]
    monkeypatch.setattr(case.costs, "peaks", lambda layers: full if layers == usual.layers else twice)
    assert taken(case, first, FREE, [rival(usual)], BRIEFLY).plan.layers == usual.layers


def test_usual_plans_keep_the_rules_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout in replicas between layers in shards breaks R4, however fast it is."""
    case, usual = case_of(PlanRequest(rules="strict")), hybrid(2, Scheme.INTERLEAVE)
    broken = replace(usual, layers={**usual.layers, "drop6": Strategy(2, devices=(0, 1))})
    step_s = case.player.step_s
    monkeypatch.setattr(case.player, "step_s", lambda plan: 0.0 if plan.layers == broken.layers else step_s(plan))
    plan = taken(case, in_one_pass(case), FREE, [rival(broken)], BRIEFLY).plan
    assert plan.layers != broken.layers
    assert plan.rules == "strict"


class SlowMachine:
    """A clock that playing a plan moves, by so much each."""

    def __init__(self, each_s: float) -> None:
        self.now_s, self.each_s = 0.0, each_s

    def simulate(self, *given: object) -> object:
        """A plan played through."""
        self.now_s += self.each_s
        return simulate(*given)  # type: ignore[arg-type]


def test_a_slow_machine_finds_the_same_plan_and_one_too_slow_for_the_limit_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searches count what they try; only a time limit far away ends them."""
    graph, cluster = pair(width=256), cluster_preset("k20", 2, "10gbe")
    costs = RooflineCosts(graph, cluster)
    fast = decide(graph, cluster, costs, PlanRequest())
    assert fast.branches is not None
    assert not [note for note in fast.notes if "time limit" in note]
    for each_s, said in ((50.0 / fast.branches.tried, False), (60.0, True)):
        machine = SlowMachine(each_s)
        monkeypatch.setattr(player, "simulate", machine.simulate)
        monkeypatch.setattr(case_module, "now_s", lambda machine=machine: machine.now_s)
        monkeypatch.setattr("parplan.planner.search.branch_attempts.now_s", lambda machine=machine: machine.now_s)
        slow = decide(graph, cluster, costs, PlanRequest())
        assert (slow.plan != fast.plan) <= said
        assert any(note.startswith("The time limit of 60 s ended a search") for note in slow.notes) == said


@pytest.mark.parametrize(("part", "tried"), [(0.006, 0), (0.012, 1)])
def test_sections_that_could_not_gain_enough_together_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, part: float, tried: int
) -> None:
    case = Case.of(graph := pair(), cluster := cluster_preset("k20", 2), RooflineCosts(graph, cluster), PlanRequest())
    first = in_one_pass(case)
    monkeypatch.setattr(worth._Times, "gain_s", lambda times, section: part * times.step_s)
    assert len(worthwhile(sections(graph), first.formulation, first.choice, 2)) == tried


def test_an_estimate_is_of_the_fastest_scheme() -> None:
    case = case_of(PlanRequest(optimizer="momentum"), devices=4)
    first, step = in_one_pass(case), estimate(case.graph, case.cluster, case.costs, case.request)
    steps_s = [case.player.step_s(replace(first.plan, scheme=scheme)) for scheme in Scheme]
    assert step.step_s == pytest.approx(min(steps_s))
    assert step.step_s < steps_s[0]
    gathered = estimate(case.graph, case.cluster, case.costs, PlanRequest(optimizer="momentum", scheme="gather"))
    assert gathered.step_s == pytest.approx(steps_s[0])
