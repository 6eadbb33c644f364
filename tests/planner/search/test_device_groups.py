"""Branches at the same time: taken where they pay, told in the report, not tried where people decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import parplan
from examples import alexnet
from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.pins import pins_from
from parplan.plan import Plan, Strategy
from parplan.planner.decide import PlanRequest, decide, predict
from parplan.planner.decision import BRANCHES, Decision
from parplan.planner.search.device_groups import balance, groupings, placed
from parplan.planner.simulation.timeline import simulate
from parplan.report.as_json import to_dict
from parplan.report.sections.proof import claim
from parplan.report.terminal import render
from tests.planner.branches import GPU, Pair, cluster_of, pair
from tests.planner.graphs import classifier, perceptron
from tests.planner.tower_ranks import chosen_towers
from tests.runtime.ranks import run_case

# The fastest plan of all devices: neither one close behind it with fewer changes nor one device alone.
FASTEST = PlanRequest(tolerance=0.0, started_ranks=True)


def decided(graph: LayerGraph, cluster: Cluster, request: PlanRequest | None = None) -> Decision:
    return decide(graph, cluster, RooflineCosts(graph, cluster), request or PlanRequest())


def devices_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: strategy.devices for name, strategy in plan.layers.items()}


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
def test_towers_win_where_weights_are_heavy_and_links_slow(devices: int) -> None:
    graph, cluster = pair(width=256), cluster_preset("k20", devices, "10gbe")
    decision = decided(graph, cluster, FASTEST)
    used = {row: {d for n, s in decision.plan.layers.items() if n.startswith(row) for d in s.devices} for row in "ab"}
    assert not used["a"] & used["b"]
    assert used["a"] | used["b"] == set(range(devices)) or devices > 2
    found = decision.branches
    assert found is not None
    assert found.without_s is not None
    assert decision.prediction.step_s < 0.99 * found.without_s
    costs = RooflineCosts(graph, cluster)
    assert decision.prediction.step_s == pytest.approx(simulate(graph, cluster, costs, decision.plan).step_s)
    assert predict(graph, cluster, costs, decision.plan).step_s == pytest.approx(decision.prediction.step_s)
    assert decision.prediction.step_s == pytest.approx(decision.proof.objective, rel=0.05)


@pytest.mark.full
def test_a_decision_with_towers_says_what_runs_beside_what_and_what_is_copied() -> None:
    graph = pair(width=256)
    decision = decided(graph, cluster_preset("k20", 2, "10gbe"))
    assert decision.branches is not None
    (phase,) = decision.branches.phases
    assert sorted(track.layers for track in phase.tracks) == [("a.0", "a.1", "a.2"), ("b.0", "b.1", "b.2")]
    assert [track.devices for track in phase.tracks] == [(0,), (1,)]
    assert phase.saved_s == pytest.approx(min(track.compute_s for track in phase.tracks))
    facts = {layer.name: layer for layer in decision.layers}
    assert facts["a.1"].why.startswith("beside b.0 .. b.2 on device ")
    assert [copy.layer for copy in facts["cat"].copies] == ["b.2"]
    parts = decision.prediction
    spent = (parts.forward_s, parts.backward_s, parts.transfer_s, parts.exposed_reduce_s, parts.update_s)
    assert parts.step_s == pytest.approx(sum(spent) + parts.overhead_s)
    console = Console(width=120, record=True)
    render(decision, console)
    text = console.export_text()
    for line in ("At the same time", "a.0 .. a.2 (3 layers)", "less than one after the other", "b.2 from device "):
        assert line in text
    assert to_dict(decision)["beside"]["phases"][0]["tracks"][1]["devices"] == [1]


@pytest.mark.full
@pytest.mark.parametrize("graph", [perceptron, classifier], ids=["perceptron", "residual add"])
def test_nothing_is_spent_on_models_without_branches(graph) -> None:  # type: ignore[no-untyped-def]
    assert decided(graph(), cluster_preset("k20", 4)).branches is None


@pytest.mark.full
def test_alexnet_has_no_branches() -> None:
    net, inputs = alexnet.small()
    assert decided(capture(net, inputs), cluster_preset("k20", 4)).branches is None


BY_HAND = {
    "strict rules": PlanRequest(rules="strict"),
    "a pin": PlanRequest(pins=pins_from({"last": "shards:2"})),
    "a scheme": PlanRequest(scheme="interleave"),
}


@pytest.mark.full
@pytest.mark.parametrize("request_", BY_HAND.values(), ids=BY_HAND)
def test_nothing_is_searched_where_people_decide(request_: PlanRequest) -> None:
    decision = decided(pair(width=256), cluster_preset("k20", 2, "10gbe"), request_)
    assert decision.branches is None or decision.branches.without_s is None


@pytest.mark.full
def test_a_given_plan_on_disjoint_devices_is_priced_with_its_branches_at_once() -> None:
    graph, cluster = pair(width=256, batch=2), cluster_preset("k20", 2, "10gbe")
    place = {name: Strategy(devices=(int(name.startswith("b")),)) for name in graph.layers}
    mine = Plan(graph.model, graph.fingerprint, 2, 2, place)
    decision = decided(graph, cluster, PlanRequest(plan=mine))
    assert decision.plan == mine
    in_turn = decided(graph, cluster, PlanRequest(plan=replace(mine, layers=dict.fromkeys(place, Strategy()))))
    assert decision.branches is not None
    assert decision.branches.without_s is None
    saved_s = decision.branches.phases[0].saved_s
    assert decision.prediction.forward_s + decision.prediction.backward_s == pytest.approx(
        in_turn.prediction.forward_s + in_turn.prediction.backward_s - saved_s
    )


class Experts(nn.Module):
    """Rows of several lengths on one input, added up: (N, 256) to (N, 256)."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__()
        rows = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(length))) for length in lengths]
        self.rows = nn.ModuleList(rows)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all rows."""
        return torch.stack([row(x) for row in self.rows]).sum(0)


@pytest.mark.full
def test_memory_holds() -> None:
    """With no room for the longer row on one device, weights are spread as evenly as memory asks for."""
    graph, cluster = capture(Experts((3, 1)), (torch.randn(1, 256),)), cluster_preset("k20", 2, "10gbe")
    free = decided(graph, cluster, FASTEST)
    assert free.branches is not None
    assert free.branches.phases
    small = cluster.with_memory(int(0.8 * max(free.prediction.memory_bytes)))
    decision = decided(graph, small, FASTEST)
    assert max(decision.prediction.memory_bytes) <= small.devices[0].memory_bytes
    assert decision.prediction.step_s >= free.prediction.step_s


@pytest.mark.full
def test_many_branches_are_spread_evenly() -> None:
    graph = capture(Experts((3, 1, 1, 2, 1)), (torch.randn(1, 256),))
    decision = decided(graph, cluster_preset("k20", 2, "10gbe"), FASTEST)
    weights = [sum(layer.kind == "linear" and d in layer.strategy.devices for layer in decision.layers) for d in (0, 1)]
    assert weights == [4, 4]


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_analyze_finds_towers_and_verify_passes_them() -> None:
    torch.manual_seed(0)
    net, x = Pair(256), torch.randn(1, 256)
    decision = parplan.analyze(net, x, gpus=2, gpu="k20", link="10gbe")
    assert decision.branches is not None
    assert decision.branches.phases
    verified = parplan.verify(net, torch.randn(4, 256), plan=decision.plan)
    assert verified.passed
    assert {row.tolerance for row in verified.rows} == {1e-9}


@pytest.mark.full
def test_ranks_with_a_row_each_agree_with_the_plain_model() -> None:
    run_case(chosen_towers, 2)


class Recommender(nn.Module):
    """A large table and a few layers: (N, 4) indices to (N, 1)."""

    def __init__(self, rows: int, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.layers = nn.Sequential(nn.Linear(4 * width, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))

    def forward(self, indices: Tensor) -> Tensor:
        """A score per sample."""
        result: Tensor = self.layers(self.table(indices).flatten(1))
        return result


@pytest.mark.full
def test_a_table_too_large_for_the_gpu_lies_on_the_cpu_and_the_rest_does_not() -> None:
    net, indices = Recommender(100_000), torch.randint(1000, (64, 4))
    gpu = replace(GPU, memory_bytes=32 << 20, flops_per_s={"fp32": 1e12}, bandwidth_bytes_per_s=1e11)
    cpu = Device("cpu", 4 << 30, {"fp32": 1e10}, 1e10, 1e-6, "made up", like="")
    cluster = Cluster((gpu, cpu), (Link("bus", 2, 1e-5, 1e10),))
    decision = parplan.analyze(net, indices, cluster=cluster)
    places = devices_of(decision.plan)
    assert places["table"] == (1,)
    assert {places[name] for name in places if name.startswith("layers")} == {(0,)}
    assert decision.prediction.memory_bytes[0] <= gpu.memory_bytes
    assert parplan.verify(net, indices[:8], plan=decision.plan).passed


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("devices", [4, 8, 64])
def test_groups_are_disjoint_and_use_every_device(devices: int, count: int) -> None:
    cluster = cluster_of(devices)
    found = list(groupings(cluster, range(devices), count, [3.0, 1.0, 1.0, 1.0]))
    assert found
    assert len(set(found)) == len(found)
    for groups in found:
        assert len(groups) == count
        assert sorted(number for group in groups for number in group) == list(range(devices))


def test_groups_of_several_kinds_come_in_every_way_or_kind_by_kind() -> None:
    slow = replace(GPU, kind="slow")
    few = Cluster((GPU, slow, GPU), (Link("link", 3, 1e-6, 1e9),))
    assert len(list(groupings(few, range(3), 2, [1.0, 1.0]))) == 6
    many = Cluster((GPU, slow) * 3, (Link("link", 6, 1e-6, 1e9),))
    assert ((0, 2, 4), (1, 3, 5)) in list(groupings(many, range(6), 2, [1.0, 1.0]))


def test_a_branch_goes_to_where_it_is_done_soonest() -> None:
    assert balance([1.0] * 4, [1.0, 3.0]).count(1) == 3
    assert balance([2.0, 3.0, 1.0], [1.0, 1.0]) == (1, 0, 1)
    assert balance([1.0], [1.0, 1.0]) == (0,)


class Many(nn.Module):
    """Branches side by side, whose results are joined."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(512, 64) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


@pytest.mark.full
def test_placements_that_are_too_many_to_formulate_are_left_out_of_the_claim() -> None:
    """Eleven branches have 2,046 placements on two devices, and tables of 23 GB."""
    graph, cluster = capture(Many(11), (torch.randn(2, 512),)), cluster_preset("k20", 2)
    phase = tuple((name,) for name, layer in graph.layers.items() if layer.parameters)
    assert placed(phase, graph, cluster, RooflineCosts(graph, cluster), every=True) == ()
    few = placed(phase[:3], graph, cluster, RooflineCosts(graph, cluster), every=True)
    assert len(few) == 2**3 - 2 + 4  # and the first or the last on both devices, the two others on one each
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest(tolerance=0.0, started_ranks=True))
    assert BRANCHES not in decision.proof.covered
    assert "runs its branches one after another" in claim(decision)
