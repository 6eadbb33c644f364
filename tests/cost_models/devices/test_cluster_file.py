"""Cluster files: what they describe, and one clear message for every mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parplan.cluster import Cluster
from parplan.cost_models.communication.collectives import Topology
from parplan.cost_models.devices.cluster_file import DEVICE_KEYS, LINK_KEYS, load_cluster, read_cluster
from parplan.cost_models.devices.presets import cluster_preset, device_preset, link_preset
from parplan.cost_models.ops.efficiency import efficiency
from parplan.errors import ClusterError

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))

OWN = """
[[devices]]
name = "card"
count = 2
memory_gib = 12.5
tflops = { fp32 = 10, bf16 = 80 }
gb_per_s = 500
launch_us = 4
"""
PAIR = """
[[links]]
name = "bridge"
size = 2
latency_us = 2.5
gb_per_s = 50
"""


def levels(cluster: Cluster) -> list[tuple[int, float, float]]:
    return [(link.size, link.bandwidth_bytes_per_s, link.contention) for link in cluster.links]


def test_the_islands_of_krizhevsky_2014() -> None:
    cluster = load_cluster(ROOT / "examples" / "clusters" / "two-islands.toml")
    assert cluster.describe() == "two islands: 8 x k20, switch, host memory"
    assert levels(cluster) == [(4, 6e9, 1.0), (8, 6e9, 0.5)]
    assert levels(cluster) == levels(cluster_preset("k20", 8))
    assert cluster.overlap == cluster_preset("k20", 8).overlap == 0.5
    assert cluster.device == device_preset("k20")


def test_gpus_beside_a_cpu() -> None:
    cluster = load_cluster(ROOT / "examples" / "clusters" / "workstation.toml")
    gpus, cpu = cluster.groups
    assert (gpus.device, gpus.members) == (device_preset("rtx4090"), (0, 1))
    assert (cpu.device.kind, cpu.members, cpu.device.memory_bytes) == ("desktop-cpu", (2,), 48 << 30)
    assert cpu.device.flops_per_s["fp32"] == 1e12
    assert cpu.device.launch_s == device_preset("cpu").launch_s  # what is not given is the preset's
    assert efficiency(cpu.device, "fp32").gemm == 1.0  # rates of a CPU are what it achieves, whatever its name
    assert "tflops" in cpu.device.source
    assert "workstation.toml" in cpu.device.source
    known = link_preset("pcie4-staged")
    assert cluster.links[0].bandwidth_bytes_per_s == known.bandwidth_bytes_per_s
    assert cluster.links[0].estimated


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_cluster(path: Path) -> None:
    assert load_cluster(path).count > 1


def test_the_example_of_the_docs_is_the_file() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    file = load_cluster(ROOT / "examples" / "clusters" / "two-islands.toml")
    assert levels(read_cluster(shown, "docs")) == levels(file)
    assert read_cluster(shown, "docs").devices == file.devices
    for key in (*DEVICE_KEYS, *LINK_KEYS):
        assert f"`{key}`" in page


def test_numbers_of_ones_own() -> None:
    cluster = read_cluster(OWN + PAIR, "mine.toml")
    device, link = cluster.device, cluster.links[0]
    assert (device.kind, cluster.count, device.memory_bytes) == ("card", 2, int(12.5 * 2**30))
    assert device.flops_per_s == {"fp32": 10e12, "bf16": 80e12}
    assert (device.bandwidth_bytes_per_s, device.launch_s) == (500e9, 4e-6)
    assert (device.source, device.estimated) == ("given in mine.toml", False)
    assert (link.name, link.bandwidth_bytes_per_s, link.contention, link.overlap) == ("bridge", 50e9, 1.0, 1.0)
    assert link.latency_s == pytest.approx(2.5e-6)


MEASURED = "[[links.measured]]\nhosts = 2\nbytes = [1000000, 100000000]\ngb_per_s = [2.0, 20.0]\n"


def test_measured_all_reduces_price_sums() -> None:
    plain, cluster = (read_cluster(OWN + own, "mine.toml") for own in (PAIR, PAIR + MEASURED))
    (table,) = cluster.links[0].measured
    assert (table.hosts, table.nbytes, table.bytes_per_s) == (2, (1_000_000, 100_000_000), (2e9, 20e9))
    for nbytes, seconds in ((1e6, 1e6 / 2e9), (1e8, 1e8 / 20e9)):  # two devices: 2 (n - 1) / n is 1
        assert Topology(cluster).all_reduce([(0, 1)]).seconds(nbytes) == pytest.approx(seconds)
        assert Topology(plain).all_reduce([(0, 1)]).seconds(nbytes) != pytest.approx(seconds)
    for old, new, said in (
        ("hosts = 2", "hosts = 1", "hosts"),
        ("[2.0, 20.0]", "[2.0]", "2 bytes and 1 gb_per_s"),
        ("[2.0, 20.0]", "[2.0, 0]", "gb_per_s"),
        ("[1000000, 100000000]", "[100000000, 1000000]", "sizes ascending"),
        ("[1000000, 100000000]", '"1e6"', "bytes"),
    ):
        with pytest.raises(ClusterError, match=said):
            read_cluster(OWN + PAIR + MEASURED.replace(old, new), "mine.toml")


def test_meshes_and_slowdowns() -> None:
    mesh = PAIR.replace('"bridge"', '"mesh"') + "pair = 0.25\nslowdown = 0.3\n"
    cluster = read_cluster(OWN + mesh, "mine.toml")
    assert (cluster.links[0].pair, cluster.links[0].slowdown, cluster.slowdown) == (0.25, 0.3, 0.3)
    known = read_cluster(OWN + '[[links]]\npreset = "nvlink1"\nsize = 2\n', "mine.toml").links[0]
    assert (known.pair, known.slowdown) == (0.25, 0.19)
    for mistake in ("pair = 0", "pair = 1.5", "slowdown = -0.1", "slowdown = 2"):
        with pytest.raises(ClusterError, match=mistake.split()[0]):
            read_cluster(OWN + PAIR + mistake, "mine.toml")


def test_a_name_like_a_presets_does_not_borrow_its_efficiencies() -> None:
    own = read_cluster(OWN.replace('"card"', '"k20"') + PAIR, "mine.toml").device
    assert efficiency(own, "fp32") != efficiency(device_preset("k20"), "fp32")
    changed = read_cluster('[[devices]]\npreset = "k20"\nname = "mine"\ngb_per_s = 200', "mine.toml").device
    assert efficiency(changed, "fp32") == efficiency(device_preset("k20"), "fp32")


def test_kinds_are_numbered_in_the_order_of_the_file() -> None:
    tables = ['[[devices]]\npreset = "k20"\n', '[[devices]]\npreset = "cpu"\n', '[[devices]]\npreset = "k20"\n']
    cluster = read_cluster("".join(tables) + PAIR.replace("2\n", "3\n", 1), "x.toml")
    assert [device.kind for device in cluster.devices] == ["k20", "cpu", "k20"]
    assert [group.members for group in cluster.groups] == [(0, 2), (1,)]


K20 = '[[devices]]\npreset = "k20"\n'
EIGHT = f"{K20}count = 8\n"
MISTAKES = [
    ("", "f.toml has no devices; add [[devices]]"),
    ('name = ""\n' + K20, "f.toml: name is ''; expected a text in quotes that is not empty"),
    ("devices = [", "f.toml is not TOML: "),
    ("a = 1\na = 2", "f.toml is not TOML: "),
    ("[devices]\ncount = 1", "f.toml: devices is {'count': 1}; expected a list of tables; begin each with [[devices]]"),
    ("devices = 8", "f.toml: devices is 8; expected a list of tables"),
    ("[[device]]\ncount = 8", "f.toml: unknown field 'device'; did you mean devices?"),
    ('[[devices]]\nprset = "k20"', "[[devices]] number 1: unknown field 'prset'; did you mean preset?"),
    (K20 + "memory = 5", "unknown field 'memory'; did you mean memory_gib?"),
    (K20 + "zz = 5", "unknown field 'zz'; known: preset, name, count"),
    ('[[devices]]\npreset = "k2O"', "[[devices]] number 1: there is no device preset 'k2O' (did you mean k20"),
    (
        '[[devices]]\nname = "card"',
        "missing field 'memory_gib', 'tflops', 'gb_per_s', 'launch_us'; add them or a preset",
    ),
    (OWN.replace("launch_us = 4", "") + PAIR, "missing field 'launch_us'; add it or a preset"),
    (OWN.replace("fp32 = 10, ", "") + PAIR, "tflops has no fp32; every device needs that one"),
    (K20 + "tflops = 3.5", "tflops is 3.5; expected rates by precision, such as { fp32 = 15.7 }"),
    (K20 + "tflops = { fp33 = 3 }", "tflops: unknown field 'fp33'; did you mean fp32?"),
    (K20 + "tflops = { fp32 = 3.52e12 }", "fp32 is 3520000000000.0; expected a peak rate in TFLOP/s"),
    (K20 + "count = 0", "count is 0; expected a whole number of at least 1 and at most 1,024"),
    (K20 + "count = -2", "count is -2; expected a whole number of at least 1"),
    (K20 + "count = 100_000_000_000", "count is 100000000000; expected a whole number of at least 1 and at most 1,024"),
    (K20 + "count = 2.0", "count is 2.0; expected a whole number"),
    (K20 + "count = true", "count is True; expected a whole number"),
    (K20 + 'memory_gib = "5"', "memory_gib is '5'; expected memory a plan may use"),
    (K20 + "memory_gib = -5", "memory_gib is -5; expected memory a plan may use"),
    (K20 + "memory_gib = 7.45e-8", "memory_gib is 7.45e-08; expected memory a plan may use, in GiB"),
    (K20 + "memory_gib = 5e9", "in GiB (2^30 bytes), from 0.001 to 65,536"),
    (K20 + "memory_gib = nan", "memory_gib is nan; expected"),
    (K20 + "gb_per_s = inf", "gb_per_s is inf; expected memory bandwidth"),
    (K20 + "launch_us = -1", "launch_us is -1; expected the least time of one op in microseconds"),
    (K20 + "preset2 = 1", "did you mean preset?"),
    (K20 + "name = 3", "name is 3; expected a text in quotes"),
    (K20 + "estimated = 1", "estimated is 1; expected true or false"),
    (K20 + K20 + "memory_gib = 3\n" + PAIR, "number 2: k20 has other numbers than above; give one of them a name"),
    (EIGHT, "f.toml: nothing joins the 8 devices; add [[links]] with size = 8 at the end"),
    (EIGHT + PAIR, "f.toml: the outermost level joins 2 devices of 8; add [[links]] with size = 8 at the end"),
    (EIGHT + PAIR + PAIR, "number 2, bridge: size = 2: the level before it joins 2; levels come innermost first"),
    (
        EIGHT + PAIR.replace("= 2\n", "= 3\n") + PAIR.replace("= 2\n", "= 7\n"),
        "does not nest: it has to be a multiple of 3",
    ),
    (EIGHT + PAIR.replace("= 2\n", "= 8\n") * 2, "the level before it joins all 8 devices already; leave this one out"),
    (EIGHT + PAIR.replace("= 2\n", "= 1\n"), "size is 1; expected a whole number of at least 2"),
    (EIGHT + '[[links]]\npreset = "pcie2"', "[[links]] number 1: missing field 'size'; add it"),
    (EIGHT + "[[links]]\nsize = 8", "missing field 'name', 'latency_us', 'gb_per_s'; add them or a preset"),
    (
        EIGHT + '[[links]]\npreset = "nvlnk3"\nsize = 8',
        "[[links]] number 1: there is no link preset 'nvlnk3' (did you mean",
    ),
    (EIGHT + PAIR + "latency = 3", "unknown field 'latency'; did you mean latency_us?"),
    (
        EIGHT + PAIR.replace("2.5", "-2.5"),
        "latency_us is -2.5; expected the latency of a message in micro",
    ),
    (EIGHT + PAIR.replace("= 50", "= 5e-7"), "gb_per_s is 5e-07; expected bandwidth of one pair of devices"),
    (EIGHT + PAIR.replace("= 50", "= 5e10"), "in GB/s (1e9 bytes per second), from 1e-06 to 100,000"),
    (EIGHT + PAIR + "contention = 2", "contention is 2; expected share of the bandwidth"),
    (EIGHT + PAIR + "contention = 0", "contention is 0; expected"),
    (EIGHT + PAIR + "overlap = 50", "overlap is 50; expected largest share of a gradient reduction"),
    (EIGHT + PAIR + "overlap = -0.5", "overlap is -0.5; expected"),
    (EIGHT + PAIR + "overlap = true", "overlap is True; expected largest share"),
]


@pytest.mark.parametrize(
    ("inner", "outer", "least"),
    [("", "", 1.0), ("overlap = 0.5", "", 0.5), ("", "overlap = 0", 0.0), ("overlap = 0.25", "overlap = 0.5", 0.25)],
)
def test_of_several_levels_the_one_that_hides_least_counts(inner: str, outer: str, least: float) -> None:
    text = f"{K20}count = 4\n{PAIR}{inner}\n{PAIR.replace('= 2', '= 4', 1)}{outer}"
    assert read_cluster(text, "f").overlap == least


def test_a_preset_brings_its_overlap_and_a_file_may_change_it() -> None:
    tables = [f'{EIGHT}[[links]]\npreset = "pcie2"\nsize = 8\n{more}' for more in ("", "overlap = 1")]
    assert [read_cluster(text, "f").overlap for text in tables] == [0.5, 1.0]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_told_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster(text, "f.toml")
    assert "f.toml" in str(caught.value)
    assert words in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    cases: list[tuple[str | Path, str]] = [
        (tmp_path, "that is a folder; name a TOML file"),
        (tmp_path / "none.toml", "cannot read the cluster .*none.toml: No such file"),
        (tmp_path / "latin.toml", "cannot read the cluster .*latin.toml: .*UTF-8"),
        ("", "the name of the cluster is empty; name a TOML file"),
    ]
    for path, words in cases:
        with pytest.raises(ClusterError, match=words):
            load_cluster(path)
