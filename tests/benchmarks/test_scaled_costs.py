"""Scaled costs: linear in the factor, and nothing but layers is scaled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.scaled_costs import ScaledCosts
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import ParplanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph, TensorSpec
from parplan.layout import Layout
from parplan.plan import Plan, Strategy
from parplan.planner.decide import predict

K20 = cluster_preset("k20", 2)
BOTH = Strategy(2, devices=(0, 1))


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
    return capture(model, (torch.zeros(64, 256),))


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_layers_are_scaled_and_nothing_else(graph: LayerGraph, factor: float) -> None:
    costs = RooflineCosts(graph, K20)
    scaled = ScaledCosts(costs, factor)
    for layer in graph.layers.values():
        own, times = costs.layer(layer, BOTH), scaled.layer(layer, BOTH)
        assert times.forward_s == pytest.approx(factor * own.forward_s)
        assert times.backward_s == pytest.approx(factor * own.backward_s)
        assert times.update_s == pytest.approx(factor * own.update_s)
        assert (times.source, times.spread) == (own.source, own.spread)
        assert scaled.memory(layer, BOTH) == costs.memory(layer, BOTH)
        assert scaled.reduction(layer, BOTH) == costs.reduction(layer, BOTH)
    value = TensorSpec((64, 512), torch.float32, requires_grad=True)
    ends = Layout(BOTH.grid, 0), Layout(BOTH.grid, None)
    assert scaled.transfer(value, *ends) == costs.transfer(value, *ends)
    assert scaled.transfer_matrix(value, ends[:1], ends[1:]).forward_s == costs.transfer(value, *ends).forward_s
    assert scaled.step == costs.step


def test_steps_are_linear_in_the_factor(graph: LayerGraph) -> None:
    one = cluster_preset("k20", 1)
    plan = Plan(graph.model, graph.fingerprint, 64, 1, {name: Strategy() for name in graph.layers})
    steps = [predict(graph, one, ScaledCosts(RooflineCosts(graph, one), factor), plan).step_s for factor in (1, 2, 5)]
    assert steps == pytest.approx([steps[0], 2 * steps[0], 5 * steps[0]])


def test_overlap_can_be_given(graph: LayerGraph) -> None:
    plan = Plan(graph.model, graph.fingerprint, 64, 2, dict.fromkeys(graph.layers, BOTH))
    costs = RooflineCosts(graph, K20)
    after = predict(graph, K20, ScaledCosts(costs, 1.0, overlap=0.0), plan)
    assert after.exposed_reduce_s == pytest.approx(after.reduce_s)
    assert predict(graph, K20, costs, plan).exposed_reduce_s < after.exposed_reduce_s
    steps = [predict(graph, K20, ScaledCosts(costs, 1.0, share), plan).step_s for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert steps == sorted(steps, reverse=True)  # what hides less never takes less
    assert predict(graph, K20, costs, plan).step_s == steps[2]  # K20 are on PCIe 2


@pytest.mark.parametrize(("factor", "overlap"), [(0.0, None), (-1.0, None), (float("nan"), None), (1.0, 1.5)])
def test_nonsense_is_refused(graph: LayerGraph, factor: float, overlap: float | None) -> None:
    with pytest.raises(ParplanError, match=r"factor above 0|from 0 to 1"):
        ScaledCosts(RooflineCosts(graph, K20), factor, overlap)
