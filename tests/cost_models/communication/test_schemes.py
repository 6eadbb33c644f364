"""How one pass's samples cross the boundary, in layouts and in seconds by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from parplan.cost_models.communication.schemes import broadcast_stops
from parplan.cost_models.communication.transfers import Transfers
from parplan.cost_models.devices.presets import cluster_preset
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import Grid, Layout

HOP = 5.7e-6
EACH = 6_000_000  # bytes on each replica: 1 ms of a lane of the paper's machine


def boundary(count: int) -> tuple[Layout, Layout]:
    """Samples on `count` replicas, wanted whole by every shard."""
    devices = tuple(range(count))
    return Layout(Grid(devices, count, 1), 0), Layout(Grid(devices, 1, count), None)


def seconds(count: int, *stops: Layout) -> list[float]:
    """What each part of the way takes of one pass of `count`."""
    transfers, part = Transfers(cluster_preset("k20", count)), TensorSpec((EACH // 4,), torch.float32)
    return [transfers.transfer(part, *hop).forward_s for hop in pairwise(stops)]


def test_a_broadcast_to_two_is_direct() -> None:
    assert seconds(2, *broadcast_stops(2, 2, *boundary(2), 0, 0)) == pytest.approx([1e-3 + HOP])


def test_a_broadcast_to_many_is_dealt_out_first() -> None:
    """Of four: three quarters out of the sender, then three quarters into everyone."""
    assert seconds(4, *broadcast_stops(4, 4, *boundary(4), 2, 0)) == pytest.approx([0.75e-3 + 3 * HOP] * 2)


def test_an_interleaved_pass_is_a_gather_of_a_share() -> None:
    """All lanes at once; each island has 12 GB/s for 4 x 4 parts of 0.75 MB to cross, 1 ms, more than a lane's 7/8."""
    assert seconds(4, *boundary(4)) == pytest.approx([0.75e-3 + 3 * HOP])
    assert seconds(8, *boundary(8)) == pytest.approx([1e-3 + 7 * HOP])


def test_groups_of_replicas_broadcast_at_once() -> None:
    """Eight replicas in front of two of two shards: pass 1 has the samples of replicas 1 and 5."""
    source = Layout(Grid(tuple(range(8)), 8, 1), 0)
    target = Layout(Grid((0, 1, 4, 5), 2, 2), 0)
    assert broadcast_stops(4, 8, source, target, 1, 0) == (Layout(Grid((1, 5), 2, 1), 0), target)


def test_receivers_that_want_slices_are_sent_slices() -> None:
    source, devices = Layout(Grid((0, 1, 2, 3), 4, 1), 0), (0, 1, 2, 3)
    cut = Layout(Grid(devices, 1, 4), None, 1)
    assert broadcast_stops(4, 4, source, cut, 3, 0) == (Layout(Grid((3,), 1, 1), 0), cut)


def test_results_go_back_to_where_the_samples_came_from() -> None:
    """Two devices for each of the two replicas in front: those of replica 1 get the results of pass 1."""
    made = Layout(Grid((0, 1, 2, 3), 1, 4), None, 1)
    delivered = Layout(Grid((0, 1, 2, 3), 4, 1), 0)
    assert broadcast_stops(2, 2, made, delivered, 1, 0)[-1] == Layout(Grid((2, 3), 2, 1), 0)
