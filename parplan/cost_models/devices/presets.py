"""Devices and clusters by name, for planning where the hardware is not.

    device_preset("v100-sxm2")                  one kind of GPU
    cluster_preset("a100-80g-sxm", 16)          two hosts of eight, NVLink inside, InfiniBand between
    cluster_preset("k20", 8, "10gbe")           the same GPUs, each in a host of its own
    cluster_preset("k20", 8, "10gbe", hosts=2)  two hosts of four

Defaults, where the table (hardware_table.py) leaves a choice: a host has 8 GPUs; its network adapters are shared evenly
by them, and of a network that is not the kind's usual one it has a single adapter; a preset offers 94 % of the labelled
memory, the rest being for the driver's context and the allocator's rounding.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.devices.hardware_table import ALIASES, CPU, CPU_LINK, GPUS, LINKS, GpuRow, LinkRow
from parplan.errors import ClusterError

__all__ = [
    "GPUS_PER_HOST",
    "USABLE_MEMORY",
    "cluster_links",
    "cluster_preset",
    "device_names",
    "device_preset",
    "link_preset",
]

GPUS_PER_HOST = 8
USABLE_MEMORY = 0.94


def device_names() -> tuple[str, ...]:
    """Every preset's name, aliases not included."""
    return (*(row.kind for row in GPUS), CPU.kind)


def device_preset(name: str) -> Device:
    """The device called `name` ("v100-sxm2", "h200", ...), in any case.

    Raises:
        ClusterError: no such preset; the text lists those there are and the closest.
    """
    return _device(_gpu(name))


def link_preset(name: str) -> Link:
    """The link called `name` ("nvlink3", "pcie4", ...), in any case, as one level that joins a pair.

    Raises:
        ClusterError: no such preset; the text lists those there are and the closest.
    """
    return _level(_link_row(name), 2, 1.0)


def cluster_preset(name: str, count: int, link: str | None = None, hosts: int | None = None) -> Cluster:
    """`count` devices called `name`, joined by their usual links.

    Args:
        link: another link than the device's own, by preset name: a host link replaces what joins the devices of a
            host; a network link what joins hosts, and without `hosts` every device has one of its own.
        hosts: how many hosts share the devices evenly; default: as many as hosts of 8 take.

    Raises:
        ClusterError: no such device or link, `count` is not positive or not a multiple of `hosts`.
    """
    row = _gpu(name)
    return Cluster.of(_device(row), count, cluster_links(row.kind, count, link, hosts))


def cluster_links(kind: str, count: int, link: str | None = None, hosts: int | None = None) -> tuple[Link, ...]:
    """The levels that join `count` devices of preset `kind`, innermost first; none for one (see `cluster_preset`).

    Raises:
        ClusterError: no such device or link, or `count` is not a multiple of `hosts`.
    """
    row, named = _gpu(kind), None if link is None else _link_row(link)
    if count <= 1:
        return ()
    apart = named is not None and named.network
    inner = _link_row(row.link) if named is None or apart else named
    network = named if named is not None and apart else _link_row(row.network)
    if hosts is not None and (hosts < 1 or count % hosts):
        raise ClusterError(f"{count} devices do not spread evenly over {hosts} hosts; say it as hosts x devices, 2x8")
    host = count // hosts if hosts else 1 if apart else count if row is CPU else min(count, GPUS_PER_HOST)
    levels = []
    if inner.island and host > inner.island:
        outer = replace(inner, gb_per_s=inner.across_gb_per_s or inner.gb_per_s, pair=1.0)
        island = inner.island if count == host else gcd(host, inner.island)  # levels between others have to nest
        levels = [_level(inner, island, 1.0)] if island > 1 else []
        levels.append(_level(outer, host, inner.contention, f"{inner.name} across islands"))
    elif host > 1:
        levels = [_level(inner, host, 1.0 if inner.island else inner.contention)]
    if count > host:
        adapters = row.nics if network.name == row.network else 1
        levels.append(_level(network, count, min(1.0, adapters / host)))
    return tuple(levels)


def _level(row: LinkRow, size: int, contention: float, name: str = "") -> Link:
    bandwidth = row.gb_per_s * 1e9
    latency_s, label = row.latency_us * 1e-6, name or row.name
    return Link(
        label, size, latency_s, bandwidth, contention, row.source, row.estimated, row.overlap, row.pair, row.slowdown
    )


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


def _gpu(name: str) -> GpuRow:
    kind, rows = ALIASES.get(name.lower(), name.lower()), {row.kind: row for row in (*GPUS, CPU)}
    if kind not in rows:
        raise _unknown("device", name, (*rows, *ALIASES), rows)
    return rows[kind]


def _link_row(name: str) -> LinkRow:
    rows = {row.name: row for row in (*LINKS, CPU_LINK)}
    if name.lower() not in rows:
        raise _unknown("link", name, rows, rows)
    return rows[name.lower()]


def _unknown(what: str, name: str, candidates: Iterable[str], listed: Iterable[str]) -> ClusterError:
    close = difflib.get_close_matches(name.lower(), list(candidates), n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return ClusterError(f"there is no {what} preset {name!r}{hint}; presets: {', '.join(listed)}")
