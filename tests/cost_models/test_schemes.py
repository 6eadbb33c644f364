"""The three schemes at a boundary by hand, what they hide, and a whole plan in passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.collectives import Topology
from parplan.cost_models.passes import PassCosts
from parplan.cost_models.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.cost_models.schemes import exposed, rounds
from parplan.errors import PlanError
from parplan.graph.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Grid, Layout
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decide import predict

HOP = 5.7e-6
EACH = 6_000_000  # bytes on each replica: 1 ms of a lane of the paper's machine


def boundary(count: int) -> tuple[Layout, Layout]:
    """Samples on `count` replicas, wanted whole by every shard."""
    devices = tuple(range(count))
    return Layout(Grid(devices, count, 1), 0), Layout(Grid(devices, 1, count), None)


def seconds(scheme: Scheme, count: int, cluster: Cluster | None = None) -> list[float]:
    topology = Topology(cluster or cluster_preset("k20", count))
    return [time.seconds(count * EACH) for time in rounds(topology, scheme, *boundary(count))]


def test_broadcasts_by_hand() -> None:
    """A sender has one lane for all its copies; four of the eight devices' seven cross to the other island."""
    assert seconds(Scheme.BROADCAST, 4) == pytest.approx([3e-3 + 3 * HOP] * 4)
    assert seconds(Scheme.BROADCAST, 8) == pytest.approx([7e-3 + 7 * HOP] * 8)


def test_gather_by_hand() -> None:
    """All lanes at once; each island has 12 GB/s for 4 x 4 parts of 6 MB to cross, 8 ms, more than a lane's 7."""
    assert seconds(Scheme.GATHER, 4) == pytest.approx([3e-3 + 3 * HOP])
    assert seconds(Scheme.GATHER, 8) == pytest.approx([8e-3 + 7 * HOP])


def test_interleaved_rounds_are_the_gather_in_parts() -> None:
    assert seconds(Scheme.INTERLEAVE, 8) == pytest.approx([1e-3 + 7 * HOP] * 8)


@pytest.mark.parametrize("scheme", Scheme)
def test_the_way_back_takes_as_long(scheme: Scheme) -> None:
    topology, (source, target) = Topology(cluster_preset("k20", 4)), boundary(4)
    there, back = (rounds(topology, scheme, *ends) for ends in ((source, target), (target, source)))
    assert len(there) == len(back) == (1 if scheme is Scheme.GATHER else 4)


def test_compute_hides_all_rounds_but_one() -> None:
    assert exposed([3.0, 3.0, 3.0], beside_s=5.0).forward_s == 3.0
    assert exposed([3.0, 3.0, 3.0], beside_s=2.0).forward_s == 3.0 + 1.0 + 1.0
    assert exposed([3.0, 3.0, 3.0], beside_s=2.0).backward_s == 3.0
    assert exposed([3.0], beside_s=2.0) == exposed([3.0], beside_s=None)
    assert exposed([3.0, 3.0], beside_s=None).backward_s == 6.0


def captured(batch: int) -> LayerGraph:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 4096), nn.Linear(4096, 4096))
    return capture(model, (torch.zeros(batch, 3, 8, 8),))


@pytest.fixture(name="whole", scope="module")
def _whole() -> LayerGraph:
    return captured(512)


@pytest.fixture(name="one", scope="module")
def _one() -> LayerGraph:
    return captured(128)


def hybrid(graph: LayerGraph) -> Plan:
    replicas, shards = Strategy(4, devices=(0, 1, 2, 3)), Strategy(1, 4, "out-features", (0, 1, 2, 3))
    layers = {name: shards if layer.kind == "linear" else replicas for name, layer in graph.layers.items()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, 4, layers)


def in_passes(whole: LayerGraph, one: LayerGraph, scheme: Scheme, often: bool = False, hide: bool = True) -> PassCosts:
    cluster = cluster_preset("k20", 4)
    costs = RooflineCosts(whole, cluster), RooflineCosts(one, cluster)
    return PassCosts(*costs, one, hybrid(whole), cluster, scheme, often, hide)


def test_gathered_is_what_the_plan_costs_anyway(whole: LayerGraph, one: LayerGraph) -> None:
    cluster, plan = cluster_preset("k20", 4), hybrid(whole)
    gathered = in_passes(whole, one, Scheme.GATHER)
    plain = predict(whole, cluster, RooflineCosts(whole, cluster), plan)
    assert predict(whole, cluster, gathered, plan) == plain


def test_passes_take_no_less_compute_and_hide_what_they_can(whole: LayerGraph, one: LayerGraph) -> None:
    cluster, plan = cluster_preset("k20", 4), hybrid(whole)

    def step(scheme: Scheme, hide: bool = True) -> tuple[float, float]:
        found = predict(whole, cluster, in_passes(whole, one, scheme, hide=hide), plan)
        return found.forward_s + found.backward_s, found.transfer_s

    assert step(Scheme.BROADCAST)[0] == step(Scheme.INTERLEAVE)[0] > step(Scheme.GATHER)[0]
    assert step(Scheme.INTERLEAVE)[1] < step(Scheme.GATHER)[1]
    assert step(Scheme.INTERLEAVE)[1] < step(Scheme.BROADCAST)[1] < step(Scheme.BROADCAST, hide=False)[1]


def test_updates_after_every_pass(whole: LayerGraph, one: LayerGraph) -> None:
    cluster, plan = cluster_preset("k20", 4), hybrid(whole)
    once, often = (in_passes(whole, one, Scheme.BROADCAST, often) for often in (False, True))
    behind = [name for name, strategy in plan.layers.items() if strategy.replicas == 1]
    extra = sum(once.layer(whole.layers[name], plan.layers[name]).update_s for name in behind)
    found = [predict(whole, cluster, costs, plan).update_s for costs in (once, often)]
    assert found[1] - found[0] == pytest.approx(3 * extra)


def test_other_plans_are_refused(whole: LayerGraph, one: LayerGraph) -> None:
    everywhere = replace(hybrid(whole), layers=dict.fromkeys(whole.layers, Strategy(4, devices=(0, 1, 2, 3))))
    cluster = cluster_preset("k20", 4)
    costs = RooflineCosts(whole, cluster), RooflineCosts(one, cluster)
    with pytest.raises(PlanError, match="two such numbers"):
        PassCosts(*costs, one, everywhere, cluster, Scheme.BROADCAST)
