"""Curves of measured communication, and what transfers and gradient sums make of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parplan.cost_models.communication.measured_links import Curve, MeasuredLinks
from parplan.cost_models.communication.transfers import Transfers
from parplan.cost_models.costs import Source
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.measured import step_cost
from parplan.cost_models.profile.records import LinkEntry, SessionProfile
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import Grid, Layout
from parplan.lowering.holdings import BUCKET_BYTES
from parplan.plan import Strategy
from tests.planner.graphs import perceptron

KINDS = ("copy", "all-gather", "reduce-scatter", "all-to-all", "all-reduce")
SIZES = (1 << 10, 1 << 16, 1 << 20)


def entry(kind: str, group: int, nbytes: int, seconds: float, reference_s: float = 0.0) -> LinkEntry:
    return LinkEntry("gloo", kind, group, nbytes, seconds, 0.03, 9, reference_s)


def linear_links(*groups: int, latency_s: float = 1e-4, per_byte_s: float = 1e-9) -> MeasuredLinks:
    """All kinds among these groups, on a line of their own each."""
    return MeasuredLinks(
        [
            entry(kind, group, nbytes, (1 + place) * group * (latency_s + per_byte_s * nbytes))
            for (place, kind), group, nbytes in product(enumerate(KINDS), groups, SIZES)
        ]
    )


def found(links: MeasuredLinks, kind: str, group: int) -> Curve:
    curve = links.curve(kind, group)
    assert curve is not None
    return curve


POINTS = st.dictionaries(st.integers(1, 10**9), st.floats(1e-7, 10), min_size=1, max_size=6)


@given(POINTS, st.lists(st.integers(0, 10**10), min_size=2, max_size=9))
def test_a_curve_never_falls_and_is_the_nearest_such_to_its_points(points: dict[int, float], wanted: list[int]) -> None:
    """By the formula of isotonic regression: the largest over begins of the smallest over ends of the mean between."""
    curve = found(MeasuredLinks([entry("copy", 2, n, s) for n, s in points.items()]), "copy", 2)
    sizes = sorted(points)
    for place, nbytes in enumerate(sizes):
        ends = range(place + 1, len(sizes) + 1)
        means = [[np.mean([points[n] for n in sizes[a:b]]) for b in ends] for a in range(place + 1)]
        assert float(curve.seconds(nbytes)) == pytest.approx(max(map(min, means)))
    times = curve.seconds(sorted(wanted))
    assert (np.diff(times) >= -1e-12).all()
    assert float(curve.seconds(0)) == 0.0


def test_between_points_it_is_a_line_and_beyond_the_last_one_goes_on() -> None:
    curve = found(MeasuredLinks([entry("copy", 2, n, s) for n, s in ((10, 1.0), (20, 2.0), (40, 8.0))]), "copy", 2)
    assert curve.seconds([1, 10, 15, 30, 40, 50, 140]).tolist() == pytest.approx([1, 1, 1.5, 5, 8, 11, 38])


def test_a_single_point_is_the_same_for_all_sizes() -> None:
    curve = found(MeasuredLinks([entry("copy", 2, 10, 1.0)]), "copy", 2)
    assert curve.seconds([1, 10, 1000]).tolist() == [1, 1, 1]


def test_a_group_that_was_not_measured_is_the_next_larger_never_a_smaller() -> None:
    links = linear_links(2, 4)
    assert links.curve("all-reduce", 3) is links.curve("all-reduce", 4)
    assert links.curve("all-reduce", 5) is None
    assert links.curve("broadcast", 2) is None


def test_times_follow_the_reference_kernel() -> None:
    slower = MeasuredLinks([entry("copy", 2, 10, 1.0, 2e-3), entry("copy", 2, 20, 2.0)], reference_s=3e-3)
    assert found(slower, "copy", 2).seconds([10, 20]).tolist() == pytest.approx([1.5, 2.0])


DEVICES = 4


def _layouts() -> st.SearchStrategy[Layout]:
    def made(order: list[int], shape: tuple[int, int], batch: bool, shard: bool, partial: bool) -> Layout:
        replicas, shards = shape
        grid = Grid(tuple(order[: replicas * shards]), replicas, shards)
        shard_dim = 1 if shard and shards > 1 else None
        return Layout(grid, 0 if batch and replicas > 1 else None, shard_dim, partial and shard_dim is None)

    shapes = st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2)])
    order = st.permutations(range(DEVICES))
    return st.builds(made, order, shapes, st.booleans(), st.booleans(), st.booleans())


@given(
    st.lists(_layouts(), min_size=1, max_size=4),
    st.lists(_layouts().filter(lambda layout: not layout.partial), min_size=1, max_size=4),
    st.sampled_from([(), (2,), (2, 4), (4,)]),
    st.booleans(),
)
def test_a_matrix_of_transfers_is_each_of_them(
    sources: list[Layout], targets: list[Layout], groups: tuple[int, ...], trained: bool
) -> None:
    transfers = Transfers(cluster_preset("cpu", DEVICES), linear_links(*groups) if groups else None)
    value = TensorSpec((8, 16, 3), torch.float32, trained)
    matrix = transfers.transfer_matrix(value, sources, targets)
    for (i, source), (j, target) in product(enumerate(sources), enumerate(targets)):
        one = transfers.transfer(value, source, target)
        assert (matrix.forward_s[i, j], matrix.backward_s[i, j]) == (one.forward_s, one.backward_s)
        assert one.forward_s >= 0
        assert (one.forward_s > 0) == (one.kind not in ("none", "slice"))


ROW = Grid(tuple(range(4)), 1, 4)
ONE = Layout(Grid((0,), 1, 1), None)
CASES = [
    ("copy", ONE, Layout(Grid((1,), 1, 1), None), "copy", 2, 1.0),
    ("gather", Layout(ROW, None, 1), ONE, "copy", 2, 0.75),
    ("all-gather", Layout(ROW, None, 1), Layout(ROW, None), "all-gather", 4, 0.75),
    ("all-to-all", Layout(ROW, None, 1), Layout(ROW, None, 0), "all-to-all", 4, 3 / 16),
    ("reduce-scatter", Layout(ROW, None, None, partial=True), Layout(ROW, None, 1), "reduce-scatter", 4, 0.75),
]


@pytest.mark.parametrize(("kind", "source", "target", "curve", "group", "share"), CASES, ids=[c[0] for c in CASES])
def test_a_transfer_takes_what_its_kind_took_for_what_the_busiest_device_receives(
    kind: str, source: Layout, target: Layout, curve: str, group: int, share: float
) -> None:
    links = linear_links(2, 4)
    value = TensorSpec((8, 16), torch.float32, True)
    cost = Transfers(cluster_preset("cpu", 4), links).transfer(value, source, target)
    assert cost.kind == kind
    assert cost.forward_s == cost.backward_s == pytest.approx(float(found(links, curve, group).seconds(share * 512)))


def test_a_layer_pays_its_share_of_a_measured_bucket() -> None:
    graph, links = perceptron(), linear_links(2)
    costs = RooflineCosts(graph, cluster_preset("cpu", 2), links=links)
    everything = sum(graph.values[name].nbytes for name in graph.parameters)
    assert everything < BUCKET_BYTES
    whole_s = float(found(links, "all-reduce", 2).seconds(everything))
    both = Strategy(2, 1, None, (0, 1))
    shares = [costs.reduction(layer, both) for layer in graph.layers.values()]
    assert sum(shares) == pytest.approx(whole_s)
    assert costs.reduction(next(iter(graph.layers.values())), Strategy()) == 0.0


def test_measured_links_say_so_with_their_spread() -> None:
    costs = RooflineCosts(perceptron(), cluster_preset("cpu", 2))
    step = step_cost(SessionProfile(), costs, linear_links(2))
    assert (step.links, step.spread) == (Source.MEASURED, 0.03)
    assert step_cost(SessionProfile(), costs, None) == costs.step
    assert costs.step.links is Source.ESTIMATED
