"""Stages: what runs before, in and after the passes of a plan, and which samples a pass has."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import Stage, Stages, shares, stages
from parplan.plan import Scheme, Strategy
from tests.every_case import every_case

PASSES = (Scheme.BROADCAST, Scheme.INTERLEAVE)


class Net(nn.Module):
    """Two convolutions, two linear layers, and a loss over all samples."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.c, self.d = nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.b(torch.relu(self.a(x)))).flatten(1)
        return functional.mse_loss(self.d(torch.relu(self.c(x))), y)


def graph_of(net: nn.Module) -> LayerGraph:
    return capture(net, (torch.zeros(8, 1, 8, 8), torch.zeros(8, 4)))


def strategies(graph: LayerGraph, replicas: Mapping[str, int], otherwise: int) -> dict[str, Strategy]:
    """Replicas by layer name; one where samples cannot be split."""
    counts = {n: replicas.get(n, otherwise) if layer.batch else 1 for n, layer in graph.layers.items()}
    return {name: Strategy(count, 1, None, tuple(range(count))) for name, count in counts.items()}


@pytest.mark.parametrize("scheme", PASSES)
def test_layers_behind_fewer_replicas_run_in_passes_and_a_loss_after_them(scheme: Scheme) -> None:
    graph = graph_of(Net())
    found = stages(graph, strategies(graph, {"c": 1}, 4), scheme)
    assert (found.passes, found.max_replicas, found.min_replicas) == (4, 4, 1)
    behind = list(graph.layers)[list(graph.layers).index("c") :]
    assert found.layers(Stage.PASSES) == tuple(n for n in behind if graph.layers[n].batch is not None)
    assert found.layers(Stage.AFTER) == tuple(n for n in behind if graph.layers[n].batch is None) != ()
    assert "d" in found.layers(Stage.PASSES)  # it has four replicas again: of each pass's samples


def test_gather_and_equal_replicas_run_once() -> None:
    graph = graph_of(Net())
    assert stages(graph, strategies(graph, {"c": 1, "d": 1}, 4), Scheme.GATHER).passes == 1
    for scheme in PASSES:
        found = stages(graph, strategies(graph, {}, 4), scheme)
        assert (found.passes, set(found.of.values())) == (1, {Stage.BEFORE})  # a loss has one replica by its nature


REFUSED = {
    "no whole number of passes": (Net(), {"c": 2}, 3, "do not divide"),
    "batch norm behind": (Net(norm=True), {"b": 1}, 2, r"norm: its statistics are of the whole batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_in_passes_is_refused(name: str) -> None:
    net, replicas, otherwise, text = REFUSED[name]
    graph = graph_of(net)
    with pytest.raises(PlanError, match=text):
        stages(graph, strategies(graph, replicas, otherwise), Scheme.INTERLEAVE)
    assert stages(graph, strategies(graph, replicas, otherwise), Scheme.GATHER).passes == 1


@every_case("seed", range(20))
def test_every_sample_is_in_one_pass(seed: int) -> None:
    draw = random.Random(seed)
    fewest, passes = draw.choice((1, 2, 3)), draw.choice((2, 3, 4))
    known = Stages(passes, fewest * passes, fewest, {})
    rows = tuple(draw.randrange(6) for _ in range(known.max_replicas))
    for scheme in PASSES:
        found = shares(rows, known, scheme)
        assert len(found) == passes
        assert sorted(i for own in found for one in own for i in range(one.start, one.stop)) == list(range(sum(rows)))
        counts = [sum(map(len, own)) for own in found]
        if scheme is Scheme.INTERLEAVE:
            assert max(counts) - min(counts) <= known.max_replicas
            assert all(len(own) == known.max_replicas for own in found)
        else:
            assert counts == [sum(rows[number::passes]) for number in range(passes)]
