"""A value that several layers read in one layout is moved once: T counts it once, as the simulated step does."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.explain.layer_report import prediction
from parplan.planner.search.context import formulated, shape_of
from parplan.planner.search_space import edges
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.simulation.list_schedule import schedule
from parplan.planner.simulation.priced_program import lowered, priced
from parplan.planner.simulation.step_tasks import step_parts
from parplan.planner.solver.problem import Status, objective
from parplan.planner.solver.solve import solve
from tests.planner.oracle import every_choice, objectives
from tests.planner.random_plans import FAR_S, case, plan_of, random_plans, step_time_s

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
        result: Tensor = y * x
        return result


class OfTheUser(nn.Module):
    """An input that layers of two kinds read: (N, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(self.layer(x)) + x
        return result


MODELS = ("residual", "readers", "input")


def model(kind: str, seed: int) -> LayerGraph:
    draw = random.Random(seed)
    batch, width, blocks = draw.choice((4, 8, 12)), draw.choice((8, 64, 256)), draw.choice((1, 2, 3))
    return _captured(kind, batch, width, blocks if kind == "residual" else 0)


@cache
def _captured(kind: str, batch: int, width: int, blocks: int) -> LayerGraph:
    nets: dict[str, Callable[[], nn.Module]] = {
        "residual": lambda: Residual(width, blocks), "readers": lambda: Readers(width),
        "input": lambda: OfTheUser(width),
    }  # fmt: skip
    return capture(nets[kind](), (torch.zeros(batch, width),))


class WithoutPeaks(RooflineCosts):
    """Memory of whole plans is not looked at."""

    def peaks(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
        """None: callers that ask have those without transfers."""
        return ()


def drawn(seed: int, kind: str, where: str) -> tuple[LayerGraph, Cluster, CostModel, list[Plan]]:
    """A small model that one process or several run, with plans of no branches at the same time."""
    graph, (_, cluster, _) = model(kind, seed), case(seed)
    cluster = replace(cluster, home=None if seed % 3 else 0)
    costs = WithoutPeaks(graph, cluster, optimizer=random.Random(seed).choice(("sgd", "adam")))
    plans = random_plans(
        graph, cluster, random.Random(seed), Scheme.GATHER,
        everywhere=where == "any blocks", all_devices=where == "all devices",
    )  # fmt: skip
    return graph, cluster, costs, [plan for plan in islice(plans, EACH) if not shape_of(plan, graph, cluster).homes]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["all devices", "nested", "any blocks"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(15))
def test_t_counts_the_transfers_of_the_lowered_program(seed: int, kind: str, where: str) -> None:
    """On a part of the devices a transfer may go on beside a layer on others, which T does not count. It counts a
    transfer to where the terms of a sum meet at the layer that reads it there, though an earlier one may need it."""
    graph, cluster, costs, plans = drawn(seed, kind, where)
    for plan in plans:
        formulation, choice = formulated(plan, graph, cluster, costs)
        predicted = prediction(formulation, choice, costs, cluster.count)
        work = priced(graph, lowered(graph, plan, cluster), costs)
        moved_s = sum(move.forward_s + move.backward_s for move in work.moves.values())
        assert predicted.transfer_s == pytest.approx(moved_s, rel=1e-9)
        exact = all(len(own.devices) == cluster.count for own in plan.layers.values())
        exact &= not any(
            layer.layout(value, plan.layers[layer.name]).partial
            for layer in graph.layers.values()
            for value in layer.outputs
        )
        error = predicted.step_s / max(span.end_s for span in schedule(step_parts(work))) - 1
        assert -1e-6 < error < (1e-6 if exact else 0.2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("anywhere", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_the_solver_proves_the_best_of_all_choices(seed: int, kind: str, anywhere: bool) -> None:
    """With the nodes that follow from the layers' options, and with every option of theirs; T of each is that of the
    plan alone."""
    graph, (_, cluster, _) = model(kind, seed), case(seed, most_devices=2)
    costs = RooflineCosts(graph, cluster)
    blocks, draw = cluster_blocks(cluster, anywhere), random.Random(seed)
    options = {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}
    known = {name: draw.sample(own, min(4, len(own))) for name, own in options.items()}
    shape = Shape(lanes=tuple(range(cluster.count)), anywhere=anywhere)
    every = formulate(graph, cluster, costs, known, shape=shape, far_s=FAR_S)
    picked = every.followed(every_choice([len(own) for own in every.options] + [1] * (1 + len(every.reused))))
    step_s = objectives(every.problem, picked)
    found = solve(every.problem)
    assert found.status is Status.OPTIMAL
    assert found.objective == pytest.approx(step_s.min(), rel=1e-9)
    assert found.choice == tuple(every.followed(found.choice or ()))
    for index in draw.sample(range(len(step_s)), min(20, len(step_s))):
        layers = every.strategies([int(np.broadcast_to(own, step_s.shape)[index]) for own in picked])
        alone = step_time_s(graph, cluster, costs, plan_of(graph, cluster, layers))
        assert step_s[index] == pytest.approx(alone, rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
def test_of_many_combinations_the_reader_before_is_looked_at(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """T of a search may then count a transfer twice, never too few: not where a later reader wants what the one before
    wants."""
    graph, (_, cluster, _) = model("readers", seed), case(seed, most_devices=2)
    costs, draw = RooflineCosts(graph, cluster), random.Random(seed)
    blocks = cluster_blocks(cluster, True)
    known = {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}
    monkeypatch.setattr(edges, "MOST_COMBINATIONS", 1)
    every = formulate(
        graph, cluster, costs, known, shape=Shape(lanes=tuple(range(cluster.count)), anywhere=True), far_s=FAR_S
    )
    monkeypatch.undo()
    read = {value: [name for name, layer in graph.layers.items() if value in layer.inputs] for value in graph.producer}
    (value,) = (value for value, readers in read.items() if len(readers) == 3)
    exact = 0
    for _ in range(60):
        layers = {name: draw.choice(own) for name, own in known.items()}
        step_s = objective(every.problem, every.choice(layers))
        alone_s = step_time_s(graph, cluster, costs, plan_of(graph, cluster, layers))
        assert step_s >= alone_s * (1 - 1e-9)
        wants = [graph.layers[name].layout(value, layers[name]) for name in read[value]]
        if wants[2] == wants[1] or wants[2] != wants[0]:
            exact += 1
            assert step_s == pytest.approx(alone_s, rel=1e-9)
    assert exact
