"""Clusters of one and of several kinds of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.cluster import Cluster, Device, Link
from parplan.errors import ClusterError

GPU = Device("gpu", 8 << 30, {"fp32": 1e13}, 5e11, 5e-6, "made up")
CPU = replace(GPU, kind="cpu", memory_bytes=64 << 30)


def link(size: int) -> Link:
    return Link(f"level of {size}", size, 1e-6, 1e10)


def test_equal_devices() -> None:
    cluster = Cluster.of(GPU, 4, (link(4),))
    assert (cluster.count, cluster.device, cluster.mixed) == (4, GPU, False)
    assert cluster.describe() == "4 x gpu, level of 4"
    assert [group.members for group in cluster.groups] == [(0, 1, 2, 3)]


def test_several_kinds_wherever_they_stand() -> None:
    cluster = Cluster((CPU, GPU, replace(CPU), GPU), (link(2), link(4)), "desk")
    assert [(group.device.kind, group.members) for group in cluster.groups] == [("cpu", (0, 2)), ("gpu", (1, 3))]
    assert cluster.mixed
    assert cluster.describe() == "desk: 2 x cpu + 2 x gpu, level of 2, level of 4"
    with pytest.raises(ClusterError, match="devices of several kinds"):
        _ = cluster.device


def test_memory_is_set_on_every_device() -> None:
    changed = Cluster((CPU, GPU, CPU), (link(3),), "desk").with_memory(7)
    assert [(device.kind, device.memory_bytes) for device in changed.devices] == [("cpu", 7), ("gpu", 7), ("cpu", 7)]
    assert (changed.name, changed.links) == ("desk", (link(3),))


@pytest.mark.parametrize(
    ("count", "sizes", "words"),
    [
        (0, (2,), "at least 1"),
        (4, (), "joins 1 devices of 4"),
        (4, (2,), "joins 2 devices of 4"),
        (8, (4, 2, 8), "level of 2 joins 2 devices, level of 4 below it 4"),
        (12, (4, 6, 12), "each joining a multiple"),
    ],
)
def test_what_is_no_cluster(count: int, sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        Cluster.of(GPU, count, tuple(link(size) for size in sizes))


def test_what_can_be_hidden_is_that_of_the_level_that_hides_least() -> None:
    half = replace(link(2), overlap=0.5)
    assert Cluster.of(GPU, 1, ()).overlap == 1
    assert Cluster.of(GPU, 4, (link(2), link(4))).overlap == 1
    assert Cluster.of(GPU, 4, (half, link(4))).overlap == 0.5
    slow = replace(link(2), slowdown=0.2)
    assert [Cluster.of(GPU, 4, (one, link(4))).slowdown for one in (link(2), slow)] == [0.0, 0.2]


def test_the_last_level_may_be_cut_short() -> None:
    assert Cluster.of(GPU, 12, (link(8), link(12))).link((0, 11)).size == 12
