"""A value that several layers read in one layout is moved once: T counts it once, as the simulated step does."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import RooflineCosts
from parplan.plan import Plan, Scheme
from parplan.planner.explain.layer_report import prediction
from parplan.planner.search.context import formulated, shape_of
from parplan.planner.simulation.priced_program import lowered, priced
from parplan.planner.simulation.timeline import simulate
from tests.planner.random_plans import case, random_plans, step_time_s

EACH = 10


class Residual(nn.Module):
    """Blocks whose input a norm and an addition read: (N, width) to the same."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class Readers(nn.Module):
    """A value that three layers of three kinds read, one after another: (N, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.first, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(x + self.first(x))
        return y * x


class OfTheUser(nn.Module):
    """An input that layers of two kinds read: (N, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) + x


MODELS = ("residual", "readers", "input")


@cache
def model(kind: str, seed: int) -> LayerGraph:
    draw = random.Random(seed)
    batch, width = draw.choice((4, 8, 12)), draw.choice((8, 64, 256))
    net = {
        "residual": lambda: Residual(width, draw.choice((1, 2, 3))),
        "readers": lambda: Readers(width),
        "input": lambda: OfTheUser(width),
    }[kind]()
    return capture(net, (torch.zeros(batch, width),))


def drawn(seed: int, kind: str, where: str) -> tuple[LayerGraph, Cluster, CostModel, list[Plan]]:
    """A small model that one process or several run, with plans of no branches at the same time."""
    graph, (_, cluster, _) = model(kind, seed), case(seed)
    cluster = replace(cluster, home=None if seed % 3 else 0)
    costs = RooflineCosts(graph, cluster, optimizer=random.Random(seed).choice(("sgd", "adam")))
    plans = random_plans(
        graph, cluster, random.Random(seed), Scheme.GATHER,
        everywhere=where == "any blocks", all_devices=where == "all devices",
    )  # fmt: skip
    return graph, cluster, costs, [plan for plan in islice(plans, EACH) if not shape_of(plan, graph, cluster).homes]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["all devices", "nested", "any blocks"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(30))
def test_t_counts_the_transfers_of_the_lowered_program(seed: int, kind: str, where: str) -> None:
    graph, cluster, costs, plans = drawn(seed, kind, where)
    for plan in plans:
        formulation, choice = formulated(plan, graph, cluster, costs)
        moves = priced(graph, lowered(graph, plan, cluster), costs).moves.values()
        moved_s = sum(move.forward_s + move.backward_s for move in moves)
        assert prediction(formulation, choice, costs, cluster.count).transfer_s == pytest.approx(moved_s, rel=1e-9)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["all devices", "nested", "any blocks"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(30))
def test_readers_of_one_value_take_t(seed: int, kind: str, where: str) -> None:
    """On a part of the devices a transfer may go on beside a layer on others, which T does not count."""
    graph, cluster, costs, plans = drawn(seed, kind, where)
    for plan in plans:
        error = step_time_s(graph, cluster, costs, plan) / simulate(graph, cluster, costs, plan).step_s - 1
        assert -1e-6 < error < (1e-6 if where == "all devices" else 0.2)
