"""Presets: complete, sourced, and clear about what they do not know."""

from __future__ import annotations

from itertools import combinations

import pytest

from parplan.cluster import Cluster
from parplan.cost_models.communication.collectives import Topology
from parplan.cost_models.communication.traffic import traffic
from parplan.cost_models.devices.hardware_table import ALIASES, CPU, CPU_LINK, GPUS, LINKS, GpuRow, LinkRow, Number
from parplan.cost_models.devices.presets import cluster_preset, device_names, device_preset, link_preset
from parplan.errors import ClusterError
from parplan.layout import Grid, Layout
from tests.every_case import every_case

# What the table's unverified figures are: these and only these may be called estimated.
ESTIMATED_GPUS = {"k80", "v100-pcie"}
ESTIMATED_LINKS = {
    "pcie2", "pcie3-pair", "pcie3-sockets", "pcie4", "pcie4-staged", "nvlink1", "nvlink2", "nvlink2-switch", "nvlink5",
    "10gbe", "25gbe", "hdr200", "ndr400",
}  # fmt: skip
# How an origin begins that no source stands behind.
UNSOURCED = ("from memory: ", "derived: ", "assumed: ")
NUMBERS = [(f"{row.kind}-{n.name}", n) for row in (*GPUS, CPU) for n in row.numbers()] + [
    (f"{row.name}-{n.name}", n) for row in (*LINKS, CPU_LINK) for n in row.numbers()
]


@every_case("number", [number for _, number in NUMBERS], ids=[name for name, _ in NUMBERS])
def test_every_number_says_where_it_comes_from(number: Number) -> None:
    text = number.origin.text
    assert len(text) > 10
    assert number.origin.estimated is text.startswith(UNSOURCED)
    assert number.value > 0
    assert number.unit


@every_case("row", [*GPUS, CPU], ids=lambda row: row.kind)
def test_no_number_of_a_device_is_left_out(row: GpuRow) -> None:
    found = {number.name: number.value for number in row.numbers()}
    rest = {"memory": row.memory_gib, "bandwidth": row.gb_per_s, "launch": row.launch_us, "adapters": row.nics}
    assert found == {**row.tflops, **rest}
    assert set(row.others) <= set(found)


@every_case("row", [*LINKS, CPU_LINK], ids=lambda row: row.name)
def test_no_number_of_a_link_is_left_out(row: LinkRow) -> None:
    found = {number.name: number.value for number in row.numbers()}
    shares = {"contention": row.contention, "pair": row.pair, "overlap": row.overlap}
    rest = {"island": row.island, "across": row.across_gb_per_s, "slowdown": row.slowdown}
    said = {name: value for name, value in shares.items() if value < 1}
    said |= {name: value for name, value in rest.items() if value > 0}
    assert found == {"bandwidth": row.gb_per_s, "latency": row.latency_us, **said}
    assert (row.contention == 1 and row.across_gb_per_s == 0) is (row.island == 0)


@every_case("name", device_names())
def test_every_preset_is_a_whole_device_with_a_source(name: str) -> None:
    device = device_preset(name)
    assert device.kind == name
    assert device.source
    assert device.memory_bytes > 2**30
    assert min(device.flops_per_s.values()) > 0
    assert device.flops_per_s["fp32"] <= max(device.flops_per_s.values())
    assert device.bandwidth_bytes_per_s > 1e9
    assert 1e-7 < device.launch_s < 1e-4


@every_case("row", GPUS, ids=lambda row: row.kind)
def test_every_gpu_row(row: GpuRow) -> None:
    assert row.estimated is (row.kind in ESTIMATED_GPUS)
    assert device_preset(row.kind).estimated is row.estimated
    assert {row.link, row.network} <= {link.name for link in LINKS}
    assert 1 <= row.nics <= 8


@every_case("row", LINKS, ids=lambda row: row.name)
def test_every_link_row(row: LinkRow) -> None:
    assert row.estimated is (row.name in ESTIMATED_LINKS)
    assert 0 < row.gb_per_s < 1000
    assert 1 < row.latency_us < 100
    assert 0 < row.contention <= 1
    link = link_preset(row.name)
    assert link.overlap == row.overlap == (0.5 if row.name == "pcie2" else 1.0)
    # Published for A100 and H100 alone; the other NVLinks are taken to be like theirs, of the rest nothing is claimed.
    assert link.slowdown == row.slowdown == (0.19 if row.name.startswith("nvlink") else 0.0)
    assert link.pair == row.pair


def test_names_are_unique_and_aliases_lead_somewhere() -> None:
    assert len(set(device_names())) == len(device_names())
    links = [link.name for link in (*LINKS, CPU_LINK)]
    assert len(set(links)) == len(links)
    assert not set(ALIASES) & set(device_names())
    assert {device_preset(alias).kind for alias in ALIASES} <= set(device_names())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("v100", "v100-sxm2"), ("A100", "a100-80g-sxm"), ("h200", "h200-sxm"), ("H100-PCIe", "h100-pcie")],
)
def test_names_in_any_case_and_aliases(name: str, kind: str) -> None:
    assert device_preset(name).kind == kind


def test_an_unknown_device_is_told_what_is_close_and_what_there_is() -> None:
    with pytest.raises(ClusterError, match=r"'a100-80gsxm' \(did you mean a100-80g-sxm.*presets: k20, k40,.*cpu"):
        device_preset("a100-80gsxm")
    with pytest.raises(ClusterError, match=r"no link preset 'nvlnk3' \(did you mean nvlink3"):
        cluster_preset("a100", 4, link="nvlnk3")


def test_no_devices_is_refused() -> None:
    with pytest.raises(ClusterError, match="at least 1"):
        cluster_preset("v100", 0)


def levels(cluster: Cluster) -> list[tuple[str, int, float]]:
    return [(link.name, link.size, link.contention) for link in cluster.links]


@every_case(
    ("name", "count", "link", "expected"),
    [
        ("v100", 1, None, []),
        ("v100", 4, None, [("nvlink2", 4, 1.0)]),
        ("p100", 8, None, [("nvlink1", 4, 1.0), ("nvlink1 across islands", 8, 1.0)]),
        ("v100", 8, "nvlink2-switch", [("nvlink2-switch", 8, 1.0)]),
        ("v100", 6, None, [("nvlink2", 4, 1.0), ("nvlink2 across islands", 6, 1.0)]),
        ("a100-80g-pcie", 4, "nvlink3-pairs", [("nvlink3-pairs", 2, 1.0), ("nvlink3-pairs across islands", 4, 0.5)]),
        ("a100", 16, None, [("nvlink3", 8, 1.0), ("hdr200", 16, 1.0)]),
        ("v100", 12, None, [("nvlink2", 4, 1.0), ("nvlink2 across islands", 8, 1.0), ("100gbe", 12, 0.5)]),
        ("k20", 4, None, [("pcie2", 4, 1.0)]),
        ("k20", 8, None, [("pcie2", 4, 1.0), ("pcie2 across islands", 8, 0.5)]),
        ("k20", 8, "10gbe", [("10gbe", 8, 1.0)]),
        ("v100", 16, "pcie3", [("pcie3", 8, 1.0), ("100gbe", 16, 0.5)]),
        ("k80", 2, None, [("pcie3-pair", 2, 1.0)]),
        ("k80", 4, None, [("pcie3-pair", 2, 1.0), ("pcie3-pair across islands", 4, 0.5)]),
        ("cpu", 3, None, [("shared memory", 3, 1.0)]),
        ("cpu", 2, "25gbe", [("25gbe", 2, 1.0)]),
    ],
)
def test_the_levels_of_a_cluster(
    name: str, count: int, link: str | None, expected: list[tuple[str, int, float]]
) -> None:
    assert levels(cluster_preset(name, count, link)) == expected


@every_case(
    ("name", "count", "link", "hosts", "expected"),
    [
        ("a100", 16, None, 2, [("nvlink3", 8, 1.0), ("hdr200", 16, 1.0)]),
        ("a100", 16, None, 4, [("nvlink3", 4, 1.0), ("hdr200", 16, 1.0)]),
        ("a100", 16, None, 1, [("nvlink3", 16, 1.0)]),
        ("a100", 3, None, 3, [("hdr200", 3, 1.0)]),
        ("v100", 16, None, 2, [("nvlink2", 4, 1.0), ("nvlink2 across islands", 8, 1.0), ("100gbe", 16, 0.5)]),
        ("v100", 16, "nvlink2-switch", 1, [("nvlink2-switch", 16, 1.0)]),
        ("k20", 12, None, 2, [("pcie2", 2, 1.0), ("pcie2 across islands", 6, 0.5), ("10gbe", 12, 1 / 6)]),
        ("k20", 10, None, 2, [("pcie2 across islands", 5, 0.5), ("10gbe", 10, 0.2)]),
        ("a100", 16, "pcie4", 4, [("pcie4", 4, 1.0), ("hdr200", 16, 1.0)]),
        ("a100", 16, "10gbe", 2, [("nvlink3", 8, 1.0), ("10gbe", 16, 0.125)]),
        ("k20", 16, None, 2, [("pcie2", 4, 1.0), ("pcie2 across islands", 8, 0.5), ("10gbe", 16, 0.125)]),
        ("cpu", 4, None, 2, [("shared memory", 2, 1.0), ("10gbe", 4, 0.5)]),
        ("a100", 1, None, 1, []),
    ],
)
def test_the_levels_of_hosts(
    name: str, count: int, link: str | None, hosts: int, expected: list[tuple[str, int, float]]
) -> None:
    assert levels(cluster_preset(name, count, link, hosts)) == expected


def test_hosts_share_the_devices_evenly() -> None:
    with pytest.raises(ClusterError, match="10 devices do not spread evenly over 4 hosts"):
        cluster_preset("a100", 10, hosts=4)


def test_a_link_alone_is_one_pair() -> None:
    link = link_preset("PCIE3")
    assert (link.name, link.size, link.bandwidth_bytes_per_s, link.contention) == ("pcie3", 2, 12e9, 1.0)


# A DGX-1 link by link, numbered as its vendor does: two faces with diagonals, and the edges between them.
FACES = [(a + 4 * face, b + 4 * face) for face in (0, 1) for a, b in combinations(range(4), 2)]
EDGES = [(device, device + 4) for device in range(4)]
P100 = dict.fromkeys((*FACES, *EDGES), 1)
V100 = {(a, b): 2 if b - a == 3 or (a % 4, b % 4) == (1, 2) or b - a == 4 else 1 for a, b in (*FACES, *EDGES)}


@pytest.mark.parametrize(("name", "wires", "gb_per_s"), [("p100", P100, 18), ("v100", V100, 20)])
def test_dgx_1_link_by_link(name: str, wires: dict[tuple[int, int], int], gb_per_s: float) -> None:
    """What the levels say of devices, pairs, faces and the cut between them is the sum of the links there are."""
    inner, outer = cluster_preset(name, 8).links
    for device in range(8):
        assert inner.bandwidth_bytes_per_s == gb_per_s * 1e9 * sum(n for pair, n in wires.items() if device in pair)
    mean = sum(wires[pair] for pair in FACES) / len(FACES)
    assert inner.pair * inner.bandwidth_bytes_per_s == pytest.approx(mean * gb_per_s * 1e9, rel=1e-2)
    crossing = sum(n for (a, b), n in wires.items() if a // 4 != b // 4)
    assert 4 * outer.contention * outer.bandwidth_bytes_per_s == crossing * gb_per_s * 1e9


@pytest.mark.parametrize(
    ("name", "all_links", "in_face", "pair", "across"), [("p100", 72, 54, 18, 18), ("v100", 120, 80, 26.7, 40)]
)
def test_rings_and_copies_in_a_dgx_1(name: str, all_links: float, in_face: float, pair: float, across: float) -> None:
    """Rings of all eight use every link (NCCL has 4 on P100, 6 on V100), rings of fewer those that there are."""
    dgx = Topology(cluster_preset(name, 8))
    groups = {tuple(range(8)): all_links, (0, 1, 2, 3): in_face, (0, 1): pair, (2, 6): across}
    for group, gb_per_s in groups.items():
        n = len(group)
        found = 2 * (n - 1) / n / dgx.all_reduce([group]).s_per_byte
        assert found == pytest.approx(gb_per_s * 1e9, rel=1e-2), group
    few = Topology(cluster_preset(name, 2))
    assert few.all_reduce([(0, 1)]).s_per_byte == dgx.all_reduce([(0, 1)]).s_per_byte
    for group, gb_per_s in {(0, 1): pair, (2, 6): across}.items():
        source, target = (Layout(Grid((device,), 1, 1), 0, None) for device in group)
        (time,) = dgx.traffic(traffic(source, target), [1])
        assert 1 / time.s_per_byte == pytest.approx(gb_per_s * 1e9, rel=1e-2)
