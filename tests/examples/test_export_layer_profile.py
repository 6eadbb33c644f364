"""A captured model written as a profile, and the plan that the profile gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.export_layer_profile import format_layer_profile, layer_profile_of, write_layer_profile
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.layer_profile.costs import ProfileCosts
from parplan.cost_models.layer_profile.graph import profile_graph
from parplan.cost_models.layer_profile.records import AxisCut, Effect, LayerProfile, Samples
from parplan.cost_models.layer_profile.text import load_layer_profile, parse_layer_profile
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import ProfileError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from parplan.planner.decide import PlanRequest, decide
from tests.planner.graphs import classifier, perceptron

CLUSTER = cluster_preset("k20", 4)


def exported(graph: LayerGraph) -> LayerProfile:
    return layer_profile_of(graph, RooflineCosts(graph, CLUSTER), "a k20, estimated", (2, 4))


@pytest.mark.parametrize("make", [classifier, perceptron])
def test_what_is_exported_is_read_back(make: Callable[[], LayerGraph], tmp_path: Path) -> None:
    profile = exported(make())
    write_layer_profile(tmp_path / "net.profile", profile)
    assert load_layer_profile(tmp_path / "net.profile") == profile


def test_sizes_times_and_axes_are_those_of_the_model() -> None:
    graph = classifier()
    by_name = {layer.name: layer for layer in exported(graph).layers}
    conv, fc, loss = by_name["conv"], by_name["fc"], by_name["loss"]
    assert [times.batch for times in conv.times] == [3, 6, 12]
    cost = RooflineCosts(graph, CLUSTER).layer(graph.layers["conv"], Strategy(2, devices=(0, 1)))
    assert (conv.times[1].forward_s, conv.times[1].backward_s) == (cost.forward_s, cost.backward_s)
    assert (conv.parameter_bytes, conv.activation_bytes) == (4 * (12 * 3 * 9 + 12), 4 * 12 * 12 * 36)
    assert conv.cuts == (AxisCut("in-channels", 3, Effect.INPUT), AxisCut("out-channels", 12, Effect.OUTPUT))
    assert by_name["norm"].cuts == (AxisCut("channels", 12, Effect.BOTH),)
    assert (fc.kind, fc.activation_bytes, fc.samples) == ("linear", 4 * 12 * 24, Samples.SPLIT)
    assert (loss.kind, loss.samples, len(loss.times)) == ("loss_rows", Samples.SPLIT, 3)
    assert loss.cuts == (AxisCut("vocabulary", 4, Effect.BOTH),)
    mean = by_name["loss.batch_mean"]
    assert (mean.kind, mean.samples, mean.cuts, len(mean.times)) == ("reduce", Samples.TOGETHER, (), 1)


def test_data_parallel_and_one_device_cost_what_they_cost_the_model() -> None:
    """Nothing of these plans is beyond the profile: whole layers and replicas that were priced."""
    graph = perceptron()
    profile = exported(graph)
    copy = profile_graph(profile)
    model = decide(graph, CLUSTER, RooflineCosts(graph, CLUSTER), PlanRequest())
    other = decide(copy, CLUSTER, ProfileCosts(profile, copy, CLUSTER), PlanRequest())
    for name in ("one device", "pure data parallel"):
        ours, theirs = (next(r.step_s for r in found.baselines if r.name == name) for found in (model, other))
        assert theirs == pytest.approx(ours)


def test_a_profile_of_a_profile_is_the_same() -> None:
    profile = parse_layer_profile(format_layer_profile(exported(classifier())))
    graph = profile_graph(profile)
    again = layer_profile_of(graph, ProfileCosts(profile, graph, CLUSTER), profile.device, (2, 4))
    assert again == profile


class Parts(nn.Module):
    """A split whose parts go different ways, a broadcast, a frozen layer, and heads in another dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.positions = nn.Parameter(torch.zeros(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x).split((8, 4), dim=2)
        heads = (a + self.positions).unflatten(2, (4, 2)).transpose(1, 2)
        result: torch.Tensor = self.frozen(self.second(b) + heads.transpose(1, 2).flatten(2))
        return result


def test_parts_of_outputs_frozen_weights_and_dimensions() -> None:
    graph = capture(Parts(), (torch.randn(4, 5, 8),))
    profile = exported(graph)
    assert parse_layer_profile(format_layer_profile(profile)) == profile
    by_name = {layer.name: layer for layer in profile.layers}
    assert by_name["frozen"].parameter_bytes == 4 * 72
    assert AxisCut("out-features", 4, Effect.OUTPUT, gives=2) in by_name["first"].cuts  # 2 of 8 and 1 of 4 each
    carried = [edge for edge in profile.edges if edge.activation_bytes is not None]
    assert carried
    assert all((edge.activation_bytes or 0) < by_name[edge.source].activation_bytes for edge in carried)
    assert profile_graph(profile).parameter_count == graph.parameter_count


def test_a_model_without_samples_has_no_profile() -> None:
    class Fixed(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(3).cumsum(0)

    graph = capture(Fixed(), ())
    with pytest.raises(ProfileError, match="no input has samples"):
        exported(graph)
