"""What was predicted for a plan, what is learned from running it, and whether the planner then thinks otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import parplan
from parplan.cluster import Cluster
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measured import MeasuredCosts, profiled_costs
from parplan.cost_models.measurement.runnable_parts import part_entry, part_signature
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.cost_models.sampling import Measurement
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.decide import PlanRequest, decide
from parplan.predicted_vs_measured import PredictedVsMeasured, Replan, devices_at_work, learn, predict_plan, replan
from parplan.runtime.measurement.measured_step import Figure, MeasuredPart, MeasuredStep, StepPart
from tests.plans import plan_by

SLOW_S, FAST_S = 1.0, 1e-3


def net() -> nn.Sequential:
    """Two equal layers and one of its own."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.fixture
def graph() -> LayerGraph:
    """The net, captured with 8 samples."""
    return capture(net(), (torch.randn(8, 16),))


@pytest.fixture
def cluster() -> Cluster:
    """Two logical CPU devices."""
    return this_cluster(2, torch.device("cpu"))


def measured(graph: LayerGraph, seconds: Mapping[str, float], turns: bool = False) -> MeasuredStep:
    """A step in which every layer took so long, and twice as long backward."""
    layers = (MeasuredPart(StepPart.LAYER, Figure(s, 0.01), Figure(2 * s, 0.02), n) for n, s in seconds.items())
    total = Figure(sum(3 * s for s in seconds.values()))
    return MeasuredStep(
        model=graph.model,
        batch=8,
        devices=2,
        processes=1 if turns else 2,
        turns=turns,
        steps=7,
        updated=True,
        slowest_step_s=total.seconds,
        parts=(*layers, MeasuredPart(StepPart.STEP, total)),
    )


def looked_back(
    graph: LayerGraph, cluster: Cluster, plan: Plan, seconds: Mapping[str, float], reference_s: float = 0.0
) -> PredictedVsMeasured:
    predicted = predict_plan(graph, plan, cluster, RooflineCosts(graph, cluster))
    step = replace(measured(graph, seconds), expected=predicted.expected)
    return PredictedVsMeasured(plan, predicted, step, reference_s)


def priced(graph: LayerGraph, cluster: Cluster, profile: SessionProfile) -> MeasuredCosts:
    """Costs from a profile of two devices at work."""
    return profiled_costs(graph, cluster, {2: profile}, backend="gloo")


def with_all_on_one_device(graph: LayerGraph, seconds: float) -> SessionProfile:
    """A profile in which every layer takes so long when one device has all of it."""
    profile = SessionProfile()
    for layer in graph.layers.values():
        taken = Measurement(seconds, 2 * seconds, 0.01, 5)
        profile.put(part_entry(graph, part_of(graph, layer, Strategy()), taken))
    return profile


@pytest.mark.parametrize("name", ["data parallel", "hybrid", "model parallel"])
def test_the_prediction_is_the_planners(graph: LayerGraph, cluster: Cluster, name: str) -> None:
    plan, costs = plan_by(name, 2, graph), RooflineCosts(graph, cluster)
    said = decide(graph, cluster, costs, PlanRequest(plan=plan))
    found = predict_plan(graph, plan, cluster, costs)
    assert found.step == said.prediction
    assert found.expected.step_s == said.prediction.step_s
    for report, layer in zip(found.layers, said.layers, strict=True):
        assert report.name == layer.name
        assert (report.forward_s, report.backward_s, report.source) == (layer.forward_s, layer.backward_s, layer.source)
        assert found.expected.layers[report.name].times.forward_s == layer.forward_s
    moved = sum(both.forward_s + both.backward_s for both in found.expected.transfers.values())
    assert moved == pytest.approx(sum(layer.transfer_s for layer in said.layers) + _delivery(found, graph), rel=1e-9)


def _delivery(found: object, graph: LayerGraph) -> float:
    """Results go back by a node of the planner's that is not a layer."""
    value = next(v for v in graph.user_outputs if isinstance(v, str))
    both = found.expected.transfers[value]  # type: ignore[attr-defined]
    return float(both.forward_s + both.backward_s)


def test_lines_have_the_predictions_and_their_source(graph: LayerGraph, cluster: Cluster) -> None:
    back = looked_back(graph, cluster, plan_by("data parallel", 2, graph), dict.fromkeys(graph.layers, FAST_S))
    lines = [line for line in back.measured.lines if line.part is StepPart.LAYER]
    assert [line.label for line in lines] == list(graph.layers)
    assert {line.source for line in lines} == {"estimated"}
    first = back.predicted.layers[0]
    assert lines[0].ratio == pytest.approx(3 * FAST_S / (first.forward_s + first.backward_s))
    assert "predicted" in str(back.measured)


def test_learning_keeps_one_entry_per_distinct_part(graph: LayerGraph, cluster: Cluster) -> None:
    plan, profile = plan_by("data parallel", 2, graph), SessionProfile()
    seconds = {"0": 1.0, "1": 0.2, "2": 3.0, "3": 0.4, "4": 5.0}
    back = looked_back(graph, cluster, plan, seconds, reference_s=0.5)
    found = learn(back, graph, profile)
    # The first layer's input needs no gradient, so it is not the same part as the third.
    assert found.parts == len({part_signature(graph, part_of(graph, graph.layers[n], plan.layers[n])) for n in seconds})
    assert (found.known, learn(back, graph, profile).known) == (0, found.parts)
    entry = profile.get(part_signature(graph, part_of(graph, graph.layers["1"], plan.layers["1"])))
    assert entry is not None
    relu = entry.measurement
    assert relu.forward_s == pytest.approx(0.3)
    assert relu.backward_s == pytest.approx(0.6)
    assert (relu.runs, relu.reference_s) == (14, 0.5)
    assert relu.when


def test_layers_that_were_not_seen_are_not_learned(graph: LayerGraph, cluster: Cluster) -> None:
    plan, profile = plan_by("data parallel", 2, graph), SessionProfile()
    assert learn(looked_back(graph, cluster, plan, {"4": FAST_S, "0": 0.0}), graph, profile).parts == 1


def test_what_was_learned_is_what_is_predicted_next(graph: LayerGraph, cluster: Cluster) -> None:
    plan, profile = plan_by("data parallel", 2, graph), SessionProfile()
    learn(looked_back(graph, cluster, plan, dict.fromkeys(graph.layers, FAST_S)), graph, profile)
    cost = priced(graph, cluster, profile).layer(graph.layers["4"], plan.layers["4"])
    assert FAST_S <= cost.forward_s <= 1.02 * FAST_S  # 2 % is how runs spread: the slower of two counts
    assert cost.backward_s == pytest.approx(2 * cost.forward_s)
    assert cost.source.value == "measured"


def test_a_plan_that_was_slow_is_given_up_for_one_that_is_known_to_be_fast(graph: LayerGraph, cluster: Cluster) -> None:
    plan, profile = plan_by("data parallel", 2, graph), with_all_on_one_device(graph, FAST_S)
    back = looked_back(graph, cluster, plan, dict.fromkeys(graph.layers, SLOW_S))
    learn(back, graph, profile)
    again = replan(back, graph, cluster, priced(graph, cluster, profile))
    assert again.changes
    assert again.changed == tuple(graph.layers)
    assert {len(strategy.devices) for strategy in again.plan.layers.values()} == {1}
    layers = len(graph.layers)
    assert again.now_s == pytest.approx(3 * SLOW_S * layers, rel=0.02)
    assert again.best_s == pytest.approx(3 * FAST_S * layers, rel=0.1)
    assert again.predicted_s == back.predicted.step.step_s
    sentence = again.sentence(plan)
    assert "the choice would change: 0 (2 replicas to" in sentence
    assert "and 2 more" in sentence
    assert f"{again.best_s * 1e3:.1f} ms instead" in sentence


def test_what_moves_is_named_by_layers(graph: LayerGraph, cluster: Cluster) -> None:
    """Also where nothing was measured: names of the captured graph say nothing to a person."""
    plan = plan_by("model parallel", 2, graph)
    labels = [
        line.label for line in looked_back(graph, cluster, plan, {}).measured.lines if line.part is StepPart.TRANSFER
    ]
    assert labels
    for label in labels:
        source, readers = label.removesuffix(" (not moved)").split(" -> ")
        assert source in {*graph.layers, "(inputs)"}
        assert set(readers.split(", ")) <= {*graph.layers, "(results)"}


def test_times_have_a_unit_that_suits_them(graph: LayerGraph) -> None:
    plan = plan_by("data parallel", 2, graph)
    sentence = Replan(plan, ("0",), predicted_s=0.32, now_s=12.0, best_s=1.5).sentence(plan)
    assert sentence.endswith("; 1.50 s instead (predicted step 320 ms before, 12.0 s with what was measured).")


def test_a_plan_that_was_fast_stays(graph: LayerGraph, cluster: Cluster) -> None:
    plan, profile = plan_by("data parallel", 2, graph), with_all_on_one_device(graph, SLOW_S)
    back = looked_back(graph, cluster, plan, dict.fromkeys(graph.layers, FAST_S))
    learn(back, graph, profile)
    again = replan(back, graph, cluster, priced(graph, cluster, profile))
    assert not again.changes
    assert "the choice stays" in again.sentence(plan)


def test_devices_that_took_turns_were_at_work_alone(graph: LayerGraph) -> None:
    step = measured(graph, {"0": FAST_S})
    assert devices_at_work(step) == 2
    assert devices_at_work(replace(step, turns=True)) == 1


def test_a_compiled_model_knows_what_it_was_planned_with() -> None:
    model, x = net(), torch.randn(8, 16)
    compiled = parplan.compile(model, x, devices=["cpu"] * 2)
    assert compiled.report.plan == compiled.plan
    found = compiled.measure(steps=1, warmup=0)
    assert found.expected is not None
    by_name = {layer.name: layer for layer in compiled.report.layers}
    assert set(found.expected.layers) == set(by_name)
    given = parplan.compile(net(), x, devices=["cpu"] * 2, plan=compiled.plan)
    assert given.report is None
    again = given.measure(steps=1, warmup=0)
    assert again.expected is not None
    assert set(again.expected.layers) == set(by_name)
    assert "predicted" in str(again)
