"""Recomputation in plans: T against the simulated step, memory against that of the plan, and when it is taken."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from benchmarks.proof_cases import KINDS, drawn
from benchmarks.proof_plans import objective_s, simulated_s
from examples.gpt2 import GPT2, Sizes
from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan, PinError, PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import fold, unit_of, units
from parplan.graph.resized import at_batch
from parplan.pins import pins_from
from parplan.plan import SAVED, STATES, Plan, Scheme, Strategy
from parplan.planner.decide import decide, predict
from parplan.planner.decision import Decision, Prediction
from parplan.planner.explain.memory_prices import memory_prices
from parplan.planner.request import PlanRequest
from parplan.planner.search.context import Case, formulated
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.timeline import Kind, simulate
from parplan.planner.solver.problem import objective
from tests.planner.random_plans import random_plans
from tests.planner.test_micro_batches import SERIAL, in_micro_batches
from tests.planner.test_sharded_state import certain_bytes, in_slices
from tests.report.golden import printed


def replaying(plan: Plan, names: Iterable[str]) -> Plan:
    return plan.with_layers({name: replace(plan.layers[name], saved="replay") for name in names})


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_t_is_the_simulated_step(kind: str, micro_batches: int, seed: int) -> None:
    """Of layers that follow each other, beside every mixture of states and with a part of a unit too.

    Of whole units the memory that is certain is no more than the plan's.
    """
    problem, draw = drawn(kind, seed), random.Random(seed)
    problem = in_micro_batches(problem, micro_batches) if micro_batches > 1 else problem
    inside = list(unit_of(problem.graph))
    assert inside or kind not in SERIAL or kind == "lstm"
    for plan in islice(random_plans(problem.graph, problem.cluster, random.Random(seed), Scheme.GATHER), 3):
        other = objective_s(plan, problem) / simulated_s(plan, problem)
        for states in (STATES[:1], STATES[2:], STATES):
            for names in (inside, [name for name in inside if draw.random() < 0.5]):
                own = replaying(in_slices(plan, draw, *states), names)
                ratio = objective_s(own, problem) / simulated_s(own, problem)
                # Beside branches T may be less: a layer on other devices waits for their replay.
                assert (
                    ratio == pytest.approx(1.0, rel=1e-9) if kind in SERIAL else abs(ratio - 1) <= abs(other - 1) + 0.03
                )
                if names is inside:
                    peaks = problem.costs.peaks(own.layers)
                    assert peaks is not None
                    least = certain_bytes(problem, own)
                    assert all(few <= 1.01 * peak for few, peak in zip(least, peaks, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_t_of_equal_blocks_is_the_simulated_step(micro_batches: int) -> None:
    net = GPT2(Sizes(layers=12, width=64, heads=2, tokens=100, positions=32))
    graph, cluster = capture(net, (torch.zeros(16, 32, dtype=torch.long),)), cluster_preset("v100-pcie", 4)
    alike, costs, unit = fold(graph), RooflineCosts(graph, cluster, micro_batches=micro_batches), unit_of(graph)
    assert alike is not None
    assert len(units(graph)) == 25
    attention, mlp = (set(own) for own in units(graph)[1:3])
    for inside in (attention, mlp, attention | mlp):
        for state in STATES:
            layers = {
                name: Strategy(4, 1, None, (0, 1, 2, 3), state=state) if layer.batch is not None else Strategy()
                for name, layer in graph.layers.items()
            }
            plan = Plan(graph.model, graph.fingerprint, 16, 4, layers)
            plan = replaying(plan, (name for name in unit if alike.first.get(name) in inside))
            formulation, choice = formulated(plan, graph, cluster, costs)
            assert formulation.fold is not None
            step_s = simulate(graph, cluster, costs, plan).step_s
            assert objective(formulation.problem, choice) == pytest.approx(step_s, rel=1e-9)


def test_a_replay_takes_its_forward_again() -> None:
    """Of all micro-batches, but for the last layer, whose result nobody keeps; nothing else takes longer."""
    problem = in_micro_batches(drawn("chain", 1), 4)
    plan = next(random_plans(problem.graph, problem.cluster, random.Random(1), Scheme.GATHER))
    names = units(problem.graph)[0]
    spent = defaultdict[tuple[bool, Kind | None, str], float](float)
    for again in (False, True):
        own = replaying(plan, names) if again else plan
        for part in simulate(problem.graph, problem.cluster, problem.costs, own).parts:
            spent[again, part.kind, part.what] += part.seconds
    assert {key[1:] for key in spent if key[0]} == {key[1:] for key in spent if not key[0]}
    for _, kind, what in [key for key in spent if not key[0]]:
        times = 2 if kind is Kind.FORWARD and what in names[:-1] else 1
        assert spent[True, kind, what] == pytest.approx(times * spent[False, kind, what])


# ---- when it is taken ------------------------------------------------------------------------------------------------


def deep() -> LayerGraph:
    """Activations take most of the memory, and the batch is a single sample."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return capture(nn.Sequential(*layers, nn.Linear(256, 1)), (torch.zeros(1, 2**14, 256),))


def decided(graph: LayerGraph, cluster: Cluster, *pins: str) -> Decision:
    request = PlanRequest(tolerance=0.0, pins=pins_from(pins))
    return decide(graph, cluster, RooflineCosts(graph, cluster), request)


def test_memory_asks_for_it() -> None:
    """Fewer units are replayed the more memory there is, in the plan that takes least of all choices of units."""
    graph, cluster = deep(), cluster_preset("a100", 1)
    costs = RooflineCosts(graph, cluster)
    known = units(graph)
    assert len(known) == 3
    whole = Plan(graph.model, graph.fingerprint, 1, 1, dict.fromkeys(graph.layers, Strategy()))
    found = {}
    for number in range(8):
        plan = replaying(whole, (name for k, own in enumerate(known) if number >> k & 1 for name in own))
        peaks = costs.peaks(plan.layers)
        assert peaks is not None
        found[number] = max(peaks), simulate(graph, cluster, costs, plan).step_s
    replayed = set()
    for peak, _ in found.values():
        limit = int(1.01 * peak)  # layers add up to 0.1 % more than the plan
        best_s = min(step_s for other, step_s in found.values() if other <= limit)
        own = decided(graph, cluster.with_memory(limit))
        assert own.prediction.step_s == pytest.approx(best_s, rel=1e-9)
        assert max(own.prediction.memory_bytes) <= limit
        assert own.proof.bound <= best_s * (1 + 1e-9)
        replayed.add(len(own.plan.replayed))
    assert len(replayed) > 2
    with pytest.raises(InfeasiblePlan):
        decided(graph, cluster.with_memory(min(peak for peak, _ in found.values()) // 2))
    text = printed(decided(graph, cluster.with_memory(int(1.01 * min(peak for peak, _ in found.values())))), 120)
    assert "with recomputation" in text
    assert "per GiB saved" in text
    assert "run forward again before it (activation checkpointing)" in " ".join(text.split())


@pytest.mark.full
def test_plans_by_hand_come_first() -> None:
    """Where all state gathered and all units replayed is what fits, a search that has no time ends with it."""
    net = GPT2(Sizes(layers=6, width=64, heads=2, tokens=100, positions=32))
    graph, cluster = capture(net, (torch.zeros(4, 32, dtype=torch.long),)), cluster_preset("v100-pcie", 4)
    layers = {
        name: Strategy(4, 1, None, (0, 1, 2, 3), state="gathered" if layer.parameters else "replicated")
        if layer.batch is not None
        else Strategy()
        for name, layer in graph.layers.items()
    }
    costs, plan = RooflineCosts(graph, cluster), Plan(graph.model, graph.fingerprint, 4, 4, layers)
    peaks = costs.peaks(replaying(plan, unit_of(graph)).layers)
    assert peaks is not None
    tight, request = cluster.with_memory(int(1.01 * max(peaks))), PlanRequest(time_limit_s=0.01, started_ranks=True)
    found = decide(graph, tight, RooflineCosts(graph, tight), request)
    assert max(found.prediction.memory_bytes) <= tight.device.memory_bytes
    known = {one.name: one for one in found.baselines}
    assert not known["fully sharded data parallel"].fits
    by_hand = known["fully sharded, recomputation"]
    assert by_hand.fits
    assert by_hand.step_s is not None
    assert found.prediction.step_s <= by_hand.step_s * (1 + request.tolerance)


@pytest.mark.full
def test_a_pin_replays_the_unit() -> None:
    graph, cluster = deep(), cluster_preset("a100", 1)
    found = decided(graph, cluster, "0=saved:replay")
    assert found.plan.replayed == units(graph)[0]
    assert found.pins is not None
    assert decided(graph, cluster, "*=saved:keep").plan.replayed == ()
    with pytest.raises(PlanError, match="saved"):
        pins_from(["0=saved:twice"])


def test_what_cannot_be_replayed() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    graph, cluster = capture(net, (torch.zeros(4, 3, 8, 8),)), cluster_preset("a100", 1)
    with pytest.raises(PinError, match=r"1 cannot be replayed: it writes running statistics; leave out the pin"):
        decided(graph, cluster, "1=saved:replay")
    plan = Plan(graph.model, graph.fingerprint, 4, 1, dict.fromkeys(graph.layers, Strategy(saved="replay")))
    with pytest.raises(PlanError, match=r"0: it cannot be replayed: it is in no unit .*; leave out"):
        check(plan, graph)


def test_prices_of_saved_memory_are_of_the_plan_without_it() -> None:
    """Step and peak of the plan with nothing replayed, all state whole, or in one micro-batch, all else as it is."""
    cluster = cluster_preset("v100-pcie", 2)
    whole = capture(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), (torch.zeros(8, 16, 64),))

    def sized(count: int) -> Case:
        graph = at_batch(whole, 8 // count)
        return Case.of(graph, cluster, RooflineCosts(graph, cluster, micro_batches=count), PlanRequest())

    def predicted(case: Case, plan: Plan) -> Prediction:
        return predict(case.graph, case.cluster, case.costs, plan)

    case, layers = sized(2), data_parallel(whole, (0, 1), STATES[-1], SAVED[-1])
    plan = Plan(whole.model, whole.fingerprint, 8, 2, layers, micro_batches=2)
    step = predicted(case, plan)
    prices = memory_prices(case, plan, step, sized, predicted)
    kept = {name: replace(own, saved="keep") for name, own in layers.items()}
    replicated = {name: replace(own, state="replicated") for name, own in layers.items()}
    others = [replace(plan, layers=kept), replace(plan, layers=replicated), replace(plan, micro_batches=1)]
    for one, other, own in zip(prices, others, (case, case, sized(1)), strict=True):
        given = predicted(own, other)
        assert one.ratio == pytest.approx(given.step_s / step.step_s)
        assert one.memory_bytes == max(given.memory_bytes) != max(step.memory_bytes)
    assert [one.name for one in prices] == ["recomputation", "state in slices", "micro-batches"]
