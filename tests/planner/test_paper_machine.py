"""On the machine of Krizhevsky 2014 the solver decides as its author did, and changes its mind as arithmetic says.

Two islands of four K20, 6 GB/s inside and 3 GB/s across when all talk. At 128 images per GPU convolutions are
replicated, fc6 and fc7 sharded; at 16 times as many nothing is sharded. Nothing is pinned.

Behind it is a count of bytes, which the second half checks where it can be done by hand. K devices in r replicas of K/r
shards sum the gradients of W weights over r copies, and pass around what the B samples leave at a shard's borders:

    2 (r-1)/r x W x r/K    against    (K/r - 1)/K x B x values at the borders
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import log2
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.scaled_costs import ScaledCosts
from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.devices.cluster_file import load_cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.pins import pins_from
from parplan.plan import Strategy
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.decision import Decision
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.solver.problem import Status, evaluate
from parplan.planner.solver.solve import solve
from tests.planner.simulation.test_timeline import alexnet

ISLANDS = Path(__file__).resolve().parents[2] / "examples" / "clusters" / "two-islands.toml"
CONVOLUTIONS = tuple(f"conv{number}" for number in range(1, 6))
GPUS = (2, 4, 8)
FEW_GPUS = [2, 4, pytest.param(8, marks=pytest.mark.full)]
FEW, MANY = 128, 2048  # images per GPU
ROOM = 1 << 40  # bytes: more than a K20 has, for batches that only arithmetic can run


def paper(gpus: int, room: bool = False) -> Cluster:
    """The paper's machine; `room` for any batch."""
    cluster = cluster_preset("k20", gpus)
    return cluster.with_memory(ROOM) if room else cluster


def faster(cluster: Cluster, speed: float) -> Cluster:
    """The same machine on links `speed` times as fast."""
    links = [replace(link, bandwidth_bytes_per_s=speed * link.bandwidth_bytes_per_s) for link in cluster.links]
    return replace(cluster, links=tuple(links))


def decided(graph: LayerGraph, cluster: Cluster, optimizer: str = "momentum", overlap: float | None = None) -> Decision:
    """What is decided with whole state, nothing else pinned; with another overlap than the cluster's if given."""
    costs, pins = ScaledCosts(RooflineCosts(graph, cluster, optimizer=optimizer), 1.0, overlap), ["*=state:replicated"]
    request = PlanRequest(
        optimizer=optimizer, tolerance=0.0, started_ranks=True, pins=pins_from(pins), price_pins=False
    )
    found = decide(graph, cluster, costs, request)
    assert found.proof.gap <= 1e-6
    return found


@cache
def on_paper(each: int, gpus: int, optimizer: str = "momentum", overlap: float | None = None) -> Decision:
    """AlexNet at so many images per GPU, of which a K20 holds `FEW`; decided once."""
    return decided(alexnet(each * gpus), paper(gpus, room=each > FEW), optimizer, overlap)


@dataclass(frozen=True)
class Optimum:
    """What the solver proves best when every layer runs once; `links_s` is its step without what devices compute."""

    layers: Mapping[str, Strategy]
    links_s: float


def optimum(graph: LayerGraph, cluster: Cluster, optimizer: str = "momentum", overlap: float | None = None) -> Optimum:
    """The solver's own answer, before anybody looks at passes."""
    blocks = cluster_blocks(cluster, False)
    candidates = {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}
    costs = ScaledCosts(RooflineCosts(graph, cluster, optimizer=optimizer), 1.0, overlap)
    formulation = formulate(graph, cluster, costs, candidates)
    found = solve(formulation.problem)
    assert found.status is Status.OPTIMAL
    assert found.choice is not None
    chosen = [options[k] for options, k in zip(formulation.options, found.choice, strict=False)]
    computed_s = sum(option.cost.forward_s + option.cost.backward_s for option in chosen)
    layers = {name: option.strategy for name, option in zip(formulation.names, chosen, strict=False)}
    return Optimum(layers, evaluate(formulation.problem, found.choice).objective - computed_s)


def strategies_of(decision: Decision, names: Sequence[str]) -> list[Strategy]:
    return [decision.plan.layers[name] for name in names]


def all_replicated(decision: Decision, names: Sequence[str]) -> bool:
    gpus = decision.cluster.count
    return all((s.replicas, s.shards) == (gpus, 1) for s in strategies_of(decision, names))


def all_sharded(decision: Decision, names: Sequence[str]) -> bool:
    """Cut, over all devices."""
    gpus = decision.cluster.count
    return all(s.shards > 1 and len(s.devices) == gpus for s in strategies_of(decision, names))


# ---- the decisions ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("gpus", FEW_GPUS)
def test_at_128_images_convolutions_are_replicated_and_fc6_and_fc7_sharded(gpus: int, optimizer: str) -> None:
    found = on_paper(FEW, gpus, optimizer)
    assert all_replicated(found, CONVOLUTIONS)
    assert all_sharded(found, ("fc6", "fc7"))
    plain = next(rival for rival in found.baselines if rival.name == "pure data parallel")
    assert plain.step_s is not None
    assert plain.step_s > 1.03 * found.prediction.step_s  # no tie


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpus", FEW_GPUS)
def test_at_16_times_the_batch_nothing_is_sharded(gpus: int) -> None:
    """No plan gains a thousandth by it."""
    plain = next(rival for rival in on_paper(MANY, gpus).baselines if rival.name == "pure data parallel")
    assert plain.step_s == pytest.approx(on_paper(MANY, gpus).prediction.step_s, rel=0.001)


@pytest.mark.full
@pytest.mark.parametrize("each", [FEW, MANY])
def test_the_file_of_the_machine_decides_as_the_preset(each: int) -> None:
    file = load_cluster(ISLANDS)
    cluster = file.with_memory(ROOM) if each > FEW else file
    assert decided(alexnet(each * 8), cluster).plan == on_paper(each, 8).plan


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize(("optimizer", "overlap"), [("momentum", 0.25), ("momentum", 0.75), ("adam", 0.5)])
def test_in_one_pass_the_decisions_do_not_hang_on_a_half(gpus: int, optimizer: str, overlap: float) -> None:
    few = optimum(alexnet(FEW * gpus), paper(gpus), optimizer, overlap).layers
    many = optimum(alexnet(MANY * gpus), paper(gpus, room=True), optimizer, overlap).layers
    assert {few[name].replicas for name in CONVOLUTIONS} == {gpus}
    assert min(few["fc6"].shards, few["fc7"].shards) > 1
    assert (many["fc6"].replicas, many["fc7"].replicas) == (gpus, gpus)


@pytest.mark.full
@pytest.mark.parametrize("gpus", FEW_GPUS)
def test_they_hang_on_there_being_some_of_both(gpus: int) -> None:
    """With all of the sums hidden, replicas tie at 128; with nothing hidden shards save their update at any batch."""
    hidden = on_paper(FEW, gpus, overlap=1.0)
    plain = next(rival for rival in hidden.baselines if rival.name == "pure data parallel")
    assert plain.step_s == pytest.approx(hidden.prediction.step_s, rel=0.005)
    assert all_sharded(on_paper(MANY, gpus, overlap=0.0), ("fc6", "fc7"))


def copies(found: Optimum) -> list[float]:
    """How far each fully-connected layer is on its way from shards (0) to replicas."""
    names = [name for name, layer in alexnet(8).layers.items() if layer.kind == "linear"]
    return [log2(found.layers[name].replicas) for name in names]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpus", GPUS)
def test_a_larger_batch_only_ever_moves_layers_towards_replicas(gpus: int) -> None:
    found = [copies(optimum(alexnet(each * gpus), paper(gpus, room=True))) for each in (32, 128, 512, 2048)]
    assert all(before <= after for few, many in pairwise(found) for before, after in zip(few, many, strict=True))
    assert (found[0], found[-1]) == ([0.0] * 3, [log2(gpus)] * 3)


def test_links_so_fast_that_only_the_update_counts_bring_shards_back() -> None:
    """Where the late half decides, faster links make it cheap and what shards need not update is left."""
    speeds = (0.25, 1.0, 16.0, 256.0)
    found = [sum(copies(optimum(alexnet(512 * 4), faster(paper(4, room=True), speed)))) for speed in speeds]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def by_the_byte(count: int, overlap: float, gb_per_s: float = 1e-3, tflops: float = 1.0) -> Cluster:
    """Devices whose memory costs no time, on links without latency: products and bytes on links are all there is."""
    device = Device("made up", ROOM, {"fp32": tflops * 1e12}, 1e18, 0.0, "made up")
    return Cluster.of(device, count, (Link("made up", count, 0.0, gb_per_s * 1e9, overlap=overlap),))


@dataclass(frozen=True)
class Tail:
    """Two layers `width -> hidden -> width` without biases, at a batch, on so many devices.

    `borders` are values per sample that shards pass around: what comes in, what goes out and its gradient, and the
    gradient of what comes in where somebody wants it; `hidden` is wide enough that every other way costs more.
    """

    devices: int
    width: int
    hidden: int
    batch: int
    borders: int

    @property
    def weights(self) -> int:
        return 2 * self.width * self.hidden

    def summed_bytes(self, replicas: int) -> float:
        """What a device sends to sum gradients over its copies."""
        return 4 * 2 * (replicas - 1) * self.weights / self.devices

    def passed_bytes(self, replicas: int) -> float:
        """What a device gets of the samples of its row."""
        return 4 * (self.devices // replicas - 1) * self.borders * self.width * self.batch / self.devices

    def best(self, cost: dict[int, float]) -> int:
        """The replicas that cost least; examples in which a second way costs about as much are passed over."""
        first, second, *_ = sorted(cost.values())
        assume(second > 1.02 * first)
        return min(cost, key=lambda replicas: cost[replicas])

    def choices(self) -> list[int]:
        return [replicas for replicas in (1, 2, 4, 8) if self.devices % replicas == 0]


DEVICES = st.sampled_from([2, 4, 8])
WIDTH = st.integers(1, 8).map(lambda eighth: 8 * eighth)
SHARE = st.floats(0.1, 2.5)


@cache
def two_layers(width: int, hidden: int) -> LayerGraph:
    net = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False))
    return capture(net, (torch.zeros(8, width),))


@pytest.mark.full
@settings(max_examples=15)
@given(DEVICES, WIDTH, st.integers(1, 3), SHARE)
def test_two_layers_are_cut_where_fewer_bytes_move(devices: int, width: int, times: int, share: float) -> None:
    """Nothing hides, only bytes differ: shards and replicas break even at 4/3 as many samples as `hidden`."""
    hidden = times * devices * width
    tail = Tail(devices, width, hidden, devices * max(1, round(share * 4 / 3 * hidden / devices)), borders=3)
    moved = {r: tail.summed_bytes(r) + tail.passed_bytes(r) for r in tail.choices()}
    found = optimum(at_batch(two_layers(width, hidden), tail.batch), by_the_byte(devices, overlap=0.0), "sgd")
    assert [s.replicas for s in found.layers.values()] == [tail.best(moved)] * 2
    assert found.links_s == pytest.approx(min(moved.values()) / 1e6, rel=1e-3)


class Behind(nn.Sequential):
    """Two layers behind a convolution that has all the arithmetic and next to no weights."""

    def __init__(self, channels: int, hidden: int) -> None:
        width = 4 * channels
        super().__init__(
            nn.Conv2d(3, channels, 5, padding=2, bias=False),
            nn.AvgPool2d(16),
            nn.Flatten(),
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )


@cache
def behind(channels: int, hidden: int) -> LayerGraph:
    return capture(Behind(channels, hidden), (torch.zeros(8, 3, 32, 32),))


def seconds_by_hand(tail: Tail, overlap: float, gb_per_s: float, body_s: float) -> dict[int, float]:
    """What replicas and shards cost when `overlap` of the sums hides behind `body_s` of backward, as far as it does."""
    found = {}
    for replicas in tail.choices():
        summed_s, passed_s = (own(replicas) / gb_per_s / 1e9 for own in (tail.summed_bytes, tail.passed_bytes))
        found[replicas] = passed_s + (1 - overlap) * summed_s + max(0.0, overlap * summed_s - body_s)
    return found


@pytest.mark.full
@settings(max_examples=15)
@given(DEVICES, st.integers(2, 8), SHARE, st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2))
def test_behind_a_convolution_what_hides_is_free(
    devices: int, channels: int, share: float, overlap: float, exponent: float
) -> None:
    hidden = 8 * 4 * channels
    tail = Tail(devices, 4 * channels, hidden, devices * max(1, round(share * hidden / devices)), borders=4)
    about_s = 2 * 75 * channels * 32 * 32 * tail.batch / devices / 1e12
    # Links on which all of the sums take from a quarter to four times as long as the convolution's products.
    gb_per_s = 2**exponent * tail.summed_bytes(devices) / about_s / 1e9
    cluster, graph = by_the_byte(devices, overlap, gb_per_s), at_batch(behind(channels, hidden), tail.batch)
    everywhere = Strategy(devices, devices=tuple(range(devices)))
    body_s = RooflineCosts(graph, cluster).layer(graph.layers["0"], everywhere).backward_s
    expected = tail.best(seconds_by_hand(tail, overlap, gb_per_s, body_s))
    found = optimum(graph, cluster, "sgd")
    assert [found.layers[name].replicas for name in ("3", "4")] == [expected] * 2


# ---- which way it moves ----------------------------------------------------------------------------------------------


@cache
def classifier(width: int, side: int) -> LayerGraph:
    """Convolutions and three fully-connected layers with biases, as models are."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 16, 5, stride=4, padding=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * side * side, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8),
    )  # fmt: skip
    return capture(net, (torch.zeros(8, 3, 4 * side, 4 * side),))


def replicas_of(graph: LayerGraph, cluster: Cluster) -> int:
    """Replicas of the two wide layers, multiplied."""
    layers = optimum(graph, cluster).layers
    return layers["5"].replicas * layers["7"].replicas


SEEDS = (st.sampled_from([2, 4]), st.sampled_from([4, 8]))


@pytest.mark.full
@settings(max_examples=4)
@given(*SEEDS, st.sampled_from([256, 512, 1024, 2048]))
def test_a_larger_batch_moves_towards_replicas(gpus: int, side: int, width: int) -> None:
    graph, cluster = classifier(width, side), paper(gpus, room=True)
    found = [replicas_of(at_batch(graph, gpus * each), cluster) for each in (4, 16, 64, 256, 1024, 8192)]
    assert found == sorted(found)
    assert found[0] < found[-1] == gpus**2


@pytest.mark.full
@settings(max_examples=4)
@given(*SEEDS, st.sampled_from([32, 64, 128]))
def test_wider_layers_move_towards_shards(gpus: int, side: int, each: int) -> None:
    cluster = paper(gpus, room=True)
    found = [replicas_of(at_batch(classifier(w, side), gpus * each), cluster) for w in (64, 256, 512, 1024, 2048)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 1


@pytest.mark.full
@settings(max_examples=6)
@given(DEVICES, st.integers(2, 8), st.floats(1.2, 1.8))
def test_faster_links_move_towards_replicas_until_what_can_hide_does(devices: int, channels: int, share: float) -> None:
    """Where half of the sums is less than what shards pass around, and all of them more: replicas win once half hides.

    From K/2 replicas to K, the bytes passed around fall by 4 x width x batch / K values, the sums rise by weights.
    """
    hidden = 32 * channels
    graph = at_batch(behind(channels, hidden), devices * round(share * hidden / 4))
    speeds = [by_the_byte(devices, 0.5, gb_per_s) for gb_per_s in (1e-2, 1e-1, 1, 10, 100)]
    found = [optimum(graph, cluster, "sgd").layers["3"].replicas for cluster in speeds]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (devices // 2, devices)
