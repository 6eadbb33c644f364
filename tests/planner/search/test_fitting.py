"""Plans that do not fit with their transfers: others are tried, and the nearest to fitting is named."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.proof_cases import drawn
from examples.gpt2 import GPT2, Sizes
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import InfeasiblePlan
from parplan.graph.capture.capture import capture
from parplan.graph.repeated import gather_groups, units
from parplan.pins import pins_from
from parplan.plan import SAVED, STATES, Plan, Strategy
from parplan.planner.decide import PlanRequest, decide, predict
from parplan.planner.search.context import Case
from parplan.planner.search.fitting import ABOUT, ATTEMPTS, fitting, in_replicas, lacking
from parplan.planner.search.formulations import Formulations
from parplan.planner.search_space.pin_search import pin_questions
from parplan.planner.solver.problem import Problem, Solution, Status, evaluate
from parplan.planner.solver.solve import solve
from tests.planner.graphs import perceptron

GIB = 2**30


@pytest.mark.parametrize("excess", [[4, 3, 1, 2, 5], [3, 2, 0, 1, 0], [0, 9, 9, 9, 9], [2, 3, 4, 5, 1]], ids=str)
def test_tries_less_memory_and_keeps_the_nearest(excess: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = perceptron(), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster)
    case = Case.of(graph, cluster, costs, PlanRequest())
    formulation = Formulations(case, pin_questions((), graph, cluster)).one_pass()
    assert len(excess) == ATTEMPTS + 1
    best, limit = solve(formulation.problem), cluster.devices[0].memory_bytes
    sizes = formulation.problem.sizes
    assert best.choice is not None
    choices = [(k % sizes[0], k // sizes[0], *best.choice[2:]) for k in range(len(excess))]
    assert len(set(choices)) == len(choices)
    lacking = {costs_key(formulation.strategies(c)): n * GIB for c, n in zip(choices, excess, strict=True)}
    monkeypatch.setattr(costs, "peaks", lambda layers: (limit, limit + lacking[costs_key(layers)]))
    asked: list[Problem] = []

    def next_choice(problem: Problem, first: bool) -> Solution:
        assert first == (not asked)
        asked.append(problem)
        return replace(best, choice=choices[len(asked) - 1], bound=float(-len(asked)))

    found, closest = fitting(case, formulation, formulation.problem, next_choice)
    tried = excess[: excess.index(0) + 1] if 0 in excess else excess
    assert found.choice == choices[excess.index(0) if 0 in excess else 0]
    assert found.bound == -1.0  # nothing beats that of the first
    short = [n for n in tried if n]
    assert (closest is None) == (not short)
    if closest is not None:
        assert (closest.lacking_bytes, closest.choice) == (min(short) * GIB, choices[excess.index(min(short))])
    # Less by what is lacking than the limit, and than what the plan before takes without its transfers.
    limits = [float(limit)]
    for choice, lacks in zip(choices, tried[:-1], strict=False):
        limits.append(max(0.0, min(limits[-1], formulation.device_peaks(choice, 2)[0]) - lacks * GIB))
    assert [problem.limits[0] for problem in asked] == limits


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["chain", "conv", "attention"])
def test_what_layers_take_beside_their_estimates_counts(kind: str) -> None:
    """A plan that lacks a byte is ruled out, without a lower limit for others."""
    known, draw = drawn(kind, 2), random.Random(0)
    questions = pin_questions((), known.graph, known.cluster)
    free = Case.of(known.graph, known.cluster, known.costs, PlanRequest())
    for _ in range(4):
        formulation, asked = Formulations(free, questions).one_pass(), list[Problem]()
        nodes = formulation.problem.nodes
        choice = [int(draw.choice(np.flatnonzero(np.isfinite(node.cost_s)))) for node in nodes]
        tight = known.cluster.with_memory(max(known.costs.peaks(formulation.strategies(choice))) - 1)
        case = Case.of(known.graph, tight, RooflineCosts(known.graph, tight), PlanRequest())
        formulation = Formulations(case, questions).one_pass()

        def again(problem: Problem, first: bool, asked: list[Problem] = asked, own: list[int] = choice) -> Solution:
            asked.append(problem)
            return Solution(Status.FEASIBLE, tuple(own), 1.0, 0.0, 1.0, 0.0)

        fitting(case, formulation, formulation.problem, again)
        assert asked[2].limits == formulation.problem.limits
        for problem in asked[2:]:
            peaks = evaluate(problem, choice).peaks
            assert any(peak > limit for peak, limit in zip(peaks, problem.limits, strict=True))


def costs_key(layers: Mapping[str, Strategy]) -> tuple[Strategy, ...]:
    return tuple(layers.values())


@pytest.mark.full
def test_a_habit_that_lacks_less_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = perceptron(), cluster_preset("k20", 2)
    costs, limit = RooflineCosts(graph, cluster), cluster.devices[0].memory_bytes

    def peaks(layers: Mapping[str, Strategy]) -> tuple[int, ...]:
        cut = sum(own.shards == 2 for own in layers.values())
        return (limit + (GIB if cut >= 3 else 3 * GIB),) * 2

    monkeypatch.setattr(costs, "peaks", peaks)
    with pytest.raises(InfeasiblePlan, match=r"the nearest one, pure model parallel, needs .* and lacks 1 GiB"):
        decide(graph, cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True))


@pytest.mark.full
def test_no_plan_named_lacks_more_than_data_parallelism() -> None:
    """ResNet-50 on five GPUs: twice what is enough for replicas was said to be the least."""
    from examples import resnet50
    from parplan.graph.capture.capture import capture

    graph, cluster = capture(resnet50.build(), resnet50.example_inputs()), cluster_preset("k20", 5)
    cluster = replace(cluster, devices=tuple(replace(one, memory_bytes=int(4.45 * GIB)) for one in cluster.devices))
    # The search's own nearest plan, or in less time one by hand: neither lacks more.
    nearest = r"needs 4\.\d+ GiB on (a device|device 0), which has 4\.45 GiB and lacks \d+(\.\d+)? MiB"
    with pytest.raises(InfeasiblePlan, match=nearest):
        decide(
            graph,
            cluster,
            RooflineCosts(graph, cluster),
            PlanRequest(tolerance=0.0, started_ranks=True, time_limit_s=4.0),
        )


def unsolved(problem: Problem, *args: Any, **options: Any) -> Solution:
    """A solver that finds nothing where there is a memory limit; plans by hand are solved without."""
    if problem.limits:
        return Solution(Status.UNKNOWN, None, inf, 0.0, inf, 1.0)
    return solve(problem, *args, **options)


@pytest.mark.full
def test_a_plan_by_hand_is_given_where_the_solver_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = perceptron(), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster)
    best = decide(graph, cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True))
    monkeypatch.setattr("parplan.planner.search.select.solve", unsolved)
    found = decide(graph, cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True))
    by_hand = [
        one.step_s for one in found.baselines if one.step_s is not None and one.fits and one.name != "one device"
    ]
    assert found.proof.status == "FEASIBLE"
    assert found.proof.bound <= best.proof.objective <= found.proof.objective
    assert found.proof.objective <= min(by_hand) * (1 + 1e-9)
    pinned = decide(
        graph, cluster, costs, PlanRequest(tolerance=0.0, started_ranks=True, pins=pins_from(["2=shards:2"]))
    )
    assert pinned.plan.layers["2"].shards == 2


def test_no_plan_by_hand_is_given_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = perceptron()
    cluster = cluster_preset("k20", 2).with_memory(1000)
    monkeypatch.setattr("parplan.planner.search.select.solve", unsolved)
    with pytest.raises(InfeasiblePlan, match=r"no plan was found that fits .* which has 1,000 bytes and lacks"):
        decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest())


@pytest.mark.full
def test_as_many_blocks_are_replayed_as_memory_asks_for() -> None:
    """Replicas with state in slices: no slower than by hand, where the feed-forward parts of two of five blocks are."""
    net = GPT2(Sizes(layers=5, width=256, heads=4, tokens=4000, positions=64))
    graph, cluster = capture(net, (torch.zeros(16, 64, dtype=torch.long),)), cluster_preset("v100-sxm2", 4)
    replayed = {name for unit in units(graph) if {"h.0.up", "h.3.up"} & {*unit} for name in unit}
    layers = {}
    for name, layer in graph.layers.items():
        sliced = name not in ("wte", "head") and any(len(graph.values[own].shape) > 1 for own in layer.parameters)
        state, saved = STATES[2 if sliced else 0], SAVED[name in replayed]
        layers[name] = Strategy(4, 1, None, (0, 1, 2, 3), state=state, saved=saved)
    plan = Plan(graph.model, graph.fingerprint, 16, 4, layers)
    by_hand = predict(graph, cluster, RooflineCosts(graph, cluster), plan)
    tight = cluster.with_memory(max(by_hand.memory_bytes))
    case = Case.of(graph, tight, RooflineCosts(graph, tight), PlanRequest())
    case = replace(case, states=STATES, saved=SAVED)
    formulation = Formulations(case, pin_questions((), graph, tight)).one_pass()
    apart = in_replicas(case, formulation)
    found, _ = fitting(case, apart, apart.problem, lambda problem, first: solve(problem, better=ABOUT))
    assert found.choice is not None
    assert found.objective <= (1 + ABOUT) * by_hand.step_s
    assert lacking(case, apart, found.choice) == [0.0]
    own = apart.strategies(found.choice)
    assert all(one.shards == 1 and one.devices == (0, 1, 2, 3) for one in own.values())
    for group in gather_groups(graph):
        options = {name: {one.strategy.state for one in apart.options[apart.layers[name]]} for name in group}
        assert len({own[name].state for name, states in options.items() if len(states) > 1}) <= 1, group
    again = [unit for unit in units(graph) if own[unit[0]].saved == "replay"]
    assert 0 < len(again) < len(units(graph))
