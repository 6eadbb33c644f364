"""The devices of this machine: names of GPUs, memory, and rates that can be measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from parplan.cost_models.devices.local_devices import device_memory_bytes, host_device, preset_of, this_cluster
from parplan.cost_models.devices.presets import device_names, device_preset
from parplan.errors import ClusterError
from tests.every_case import every_case

NAMES = [
    ("Tesla K20c", "k20"),
    ("Tesla K80", "k80"),
    ("Tesla P100-SXM2-16GB", "p100-sxm2"),
    ("Tesla P100-PCIE-16GB", "p100-pcie"),
    ("Tesla V100-SXM2-16GB", "v100-sxm2"),
    ("Tesla V100-SXM2-32GB", "v100-sxm2-32g"),
    ("Tesla V100-PCIE-16GB", "v100-pcie"),
    ("NVIDIA A100-SXM4-40GB", "a100-40g-sxm"),
    ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"),
    ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
    ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"),
    ("NVIDIA H100 80GB HBM3", "h100-sxm"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H200", "h200-sxm"),
    ("NVIDIA B200", "b200-sxm"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("NVIDIA T4", None),
]


@every_case(("name", "kind"), NAMES)
def test_drivers_names_lead_to_presets(name: str, kind: str | None) -> None:
    assert preset_of(name) == kind
    assert kind is None or kind in device_names()


def test_the_cpu_as_logical_devices_that_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    one, four = this_cluster(), this_cluster(4)
    assert (one.count, four.count) == (1, 4)
    assert four.device.kind == "cpu"
    assert four.device.memory_bytes == one.device.memory_bytes // 4
    assert "4 logical devices share each" in four.device.source
    assert four.links[0].name == "shared memory"
    assert four.device.estimated


def test_a_calibrated_cpu_is_no_estimate() -> None:
    device = host_device("cpu", calibrate=True)
    assert not device.estimated
    assert "measured" in device.source
    assert min(*device.flops_per_s.values(), device.bandwidth_bytes_per_s, device.launch_s) > 0
    assert device.memory_bytes < device_memory_bytes(torch.device("cpu"))


@dataclass(frozen=True)
class Properties:
    """What torch tells of a GPU."""

    multi_processor_count: int = 40


def pretend(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if CUDA devices called `names` were here."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda index: (0, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())


def test_gpus_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200", "NVIDIA H200")
    both = this_cluster()
    assert (both.count, both.device.kind, both.links[0].name) == (2, "h200-sxm", "nvlink4")
    assert both.device.memory_bytes == int(0.94 * 140 * 2**30)
    assert both.device.flops_per_s == device_preset("h200").flops_per_s
    assert this_cluster(4).device.memory_bytes == both.device.memory_bytes // 2
    assert this_cluster(2, torch.device("cpu")).device.kind == "cpu"


def test_a_gpu_nobody_listed_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA T4", "NVIDIA T4")
    cluster = this_cluster()
    assert cluster.device.kind == "nvidia-t4"
    assert cluster.device.estimated
    assert "no preset" in cluster.device.source
    assert cluster.links[0].name == "pcie4"


def test_gpus_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200", "NVIDIA T4")
    with pytest.raises(ClusterError, match=r"differ .*choose equal ones"):
        this_cluster()
    assert this_cluster(1).device.kind == "h200-sxm"


@pytest.mark.parametrize(
    ("kind", "message"), [("cuda:9", "there is no cuda:9: this"), ("meta", "there is no meta: this")]
)
def test_devices_that_are_not_here(kind: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        host_device(kind)


@pytest.mark.gpu
def test_the_gpu_that_is_here() -> None:
    device = host_device("cuda")
    assert torch.cuda.get_device_name(0) in device.source
    assert device.memory_bytes < torch.cuda.get_device_properties(0).total_memory
