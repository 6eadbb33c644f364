"""What is asked for becomes a cluster, or one clear refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parplan.cluster import MOST_DEVICES
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.devices.requested import DEFAULT_GPU, ClusterRequest, Hosts, find_cluster, hosts_of
from parplan.errors import ClusterError

FILE = Path(__file__).resolve().parents[3] / "examples" / "clusters" / "two-islands.toml"
GIB = 2**30


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(16, Hosts(16)), ("16", Hosts(16)), ("2x8", Hosts(16, 2)), ("16x1", Hosts(16, 16)), ("1x16", Hosts(16, 1))],
)
def test_numbers_and_hosts(text: int | str, expected: Hosts) -> None:
    assert hosts_of(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("four", "--gpus four: neither a number of GPUs, such as 16, nor hosts x GPUs of each, such as 2x8"),
        ("2x8x2", "neither a number"),
        ("2x", "neither a number"),
        ("9" * 5000, "neither a number"),
        (0, "--gpus 0: a plan needs at least 1 device"),
        ("-3", "at least 1 device"),
        ("0x8", "at least 1 device"),
        ("2x0", "at least 1 device"),
        (MOST_DEVICES + 1, f"--gpus {MOST_DEVICES + 1}: parplan plans for up to {MOST_DEVICES} devices"),
        ("1000x1000", "up to"),
    ],
)
def test_numbers_that_make_no_cluster(text: int | str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        hosts_of(text)


def test_presets_with_hosts_and_links() -> None:
    found = find_cluster(ClusterRequest(gpus="4x2", gpu="v100", link="10gbe"))
    assert found.cluster == cluster_preset("v100", 8, "10gbe", hosts=4)
    assert found.notes == ("--gpu v100 is v100-sxm2; there is also v100-sxm2-32g, v100-pcie.",)
    assert find_cluster(ClusterRequest(gpus=2, gpu="V100-SXM2")).notes == ()
    assert [level.size for level in found.cluster.links] == [2, 8]


def test_nothing_said_is_a_preset_with_a_note() -> None:
    found = find_cluster(ClusterRequest(gpus=4))
    assert found.cluster == cluster_preset(DEFAULT_GPU, 4)
    assert found.notes == (f"No GPU here and no --gpu: planned for 4 x {DEFAULT_GPU}, a preset.",)


def test_memory_replaces_that_of_every_device() -> None:
    assert find_cluster(ClusterRequest(gpus=2, gpu="k20", memory_bytes=GIB)).cluster.device.memory_bytes == GIB
    found = find_cluster(ClusterRequest(cluster=FILE.with_name("workstation.toml"), memory_bytes=GIB))
    assert {device.memory_bytes for device in found.cluster.devices} == {GIB}
    assert [group.device.kind for group in found.cluster.groups] == ["rtx4090", "desktop-cpu"]
    assert "memory" in found.notes[0]


def test_a_cluster_or_its_file() -> None:
    from_file = find_cluster(ClusterRequest(cluster=FILE)).cluster
    assert find_cluster(ClusterRequest(cluster=str(FILE))).cluster == from_file
    assert find_cluster(ClusterRequest(cluster=from_file)).cluster is from_file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 8}, "leave out --gpus, or change the file"),
        ({"gpus": 8, "gpu": "k20", "link": "pcie3"}, "leave out --gpus and --gpu and --link"),
        ({"measure": True}, "--measure times the devices of this machine, which cannot stand for those of --cluster"),
        ({"memory_bytes": 0}, "0 bytes of memory"),
    ],
)
def test_what_contradicts_a_cluster_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        find_cluster(replace(ClusterRequest(cluster=FILE), **change))  # type: ignore[arg-type]


def test_too_large_a_cluster_is_refused(tmp_path: Path) -> None:
    tables = '[[devices]]\npreset = "k20"\ncount = 1000\n' * 2 + '[[links]]\npreset = "10gbe"\nsize = 2000\n'
    (tmp_path / "big.toml").write_text(tables)
    with pytest.raises(ClusterError, match="--cluster has 2000 devices; parplan plans for up to 1024"):
        find_cluster(ClusterRequest(cluster=tmp_path / "big.toml"))


def test_measured_processes_may_be_joined_by_another_link() -> None:
    found = find_cluster(ClusterRequest(gpus="2x2", link="10gbe", measure=True))
    assert [(link.name, link.size, link.contention) for link in found.cluster.links] == [
        ("shared memory", 2, 1.0),
        ("10gbe", 4, 0.5),
    ]
