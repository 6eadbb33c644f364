"""Branches of a model: on drawn graphs against brute force, and on the networks people have."""

from __future__ import annotations

import random

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from examples import alexnet, resnet50, two_tower
from parplan.api import analyze
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.planner.search.branches import Section, homes_of, sections, sections_of
from tests.planner.graphs import classifier, perceptron

SEEDS = range(60)


class Drawn:
    """A series-parallel graph and what it was built of: branches by the fork and the join they lie between."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.digraph = draw, nx.DiGraph()
        self.forks: list[tuple[str | None, str | None, frozenset[frozenset[str]]]] = []
        self.ends = self._chain(3, None, None)
        self.order = list(nx.lexicographical_topological_sort(self.digraph, key=lambda _: draw.random()))

    def _node(self, sources: list[str]) -> str:
        name = f"n{len(self.digraph)}"
        self.digraph.add_node(name)
        self.digraph.add_edges_from((source, name) for source in sources)
        return name

    def _chain(self, depth: int, fork: str | None, join: str | None) -> list[str]:
        """A few layers in a row, with branches between two of them now and then; what is left open at the end."""
        last = self._node([fork] if fork else [])
        for _ in range(self.draw.randint(0, 3)):
            if depth and self.draw.random() < 0.7:
                last = self._fork(depth - 1, last)
            last = self._node([last])
        return [last]

    def _fork(self, depth: int, fork: str) -> str:
        branches, ends = [], []
        for _ in range(self.draw.randint(2, 3)):
            before = set(self.digraph)
            ends += self._chain(depth, fork, None)
            branches.append(frozenset(set(self.digraph) - before))
        skip = [fork] if self.draw.random() < 0.3 else []
        join = self._node([*ends, *skip])
        self.forks.append((fork, join, frozenset(branches)))
        return join


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_branches_of_series_parallel_graphs_are_those_they_were_built_of(seed: int) -> None:
    drawn = Drawn(random.Random(seed))
    found = sections_of(drawn.digraph, drawn.order)
    assert all(len(section.phases) == 1 for section in found)
    listed = {(one.fork, one.join, frozenset(frozenset(b) for b in one.phases[0])) for one in found}
    assert listed == set(drawn.forks)
    assert len(found) == len(drawn.forks)


def random_graph(seed: int) -> tuple[nx.DiGraph, list[str]]:
    """Any directed graph without cycles, its nodes in order."""
    draw = random.Random(seed)
    order = [f"n{index}" for index in range(draw.randint(2, 14))]
    digraph = nx.DiGraph()
    digraph.add_nodes_from(order)
    chance = draw.choice((0.15, 0.3, 0.5))
    digraph.add_edges_from((a, b) for i, a in enumerate(order) for b in order[i + 1 :] if draw.random() < chance)
    return digraph, order


def passed_by_all(digraph: nx.DiGraph) -> set[str]:
    """Layers without which no path leads from the inputs to the results, by taking each out."""
    whole = nx.DiGraph(digraph)
    whole.add_edges_from(("(in)", name) for name, degree in digraph.in_degree() if degree == 0)
    whole.add_edges_from((name, "(out)") for name, degree in digraph.out_degree() if degree == 0)
    found = set()
    for name in digraph:
        left = nx.restricted_view(whole, [name], [])
        if not nx.has_path(left, "(in)", "(out)"):
            found.add(name)
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_forks_and_joins_are_what_every_path_passes(seed: int) -> None:
    digraph, order = random_graph(seed)
    cuts = passed_by_all(digraph)
    outer = [section for section in sections_of(digraph, order) if not section.inside]
    for section in outer:
        assert {section.fork, section.join} - {None} <= cuts
        assert not cuts & set(section.layers)
        begin = order.index(section.fork) if section.fork else -1
        end = order.index(section.join) if section.join else len(order)
        assert not any(name in cuts for name in order[begin + 1 : end])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_branches_of_a_phase_cannot_reach_each_other(seed: int) -> None:
    digraph, order = random_graph(seed)
    place = {name: index for index, name in enumerate(order)}
    for section in sections_of(digraph, order):
        assert section.width > 1
        assert len(set(section.layers)) == len(section.layers)
        for phase in section.phases:
            for one in phase:
                assert list(one) == sorted(one, key=place.__getitem__)
                reached = set().union(*(nx.descendants(digraph, name) for name in one))
                assert not any(reached & set(other) for other in phase if other is not one)
        after: set[str] = set()
        for phase in reversed(section.phases):  # nothing that comes later leads back
            own = {name for branch in phase for name in branch}
            assert not any(nx.descendants(digraph, name) & own for name in after)
            after |= own
        assert not section.inside or set(section.layers) <= set(section.inside)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
def test_layers_that_could_run_side_by_side_are_in_some_section(seed: int) -> None:
    """Two layers of one stretch neither of which needs the other are told apart by a branch or by a phase."""
    digraph, order = random_graph(seed)
    found = sections_of(digraph, order)
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :] if b not in nx.descendants(digraph, a)]
    for a, b in pairs:
        assert any(_apart(section, a, b) for section in found), (a, b)


def _apart(section: Section, a: str, b: str) -> bool:
    homes = [
        {(i, j) for i, phase in enumerate(section.phases) for j, branch in enumerate(phase) if name in branch}
        for name in (a, b)
    ]
    return bool(homes[0] and homes[1]) and homes[0] != homes[1]


@pytest.mark.full
def test_the_two_towers_of_2012_are_four_phases_between_their_crossings() -> None:
    net, inputs = two_tower.small()
    (section,) = sections(capture(net, inputs))
    assert (section.fork, section.join, section.inside) == (None, "join8", ())
    ends = [[(branch[0], branch[-1]) for branch in phase] for phase in section.phases]
    assert ends == [
        [("conv1a", "pool2a"), ("conv1b", "pool2b")],
        [("join3a", "flattena"), ("join3b", "flattenb")],
        [("join6a", "drop6a"), ("join6b", "drop6b")],
        [("join7a", "drop7a"), ("join7b", "drop7b")],
    ]


@pytest.mark.full
def test_a_residual_network_branches_where_its_shortcuts_have_layers() -> None:
    net, inputs = resnet50.small()
    found = sections(capture(net, inputs))
    assert [section.fork for section in found] == ["maxpool", "layer1.0.relu3", "layer2.1.relu3", "layer3.0.relu3"][
        : len(found)
    ]
    assert all({"downsample" in name for branch in s.phases[0] for name in branch} == {True, False} for s in found)


@pytest.mark.parametrize("graph", [perceptron, classifier], ids=["perceptron", "residual add"])
def test_chains_and_skips_have_no_branches(graph) -> None:  # type: ignore[no-untyped-def]
    assert sections(graph()) == ()


def test_alexnet_has_none() -> None:
    net, inputs = alexnet.small()
    assert sections(capture(net, inputs)) == ()


class Positions(nn.Module):
    """A table that no sample reaches, read again and again, beside one row of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Parameter(torch.ones(8)), nn.Dropout()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to (N, 8)."""
        at = self.drop(self.table)
        for layer in self.layers:
            x = layer(x + at)
        return x


def test_what_no_sample_reaches_is_no_branch() -> None:
    graph = capture(Positions(), (torch.zeros(4, 8),))
    assert any(layer.constant for layer in graph.layers.values())
    assert sections(graph) == ()


def two_branches() -> LayerGraph:
    net = nn.Sequential(nn.Linear(8, 8), Both(), nn.Linear(8, 8))
    return capture(net, (torch.zeros(4, 8),))


class Both(nn.Module):
    """Two layers on one input, added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to (N, 8)."""
        result: Tensor = self.a(x) + self.b(x)
        return result


class Towers(nn.Module):
    """Users and items, each with layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Sequential(nn.EmbeddingBag(20_000, 64), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128))
        self.other = nn.Sequential(nn.EmbeddingBag(50_000, 64), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128))
        self.last = nn.Linear(256, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Eight users and items of each sample to its score."""
        score: Tensor = self.last(torch.cat([self.own(user), self.other(item)], 1)).squeeze(1)
        return score


PINS = (["own.0=saved:replay"], ["own=gpu:0,1 replicas:2 state:sharded", "other=gpu:2,3 replicas:2"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pins", PINS, ids=["replay", "state"])
def test_layers_of_branches_with_devices_of_their_own_keep_what_is_pinned(pins: list[str]) -> None:
    """Strategies on their blocks were listed anew, without state and replay."""
    batch = torch.zeros(256, 8, dtype=torch.long), torch.zeros(256, 8, dtype=torch.long)
    gpus = 4 if len(pins) > 1 else 2
    found = analyze(Towers(), batch, gpus=gpus, gpu="v100-sxm2", pins=pins)
    homes = {name: own.devices for name, own in found.plan.layers.items()}
    assert not set(homes["own.1"]) & set(homes["other.1"])
    again = analyze(Towers(), batch, gpus=gpus, gpu="v100-sxm2", plan=found.plan)
    assert again.prediction.step_s == pytest.approx(found.prediction.step_s)


def test_branches_are_beside_each_other_on_disjoint_devices_only() -> None:
    graph = two_branches()
    together = dict.fromkeys(graph.layers, (0, 1))
    assert homes_of(graph, together) == ()
    assert homes_of(graph, {**together, "1.b": (1,)}) == ()
    assert homes_of(graph, {**together, "1.b": (1,), "1.a": (0,)}) == (((("1.a",), (0,)), (("1.b",), (1,))),)
    assert homes_of(graph, {**dict.fromkeys(graph.layers, (0,)), "0": (1,)}) == ()
