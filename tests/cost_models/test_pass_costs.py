"""What a device has of a layer in one of P passes costs what it would at a batch P times smaller, under every model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaled_costs import ScaledCosts
from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.layer_profile.costs import ProfileCosts
from parplan.cost_models.layer_profile.graph import profile_graph
from parplan.cost_models.layer_profile.text import load_layer_profile
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.plan import Strategy
from tests.cost_models.made_up import all_parts, made_up_costs, made_up_profile
from tests.every_case import every_case
from tests.planner.graphs import perceptron

PASSES = 3
PROFILE = load_layer_profile(Path(__file__).resolve().parents[2] / "examples" / "alexnet.profile")


def measured(graph: LayerGraph, cluster: Cluster) -> CostModel:
    """Of what was measured at the smaller batch, whichever graph asks."""
    small = at_batch(perceptron(), 12 // PASSES)
    return made_up_costs(graph, cluster, profile=made_up_profile(small, all_parts(small, cluster)))


def scaled(graph: LayerGraph, cluster: Cluster) -> CostModel:
    return ScaledCosts(RooflineCosts(graph, cluster), 1.5)


@every_case("model", [RooflineCosts, scaled, measured], ids=["roofline", "scaled", "measured"])
@every_case("strategy", [Strategy(), Strategy(2, devices=(0, 1)), Strategy(1, 2, "out-features", (0, 1))])
def test_a_pass_costs_what_its_samples_do(
    model: Callable[[LayerGraph, Cluster], CostModel], strategy: Strategy
) -> None:
    whole, cluster = perceptron(), cluster_preset("k20", 2)
    part = at_batch(whole, 12 // PASSES)
    costs, small = model(whole, cluster), model(part, cluster)
    one = costs.layer(whole.layers["0"], strategy, PASSES)
    assert one == replace(small.layer(part.layers["0"], strategy), update_s=one.update_s)
    assert one.update_s == pytest.approx(costs.layer(whole.layers["0"], strategy).update_s)


def test_a_pass_of_a_layer_profile_is_interpolated_like_a_smaller_batch() -> None:
    cluster = cluster_preset("k20", 2)
    whole, part = profile_graph(PROFILE, 96), profile_graph(PROFILE, 32)
    costs, small = ProfileCosts(PROFILE, whole, cluster), ProfileCosts(PROFILE, part, cluster)
    for name in whole.layers:
        strategy = Strategy()
        assert costs.layer(whole.layers[name], strategy, 3) == small.layer(part.layers[name], strategy)
