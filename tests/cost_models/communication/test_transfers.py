"""Transfers: volumes against `pieces`, words, published volumes, and that more bandwidth is never slower.

What goes from where to where is in test_traffic.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parplan.cluster import Cluster, Link
from parplan.cost_models.communication.collectives import Topology
from parplan.cost_models.communication.traffic import traffic
from parplan.cost_models.communication.transfers import Transfers
from parplan.cost_models.devices.presets import cluster_preset, device_preset
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import Grid, Layout, pieces
from tests.every_case import every_case

SHAPE = (24, 12, 60)  # every count below divides every dimension


def grid(replicas: int, shards: int, first: int = 0) -> Grid:
    return Grid(tuple(range(first, first + replicas * shards)), replicas, shards)


def switch(count: int, bandwidth: float = 1e9, latency_s: float = 0.0, contention: float = 1.0) -> Cluster:
    return Cluster.of(device_preset("v100"), count, (Link("test", count, latency_s, bandwidth, contention),))


@st.composite
def layouts(draw: st.DrawFn, partial: bool) -> Layout:
    replicas, shards = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    devices = draw(st.permutations(range(12)))[: replicas * shards]
    batch = draw(st.sampled_from([None, 0, 1]))
    is_sum = partial and draw(st.booleans())
    shard = None if is_sum else draw(st.sampled_from([d for d in (None, 0, 1, 2) if d is None or d != batch]))
    return Layout(Grid(tuple(devices), replicas, shards), batch, shard, is_sum)


@given(layouts(partial=True), layouts(partial=False))
def test_on_one_switch_the_busiest_device_sets_the_time(source: Layout, target: Layout) -> None:
    value = TensorSpec(SHAPE, torch.float32, requires_grad=True)
    cost = Transfers(switch(12)).transfer(value, source, target)
    taken: Counter[int] = Counter()
    given_: Counter[int] = Counter()
    for piece in pieces(SHAPE, source, target):
        if piece.source != piece.target:
            taken[piece.target] += piece.elements * 4
            given_[piece.source] += piece.elements * 4
    busiest = max([*taken.values(), *given_.values()], default=0)
    assert cost.backward_s == cost.forward_s
    if cost.kind == "all-reduce" and source.grid == target.grid and source.batch_dim == target.batch_dim:
        assert cost.forward_s <= busiest / 1e9 * (1 + 1e-12)  # the ring beats everyone asking everyone
    else:
        assert cost.forward_s == pytest.approx(busiest / 1e9)
        assert cost.nbytes == max(taken.values(), default=0)
    assert (cost.kind in ("none", "slice")) is (busiest == 0)


ROWS4, COLUMNS4 = grid(4, 1), grid(1, 4)
ONE = grid(1, 1)
KINDS = [
    ("none", Layout(ROWS4, 0), Layout(ROWS4, 0)),
    ("slice", Layout(COLUMNS4, None), Layout(ROWS4, 0)),
    ("copy", Layout(ONE, 0), Layout(grid(1, 1, first=2), 0)),
    ("scatter", Layout(ONE, None), Layout(ROWS4, 0)),
    ("gather", Layout(ROWS4, 0), Layout(ONE, None)),
    ("gather", Layout(ROWS4, 0), Layout(grid(2, 1), 0)),
    ("broadcast", Layout(ONE, None), Layout(COLUMNS4, None)),
    ("all-gather", Layout(ROWS4, 0), Layout(COLUMNS4, None)),
    ("all-gather", Layout(COLUMNS4, None, 1), Layout(COLUMNS4, None)),
    ("all-to-all", Layout(ROWS4, 0), Layout(COLUMNS4, None, 1)),
    ("reduce", Layout(COLUMNS4, None, None, True), Layout(ONE, None)),
    ("reduce-scatter", Layout(COLUMNS4, None, None, True), Layout(ROWS4, 0)),
    ("all-reduce", Layout(COLUMNS4, None, None, True), Layout(COLUMNS4, None)),
    ("all-reduce", Layout(grid(2, 2), 0, None, True), Layout(grid(2, 2), 0)),
    ("none", Layout(grid(4, 1), 0, None, True), Layout(ROWS4, 0)),
]


@every_case(("kind", "source", "target"), KINDS)
def test_the_word_for_a_transfer(kind: str, source: Layout, target: Layout) -> None:
    assert Transfers(switch(4)).transfer(TensorSpec(SHAPE, torch.float32), source, target).kind == kind


def test_a_matrix_is_the_transfers_one_by_one() -> None:
    transfers = Transfers(cluster_preset("k20", 8))
    value = TensorSpec((64, 96), torch.float32, requires_grad=True)
    sources = [Layout(grid(r, s), b, d) for r, s in ((1, 1), (4, 2), (8, 1)) for b in (0, None) for d in (1, None)]
    matrix = transfers.transfer_matrix(value, sources, sources)
    assert matrix.forward_s.shape == (12, 12)
    for i, source in enumerate(sources):
        for j, target in enumerate(sources):
            cost = transfers.transfer(value, source, target)
            assert matrix.forward_s[i, j] == pytest.approx(cost.forward_s, rel=1e-12)
            assert matrix.backward_s[i, j] == pytest.approx(cost.backward_s, rel=1e-12)


def test_what_has_no_gradient_or_no_elements_costs_nothing() -> None:
    transfers = Transfers(switch(4, latency_s=1e-3))
    labels = transfers.transfer(TensorSpec((64,), torch.int64), Layout(ROWS4, 0), Layout(COLUMNS4, None))
    nothing = transfers.transfer_matrix(
        TensorSpec((0, 4), torch.float32, True), [Layout(ROWS4, 0)], [Layout(ONE, None)]
    )
    assert labels.forward_s > 0
    assert labels.backward_s == 0
    assert nothing.forward_s[0, 0] == nothing.backward_s[0, 0] == 0


def test_messages_are_paid_one_after_another() -> None:
    tiny = TensorSpec((4,), torch.float32)
    gathered = Transfers(switch(4, bandwidth=1e15, latency_s=1e-3)).transfer(
        tiny, Layout(ROWS4, 0), Layout(COLUMNS4, None)
    )
    assert gathered.forward_s == pytest.approx(3e-3)


@given(layouts(partial=True), layouts(partial=False), st.sampled_from([1, 1 << 20]))
def test_more_bandwidth_or_less_contention_is_never_slower(source: Layout, target: Layout, width: int) -> None:
    value = TensorSpec((24, width), torch.float32)
    slow = Cluster.of(
        device_preset("v100"), 12, (Link("in", 4, 1e-6, 1e10), Link("across", 12, 1e-5, 1e9, contention=0.25))
    )
    base = Transfers(slow).transfer(value, source, target).forward_s
    faster_inside = replace(slow, links=(replace(slow.links[0], bandwidth_bytes_per_s=2e10), slow.links[1]))
    less_shared = replace(slow, links=(slow.links[0], replace(slow.links[1], contention=1.0)))
    for better in (faster_inside, less_shared):
        assert Transfers(better).transfer(value, source, target).forward_s <= base


# Krizhevsky 2014: AlexNet, 128 images per GPU, fp32. MB that each GPU receives (our reading of the paper, ring).
DP_MB = {2: 244, 4: 367, 8: 428}
HYBRID_FC_MB = {2: 18, 4: 53, 8: 125}


@pytest.mark.parametrize("k", [2, 4, 8])
def test_published_volume_of_data_parallel_gradients(k: int) -> None:
    parameters_bytes = 61_100_840 * 4
    seconds = Topology(switch(k, bandwidth=1e6)).all_reduce([tuple(range(k))]).seconds(parameters_bytes)
    assert seconds == pytest.approx(2 * (k - 1) / k * parameters_bytes / 1e6)
    assert seconds == pytest.approx(DP_MB[k], abs=0.5)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_published_volume_of_hybrid_activations(k: int) -> None:
    transfers = Transfers(switch(k))
    images = Layout(grid(k, 1), 0)
    whole, columns = Layout(grid(1, k), None), Layout(grid(1, k), None, 1)
    pool5 = transfers.transfer(TensorSpec((128 * k, 9216), torch.float32, True), images, whole)
    fc = transfers.transfer(TensorSpec((128 * k, 4096), torch.float32, True), columns, whole)
    assert pool5.nbytes == (k - 1) * 128 * 9216 * 4
    # every gather has its backward, and fc6 and fc7 have one each
    megabytes = (2 * pool5.nbytes + 2 * 2 * fc.nbytes) / 1e6
    assert megabytes == pytest.approx(HYBRID_FC_MB[k], abs=0.5)


def test_islands_contend_only_when_all_talk_across() -> None:
    k20 = Transfers(cluster_preset("k20", 8))
    value = TensorSpec((6_000_000,), torch.uint8)  # a millisecond of one lane
    latency_s = 5.7e-6
    pair = k20.transfer(value, Layout(grid(1, 1), None), Layout(grid(1, 1, first=4), None))
    assert pair.forward_s == pytest.approx(1e-3 + latency_s)
    four = Layout(Grid((0, 1, 2, 3), 4, 1), 0)
    across = k20.transfer(value, four, Layout(Grid((4, 5, 6, 7), 4, 1), 0))
    assert across.forward_s == pytest.approx(0.5e-3 + latency_s)  # a quarter each, at half the rate
    inside = k20.transfer(value, four, Layout(Grid((1, 2, 3, 0), 4, 1), 0))
    assert inside.forward_s == pytest.approx(0.25e-3 + latency_s)


def test_rings_over_hosts_use_the_adapters_of_all_members() -> None:
    dgx = Topology(cluster_preset("a100", 16))
    everyone = dgx.all_reduce([tuple(range(16))])
    assert 2 * 15 / 16 / everyone.s_per_byte == pytest.approx(8 * 24e9)
    one_each = dgx.all_reduce([(0, 8)])
    assert 1 / one_each.s_per_byte == pytest.approx(24e9)
    assert everyone.latency_s == pytest.approx(2 * (14 * 3.4e-6 + 14e-6))


def test_rings_at_once_share_the_way_out() -> None:
    k20 = Topology(cluster_preset("k20", 8))
    assert 1 / k20.all_reduce([(0, 4)]).s_per_byte == pytest.approx(6e9)
    assert 1 / k20.all_reduce([(0, 4), (1, 5), (2, 6), (3, 7)]).s_per_byte == pytest.approx(3e9)
    assert k20.all_reduce([(0,), (1,)]).seconds(1e6) == 0


def test_nothing_is_sent_to_become_a_sum() -> None:
    with pytest.raises(ValueError, match="partial"):
        traffic(Layout(COLUMNS4, None), Layout(COLUMNS4, None, None, True))


# Krizhevsky 2014: islands 0-3 and 4-7, 6 GB/s per device, 3 GB/s each across when all talk: 12 GB/s out of an island.
HOP = 5.7e-6


def test_all_reduce_over_two_islands_by_hand() -> None:
    k20, nbytes = Topology(cluster_preset("k20", 8)), 48e6
    # One ring passes each way between the islands once, so it has a lane to itself: 14 steps of 6 MB at 6 GB/s.
    assert k20.all_reduce([tuple(range(8))]).seconds(nbytes) == pytest.approx(14 * 1e-3 + 14 * HOP)
    # A ring in each island: 6 steps of 12 MB at 6 GB/s.
    inside = k20.all_reduce([(0, 1, 2, 3), (4, 5, 6, 7)])
    assert inside.seconds(nbytes) == pytest.approx(6 * 2e-3 + 6 * HOP)
    # Four pairs across: 2 steps of 24 MB, each at its quarter of the 12 GB/s.
    pairs = k20.all_reduce([(0, 4), (1, 5), (2, 6), (3, 7)])
    assert pairs.seconds(nbytes) == pytest.approx(2 * 8e-3 + 2 * HOP)


def test_all_to_all_over_two_islands_by_hand() -> None:
    value = TensorSpec((48_000, 1000), torch.uint8)  # 48 MB: 6 MB on each device, in pieces of 0.75 MB
    rows, columns = Layout(grid(8, 1), 0), Layout(grid(1, 8), None, 1)
    eight = Transfers(cluster_preset("k20", 8)).transfer(value, rows, columns)
    assert eight.kind == "all-to-all"
    # A device sends 7 pieces at 6 GB/s: 0.875 ms. An island sends 4 x 4 pieces out at 12 GB/s: 1 ms, which is longer.
    assert eight.forward_s == pytest.approx(1e-3 + 7 * HOP)
    # Within one island nothing is shared: 3 pieces of 3 MB at 6 GB/s.
    four = Transfers(cluster_preset("k20", 4)).transfer(value, Layout(grid(4, 1), 0), Layout(grid(1, 4), None, 1))
    assert four.forward_s == pytest.approx(1.5e-3 + 3 * HOP)
    # Without contention eight devices would be held up by their own lanes only.
    cluster = cluster_preset("k20", 8)
    free = replace(cluster, links=(cluster.links[0], replace(cluster.links[1], contention=1.0)))
    assert Transfers(free).transfer(value, rows, columns).forward_s == pytest.approx(0.875e-3 + 7 * HOP)
