"""Which scheme is taken, what the others would cost, and what is claimed of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import PlanError, RuleError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import stages
from parplan.pins import read_pins
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decide import PlanRequest, predict
from parplan.planner.decision import Baseline, Decision
from parplan.planner.search.context import Case
from parplan.planner.search.schemes import rival_in_passes, under
from parplan.planner.search_space.strategies import strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.timeline import simulate
from tests.planner.decided import decided as decided_once
from tests.planner.graphs import classifier, perceptron
from tests.planner.simulation.test_timeline import alexnet, hybrid


def decided(graph: LayerGraph, cluster: Cluster, scheme: str = "auto", plan: Plan | None = None) -> Decision:
    pins = read_pins(["*=state:replicated"] if plan is None else None)  # what is in slices has no passes
    request = PlanRequest(
        optimizer="momentum", scheme=scheme, plan=plan, tolerance=0.0, started_ranks=True, pins=pins, price_pins=False
    )
    return decided_once(graph, cluster, request)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpus", [2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_the_papers_plan_is_found_and_run_in_passes(gpus: int) -> None:
    graph, cluster = alexnet(128 * gpus), cluster_preset("k20", gpus)
    decision = decided(graph, cluster)
    assert all(decision.plan.layers[f"conv{number}"].replicas == gpus for number in range(1, 6))
    assert all(decision.plan.layers[name].shards > 1 for name in ("fc6", "fc7"))
    assert decision.passes is not None
    assert decision.plan.scheme is decision.passes.taken is Scheme.INTERLEAVE
    assert decision.proof.status == "OPTIMAL"
    assert decision.prediction.step_s == pytest.approx(decision.proof.objective, rel=1e-4)
    assert decision.prediction.step_s < decided(graph, cluster, "gather").prediction.step_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("graph", [perceptron, classifier])
@pytest.mark.parametrize("devices", [2, 4])
def test_no_other_legal_scheme_is_faster(graph, devices: int) -> None:  # type: ignore[no-untyped-def]
    """Nor is any of the usual plans, whatever its scheme; parts add up."""
    decision = decided(graph(), cluster_preset("k20", devices))
    own = decision.prediction
    if decision.passes is not None and decision.passes.count > 1:
        known = [one.step_s for one in decision.passes.schemes if one.step_s is not None]
        assert own.step_s == pytest.approx(min(known))
    parts = (own.forward_s, own.backward_s, own.transfer_s, own.exposed_reduce_s, own.update_s, own.overhead_s)
    assert own.step_s == pytest.approx(sum(parts))
    check(decision.plan, graph())


@st.composite
def narrowing(draw: st.DrawFn) -> Plan:
    """Replicas in front, shards or fewer replicas behind."""
    graph, devices = perceptron(draw(st.sampled_from([24, 256]))), draw(st.sampled_from([2, 4]))
    layers = {}
    for name, layer in graph.layers.items():
        known = strategies(layer, graph.batch or 1, devices)
        layers[name] = draw(st.sampled_from(known))
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, layers)


@pytest.mark.full
@settings(max_examples=60)
@given(narrowing(), st.sampled_from([None, "10gbe"]))
def test_the_fastest_scheme_is_no_slower_than_any_other_legal_one(plan: Plan, link: str | None) -> None:
    graph = next(one for one in (perceptron(), perceptron(256)) if one.fingerprint == plan.fingerprint)
    cluster = cluster_preset("k20", plan.devices, link)
    costs = RooflineCosts(graph, cluster)
    by_hand = Baseline("drawn", simulate(graph, cluster, costs, plan).step_s, None, True, plan=plan)
    found = rival_in_passes(by_hand, Case.of(graph, cluster, costs, PlanRequest()))
    assert found.plan is not None
    best_s = simulate(graph, cluster, costs, found.plan).step_s
    assert best_s == found.step_s
    for scheme in Scheme:
        try:
            check(replace(plan, scheme=scheme), graph)
        except PlanError:
            continue
        assert best_s <= simulate(graph, cluster, costs, replace(plan, scheme=scheme)).step_s * (1 + 1e-6)


def wide(batch: int = 256) -> LayerGraph:
    """Two layers: many activations in front of many weights."""
    return capture(nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 4096)), (torch.zeros(batch, 2048),))


@pytest.mark.full
def test_no_combination_of_strategies_and_schemes_is_faster() -> None:
    """Of a model small enough to try all of them the best is found, and by the clock."""
    graph, cluster = wide(), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster, optimizer="momentum")
    options = [strategies(layer, graph.batch or 1, 2) for layer in graph.layers.values()]
    plans = [
        Plan(graph.model, graph.fingerprint, graph.batch or 1, 2, dict(zip(graph.layers, one, strict=True)))
        for one in product(*options)
    ]
    tried = [predict(graph, cluster, costs, p).step_s for plan in plans for s in Scheme if (p := under(plan, graph, s))]
    assert decided(graph, cluster).prediction.step_s <= min(tried) * (1 + 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("scheme", Scheme)
def test_a_scheme_that_is_asked_for_is_kept(scheme: Scheme) -> None:
    decision = decided(alexnet(512), cluster_preset("k20", 4), scheme.value)
    assert decision.plan.scheme is scheme
    assert decision.passes is not None
    assert decision.passes.taken is scheme
    assert decision.proof.status == "OPTIMAL"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", Scheme)
def test_a_given_plan_keeps_its_scheme_and_the_others_are_priced(scheme: Scheme) -> None:
    graph, cluster = alexnet(512), cluster_preset("k20", 4)
    plan = hybrid(4, scheme)
    decision = decided(graph, cluster, plan=plan)
    assert decision.plan == plan
    assert decision.passes is not None
    assert [one.passes for one in decision.passes.schemes] == [1, 4, 4]
    assert [one.samples for one in decision.passes.schemes] == [512, 128, 128]
    own = next(one for one in decision.passes.schemes if one.scheme is scheme)
    assert own.step_s == pytest.approx(decision.prediction.step_s)
    assert own.exposed_transfer_s == pytest.approx(decision.prediction.transfer_s)


def test_facts_of_layers_are_of_all_their_passes() -> None:
    graph, cluster = alexnet(512), cluster_preset("k20", 4)
    decision = decided(graph, cluster, plan=hybrid(4, Scheme.INTERLEAVE))
    assert sum(one.forward_s for one in decision.layers) == pytest.approx(decision.prediction.forward_s)
    assert sum(one.backward_s for one in decision.layers) == pytest.approx(decision.prediction.backward_s)
    assert sum(one.transfer_s for one in decision.layers) > decision.prediction.transfer_s


def test_a_scheme_that_mixes_samples_is_refused_with_the_reason() -> None:
    """Batch norm behind fewer replicas would see one pass's samples."""
    graph, cluster = classifier(), cluster_preset("k20", 2)
    layers = {name: Strategy() for name in graph.layers}
    layers["conv"] = Strategy(2, devices=(0, 1))
    plan = Plan(graph.model, graph.fingerprint, 12, 2, layers)
    decision = decided(graph, cluster, plan=plan)
    assert decision.passes is not None
    why_not = {one.scheme: one.why_not for one in decision.passes.schemes}
    assert why_not[Scheme.GATHER] == ""
    assert "statistics are of the whole batch" in why_not[Scheme.BROADCAST]
    with pytest.raises(PlanError, match="statistics are of the whole batch"):
        check(replace(plan, scheme=Scheme.INTERLEAVE), graph)


@pytest.mark.parametrize(("scheme", "period", "legal"), [
    (Scheme.GATHER, 1, True), (Scheme.GATHER, 2, False), (Scheme.BROADCAST, 3, False), (Scheme.BROADCAST, 2, True),
    (Scheme.INTERLEAVE, 4, True), (Scheme.INTERLEAVE, 8, False),
])  # fmt: skip
def test_update_periods_divide_the_passes_that_the_scheme_has(scheme: Scheme, period: int, legal: bool) -> None:
    graph, plan = alexnet(512), hybrid(4, scheme, period)
    if legal:
        check(plan, graph)
    else:
        with pytest.raises(RuleError, match=r"update period"):
            check(plan, graph)


@pytest.mark.parametrize(("scheme", "given", "message"), [
    ("scatter", None, r"scheme 'scatter' is not known; use \"auto\", \"gather\""),
    ("gather", Scheme.BROADCAST, r"the plan's scheme is broadcast, and gather is asked for"),
])  # fmt: skip
def test_schemes_that_cannot_be_asked_for(scheme: str, given: Scheme | None, message: str) -> None:
    plan = None if given is None else hybrid(4, given)
    with pytest.raises(PlanError, match=message):
        decided(alexnet(512), cluster_preset("k20", 4), scheme, plan)


@pytest.mark.full
@pytest.mark.parametrize("scheme", [Scheme.BROADCAST, Scheme.INTERLEAVE])
def test_a_scheme_that_is_asked_for_is_not_left_for_a_faster_one(scheme: Scheme) -> None:
    """Fast links hide nothing behind passes: gather is faster here, and only plans of one replica count go without."""
    graph, cluster = alexnet(512), cluster_preset("h100-sxm", 4)
    decision = decided(graph, cluster, scheme.value)
    assert decided(graph, cluster).plan.scheme is Scheme.GATHER
    counts = stages(graph, decision.plan.layers, Scheme.GATHER)
    assert decision.plan.scheme is scheme or counts.max_replicas == counts.min_replicas
