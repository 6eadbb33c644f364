"""Clusters of several kinds of devices: what a plan costs there, and that the best is found whatever their order."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.devices.presets import device_preset
from parplan.cost_models.roofline import RooflineCosts, rate_notes
from parplan.errors import ClusterError, InfeasiblePlan
from parplan.graph.layer_graph import LayerGraph
from parplan.pins import read_pins
from parplan.plan import Strategy
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.decision import Decision
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from tests.planner.graphs import classifier, perceptron
from tests.planner.oracle import brute_force

# Slow enough that small layers are worth spreading, on links fast enough.
GPU = Device("gpu", 1 << 30, {"fp32": 2e9}, 1e10, 1e-7, "made up", like="")
SLOW = replace(GPU, kind="slow", memory_bytes=4 << 30, flops_per_s={"fp32": 1e8}, bandwidth_bytes_per_s=1e9)
LINK = Link("link", 8, 1e-7, 1e10)


def cluster_of(*devices: Device) -> Cluster:
    return Cluster(devices, (LINK,))


def decided(graph: LayerGraph, cluster: Cluster, request: PlanRequest | None = None) -> Decision:
    return decide(graph, cluster, RooflineCosts(graph, cluster), request or PlanRequest())


ORDERS = [(GPU, GPU, SLOW), (GPU, SLOW, GPU), (SLOW, GPU, GPU)]
in_every_order = pytest.mark.parametrize(
    "devices", ORDERS, ids=lambda devices: "-".join(device.kind for device in devices)
)


def gpus_of(devices: tuple[Device, ...]) -> tuple[int, ...]:
    return tuple(number for number, device in enumerate(devices) if device is GPU)


def every_block(count: int) -> list[tuple[int, ...]]:
    """All sets of devices, whatever the planner tries."""
    chosen = product((False, True), repeat=count)
    return [tuple(d for d, used in enumerate(mask) if used) for mask in chosen if any(mask)]


@pytest.mark.full
@pytest.mark.parametrize("link", [LINK, replace(LINK, latency_s=1e-5, bandwidth_bytes_per_s=1e8)], ids=["fast", "slow"])
@in_every_order
def test_no_choice_of_devices_is_faster(devices: tuple[Device, ...], link: Link) -> None:
    graph, cluster = perceptron(8), Cluster(devices, (link,))
    costs = RooflineCosts(graph, cluster)
    candidates = {name: strategies(layer, 12, every_block(3)) for name, layer in graph.layers.items()}
    shape = Shape(lanes=(0, 1, 2), anywhere=True)
    problem = formulate(graph, cluster, costs, candidates, shape=shape, far_s=1.0).problem
    whole = read_pins(["*=state:replicated"])
    decision = decided(graph, cluster, PlanRequest(tolerance=0.0, started_ranks=True, pins=whole, price_pins=False))
    assert decision.proof.status == "OPTIMAL"
    assert decision.prediction.step_s == pytest.approx(brute_force(problem).objective, rel=1e-6)


@pytest.mark.sampled(1)
@in_every_order
def test_the_two_gpus_and_not_the_slow_one(devices: tuple[Device, ...]) -> None:
    decision = decided(perceptron(96), cluster_of(*devices))
    used = {number for strategy in decision.plan.layers.values() for number in strategy.devices}
    assert used == set(gpus_of(devices))
    rivals = {rival.name: rival for rival in decision.baselines}
    assert rivals["one device"].on == "gpu"
    assert rivals["pure data parallel"].on == rivals["pure model parallel"].on == "2 x gpu"
    one = rivals["one device"].plan
    assert one is not None
    assert {strategy.devices for strategy in one.layers.values()} == {gpus_of(devices)[:1]}


@pytest.mark.full
@in_every_order
def test_memory_is_each_devices_own(devices: tuple[Device, ...]) -> None:
    """On GPUs that hold a third of the model the slow device, which has room, takes the rest."""
    graph = perceptron(96)
    free = decided(graph, cluster_of(SLOW))
    small = replace(GPU, memory_bytes=max(free.prediction.memory_bytes) // 6)
    cluster = cluster_of(*(small if device is GPU else device for device in devices))
    decision = decided(graph, cluster)
    limits = [device.memory_bytes for device in cluster.devices]
    assert all(used <= limit for used, limit in zip(decision.prediction.memory_bytes, limits, strict=True))
    slow = next(number for number, device in enumerate(devices) if device is SLOW)
    assert any(slow in strategy.devices for strategy in decision.plan.layers.values())
    one = next(rival for rival in decision.baselines if rival.name == "one device")
    assert (one.on, one.fits, one.limit_bytes) == ("slow", True, SLOW.memory_bytes)


def test_what_does_not_fit_names_the_kind() -> None:
    cluster = cluster_of(replace(GPU, memory_bytes=512), replace(SLOW, memory_bytes=1024))
    with pytest.raises(InfeasiblePlan, match=r"device [01] \((gpu|slow)\) has"):
        decided(perceptron(8), cluster)


def test_a_layer_takes_as_long_as_its_slowest_device() -> None:
    graph = classifier()
    costs = RooflineCosts(graph, cluster_of(GPU, SLOW, GPU))
    fast, slow = (RooflineCosts(graph, Cluster.of(device, 3, (LINK,))) for device in (GPU, SLOW))
    layer = graph.layers["conv"]
    for devices, alone in (((0, 2), fast), ((0, 1), slow), ((1,), slow), ((2,), fast)):
        strategy = Strategy(len(devices), 1, None, devices)
        assert costs.layer(layer, strategy) == alone.layer(layer, strategy)


@in_every_order
def test_blocks_hold_each_kind_and_all_devices(devices: tuple[Device, ...]) -> None:
    blocks = cluster_blocks(cluster_of(*devices))
    slow = devices.index(SLOW)
    assert {gpus_of(devices), gpus_of(devices)[:1], (slow,), (0, 1, 2)} <= set(blocks)
    assert len(set(blocks)) == len(blocks)
    assert {(0,), (1,), (2,)} <= set(cluster_blocks(cluster_of(*devices), everywhere=True))


@pytest.mark.parametrize("counts", [(8, 8), (32, 32, 32), (3,) * 9])
def test_blocks_of_many_devices_stay_few(counts: tuple[int, ...]) -> None:
    kinds = [replace(GPU, kind=f"kind {index}") for index in range(len(counts))]
    devices = tuple(kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count))
    blocks = cluster_blocks(Cluster(devices, (replace(LINK, size=len(devices)),)))
    assert tuple(range(len(devices))) in blocks
    assert len(blocks) <= sum(counts) + 2 ** min(len(counts), 6)


def test_a_cpu_without_the_rate_falls_back_with_a_note_and_a_gpu_is_refused() -> None:
    graph, a100, cpu = perceptron(8), device_preset("a100"), device_preset("cpu")
    costs = RooflineCosts(graph, cluster_of(a100, cpu), precision="tf32")
    note = "cpu has no tf32 rate: what it computes is priced at its fp32 rate."
    assert rate_notes(cluster_of(a100, cpu), "tf32") == (note,)
    alone = RooflineCosts(graph, cluster_of(a100, cpu))
    layer = graph.layers["0"]
    assert costs.layer(layer, Strategy(devices=(1,))) == alone.layer(layer, Strategy(devices=(1,)))
    assert rate_notes(cluster_of(a100, cpu), "fp32") == ()
    with pytest.raises(ClusterError, match="k20 has no tf32 rate; use one of fp32"):
        RooflineCosts(graph, cluster_of(a100, device_preset("k20")), precision="tf32")
