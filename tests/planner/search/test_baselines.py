"""Plans that people write by hand: data parallel is priced as DistributedDataParallel runs it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.planner.decide import decide
from parplan.planner.request import PlanRequest
from tests.planner.decided import decided
from tests.planner.graphs import classifier, perceptron


def test_data_parallel_has_batch_norm_per_device() -> None:
    graph, cluster = classifier(), cluster_preset("k20", 4)
    data = next(one for one in decided(graph, cluster).baselines if one.name == "pure data parallel")
    assert data.plan is not None
    assert data.step_s is not None
    whole_batch = decided(graph, cluster, PlanRequest(plan=data.plan)).prediction
    assert 0 < data.batch_norm_s == pytest.approx(whole_batch.batch_norm_s)
    assert data.step_s + data.batch_norm_s == pytest.approx(whole_batch.step_s)


class Blocks(nn.Module):
    """33 equal blocks with a batch norm in each, planned alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(33)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


@pytest.mark.full
def test_repeated_blocks_count_as_often_as_they_are_there() -> None:
    graph, cluster = capture(Blocks(), (torch.randn(32, 32),)), cluster_preset("k20", 2)
    costs = RooflineCosts(graph, cluster)
    decision = decide(graph, cluster, costs, PlanRequest())
    assert decision.proof.alike
    data = next(one for one in decision.baselines if one.name == "pure data parallel")
    assert data.plan is not None
    assert data.step_s is not None
    whole_batch = decide(graph, cluster, costs, PlanRequest(plan=data.plan)).prediction
    assert data.batch_norm_s == pytest.approx(whole_batch.batch_norm_s)
    assert data.step_s + data.batch_norm_s == pytest.approx(whole_batch.step_s)
    norm = next(layer for layer in decision.layers if layer.name == "blocks.2.1")
    assert {other.layers for other in norm.alternatives} == {32}  # the first block takes the user's input


@pytest.mark.full
def test_other_plans_and_models_without_batch_norm_pay_nothing_for_it() -> None:
    cluster = cluster_preset("k20", 4)
    normed = decided(classifier(), cluster).baselines
    assert all(one.batch_norm_s == 0 for one in normed if one.name != "pure data parallel")
    decision = decided(perceptron(), cluster)
    assert [one.batch_norm_s for one in decision.baselines if one.step_s] == [0.0] * sum(
        one.step_s is not None for one in decision.baselines
    )
    assert decision.prediction.batch_norm_s == 0
