"""`parplan doctor`: versions, devices, links, cache and profile of this machine in about ten lines, for an issue.

Every probe stands alone: one that fails is told as broken, with its error, and the others go on.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

from parplan import __version__
from parplan.fields import counted

__all__ = ["Finding", "examine", "report"]

PACKAGES = ("networkx", "numpy", "ortools", "rich")
VARIABLES = ("PARPLAN_CACHE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
SHOWN = 3  # kinds of measurements listed
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The lines of one probe; the last says what is wrong where it is `broken`."""

    name: str
    lines: tuple[str, ...]
    broken: bool = False


def examine() -> list[Finding]:
    """Run all probes; none raises."""
    findings = []
    for name, probe in PROBES.items():
        lines, broken = list[str](), False
        try:
            for line in probe():
                lines.append(line)
        except Exception as error:
            lines, broken = [*lines, f"BROKEN: {type(error).__name__}: {' '.join(str(error).split())}"], True
        findings.append(Finding(name, tuple(lines), broken))
    return findings


def report(findings: list[Finding]) -> str:
    """The findings as text, a name in front of the first line of each."""
    lines = [
        f"{'' if index else finding.name:<10}{line}" for finding in findings for index, line in enumerate(finding.lines)
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _versions() -> Iterator[str]:
    yield f"{__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def _torch() -> Iterator[str]:
    import torch
    import torch.distributed as dist

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    yield f"{torch.__version__}, {cuda}; between processes: {' and '.join(backends) or 'no backend'}"


def _devices() -> Iterator[str]:
    import torch

    from parplan.accelerators import accelerator_count, accelerator_name, place_of
    from parplan.cost_models.devices.local_devices import device_memory_bytes, preset_of
    from parplan.cost_models.measurement.conditions import cpu_name

    memory = device_memory_bytes(torch.device("cpu")) / GIB
    cores, threads = counted(os.cpu_count() or 1, "core"), counted(torch.get_num_threads(), "thread")
    yield f"{cpu_name()}, {cores}, {memory:.1f} GiB; torch uses {threads}"
    count = accelerator_count()
    if not count:
        yield "no accelerator"
    for device in map(place_of, range(count)):
        name = accelerator_name(device)
        preset = preset_of(name) or "no preset: rates are guessed"
        yield f"{device}: {name} ({preset}), {device_memory_bytes(device) / GIB:.1f} GiB"


def _links() -> Iterator[str]:
    from parplan.accelerators import accelerator_count
    from parplan.cost_models.devices.local_devices import this_cluster

    count = accelerator_count()
    for link in this_cluster(max(2, count)).links:
        rate = f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} µs a message"
        yield f"{link.name} between {max(2, count)} devices: {rate}{' (estimated)' if link.estimated else ''}"


def _cache() -> Iterator[str]:
    from parplan.cost_models.profile.store import ProfileStore

    with ProfileStore(read_only=True) as store:
        yield f"{store.path}, {store.path.stat().st_size:,} bytes" if store.path.exists() else f"{store.path}: none yet"


def _profile() -> Iterator[str]:
    from parplan.accelerators import accelerator_count, place_of
    from parplan.cost_models.measurement.conditions import current_conditions
    from parplan.cost_models.profile.store import ProfileStore

    device, most = place_of(0), accelerator_count() or os.cpu_count() or 1
    now = {current_conditions(device, busy) for busy in range(1, most + 1)}
    with ProfileStore(read_only=True) as store:
        kept = store.groups()
    for one in sorted(kept, key=lambda one: one.conditions not in now)[:SHOWN]:
        use = "used here" if one.conditions in now else "not used: measured under other conditions than now"
        yield f"{one.describe()}, {one.conditions.describe()}: {use}"
    if len(kept) > SHOWN:
        yield f"and {len(kept) - SHOWN} more; `parplan profile` lists all"
    if not kept:
        yield "nothing measured: costs are estimates; `parplan profile TARGET` measures"


def _settings() -> Iterator[str]:
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    yield ", ".join(given) or f"none of {', '.join(VARIABLES)}"


PROBES: dict[str, Callable[[], Iterator[str]]] = {
    "parplan": _versions,
    "torch": _torch,
    "devices": _devices,
    "links": _links,
    "cache": _cache,
    "profile": _profile,
    "settings": _settings,
}
