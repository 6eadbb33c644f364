"""The predicted peak of whole steps against the real one: allocations are exact, so nothing here depends on time."""

from __future__ import annotations

from functools import cache, partial
from random import Random

import pytest
import torch

from benchmarks.memory import Case, peaks
from benchmarks.memory_networks import NETWORKS
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.plan_peaks import memory_over_step
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy
from parplan.planner.search_space.strategies import strategies
from tests.cost_models.memory.slow_peaks import slow_peaks
from tests.runtime.ranks import run_case

BY_NAME = {network.name: network for network in NETWORKS}


def check(name: str, plan: str, optimizer: str, rank: int = 0, ranks: int = 1) -> None:
    """One step's peak within 5 % of the prediction, which the process that plans has for all."""
    found = peaks(Case(BY_NAME[name], plan, optimizer, ranks))
    if rank == 0:
        assert found.predicted_bytes[rank] == pytest.approx(found.measured_bytes, rel=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("mlp, wide", "adam"), ("mlp, many classes", "sgd"), ("convnet, wide", "momentum"), ("transformer", "adam")],
)
def test_one_device(name: str, optimizer: str) -> None:
    check(name, "one device", optimizer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "plan", "optimizer"),
    [
        ("convnet, batch norm", "data-parallel", "sgd"),
        ("mlp, deep", "sharded", "momentum"),
        ("alexnet-like", "hybrid", "adam"),
        ("tied words", "sharded", "adam"),  # both cut the table, each along its own axis: it stays whole
        ("tied words", "hybrid", "momentum"),
    ],
)
def test_two_processes(name: str, plan: str, optimizer: str) -> None:
    run_case(partial(check, name, plan, optimizer), 2)


# ---- all devices at once, against one after another ------------------------------------------------------------------


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [network.name for network in NETWORKS])
def test_all_devices_at_once_and_one_after_another(name: str) -> None:
    graph = captured(name)
    for seed in range(12):
        random = Random(seed)
        devices, optimizer = random.choice([2, 3, 4, 6, 8]), random.choice(["sgd", "momentum", "adam"])
        model = MemoryModel(graph, optimizer, on_cpu=random.random() < 0.5)
        setting = StepSetting.per_process(devices, random.choice([24, 25, 5]))
        program = lower(graph, random_plan(graph, devices, random), setting)
        assert tuple(memory_over_step(model, program).max(axis=0).tolist()) == slow_peaks(model, program)
