"""The predicted peak of whole steps against the real one: allocations are exact, so nothing here depends on time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import islice
from random import Random
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.memory import PLANS, Case, peaks
from benchmarks.memory_networks import NETWORKS
from benchmarks.proof_cases import KINDS, drawn
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.plan_peaks import memory_by_layer, memory_over_step
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.local import LocalLayer
from parplan.graph.repeated import unit_of
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from parplan.plan import STATES, Scheme, Strategy
from parplan.planner.search_space.strategies import strategies
from tests.planner.random_plans import random_plans
from tests.planner.test_sharded_state import in_slices
from tests.runtime.ranks import run_case

BY_NAME = {network.name: network for network in NETWORKS}


def check(name: str, plan: str, optimizer: str, rank: int = 0, ranks: int = 1, *, autocast: bool = False) -> None:
    """One step's peak within 5 % of the prediction, which the process that plans has for all."""
    found = peaks(Case(BY_NAME[name], plan, optimizer, ranks, autocast=autocast))
    if rank == 0:
        assert found.predicted_bytes[rank] == pytest.approx(found.measured_bytes, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("mlp, wide", "adam"), ("mlp, many classes", "sgd"), ("convnet, wide", "momentum"), ("transformer", "adam")],
)
def test_one_device(name: str, optimizer: str) -> None:
    check(name, "one device", optimizer)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "plan", "optimizer"),
    [
        ("convnet, batch norm", "data-parallel", "sgd"),
        ("mlp, deep", "sharded", "momentum"),
        ("alexnet-like", "hybrid", "adam"),
        ("transformer, wide", "sharded state", "adam"),
        ("mlp, wide", "gathered state", "adam"),
        ("tied words", "sharded", "adam"),  # both cut the table, each along its own axis: it stays whole
        ("tied words", "hybrid", "momentum"),
    ],
)
def test_two_processes(name: str, plan: str, optimizer: str) -> None:
    run_case(partial(check, name, plan, optimizer), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("transformer", "data-parallel"),
        ("transformer, wide", "sharded state"),
        ("transformer, wide", "gathered state"),
        ("alexnet-like", "gathered state"),
        ("mlp, many classes", "sharded"),
        ("residual", "data-parallel"),  # a batch norm over replicas has copies in float32
        ("tied words", "hybrid"),
    ],
)
def test_two_processes_under_autocast(name: str, plan: str) -> None:
    run_case(partial(check, name, plan, "adam", autocast=True), 2)


# ---- random plans ----------------------------------------------------------------------------------------------------


@cache
def captured(name: str) -> LayerGraph:
    torch.manual_seed(0)
    network = BY_NAME[name]
    return capture(network.build(), (network.batch(24)[0],))


def random_plan(graph: LayerGraph, devices: int, random: Random) -> dict[str, Strategy]:
    """Layers on any blocks of neighbours, or in odd orders; most follow the layer before."""
    plan: dict[str, Strategy] = {}
    last = Strategy()
    for name, layer in graph.layers.items():
        size = random.randint(1, devices)
        first = random.randrange(devices - size + 1)
        block = random.sample(range(devices), size) if random.random() < 0.2 else range(first, first + size)
        legal = strategies(layer, graph.batch or 1, [tuple(block), last.devices])
        alike = [one for one in legal if one == last]
        last = plan[name] = alike[0] if alike and random.random() < 0.5 else random.choice(legal)
    return plan


def check_random(name: str, seed: int, rank: int, ranks: int) -> None:
    """Every process's peak within 2 % of what the first one predicts."""
    drawn: dict[str, Strategy] = {}

    def rule(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
        drawn.update(drawn or random_plan(graph, devices, Random(seed)))
        return drawn[layer.name]

    with patch.dict(PLANS, random=rule):
        found = peaks(Case(BY_NAME[name], "random", ("sgd", "momentum", "adam")[seed % 3], ranks))
    measured = [0] * ranks
    dist.all_gather_object(measured, found.measured_bytes)
    if rank == 0:
        assert list(found.predicted_bytes) == pytest.approx(measured, rel=0.02), (found.predicted_bytes, measured)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("embedding", 2),  # a view is the result of a segment
        ("residual", 4),  # gradients that arrive for values that layers on the same device read too
        ("residual", 5),
        ("transformer, wide", 4),  # a gradient is handed on to values of two devices
        ("convnet", 3),
    ],
)
def test_random_plans(name: str, seed: int) -> None:
    run_case(partial(check_random, name, seed), 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_have_all_of_it(kind: str) -> None:
    """With layers on any devices, in every mixture of states, and replayed where they may be."""
    problem, draw = drawn(kind, 1), Random(1)
    model, graph = problem.costs.memory_model, problem.graph
    for plan in islice(random_plans(graph, problem.cluster, draw, Scheme.GATHER), 3):
        replayed = [name for name in unit_of(graph) if draw.random() < 0.5]
        layers = in_slices(plan, draw, *STATES).layers
        layers = {name: replace(own, saved="replay" if name in replayed else "keep") for name, own in layers.items()}
        program = lower(graph, layers, StepSetting.on(problem.cluster, graph.batch or 1))
        over = memory_over_step(model, program)
        for point in draw.sample(range(len(over)), 12):
            device = draw.randrange(over.shape[1])
            assert sum(memory_by_layer(model, program, [point], device)[0][0].values()) == over[point, device]


# ---- by hand, and against the sum over layers ------------------------------------------------------------------------


def test_a_view_at_the_end_of_a_segment_is_counted_once() -> None:
    """Six samples: a linear layer and a view of its result on device 0, the next linear layer on device 1."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 3))
    graph = capture(net, (torch.zeros(6, 4),))
    plan = dict(zip(graph.layers, [Strategy(), Strategy(), Strategy(devices=(1,))], strict=True))
    model = MemoryModel(graph, "sgd", on_cpu=True)
    held = memory_over_step(model, lower(graph, plan, StepSetting.per_process(2, 6)))
    weights, inputs, share, hidden, result_share = 4 * 40, 4 * 6 * 4, 4 * 3 * 4, 4 * 6 * 8, 4 * 3 * 2 * 3
    # The caller holds its share of the results, whose gradient is there twice: the process's own, and its part of the
    # mean, which is sent as it lies. Of the hidden values there is the gradient alone.
    stays = 2 * weights + inputs + share + 3 * result_share
    assert held[model.moments.backward(0), 0] == stays + hidden


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table(ids))
        return result


def test_layers_that_share_a_parameter_on_two_devices_have_one_gradient_each() -> None:
    graph = capture(Tied(), (torch.zeros(6, dtype=torch.long),))
    plan = dict(zip(graph.layers, [Strategy(), Strategy(devices=(1,))], strict=True))
    model = MemoryModel(graph, "sgd", on_cpu=True)
    held = memory_over_step(model, lower(graph, plan, StepSetting.per_process(2, 6)))
    weights, ids_share, hidden, result_share = 4 * 40, 8 * 3, 4 * 6 * 4, 4 * 3 * 10
    # The gradient of the hidden values is sent as it lies. The caller's share of the results is a view of all of them,
    # and its gradient is kept.
    assert held[model.moments.backward(0), 1] == 2 * weights + ids_share + hidden + (2 + 1) * result_share


class Unread(nn.Linear):
    """A layer beside an input that none reads."""

    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


def test_an_input_that_no_layer_reads_is_held() -> None:
    x, unread = torch.zeros(6, 4), torch.zeros(6, 7)
    held = []
    for net, inputs in ((nn.Linear(4, 3), (x,)), (Unread(4, 3), (x, unread))):
        graph = capture(net, inputs)
        plan = dict.fromkeys(graph.layers, Strategy(2, 1, None, (0, 1)))
        model = MemoryModel(graph, "sgd", on_cpu=True)
        held.append(memory_over_step(model, lower(graph, plan, StepSetting.per_process(2, 6))))
    assert (held[1] - held[0] == 3 * 7 * 4).all()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("name", [network.name for network in NETWORKS])
def test_one_device_holds_the_sum_over_its_layers(name: str, optimizer: str, on_cpu: bool) -> None:
    graph = captured(name)
    model = MemoryModel(graph, optimizer, on_cpu)
    program = lower(graph, dict.fromkeys(graph.layers, Strategy()), StepSetting.per_process(1, 24))
    added = np.zeros(model.moments.end, dtype=np.int64)
    for layer in graph.layers.values():
        for one in model.layer_memory(LocalLayer(layer, Strategy(), 0, 24)).held:
            added[one.start : one.end] += one.nbytes
    assert memory_over_step(model, program)[:, 0].tolist() == added.tolist()
