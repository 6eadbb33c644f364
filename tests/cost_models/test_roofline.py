"""Roofline: published arithmetic, published time, and that more hardware never costs more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, Source
from parplan.cost_models.devices.presets import cluster_preset, device_names, device_preset
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.ops.efficiency import Efficiency, efficiency, kernel_seconds
from parplan.cost_models.ops.op_calls import op_calls
from parplan.cost_models.ops.work import Engine, Kernel, flops_of, op_work
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.errors import ClusterError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.lowering.holdings import BUCKET_BYTES
from parplan.plan import Strategy
from tests.cost_models.networks import NETWORKS, full_alexnet, network
from tests.every_case import every_case

ONE = Strategy()

# Krizhevsky 2014's network as in cuda-convnet2's configuration: forward MFLOP per image.
ALEXNET_MFLOP = {
    "conv1": 140.6, "conv2": 447.9, "conv3": 224.3, "conv4": 299.0, "conv5": 199.4, "fc6": 75.5, "fc7": 33.6,
    "fc8": 8.2,
}  # fmt: skip


def strategies(layer: Layer, devices: int) -> list[Strategy]:
    """Every way to spread `layer` over `devices` devices or one."""
    every = tuple(range(devices))
    found = [ONE]
    if layer.batch is not None and layer.batch.units % devices == 0:
        found.append(Strategy(devices, 1, None, every))
    return found + [Strategy(1, devices, a.name, every) for a in layer.axes if a.units % devices == 0]


def flops(graph: LayerGraph, layer: Layer, strategy: Strategy) -> float:
    return sum(flops_of(call) for call in op_calls(graph, part_of(graph, layer, strategy)))


def test_alexnet_has_the_published_arithmetic() -> None:
    graph = full_alexnet()
    found = {name: flops(graph, layer, ONE) / 512 / 1e6 for name, layer in graph.layers.items()}
    assert {name: round(mflop, 1) for name, mflop in found.items() if mflop} == ALEXNET_MFLOP
    assert sum(found.values()) == pytest.approx(1428, abs=0.5)


def test_peaks_are_the_slower_of_arithmetic_and_memory() -> None:
    graph, cluster = full_alexnet(), cluster_preset("k20", 1)
    costs, device = RooflineCosts(graph, cluster), cluster.devices[0]
    compute_s, memory_s = 1e12 / device.flops_per_s["fp32"], 1e11 / device.bandwidth_bytes_per_s
    assert costs.peak_seconds(1e12, 1.0) == pytest.approx(compute_s)
    assert costs.peak_seconds(1.0, 1e11) == pytest.approx(memory_s)
    assert costs.ideal_seconds(0.0, 0.0) == device.launch_s


def test_numbers_of_two_bytes_take_half_of_what_those_of_four_take() -> None:
    """Of what ops read and write, and of weights and saved activations."""
    found: list[list[int]] = []
    for dtype in (torch.float32, torch.bfloat16):
        net = nn.Sequential(nn.Linear(64, 32), nn.Tanh()).to(dtype)
        graph = capture(net, (torch.randn(16, 64, dtype=dtype),))
        memory, taken = MemoryModel(graph, "sgd"), list[int]()
        for layer in graph.layers.values():
            local = part_of(graph, layer, ONE)
            held = memory.layer_memory(local)
            works = [op_work(call) for call in op_calls(graph, local)]
            taken += [kernel.nbytes for work in works for kernel in (*work.forward, *work.backward)]
            taken += [held.weights_bytes, held.gradients_bytes, held.saved_bytes]
        found.append(taken)
    assert sum(nbytes > 0 for nbytes in found[0]) > 4
    assert found[0] == [2 * nbytes for nbytes in found[1]]


def test_alexnet_on_a_k20_takes_about_the_published_time() -> None:
    costs = RooflineCosts(full_alexnet(), cluster_preset("k20", 4))
    layers = [costs.layer(layer, Strategy(4, 1, None, (0, 1, 2, 3))) for layer in costs.graph.layers.values()]
    milliseconds = 1e3 * sum(cost.forward_s + cost.backward_s for cost in layers)
    assert milliseconds == pytest.approx(391.8, rel=0.1)  # Table 1: 128 images on one GPU
    assert {cost.source for cost in layers} == {Source.ESTIMATED}


@pytest.mark.full
@every_case("name", NETWORKS)
@every_case("devices", [2, 3, 4])
def test_more_devices_never_mean_more_work_for_each(name: str, devices: int) -> None:
    graph = network(name).graph
    costs: CostModel = RooflineCosts(graph, cluster_preset("v100", devices))
    for layer in graph.layers.values():
        whole, whole_memory = costs.layer(layer, ONE), costs.memory(layer, ONE)
        for strategy in strategies(layer, devices)[1:]:
            part, memory = costs.layer(layer, strategy), costs.memory(layer, strategy)
            assert flops(graph, layer, strategy) == pytest.approx(flops(graph, layer, ONE) / devices)
            assert part.forward_s <= whole.forward_s
            assert part.backward_s <= whole.backward_s
            assert memory.resident_bytes <= whole_memory.resident_bytes
            gathered = sum(graph.values[value].nbytes for value in layer.inputs) if strategy.shards > 1 else 0
            assert memory.saved_bytes <= whole_memory.saved_bytes + gathered


@pytest.mark.parametrize("name", ["alexnet", "attention"])
@pytest.mark.parametrize(
    "change", [{"bandwidth_bytes_per_s": 2e12}, {"flops_per_s": {"fp32": 1e14}}, {"launch_s": 1e-7}]
)
def test_a_better_device_is_never_slower(name: str, change: dict[str, object]) -> None:
    graph, cluster = network(name).graph, cluster_preset("v100", 1)
    better = Cluster.of(replace(cluster.device, **change), 1, ())  # type: ignore[arg-type]
    base, improved = RooflineCosts(graph, cluster), RooflineCosts(graph, better)
    for layer in graph.layers.values():
        assert improved.layer(layer, ONE).forward_s <= base.layer(layer, ONE).forward_s
        assert improved.layer(layer, ONE).backward_s <= base.layer(layer, ONE).backward_s


def test_a_kernel_by_hand() -> None:
    device = replace(device_preset("v100"), bandwidth_bytes_per_s=1e12, launch_s=1e-6)
    shares = Efficiency(gemm=0.5, conv=0.25, memory=0.5)
    kernels = [
        (Kernel(Engine.GEMM, 99e6, 0, torch.float32), (99e6 + 1e6) / 0.5e12),
        (Kernel(Engine.CONV, 99e6, 0, torch.float32), (99e6 + 1e6) / 0.25e12),
        (Kernel(Engine.GEMM, 99e6, 10**9, torch.float32), 1e9 / 0.5e12),
        (Kernel(Engine.MEMORY, 0, 10**9, torch.float32), 1e9 / 0.5e12),
        (Kernel(Engine.MEMORY, 0, 4, torch.float32), 1e-6),
    ]
    for kernel, expected in kernels:
        assert kernel_seconds(kernel, device, 1e12, shares) == pytest.approx(expected)


@every_case("name", device_names())
def test_every_device_has_sensible_efficiencies(name: str) -> None:
    device = device_preset(name)
    for precision in device.flops_per_s:
        shares = efficiency(device, precision)
        assert 0.3 < shares.conv < shares.gemm <= 1
        assert 0.5 < shares.memory <= 1


def test_precision_decides_the_rate_and_must_be_there() -> None:
    graph = full_alexnet()
    fp32, tf32 = (RooflineCosts(graph, cluster_preset("a100", 1), precision=p) for p in ("fp32", "tf32"))
    fc6, conv2 = graph.layers["fc6"], graph.layers["conv2"]
    ratio = fp32.layer(fc6, ONE).forward_s / tf32.layer(fc6, ONE).forward_s
    assert ratio == pytest.approx(8 * 0.87 / 0.8, rel=0.05)  # launches are in both
    assert fp32.layer(conv2, ONE) == tf32.layer(conv2, ONE)  # torch's default: cuDNN may use TF32, matrix products not
    assert fp32.layer(graph.layers["relu1"], ONE) == tf32.layer(graph.layers["relu1"], ONE)
    with pytest.raises(ClusterError, match="k20 has no bf16 rate; use one of fp32"):
        RooflineCosts(graph, cluster_preset("k20", 1), precision="bf16")


def test_the_reduction_of_gradients_by_hand() -> None:
    graph, cluster = full_alexnet(), cluster_preset("a100", 4)
    costs, fc6 = RooflineCosts(graph, cluster), graph.layers["fc6"]
    every, rate, hop = (0, 1, 2, 3), 235e9, 3.4e-6
    weight, bias = 9216 * 4096 * 4, 4096 * 4

    def ring(n: int, nbytes: int) -> float:
        return 2 * (n - 1) / n * nbytes / rate + 2 * (n - 1) * hop * nbytes / BUCKET_BYTES

    assert costs.reduction(fc6, ONE) == 0
    assert costs.reduction(graph.layers["relu6"], Strategy(4, 1, None, every)) == 0
    assert costs.reduction(fc6, Strategy(4, 1, None, every)) == pytest.approx(ring(4, weight + bias))
    assert costs.reduction(fc6, Strategy(1, 4, "out-features", every)) == 0
    assert costs.reduction(fc6, Strategy(2, 2, "out-features", every)) == pytest.approx(ring(2, (weight + bias) // 2))
    # the bias has no in-features: all four devices add theirs up
    by_rows = costs.reduction(fc6, Strategy(2, 2, "in-features", every))
    assert by_rows == pytest.approx(ring(2, weight // 2) + ring(4, bias))


def test_frozen_weights_are_not_reduced() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    graph = capture(model, (torch.zeros(6, 4),))
    costs = RooflineCosts(graph, cluster_preset("v100", 2))
    first, second = graph.layers.values()
    spread = Strategy(2, 1, None, (0, 1))
    assert costs.reduction(first, spread) == 0
    assert costs.reduction(second, spread) > 0
    assert costs.layer(first, ONE).backward_s == 0


def test_weights_travel_as_autocast_reads_them() -> None:
    """In bf16 half of the bytes are gathered; gradients are summed as float32; casts take what they read and write."""
    model, inputs = nn.Sequential(nn.Linear(4096, 4096, bias=False)), torch.zeros(8, 4096)
    cluster, sliced = cluster_preset("a100", 4), Strategy(4, 1, None, (0, 1, 2, 3), state="sharded")
    plain = capture(model, (inputs,))
    with torch.autocast("cpu", torch.bfloat16):
        cast = capture(model, (inputs,))
    costs, narrow = (RooflineCosts(graph, cluster, precision="bf16") for graph in (plain, cast))
    (gather_s, scatter_s), (narrow_s, same_s) = (own.gather(own.graph.layers["0"], sliced) for own in (costs, narrow))
    hops_s = 3 * 3.4e-6  # latencies, which are in both
    assert narrow_s - hops_s == pytest.approx((gather_s - hops_s) / 2, rel=0.05)
    assert same_s == scatter_s
    forward = [op_work(call).forward for call in op_calls(cast, part_of(cast, cast.layers["0"], ONE))]
    assert [kernel.nbytes for own in forward for kernel in own] == [
        8 * 4096 * (4 + 2), 4096 * 4096 * (4 + 2), 2 * (4096 * 4096 + 2 * 8 * 4096)
    ]  # fmt: skip
