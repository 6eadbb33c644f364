"""The hardware table: rates of GPUs and links, as data, each row with where its numbers come from.

Rates are dense (no sparsity) peaks; links are one direction per device, at what was measured rather than what is
printed on the box where a measurement is known. A row is `estimated` when any of its rates is unverified. No source
gives the launch times and the usable share of memory: those are estimates in every row. What a kernel reaches of a
peak is in efficiency.py; presets.py makes devices and clusters of these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ALIASES", "GPUS", "LINKS", "GpuRow", "LinkRow"]


@dataclass(frozen=True)
class GpuRow:
    """One kind of GPU.

    Args:
        kind: the preset's name.
        memory_gib: memory as labelled.
        tflops: peak dense rate by precision, in 1e12 FLOP/s.
        gb_per_s: memory bandwidth in 1e9 bytes/s.
        link: what joins the GPUs of a host, a name of LINKS.
        network: what joins hosts, a name of LINKS.
        nics: network adapters of a host; 8 is one for each GPU.
        source: where the rates come from.
        launch_us: least time of one op in microseconds (estimated).
        estimated: True when any rate is unverified.
    """

    kind: str
    memory_gib: float
    tflops: Mapping[str, float]
    gb_per_s: float
    link: str
    network: str
    nics: int
    source: str
    launch_us: float = 5.0
    estimated: bool = False


@dataclass(frozen=True)
class LinkRow:
    """One kind of link, one direction per device.

    Args:
        name: the preset's name.
        gb_per_s: 1e9 bytes/s that one pair reaches.
        latency_us: per message, in microseconds.
        source: where bandwidth and latency come from.
        network: True when it joins hosts.
        island: devices on one switch, when a host has several; 0 when one switch joins the host.
        contention: factor on bandwidth when all devices talk at once (across islands, where there are any).
        estimated: True when any number is unverified.
    """

    name: str
    gb_per_s: float
    latency_us: float
    source: str
    network: bool = False
    island: int = 0
    contention: float = 1.0
    estimated: bool = False


_GUIDE = "ml-engineering guide (stas00, 744d01e), accelerator tables"
_PLAIN = "vendor figures as listed by secondary pages"

# ruff: noqa: E501  (a table reads better in rows)
GPUS: tuple[GpuRow, ...] = (
    GpuRow("k20", 5, {"fp32": 3.52}, 208, "pcie2", "10gbe", 1, f"{_PLAIN} (alldbin)", 8),
    GpuRow("k40", 12, {"fp32": 4.29}, 288, "pcie3", "10gbe", 1, f"{_PLAIN} (alldbin, sysrqmts), base clock", 8),
    GpuRow("k80", 12, {"fp32": 2.8}, 240, "pcie3-pair", "10gbe", 1, "from memory; each of the board's two GPUs, base clock", 8, True),
    GpuRow("p100-sxm2", 16, {"fp32": 10.6, "fp16": 21.2}, 732, "nvlink1", "100gbe", 4, f"{_PLAIN} (tech4gamers), AutoParallel's table"),
    GpuRow("p100-pcie", 16, {"fp32": 9.3, "fp16": 18.7}, 732, "pcie3", "100gbe", 1, f"{_PLAIN} (tech4gamers, techworm)"),
    GpuRow("v100-sxm2", 16, {"fp32": 15.7, "fp16": 125}, 900, "nvlink2", "100gbe", 4, "AutoParallel, compute_estimation.py"),
    GpuRow("v100-sxm2-32g", 32, {"fp32": 15.7, "fp16": 125}, 900, "nvlink2", "100gbe", 4, "AutoParallel, compute_estimation.py"),
    GpuRow("v100-pcie", 16, {"fp32": 14.1, "fp16": 112}, 897, "pcie3", "100gbe", 1, f"{_PLAIN} (sysrqmts); fp16 from memory", estimated=True),
    GpuRow("a100-40g-sxm", 40, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 1555, "nvlink3", "hdr200", 8, f"{_PLAIN} (sysrqmts), AutoParallel's table"),
    GpuRow("a100-40g-pcie", 40, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 1555, "pcie4", "100gbe", 1, f"{_PLAIN} (sysrqmts), AutoParallel's table"),
    GpuRow("a100-80g-sxm", 80, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 2000, "nvlink3", "hdr200", 8, _GUIDE),
    GpuRow("a100-80g-pcie", 80, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 1940, "pcie4", "100gbe", 1, _GUIDE),
    GpuRow("h100-sxm", 80, {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989}, 3350, "nvlink4", "ndr400", 8, _GUIDE),
    GpuRow("h100-pcie", 80, {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756}, 2000, "pcie5", "100gbe", 1, _GUIDE),
    GpuRow("h200-sxm", 141, {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989}, 4800, "nvlink4", "ndr400", 8, f"{_GUIDE}; vendor datasheet"),
    GpuRow("b200-sxm", 180, {"fp32": 80, "tf32": 1125, "fp16": 2250, "bf16": 2250}, 8000, "nvlink5", "ndr400", 8, _GUIDE),
    GpuRow("rtx4090", 24, {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2}, 1008, "pcie4-staged", "25gbe", 1, f"{_PLAIN} (waredb); 16-bit rates with fp32 sums"),
)  # fmt: skip

# Latencies: NCCL's constants (tuning.cc, 5067397), "simple" protocol, ring, per hop: NVLink 3.4, PCI 5.7, network 14 µs.
# Eight H200 then take 14 x 3.4 = 48 µs for a small all-reduce; measured: 40.
_HOP = "latency: NCCL's constant per hop"
_NIC = f"NCCL's model gives a 100 Gb/s adapter 12 GB/s (0.96 of nominal); {_HOP}"
LINKS: tuple[LinkRow, ...] = (
    LinkRow("pcie2", 6, 5.7, f"Krizhevsky 2014, section on the machine: about 6 GB/s within four GPUs of one CPU, half across when all talk; {_HOP}", island=4, contention=0.5),
    LinkRow("pcie3", 12, 5.7, f"NCCL's constant for x16 (nominal 15.8); {_HOP}"),
    LinkRow("pcie3-pair", 12, 5.7, f"pcie3, shared by the two GPUs of a board (from memory); {_HOP}", contention=0.5, estimated=True),
    LinkRow("pcie4", 27, 5.7, f"nominal 31, times the 88 % measured on gen 5; {_HOP}", estimated=True),
    LinkRow("pcie4-staged", 13.5, 11.4, "pcie4 twice: without peer access every byte goes through host memory", estimated=True),
    LinkRow("pcie5", 55, 5.7, f"copies measured on eight H200: 55.4 to and 55.1 from the device; {_HOP}"),
    LinkRow("nvlink1", 72, 3.4, f"NCCL's constant, 4 links of 18; {_HOP}"),
    LinkRow("nvlink2", 120, 3.4, f"NCCL's constant, 6 links of 20; {_HOP}"),
    LinkRow("nvlink3", 235, 3.4, f"ring all-reduce measured on eight A100 (nominal 300); {_HOP}"),
    LinkRow("nvlink4", 368, 3.4, f"ring all-reduce measured on eight H200 (nominal 450); {_HOP}"),
    LinkRow("nvlink5", 682, 3.4, f"ring all-reduce measured on eight B200 (nominal 900); {_HOP}"),
    LinkRow("10gbe", 1.2, 14, _NIC, network=True),
    LinkRow("25gbe", 3, 14, _NIC, network=True),
    LinkRow("100gbe", 12, 14, _NIC, network=True),
    LinkRow("hdr200", 24, 14, _NIC, network=True),
    LinkRow("ndr400", 48, 14, _NIC, network=True),
)  # fmt: skip

# A bare name means the kind met most often in servers.
ALIASES: Mapping[str, str] = {
    "k20c": "k20", "p100": "p100-sxm2", "v100": "v100-sxm2", "v100-32g": "v100-sxm2-32g", "v100-sxm2-16g": "v100-sxm2",
    "a100": "a100-80g-sxm", "a100-sxm": "a100-80g-sxm", "a100-pcie": "a100-80g-pcie", "a100-40g": "a100-40g-sxm",
    "a100-80g": "a100-80g-sxm", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "4090": "rtx4090",
}  # fmt: skip
