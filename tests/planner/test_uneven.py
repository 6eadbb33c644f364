"""Unequal parts of the batch: where plans take them, what the report says, and what pins and rules decide."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import PinError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.pins import read_pins
from parplan.plan import Scheme
from parplan.planner import decide as driver
from parplan.planner.decision import Baseline, Decision
from parplan.planner.explain.advice import advice, better_batch
from parplan.planner.request import PlanRequest
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.rules import parts_words
from parplan.planner.search_space.strategies import offers_uneven, strategies
from parplan.planner.search_space.verifier import uneven_replicas
from parplan.report.as_json import to_dict
from tests.planner.graphs import perceptron
from tests.planner.oracle import brute_force


@cache
def images() -> LayerGraph:
    """Convolutions, which replicas suit, at a batch of 256."""
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 256, 10),
    )  # fmt: skip
    return capture(net, (torch.zeros(1, 3, 32, 32).expand(256, -1, -1, -1),))


def decided(graph: LayerGraph, devices: int, *pins: str, kind: str = "v100-sxm2", **options: Any) -> Decision:
    cluster = cluster_preset(kind, devices)
    request = PlanRequest(pins=read_pins(pins), **options)
    return driver.decide(graph, cluster, RooflineCosts(graph, cluster), request)


@pytest.mark.full
@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_256_samples_are_nearly_as_fast_as_a_batch_that_divides(devices: int) -> None:
    batch = -(-256 // devices) * devices
    uneven, even = decided(images(), devices), decided(at_batch(images(), batch), devices)
    assert uneven.speedup is not None
    assert even.speedup is not None
    assert uneven.speedup >= 0.95 * even.speedup
    assert uneven.speedup >= 0.8 * devices
    assert uneven.proof.status == "OPTIMAL"
    assert devices in uneven_replicas(uneven.plan, images())
    assert uneven.plan.scheme is Scheme.GATHER
    parts = parts_words(256, devices)
    assert f"{devices} replicas have {parts} samples; bends R1" in uneven.notes[0]
    found = to_dict(uneven)
    assert [f"R1: {parts} samples"] in found["bends"].values()
    rival = next(one for one in found["baselines"] if one["name"] == "pure data parallel")
    assert (rival["bends"], rival["fits"]) == (f"R1: {parts} samples", True)


def test_strict_rules_keep_equal_parts() -> None:
    decision = decided(images(), 3, rules="strict")
    assert uneven_replicas(decision.plan, images()) == ()
    rival = next(one for one in decision.baselines if one.name == "pure data parallel")
    assert rival.why_not == "R1: a batch of 256 does not divide by 3; 258 does"
    assert rival.step_s is None


@pytest.mark.full
def test_unequal_parts_that_gain_too_little_are_not_taken() -> None:
    whole = "*=state:replicated"
    even = decided(images(), 3, whole, rules="strict", tolerance=0.0, started_ranks=True)
    taken = decided(images(), 3, whole, tolerance=0.0, started_ranks=True)
    gain = even.prediction.step_s / taken.prediction.step_s - 1

    def searched(tolerance: float) -> float:
        request = PlanRequest(tolerance=tolerance, pins=read_pins([whole]))
        return driver.estimate(graph, cluster, RooflineCosts(graph, cluster), request).step_s

    graph, cluster = images(), cluster_preset("v100-sxm2", 3)
    assert searched(1.01 * gain) == pytest.approx(even.prediction.step_s)
    assert searched(0.9 * gain) == pytest.approx(taken.prediction.step_s)


@pytest.mark.parametrize("devices", [2, 3])
def test_no_combination_of_strategies_is_faster(devices: int) -> None:
    graph, cluster = at_batch(perceptron(), 11), cluster_preset("k20", devices)
    candidates = {name: strategies(layer, 11, devices, uneven=True) for name, layer in graph.layers.items()}
    problem = formulate(graph, cluster, RooflineCosts(graph, cluster), candidates).problem
    least_s = brute_force(problem).objective
    decision = decided(graph, devices, kind="k20", tolerance=0.0, started_ranks=True)
    assert decision.prediction.step_s == pytest.approx(least_s, rel=1e-6)


def test_devices_that_divide_the_batch_are_offered_nothing_new() -> None:
    for batch, devices in ((256, 4), (12, 3), (12, 1), (1, 2), (2, 3)):
        assert not offers_uneven(batch, cluster_preset("k20", devices))
    assert offers_uneven(256, cluster_preset("k20", 6))
    assert not offers_uneven(None, cluster_preset("k20", 6))
    graph = perceptron()
    own, more = (strategies(graph.layers["0"], 12, 5, uneven=uneven) for uneven in (False, True))
    assert {one.replicas for one in set(more) - set(own)} == {5}
    assert all(one.replicas <= 12 for one in strategies(graph.layers["0"], 12, 16, uneven=True))


# ---- pins ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_pin_may_ask_for_unequal_parts() -> None:
    decision = decided(perceptron(), 6, "0=replicas:5", kind="k20")
    assert decision.plan.layers["0"].replicas == 5
    assert uneven_replicas(decision.plan, perceptron()) == (5,)
    with pytest.raises(PinError, match=r"a batch of 12 cannot be split over 5 replicas; use 3 or 4 or 6 .*\(R1\)"):
        decided(perceptron(), 6, "0=replicas:5", kind="k20", rules="strict")


@pytest.mark.full
def test_a_pin_that_leaves_nothing_else_has_unequal_parts() -> None:
    """ReLU of 48 features on five devices: neither samples nor features divide."""
    decision = decided(perceptron(), 6, "1=gpu:0,1,2,3,4", kind="k20")
    assert decision.plan.layers["1"].replicas == 5


@pytest.mark.parametrize("scheme", ["broadcast", "interleave"])
def test_a_scheme_with_passes_keeps_equal_parts(scheme: str) -> None:
    decision = decided(at_batch(perceptron(), 11), 3, kind="k20", scheme=scheme)
    assert uneven_replicas(decision.plan, at_batch(perceptron(), 11)) == ()


@pytest.mark.full
def test_updates_between_passes_keep_equal_parts() -> None:
    decision = decided(at_batch(perceptron(), 10), 4, "0=update:1", kind="k20")
    assert uneven_replicas(decision.plan, at_batch(perceptron(), 10)) == ()


# ---- advice ----------------------------------------------------------------------------------------------------------


def test_a_batch_that_divides_is_advised_where_it_gains() -> None:
    decision = decided(images(), 3)
    assert better_batch(decision.plan, images()) == "258 divides by 3: +1% samples/s."
    assert decision.advice.endswith(" 258 divides by 3: +1% samples/s.")
    assert decided(at_batch(images(), 258), 3).advice.count("divides") == 0


def test_a_larger_batch_is_not_advised_beside_one_device() -> None:
    hint, plan = "258 divides by 3: +1% samples/s.", decided(images(), 3).plan
    assert "258" not in advice(plan, 1.0, (Baseline("one device", 1.0, 1, True, plan=plan),), hint=hint)
    assert advice(plan, 1.0, (Baseline("pure data parallel", 1.0, 1, True, plan=plan),), hint=hint).endswith(hint)


@pytest.mark.parametrize(
    ("batch", "replicas", "words"),
    [(7, 2, "4, 3"), (7, 7, "1, 1, 1, 1, 1, 1, 1"), (256, 24, "16 x 11, 8 x 10"), (256, 16, "16 x 16")],
)
def test_parts_in_words(batch: int, replicas: int, words: str) -> None:
    assert parts_words(batch, replicas) == words
