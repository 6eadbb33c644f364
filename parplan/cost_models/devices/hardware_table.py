"""The hardware table: rates of devices and links, as data, each number with where it comes from.

Rates are dense (no sparsity) peaks; links are one direction per device, at what was measured rather than what is
printed on the box where a measurement is known. An origin is `estimated` when its number is from memory, derived from
another one, or assumed, and not what a source says. What a kernel reaches of a peak is in efficiency.py; presets.py
makes devices and clusters of these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["ALIASES", "CPU", "CPU_LINK", "GPUS", "LINKS", "GpuRow", "LinkRow", "Number", "Origin"]


@dataclass(frozen=True)
class Origin:
    """Source of a number; `estimated` when no source says it."""

    text: str
    estimated: bool = False


@dataclass(frozen=True)
class Number:
    """One number of a row."""

    name: str
    value: float
    unit: str
    origin: Origin


def _memory(text: str) -> Origin:
    return Origin(f"from memory: {text}", estimated=True)


def _derived(text: str) -> Origin:
    return Origin(f"derived: {text}", estimated=True)


def _assumed(text: str) -> Origin:
    return Origin(f"assumed: {text}", estimated=True)


_LAUNCH = _assumed("no source gives launch times; about what kernels of this generation take")
_NICS = _assumed("no source names a host")


@dataclass(frozen=True)
class GpuRow:
    """One kind of device.

    Args:
        kind: the preset's name.
        memory_gib: memory as labelled.
        tflops: peak dense rate by precision, in 1e12 FLOP/s.
        gb_per_s: memory bandwidth in 1e9 bytes/s.
        link: what joins the devices of a host, a name of LINKS.
        network: what joins hosts, a name of LINKS.
        nics: network adapters of a host; 8 is one for each of its GPUs.
        origin: where memory, rates and bandwidth come from.
        others: other origins, by the number's name ("fp16", "memory", "bandwidth", "launch", "adapters").
        launch_us: least time of one op in microseconds.
    """

    kind: str
    memory_gib: float
    tflops: Mapping[str, float]
    gb_per_s: float
    link: str
    network: str
    nics: int
    origin: Origin
    others: Mapping[str, Origin] = field(default_factory=dict)
    launch_us: float = 5.0

    def numbers(self) -> Iterator[Number]:
        """Every number of the row with its origin."""
        yield self._number("memory", self.memory_gib, "GiB", self.origin)
        for precision, rate in self.tflops.items():
            yield self._number(precision, rate, "TFLOP/s", self.origin)
        yield self._number("bandwidth", self.gb_per_s, "GB/s", self.origin)
        yield self._number("launch", self.launch_us, "µs", _LAUNCH)
        yield self._number("adapters", self.nics, "per host", _NICS)

    def _number(self, name: str, value: float, unit: str, usual: Origin) -> Number:
        return Number(name, value, unit, self.others.get(name, usual))

    @property
    def estimated(self) -> bool:
        """Whether memory, a rate or the bandwidth is; launch times and adapters of a host mostly are."""
        return any(number.origin.estimated for number in self.numbers() if number.name not in ("launch", "adapters"))

    @property
    def source(self) -> str:
        """The origins of memory, rates and bandwidth, as one text."""
        apart = [f"{name}: {origin.text}" for name, origin in self.others.items() if name not in ("launch", "adapters")]
        return "; ".join((self.origin.text, *apart))


_HOP = Origin("NCCL's constant per hop (tuning.cc, 5067397; ring, simple protocol)")
_ALONE = Origin("one switch joins all")
_BESIDE = Origin("collectives that run on their own, as NCCL's do")
_SLOWER = Origin(
    "arXiv 2507.03114: beside collectives, compute on four A100 or H100 (or MI210, MI250) takes 18.9 % longer in the "
    "mean, 40 % at most, GPT and LLaMA; as if collectives were under way all the time, so rather too low"
)
_SLOWER_LIKE = _derived("as the mean on four A100 or H100 (arXiv 2507.03114); nothing is published for this one")
# A ring moves 2(K-1)/K of the gradients. So do these: (K-1)/K to sum them, then (K-1)/K of the new weights back.
_WEIGHTS_BACK = _derived(
    "on such machines one process sums gradients, updates, and sends weights back (DataParallelTable, nn.DataParallel; "
    "NCCL is younger): the second half of the traffic comes after the update and hides behind nothing"
)


@dataclass(frozen=True)
class LinkRow:
    """One kind of link, one direction per device.

    Args:
        name: the preset's name.
        gb_per_s: 1e9 bytes/s that one pair reaches.
        latency_us: per message, in microseconds.
        bandwidth: where the bandwidth comes from.
        latency: where the latency comes from.
        network: True when it joins hosts.
        island: devices on one switch, when a host has several; 0 when one switch joins the host.
        contention: factor on bandwidth when all devices talk at once (across islands, where there are any).
        across_gb_per_s: bandwidth of a pair in different islands; 0 where it is that within one.
        pair: share of the bandwidth that one pair of an island gets, less than 1 in a mesh (see Link).
        sharing: where island, contention, across and pair come from.
        overlap: the most of a gradient reduction that can run beside the backward pass (see Link).
        hiding: where overlap comes from.
        slowdown: share of a reduction's seconds that the backward pass beside it loses (see Link).
        slowing: where slowdown comes from.
    """

    name: str
    gb_per_s: float
    latency_us: float
    bandwidth: Origin
    latency: Origin = _HOP
    network: bool = False
    island: int = 0
    contention: float = 1.0
    across_gb_per_s: float = 0.0
    pair: float = 1.0
    sharing: Origin = _ALONE
    overlap: float = 1.0
    hiding: Origin = _BESIDE
    slowdown: float = 0.0
    slowing: Origin = _SLOWER

    def numbers(self) -> Iterator[Number]:
        """Every number of the row with its origin."""
        yield Number("bandwidth", self.gb_per_s, "GB/s", self.bandwidth)
        yield Number("latency", self.latency_us, "µs", self.latency)
        if self.island:
            yield Number("island", self.island, "devices", self.sharing)
        if self.contention < 1:
            yield Number("contention", self.contention, "of the bandwidth", self.sharing)
        if self.across_gb_per_s:
            yield Number("across", self.across_gb_per_s, "GB/s", self.sharing)
        if self.pair < 1:
            yield Number("pair", self.pair, "of the bandwidth", self.sharing)
        if self.overlap < 1:
            yield Number("overlap", self.overlap, "of a reduction", self.hiding)
        if self.slowdown:
            yield Number("slowdown", self.slowdown, "of a reduction's time", self.slowing)

    @property
    def estimated(self) -> bool:
        """Whether any number is."""
        return any(number.origin.estimated for number in self.numbers())

    @property
    def source(self) -> str:
        """The origins of bandwidth and latency, as one text."""
        return f"{self.bandwidth.text}; latency: {self.latency.text}"


_GUIDE = Origin("ml-engineering guide (stas00, 744d01e), accelerator tables")
_AUTO = Origin("AutoParallel, compute_estimation.py")


def _plain(pages: str) -> Origin:
    return Origin(f"vendor figures as listed by secondary pages ({pages})")


_OLD = {"launch": _assumed("no source gives launch times; older drivers took longer")}
_DGX_V100 = {"adapters": Origin("4 EDR adapters for 8 V100 (nccl-tests issue 29)")}
_LIKE_V100 = {"adapters": _assumed("as a host of V100, 4 EDR adapters")}
_DGX_A100 = {"adapters": Origin("DGX A100: 8 adapters of 200 Gb/s (Megatron-LM, SC21, section 5)")}
_DGX_H100 = {"adapters": Origin("DGX H100: 8 adapters of 400 Gb/s (ml-engineering guide, network)")}
_P5EN = {"adapters": Origin("AWS P5en: 400 GB/s per host (ml-engineering guide, network)")}
_P6 = {"adapters": Origin("AWS P6-B200: 8 adapters of 400 Gb/s (ml-engineering guide, network)")}

# ruff: noqa: E501  (a table reads better in rows)
GPUS: tuple[GpuRow, ...] = (
    GpuRow("k20", 5, {"fp32": 3.52}, 208, "pcie2", "10gbe", 1, _plain("alldbin"), _OLD, 8),
    GpuRow("k40", 12, {"fp32": 4.29}, 288, "pcie3", "10gbe", 1, _plain("alldbin, sysrqmts; base clock"), _OLD, 8),
    GpuRow("k80", 12, {"fp32": 2.8}, 240, "pcie3-pair", "10gbe", 1, _memory("each of the board's two GPUs, base clock"), _OLD, 8),
    GpuRow("p100-sxm2", 16, {"fp32": 10.6, "fp16": 21.2}, 732, "nvlink1", "100gbe", 4, _plain("tech4gamers; AutoParallel's table"), _LIKE_V100),
    GpuRow("p100-pcie", 16, {"fp32": 9.3, "fp16": 18.7}, 732, "pcie3", "100gbe", 1, _plain("tech4gamers, techworm")),
    GpuRow("p100-pcie-12g", 12, {"fp32": 9.3, "fp16": 18.7}, 549, "pcie3", "100gbe", 1, _plain("tech4gamers, techworm")),
    GpuRow("v100-sxm2", 16, {"fp32": 15.7, "fp16": 125}, 900, "nvlink2", "100gbe", 4, _AUTO, _DGX_V100),
    GpuRow("v100-sxm2-32g", 32, {"fp32": 15.7, "fp16": 125}, 900, "nvlink2", "100gbe", 4, _AUTO, _DGX_V100),
    GpuRow("v100-pcie", 16, {"fp32": 14.1, "fp16": 112}, 897, "pcie3", "100gbe", 1, _plain("sysrqmts"), {"fp16": _memory("tensor cores at the PCIe card's clock")}),
    GpuRow("a100-40g-sxm", 40, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 1555, "nvlink3", "hdr200", 8, _plain("sysrqmts; AutoParallel's table"), _DGX_A100),
    GpuRow("a100-40g-pcie", 40, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 1555, "pcie4", "100gbe", 1, _plain("sysrqmts; AutoParallel's table")),
    GpuRow("a100-80g-sxm", 80, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 2000, "nvlink3", "hdr200", 8, _GUIDE, _DGX_A100),
    GpuRow("a100-80g-pcie", 80, {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 1940, "pcie4", "100gbe", 1, _GUIDE),
    GpuRow("h100-sxm", 80, {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989}, 3350, "nvlink4", "ndr400", 8, _GUIDE, _DGX_H100),
    GpuRow("h100-pcie", 80, {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756}, 2000, "pcie5", "100gbe", 1, _GUIDE),
    GpuRow("h200-sxm", 141, {"fp32": 67, "tf32": 494.5, "fp16": 989, "bf16": 989}, 4800, "nvlink4", "ndr400", 8, Origin(f"{_GUIDE.text}; vendor datasheet"), _P5EN),
    GpuRow("b200-sxm", 180, {"fp32": 80, "tf32": 1125, "fp16": 2250, "bf16": 2250}, 8000, "nvlink5", "ndr400", 8, _GUIDE, _P6),
    GpuRow("rtx4090", 24, {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2}, 1008, "pcie4-staged", "25gbe", 1, _plain("waredb; 16-bit rates with fp32 sums")),
)  # fmt: skip

# One thread of a server core, as achieved in large matrix products and copies, for CPU processes nobody has measured.
CPU = GpuRow(
    "cpu", 4, {"fp32": 0.05, "fp64": 0.025, "bf16": 0.025, "fp16": 0.025}, 8, "shared memory", "10gbe", 1,
    _memory("one thread of a server core; `--measure` measures the one that is here"),
)  # fmt: skip

# Eight H200 take 14 x 3.4 = 48 µs for a small all-reduce with these latencies; measured: 40.
_NIC = Origin("NCCL's model of a 100 Gb/s adapter (topo.h): 12 GB/s, 0.96 of nominal")
_SCALED = _derived("0.96 of nominal, as NCCL's model has it for 100 Gb/s")
_LINKS_OF = "NCCL's constant for one link (topo.h, 5067397)"
_CUBE = "DGX-1 is a cube with all edges and the diagonals of two faces linked (NVIDIA, WP-08437):"
_DGX_1P = Origin(
    f"{_CUBE} of a P100's 4 links 3 go to the others of its face, 1 across; 4 rings of all 8 (nccl issue 299)"
)
_DGX_1V = Origin(
    f"{_CUBE} of a V100's 6 links 4 go to the others of its face (1, 1 and 2; the mean counts), 2 across "
    "(topology file in nccl issue 671)"
)
_SOCKETS = _derived("NCCL's 10 GB/s between two Skylake sockets (topo.h), shared by the four GPUs of each")
_BRIDGED = Origin("A100 in bridged pairs: all-reduce at 208 GB/s in a pair, 20 beyond it (nccl-tests issue 178)")
LINKS: tuple[LinkRow, ...] = (
    LinkRow("pcie2", 6, 5.7, Origin("Krizhevsky 2014, section on the machine: about 6 GB/s within four GPUs of one CPU"), island=4, contention=0.5,
            sharing=Origin("Krizhevsky 2014, same place: half of it across the two CPUs when all GPUs talk"), overlap=0.5, hiding=_WEIGHTS_BACK),
    LinkRow("pcie3", 12, 5.7, Origin("NCCL's constant for x16 (topo.h, 5067397); nominal 15.8")),
    LinkRow("pcie3-pair", 12, 5.7, Origin("NCCL's constant for x16 (topo.h, 5067397)"), island=2, contention=0.5, sharing=_memory("the two GPUs of a board share one x16 slot")),
    LinkRow("pcie4", 27, 5.7, _derived("nominal 31, times the 88 % measured on gen 5")),
    LinkRow("pcie4-staged", 13.5, 11.4, _derived("pcie4 twice: without peer access every byte goes through host memory"), _derived("pcie4 twice")),
    LinkRow("pcie5", 55, 5.7, Origin("copies measured on eight H200: 55.4 to and 55.1 from the device (ml-engineering guide)")),
    LinkRow("pcie3-sockets", 12, 5.7, Origin("NCCL's constant for x16 (topo.h, 5067397)"), island=4, contention=0.21, sharing=_SOCKETS),
    LinkRow("nvlink1", 72, 3.4, _derived(f"4 links of 18, {_LINKS_OF}; nominal 80"), island=4, across_gb_per_s=18, pair=0.25, sharing=_DGX_1P,
            slowdown=0.19, slowing=_SLOWER_LIKE),
    LinkRow("nvlink2", 120, 3.4, _derived(f"6 links of 20, {_LINKS_OF}; nominal 150"), island=4, across_gb_per_s=40, pair=0.222, sharing=_DGX_1V,
            slowdown=0.19, slowing=_SLOWER_LIKE),
    LinkRow("nvlink2-switch", 120, 3.4, _derived(f"6 links of 20, {_LINKS_OF}; nominal 150; DGX-2"), slowdown=0.19, slowing=_SLOWER_LIKE),
    LinkRow("nvlink3", 235, 3.4, Origin("ring all-reduce measured on eight A100 (ml-engineering guide); nominal 300"), slowdown=0.19),
    LinkRow("nvlink3-pairs", 208, 3.4, _BRIDGED, island=2, contention=0.5, across_gb_per_s=20, sharing=_BRIDGED, slowdown=0.19),
    LinkRow("nvlink4", 368, 3.4, Origin("ring all-reduce measured on eight H200 (ml-engineering guide); nominal 450"), slowdown=0.19),
    LinkRow("nvlink5", 682, 3.4, Origin("ring all-reduce measured on eight B200 (ml-engineering guide); nominal 900"), slowdown=0.19, slowing=_SLOWER_LIKE),
    LinkRow("10gbe", 1.2, 14, _SCALED, network=True),
    LinkRow("25gbe", 3, 14, _SCALED, network=True),
    LinkRow("100gbe", 12, 14, _NIC, network=True),
    LinkRow("hdr200", 24, 14, _SCALED, network=True),
    LinkRow("ndr400", 48, 14, _SCALED, network=True),
)  # fmt: skip

CPU_LINK = LinkRow("shared memory", 2.0, 50.0, _memory("copies between processes of one host"), _memory("same"))

# A bare name means the kind met most often in servers.
ALIASES: Mapping[str, str] = {
    "k20c": "k20", "p100": "p100-sxm2", "v100": "v100-sxm2", "v100-32g": "v100-sxm2-32g", "v100-sxm2-16g": "v100-sxm2",
    "a100": "a100-80g-sxm", "a100-sxm": "a100-80g-sxm", "a100-pcie": "a100-80g-pcie", "a100-40g": "a100-40g-sxm",
    "a100-80g": "a100-80g-sxm", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "4090": "rtx4090",
}  # fmt: skip
