"""Charges of a layer as literal tables: which part of its gradient sum comes when, and what one pass has of a value."""

from __future__ import annotations

import pytest

from parplan.cost_models.costs import StepCost, charges
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.plan import Strategy
from tests.planner.graphs import perceptron

TWO = Strategy(2, devices=(0, 1))


@pytest.mark.parametrize(
    ("overlap", "late", "interference", "beside", "after"),
    [
        (1.0, 0.0, 0.0, 8.0, 0.0),  # links and devices that work independently
        (0.5, 0.0, 4.0, 4.0, 0.0),  # the processor that computes also carries
        (0.5, 0.25, 3.0, 3.0, 2.0),  # and a quarter comes after the update
        (-0.5, 0.0, 12.0, 0.0, 0.0),  # compute and sums hinder each other: it takes more than the sum alone
        (1.0, 1.0, 0.0, 0.0, 8.0),
    ],
)
def test_a_gradient_sum_interferes_overlaps_or_comes_after_the_update(
    overlap: float, late: float, interference: float, beside: float, after: float
) -> None:
    graph = perceptron()
    costs, layer = RooflineCosts(graph, cluster_preset("k20", 2)), graph.layers["0"]
    costs.step, costs.reduction = StepCost(overlap=overlap, late=late), lambda *_: 8.0  # type: ignore[method-assign]
    found, cost = charges(costs, layer, TWO, passes=3), costs.layer(layer, TWO, 3)
    assert (found.compute_interference_s, found.overlappable_s, found.post_update_s) == (interference, beside, after)
    assert found.reduce_s == 8.0
    assert (found.forward_s, found.backward_s, found.update_s) == (cost.forward_s, cost.backward_s, cost.update_s)
    assert (found.source, found.spread) == (cost.source, cost.spread)


def test_a_pass_has_its_share_of_the_samples_rounded_up() -> None:
    graph = perceptron()
    (value,), weight = graph.layers["0"].outputs, graph.layers["0"].parameters[0]
    assert [graph.of_pass(value, passes).shape for passes in (1, 3, 5)] == [(12, 48), (4, 48), (3, 48)]
    assert graph.of_pass(weight, 3) is graph.values[weight]
