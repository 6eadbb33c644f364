"""Figures of a change of layout, by device and by domain of links, against the pieces listed one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import lcm, prod
from random import Random

import pytest
import torch

from parplan.cluster import Cluster, Link
from parplan.cost_models.communication.binary_flows import BinaryFlows, binary
from parplan.cost_models.communication.collectives import Topology
from parplan.cost_models.communication.regular_flows import RegularFlows, regular
from parplan.cost_models.communication.traffic import Traffic, traffic
from parplan.cost_models.communication.transfers import Transfers
from parplan.cost_models.devices.presets import device_preset
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import Grid, Layout, Piece
from tests.every_case import every_case
from tests.slow_layout import in_sections, random_layout, slow_elements, slow_pieces

SIZES = (None, 1, 2, 3, 4, 6, 8, 12, 16)


def random_pair(seed: int) -> tuple[Layout, Layout]:
    random = Random(seed)
    devices, rank, regular = random.choice([4, 6, 8, 16, 24]), random.randint(1, 3), random.random() < 0.7
    ends = [random_layout(random, devices, rank, partial, regular) for partial in (True, False)]
    return ends[0], ends[1]


def check_flows(moved: Traffic, listed: list[Piece], size: int | None) -> None:
    inside = [piece for piece in listed if size is None or piece.source // size == piece.target // size]
    counted: Mapping[str, Counter[int]] = {name: Counter() for name in ("in", "messages in", "out", "messages out")}
    for piece in inside:
        counted["in"][piece.target] += piece.elements
        counted["out"][piece.source] += piece.elements
        counted["messages in"][piece.target] += 1
        counted["messages out"][piece.source] += 1
    flow = moved.within(size)
    assert flow.received.tolist() == [counted["in"][device] for device in moved.receivers]
    assert flow.messages_in.tolist() == [counted["messages in"][device] for device in moved.receivers]
    assert flow.sent.tolist() == [counted["out"][device] for device in moved.senders]
    assert flow.messages_out.tolist() == [counted["messages out"][device] for device in moved.senders]


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_flows_between_sections_are_the_elements_added_up(start: int) -> None:
    for seed in range(start, start + 50):
        random = Random(seed)
        source, target = (random_layout(random, 6, 2, partial, random.random() < 0.6) for partial in (True, False))
        source, target = in_sections(random, source), in_sections(random, target)
        shape = [1, 1]
        for layout in (source, target):
            for dim, parts in layout.cuts.items():
                total = layout.sections.total if layout.sections is not None and dim == layout.shard_dim else 1
                shape[dim] = lcm(shape[dim], parts * total)
        listed, moved = slow_elements(shape, source, target), traffic(source, target)
        for size in (None, 1, 2, 3, 4):
            flow, inside = (
                moved.within(size),
                {p: n for p, n in listed.items() if not size or p[0] // size == p[1] // size},
            )
            for index, devices, elements, messages in (
                (0, moved.senders, flow.sent, flow.messages_out),
                (1, moved.receivers, flow.received, flow.messages_in),
            ):
                found = [Fraction(int(count), moved.total) for count in elements]
                pairs = [[n for pair, n in inside.items() if pair[index] == device] for device in devices]
                assert found == [Fraction(sum(own), prod(shape)) for own in pairs], seed
                assert messages.tolist() == [len(own) for own in pairs], seed


@every_case("start", range(0, 400, 50))
def test_flows_are_the_pieces_added_up(start: int) -> None:
    for seed in range(start, start + 50):
        moved = traffic(*random_pair(seed))
        listed = slow_pieces(moved.shape, moved.source, moved.target)
        for size in SIZES:
            check_flows(moved, listed, size)
        foreign = [piece for piece in listed if piece.source != piece.target]
        if foreign:
            assert moved.whole == all(piece.elements == moved.held for piece in foreign)


def test_formula_and_list_are_both_tried() -> None:
    by_formula = [regular(*random_pair(seed)) for seed in range(400)]
    assert 100 < sum(by_formula) < 350


def slow_seconds(cluster: Cluster, moved: Traffic, listed: list[Piece]) -> Fraction:
    """A message passes all levels inside the one that joins its ends; each level waits for the busiest there."""
    waiting, slowest, inner = Fraction(0), Fraction(0), 1
    for link in cluster.links:
        beyond = [p for p in listed if p.source // inner != p.target // inner]  # that do not stay in a domain
        joined = [p for p in beyond if p.source // link.size == p.target // link.size]
        messages = [Counter(getattr(p, end) for p in joined) for end in ("source", "target")]
        waiting += max((max(own.values(), default=0) for own in messages), default=0) * Fraction(link.latency_s)
        uplink = inner * Fraction(link.contention) * Fraction(link.bandwidth_bytes_per_s)
        for domain, rate in ((inner, uplink), (1, Fraction(link.bandwidth_bytes_per_s))):
            if domain == 1 and rate != uplink and inner == 1:
                continue  # the device is the domain
            for end in ("source", "target"):
                busy: Counter[int] = Counter()
                for piece in beyond:
                    busy[getattr(piece, end) // domain] += piece.elements
                slowest = max(slowest, max(busy.values(), default=0) / rate / moved.total)
        inner = link.size
    return waiting + slowest * 1000


@pytest.mark.parametrize("levels", [(24,), (4, 24), (2, 8, 24), (3, 12, 24), (8, 16, 32)], ids=str)
def test_seconds_over_several_levels(levels: tuple[int, ...]) -> None:
    links = tuple(
        Link(str(size), size, 1e-6 * (3 + place), 1e9 / (1 + place), 1 / (1 + place))
        for place, size in enumerate(levels)
    )
    cluster = Cluster.of(device_preset("v100"), 24, links)
    for seed in range(150):
        moved = traffic(*random_pair(seed))
        listed = slow_pieces(moved.shape, moved.source, moved.target)
        expected = float(slow_seconds(cluster, moved, listed))
        (time,) = Topology(cluster).traffic(moved, [moved.total])
        assert time.seconds(1000) == pytest.approx(expected, rel=1e-12)


def test_a_thousand_devices_are_counted_by_formula() -> None:
    """Every device gets all of what every other holds: a million pieces, none of them listed."""
    devices = tuple(range(1024))
    moved = traffic(Layout(Grid(devices, 1024, 1), 0), Layout(Grid(devices, 1, 1024), None))
    assert moved.foreign.received.tolist() == [1023] * 1024
    assert moved.within(8).messages_out.tolist() == [8] * 1024
    assert "_table" not in vars(moved)


def test_pairs_of_one_class_cost_the_same() -> None:
    """What is known of one pair and used for others equals what each of them costs by itself."""
    links = (Link("in", 4, 1e-6, 1e10), Link("out", 12, 1e-5, 1e9, 0.5), Link("far", 24, 1e-4, 1e8))
    cluster, value = Cluster.of(device_preset("v100"), 24, links), TensorSpec((48, 48, 48), torch.float32, True)
    together = Transfers(cluster)
    for seed in range(200):
        random = Random(seed)
        pair = [random_layout(random, 4, 2, partial, regular=True) for partial in (True, False)]
        for by in (0, 4, 8, random.randrange(21), 20):
            grids = [replace(own.grid, devices=tuple(device + by for device in own.grid.devices)) for own in pair]
            moved = [replace(own, grid=grid) for own, grid in zip(pair, grids, strict=True)]
            assert together.transfer(value, *moved) == Transfers(cluster).transfer(value, *moved)
    assert len(together._known) < 400


def test_pairs_counted_together_cost_what_each_costs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular pairs and others, with few enough devices together that there are many batches."""
    monkeypatch.setattr("parplan.cost_models.communication.traffic.TOGETHER", 100)
    links = (Link("in", 2, 1e-6, 1e10, 0.5), Link("out", 8, 1e-5, 1e9), Link("far", 24, 1e-4, 1e8))
    cluster, value = Cluster.of(device_preset("v100"), 24, links), TensorSpec((48, 48, 48), torch.float32, True)
    ends = list(zip(*map(random_pair, range(30)), strict=True))
    found = Transfers(cluster).transfer_matrix(value, *ends).forward_s
    alone = [[Transfers(cluster).transfer(value, a, b).forward_s for b in ends[1]] for a in ends[0]]
    assert found.tolist() == alone


def binary_pairs(devices: int, draw: Random | None = None) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts on aligned blocks of powers of two: all of them, or 3,000 that are drawn."""
    grids = [
        Grid(tuple(range(first, first + count)), rows, count // rows)
        for count in (1 << n for n in range(devices.bit_length()))
        for first in range(0, devices, count)
        for rows in (1 << n for n in range(count.bit_length()))
    ]
    cuts = [(None, None), (None, 0), (0, None), (0, 1), (1, 0), (0, 2), (2, None), (None, 1)]
    wanted = [(grid, *cut) for grid in grids for cut in cuts]
    given = [(*one, partial) for one in wanted for partial in (False, True) if not partial or one[2] is None]
    ends = [(a, b) for a in given for b in wanted] if draw is None else []
    ends += [(draw.choice(given), draw.choice(wanted)) for _ in range(3000)] if draw is not None else []
    return [(Layout(*a), Layout(*b)) for a, b in ends]


@pytest.mark.parametrize("devices", [2, 4, 16, 64, 1024])
def test_digits_count_what_arrays_of_all_devices_add_up_to(devices: int) -> None:
    draw = Random(devices) if devices > 4 else None
    sizes = [size for size in (1, 2, 8, 32) if size < devices]
    pairs = [pair for pair in binary_pairs(devices, draw) if regular(*pair) and binary(*pair, sizes)]
    pairs = pairs[: 300 if devices > 64 else None]
    assert len(pairs) > 100
    by_digits, by_arrays = BinaryFlows(pairs), RegularFlows(pairs)
    assert by_digits.last == by_arrays.last
    assert by_digits.pieces.tolist() == by_arrays.pieces.tolist()
    for inner, outer in combinations([*sizes, None], 2):
        assert inner is not None
        for unit in {1, inner}:
            found, expected = (one.elements(inner, outer, unit) for one in (by_digits, by_arrays))
            assert [one.tolist() for one in found] == [one.tolist() for one in expected]
        for find in ("messages", "message"):
            found, expected = (getattr(one, find)(inner, outer) for one in (by_digits, by_arrays))
            assert found.tolist() == expected.tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("levels", [(16,), (8, 64), (2, 8, 32), (8, 24), (4, 12, 24)], ids=str)
def test_many_pairs_cost_the_same_counted_by_digits(levels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    links = tuple(
        Link(str(size), size, 1e-6 * (3 + place), 1e9 / (1 + place), 1 / (1 + place), pair=0.5 if place == 0 else 1.0)
        for place, size in enumerate(levels)
    )
    cluster = Cluster.of(device_preset("v100"), levels[-1], links)
    value = TensorSpec((1024, 1024), torch.float32, True)
    draw = Random(levels[-1])
    pairs = binary_pairs(1 << (levels[-1].bit_length() - 1), draw)[:80]
    found = []
    for together in (0, 1 << 40):
        monkeypatch.setattr("parplan.cost_models.communication.traffic.TOGETHER", together)
        transfers = Transfers(cluster)
        matrix = transfers.transfer_matrix(value, [a for a, _ in pairs], [b for _, b in pairs])
        found.append((matrix.forward_s.tolist(), [transfers.transfer(value, *pair) for pair in pairs]))
    assert found[0] == found[1]
