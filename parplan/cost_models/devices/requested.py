"""The requested cluster: by preset and number, by file, or the devices that are here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.cluster import MOST_DEVICES, Cluster
from parplan.errors import ClusterError

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_GPU", "ClusterRequest", "FoundCluster", "Hosts", "check_names", "find_cluster", "hosts_of"]

# Planned for when no GPU is here and none is named: the most common card of current clusters.
DEFAULT_GPU = "a100-80g-sxm"

_COUNT = re.compile(r"[+-]?\d{1,12}", re.ASCII)
_HOSTS = re.compile(r"(\d{1,12})x(\d{1,12})", re.ASCII)


@dataclass(frozen=True)
class Hosts:
    """Number of devices, and of hosts; None leaves that to the preset."""

    count: int
    hosts: int | None = None


@dataclass(frozen=True)
class ClusterRequest:
    """The cluster that options name; None where an option is not given.

    Args:
        gpus: how many devices, or hosts x devices of each, "2x8".
        gpu: device preset.
        link: link preset.
        memory_bytes: memory of every device.
        cluster: a cluster, or the file that describes one; says all but the memory.
        measure: layers are to be timed on the devices that are here.
    """

    gpus: int | str | None = None
    gpu: str | None = None
    link: str | None = None
    memory_bytes: int | None = None
    cluster: Cluster | str | Path | None = None
    measure: bool = False


@dataclass(frozen=True)
class FoundCluster:
    """The cluster, what the reader must know about it, and one of its devices where they are here."""

    cluster: Cluster
    notes: tuple[str, ...] = ()
    device: torch.device | None = None


def hosts_of(gpus: int | str) -> Hosts:
    """A number of devices from 16, "16", or "2x8".

    Raises:
        ClusterError: neither, or none, or more than MOST_DEVICES.

    >>> hosts_of("2x8")
    Hosts(count=16, hosts=2)
    """
    text = str(gpus).strip()
    parts = _HOSTS.fullmatch(text)
    if parts is None and not _COUNT.fullmatch(text):
        raise ClusterError(
            f"--gpus {gpus}: neither a number of GPUs, such as 16, nor hosts x GPUs of each, such as 2x8"
        )
    hosts = int(parts[1]) if parts else None
    count = int(text) if parts is None else int(parts[1]) * int(parts[2])
    if count < 1:
        raise ClusterError(f"--gpus {gpus}: a plan needs at least 1 device")
    if count > MOST_DEVICES:
        raise ClusterError(f"--gpus {gpus}: parplan plans for up to {MOST_DEVICES} devices")
    return Hosts(count, hosts)


def check_names(request: ClusterRequest) -> None:
    """Refuse a number of devices, a name or a combination that cannot be, without torch, before any model is loaded.

    Raises:
        ClusterError: no such number, preset or link, a cluster file with mistakes, or two options that contradict.
    """
    _check_combination(request)
    from parplan.cost_models.devices.presets import device_preset, link_preset

    if request.gpus is not None:
        hosts_of(request.gpus)
    if request.gpu is not None:
        device_preset(request.gpu)
    if request.link is not None:
        link_preset(request.link)
    if isinstance(request.cluster, (str, Path)):
        from parplan.cost_models.devices.cluster_file import load_cluster

        load_cluster(request.cluster)


def _check_combination(request: ClusterRequest) -> None:
    if request.memory_bytes is not None and request.memory_bytes < 1:
        raise ClusterError(f"{request.memory_bytes} bytes of memory: a device has more; --memory is in GiB")
    if request.cluster is None:
        if request.measure and (request.gpu or "").lower() not in ("", "cpu"):
            raise ClusterError(
                f"--measure times the devices of this machine, which cannot stand for {request.gpu}; leave out --gpu"
            )
        return
    said = {"--gpus": request.gpus, "--gpu": request.gpu, "--link": request.link}
    if twice := [option for option, value in said.items() if value is not None]:
        raise ClusterError(
            f"--cluster says which devices there are and what joins them; leave out {' and '.join(twice)}, "
            "or change the file"
        )
    if request.measure:
        raise ClusterError(
            "--measure times the devices of this machine, which cannot stand for those of --cluster; leave out one"
        )


def find_cluster(request: ClusterRequest) -> FoundCluster:
    """The requested cluster.

    Raises:
        ClusterError: the request contradicts itself, does not exist, or cannot be measured here.
    """
    _check_combination(request)
    if request.cluster is None:
        import torch

        from parplan.accelerators import accelerator_count, place_of
        from parplan.cost_models.devices.local_devices import this_cluster
        from parplan.cost_models.devices.presets import cluster_preset, device_names

        here, named = accelerator_count(), (request.gpu or "").lower()
        wanted = hosts_of(request.gpus) if request.gpus is not None else Hosts(max(here, 1))
        if request.measure or (request.gpu is None and here) or named == "cpu":
            device = place_of(0) if request.gpu is None else torch.device("cpu")
            cluster = this_cluster(wanted.count, device, request.measure, link=request.link, hosts=wanted.hosts)
            note = (
                f"No GPU here: planned for {wanted.count} CPU processes of one thread each, measured on this machine."
            )
            found = FoundCluster(cluster, (note,) if request.measure and not here else (), device)
        else:
            cluster = cluster_preset(request.gpu or DEFAULT_GPU, wanted.count, request.link, wanted.hosts)
            note = f"No GPU here and no --gpu: planned for {wanted.count} x {DEFAULT_GPU}, a preset."
            if request.gpu is not None and (kind := cluster.device.kind) != request.gpu.lower():
                others = ", ".join(other for other in device_names() if other.startswith(named[:4]) and other != kind)
                note = f"--gpu {request.gpu} is {kind}{f'; there is also {others}' if others else ''}."
            exact = cluster.device.kind == named
            found = FoundCluster(cluster, () if exact else (note,))
    else:
        from parplan.cost_models.devices.cluster_file import load_cluster

        cluster = request.cluster if isinstance(request.cluster, Cluster) else load_cluster(request.cluster)
        if cluster.count > MOST_DEVICES:
            raise ClusterError(f"--cluster has {cluster.count} devices; parplan plans for up to {MOST_DEVICES}")
        note = "The memory of every device is as --memory says, not as the cluster says."
        found = FoundCluster(cluster, () if request.memory_bytes is None else (note,))
    if request.memory_bytes is None:
        return found
    return replace(found, cluster=found.cluster.with_memory(request.memory_bytes))
