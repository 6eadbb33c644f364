"""The devices of this machine, as a cluster: accelerators matched to presets, or the CPU, measured on request.

An accelerator is known by its name; its memory is its own, its rates are the preset's. The CPU counts as logical
devices of one thread each, which share its memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from statistics import median
from time import perf_counter

import torch

from parplan.accelerators import accelerator_count, accelerator_name, accelerator_type
from parplan.cluster import Cluster, Device
from parplan.cost_models.devices.presets import USABLE_MEMORY, cluster_links, device_names, device_preset
from parplan.cost_models.sampling import one_thread
from parplan.errors import ClusterError

__all__ = ["calibrate_cpu", "device_memory_bytes", "host_device", "preset_of", "this_cluster"]

# What has to be in a device's name for it to be that preset; the first that fits.
_NAMES: tuple[tuple[str, str], ...] = (
    ("k20", "k20"), ("k40", "k40"), ("k80", "k80"),
    ("p100 sxm2", "p100-sxm2"), ("p100 12gb", "p100-pcie-12g"), ("p100", "p100-pcie"),
    ("v100 sxm2 32gb", "v100-sxm2-32g"), ("v100 sxm2", "v100-sxm2"), ("v100", "v100-pcie"),
    ("a100 sxm4 80gb", "a100-80g-sxm"), ("a100 sxm4", "a100-40g-sxm"),
    ("a100 80gb", "a100-80g-pcie"), ("a100", "a100-40g-pcie"),
    ("h100 pcie", "h100-pcie"), ("h100", "h100-sxm"), ("h200", "h200-sxm"), ("b200", "b200-sxm"), ("4090", "rtx4090"),
)  # fmt: skip


def preset_of(name: str) -> str | None:
    """The preset of an accelerator called `name` by its driver ("NVIDIA A100-SXM4-80GB"), or None."""
    lowered = name.lower()
    return next((kind for words, kind in _NAMES if all(word in lowered for word in words.split())), None)


def device_memory_bytes(device: torch.device) -> int:
    """All of a device's memory; a CPU's is the machine's.

    Raises:
        ClusterError: no such device here.
    """
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind, count, index = accelerator_type(), accelerator_count(), device.index or 0
    if device.type != kind or index >= count:
        here = f"{count} {kind} devices" if kind is not None else "none but the CPU"
        raise ClusterError(f"there is no {device}: this machine has {here}")
    return int(torch.accelerator.get_memory_info(index)[1])


def host_device(kind: str = "cpu", calibrate: bool = False) -> Device:
    """The CPU of this machine (one thread of it), or its accelerator `kind` ("cuda", "cuda:1").

    Args:
        calibrate: measure the CPU's rates (about a second) instead of taking the preset's.

    Raises:
        ClusterError: no such device here.
    """
    device = torch.device(kind)
    memory_bytes = int(USABLE_MEMORY * device_memory_bytes(device))
    if device.type == "cpu":
        return replace(calibrate_cpu() if calibrate else device_preset("cpu"), memory_bytes=memory_bytes)
    name = accelerator_name(device)
    preset = preset_of(name)
    if preset is not None:
        known = device_preset(preset)
        return replace(known, memory_bytes=memory_bytes, source=f"{name}, memory as found; {known.source}")
    # An unlisted GPU: 128 multiply-adds of each multiprocessor at 1.5 GHz, 10 bytes of memory per 256 FLOP.
    # Where the driver counts no multiprocessors, 100 of them: a large GPU of 2020.
    told = getattr(torch.get_device_module(device), "get_device_properties", lambda index: None)(device.index or 0)
    fp32 = getattr(told, "multi_processor_count", 100) * 128 * 2 * 1.5e9
    rates = {"fp32": fp32, "tf32": 2 * fp32, "fp16": 4 * fp32, "bf16": 4 * fp32}
    source = f"{name} is no preset; rates guessed, measure them with --measure"
    return Device(name.lower().replace(" ", "-"), memory_bytes, rates, fp32 / 25.6, 5e-6, source)


def this_cluster(
    count: int | None = None,
    device: torch.device | None = None,
    calibrate: bool = False,
    link: str | None = None,
    hosts: int | None = None,
) -> Cluster:
    """The devices that are here as a cluster of `count` logical ones.

    Logical devices beyond the physical ones share those, and their memory with them.

    Args:
        count: how many; by default all accelerators, or one CPU device.
        device: the kind to use; by default the accelerators where there are any, else the CPU.
        calibrate: measure the CPU's rates (about a second) instead of taking the preset's.
        link: what joins them, as for `cluster_preset`.
        hosts: how many machines like this one they are in, as for `cluster_preset`.

    Raises:
        ClusterError: `count` is not positive, no such link, or the accelerators are of several kinds.
    """
    kind = device.type if device is not None else accelerator_type() or "cpu"
    present = accelerator_count() if kind != "cpu" else 1
    wanted = count if count is not None else max(1, present)
    found = host_device(kind, calibrate)
    numbers = range(min(present, wanted)) if kind != "cpu" else ()
    names = {accelerator_name(torch.device(kind, number)) for number in numbers}
    if len(names) > 1:
        raise ClusterError(
            f"the {kind} devices differ ({', '.join(sorted(names))}); choose equal ones, or name a preset"
        )
    sharing = -(-wanted // (max(1, present) * (hosts or 1)))
    if sharing > 1:
        shared = f"{found.source}; {sharing} logical devices share each"
        found = replace(found, memory_bytes=found.memory_bytes // sharing, source=shared)
    known = found.kind if found.kind in device_names() else _LIKE_UNKNOWN
    return Cluster.of(found, wanted, cluster_links(known, wanted, link, hosts))


# What joins GPUs that are no preset: the usual links of this one.
_LIKE_UNKNOWN = "a100-80g-pcie"


def calibrate_cpu() -> Device:
    """The CPU with rates measured now, on one thread: matrix products, a copy, small ops. Takes about a second."""
    preset = device_preset("cpu")
    with one_thread(torch.device("cpu")):
        rates, side = dict[str, float](), 768
        for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
            a = torch.rand(side, side, dtype=dtype)
            rates[precision] = 2 * side**3 / _median_s(partial(torch.matmul, a, a), 7)
        source = torch.rand(16 << 20)
        target = torch.empty_like(source)
        copy_s, leaf, ops = _median_s(lambda: target.copy_(source), 5), torch.ones(16, requires_grad=True), 50

        def small_ops() -> None:
            """A chain of ops too small to matter, forward and backward."""
            end = reduce(lambda value, _: value * 1.0, range(ops), leaf)
            torch.autograd.grad(end, leaf, torch.ones(16))

        launch_s = _median_s(small_ops, 20) / (2 * ops)
    return replace(
        preset,
        flops_per_s={**rates, "bf16": rates["fp32"], "fp16": rates["fp32"]},
        bandwidth_bytes_per_s=2 * source.nbytes / copy_s,
        launch_s=launch_s,
        source="this machine's CPU, one thread, measured: products of 768 x 768, a copy of 64 MiB, small ops",
        estimated=False,
    )


def _median_s(run: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times + 1):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    return median(seconds[1:])
