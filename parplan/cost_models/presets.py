"""Devices and clusters by name, for planning where the hardware is not.

    device_preset("v100-sxm2")            one kind of GPU
    cluster_preset("a100-80g-sxm", 16)    two hosts of eight, NVLink inside, InfiniBand between
    cluster_preset("k20", 8, "10gbe")     the same GPUs, each in a host of its own

Defaults, where the table (hardware.py) leaves a choice: a host has 8 GPUs; its network adapters are shared evenly by
them; a preset offers 94 % of the labelled memory, the rest being for the driver's context and the allocator's rounding.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.hardware import ALIASES, GPUS, LINKS, GpuRow, LinkRow
from parplan.errors import ClusterError

__all__ = [
    "GPUS_PER_HOST",
    "USABLE_MEMORY",
    "cluster_links",
    "cluster_preset",
    "device_names",
    "device_preset",
    "host_links",
    "link_names",
]

GPUS_PER_HOST = 8
USABLE_MEMORY = 0.94

# One thread of a server core, as achieved in large matrix products and copies, for CPU processes nobody has measured.
_CPU = Device(
    kind="cpu",
    memory_bytes=4 << 30,
    flops_per_s={"fp32": 5e10, "fp64": 2.5e10, "bf16": 2.5e10, "fp16": 2.5e10},
    bandwidth_bytes_per_s=8e9,
    launch_s=5e-6,
    source="one thread of a server core, from memory; this_machine.calibrate_cpu() measures it",
)
_CPU_LINK = LinkRow("shared memory", 2.0, 50.0, "copies between processes of one host, from memory", estimated=True)


def device_names() -> tuple[str, ...]:
    """Every preset's name, aliases not included."""
    return (*(row.kind for row in GPUS), _CPU.kind)


def link_names() -> tuple[str, ...]:
    """Every link preset's name."""
    return tuple(row.name for row in LINKS)


def device_preset(name: str) -> Device:
    """The device called `name` ("v100-sxm2", "h200", ...), in any case.

    Raises:
        ClusterError: no such preset; the text lists those there are and the closest.
    """
    wanted = name.lower()
    if wanted == _CPU.kind:
        return _CPU
    return _device(_gpu(wanted, name))


def cluster_preset(name: str, count: int, link: str | None = None) -> Cluster:
    """`count` devices called `name`, joined by their usual links.

    Args:
        link: another link than the device's own, by preset name: a host link replaces what joins the devices of a
            host, a network link puts every device into a host of its own.

    Raises:
        ClusterError: no such device or link, or `count` is not positive.
    """
    device = device_preset(name)
    row = None if device.kind == _CPU.kind else _gpu(name.lower(), name)
    inner = _link_row(link) if link is not None else (_link_row(row.link) if row else _CPU_LINK)
    if inner.network or row is None:
        return Cluster(device, count, host_links(inner.name, count))
    return Cluster(device, count, cluster_links(row.kind, count, inner.name))


def host_links(link: str, count: int) -> tuple[Link, ...]:
    """One level (or two, where the link comes in islands) called `link` that joins `count` devices; none for one."""
    return tuple(_host_levels(_link_row(link), count)) if count > 1 else ()


def cluster_links(kind: str, count: int, link: str | None = None) -> tuple[Link, ...]:
    """The levels that join `count` GPUs of `kind` (a preset's full name), innermost first; none for one GPU."""
    row = _gpu(kind, kind)
    inner = _link_row(link or row.link)
    host = min(count, GPUS_PER_HOST)
    levels = _host_levels(inner, host) if count > 1 else []
    if count > host:
        levels.append(_level(_link_row(row.network), count, min(1.0, row.nics / GPUS_PER_HOST)))
    return tuple(levels)


def _host_levels(row: LinkRow, host: int) -> list[Link]:
    if not row.island or host <= row.island:
        return [_level(row, host, 1.0 if row.island else row.contention)]
    return [_level(row, row.island, 1.0), _level(row, host, row.contention, f"{row.name} across islands")]


def _level(row: LinkRow, size: int, contention: float, name: str = "") -> Link:
    bandwidth = row.gb_per_s * 1e9
    return Link(name or row.name, size, row.latency_us * 1e-6, bandwidth, contention, row.source, row.estimated)


def _device(row: GpuRow) -> Device:
    return Device(
        kind=row.kind,
        memory_bytes=int(row.memory_gib * 2**30 * USABLE_MEMORY),
        flops_per_s={precision: tera * 1e12 for precision, tera in row.tflops.items()},
        bandwidth_bytes_per_s=row.gb_per_s * 1e9,
        launch_s=row.launch_us * 1e-6,
        source=f"{row.source}; launch time and usable share of memory estimated",
        estimated=row.estimated,
    )


def _gpu(wanted: str, name: str) -> GpuRow:
    kind = ALIASES.get(wanted, wanted)
    for row in GPUS:
        if row.kind == kind:
            return row
    raise _unknown("device", name, (*device_names(), *ALIASES), device_names())


def _link_row(name: str) -> LinkRow:
    for row in (*LINKS, _CPU_LINK):
        if row.name == name.lower():
            return row
    raise _unknown("link", name, link_names(), link_names())


def _unknown(what: str, name: str, candidates: Iterable[str], listed: Iterable[str]) -> ClusterError:
    close = difflib.get_close_matches(name.lower(), list(candidates), n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return ClusterError(f"there is no {what} preset {name!r}{hint}; presets: {', '.join(listed)}")
