"""Random networks under random legal plans compute what the plain model computes, whatever the plan.

One network is captured once and run under many plans; batches are even, uneven and smaller than the number of devices.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import stages
from parplan.plan import Scheme, Strategy
from parplan.runtime.execution.program_function import run_program
from tests.runtime.helpers import differences, executor, outcome, random_passes, random_strategies
from tests.runtime.nets import RandomNet

NETS = 24
PLANS_PER_NET = 10
PASSES_PER_NET = 8


@dataclass(frozen=True)
class Drawn:
    """A network and its captured graph."""

    net: RandomNet
    graph: LayerGraph
    draw: random.Random


def drawn(seed: int) -> Drawn:
    """As if drawn afresh: nobody else goes on with the same generator, and `check` copies the network."""
    known = _captured(seed)
    return replace(known, draw=copy.deepcopy(known.draw))


@cache
def _captured(seed: int) -> Drawn:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = RandomNet(draw)
    return Drawn(net, capture(net, (torch.zeros(12, 3, 8, 8, dtype=torch.float64, requires_grad=True),)), draw)


def check(known: Drawn, strategies: Mapping[str, Strategy], devices: int, batch: int, scheme: Scheme) -> None:
    """One step of the plan against one of the plain model."""
    x = torch.randn(batch, 3, 8, 8, dtype=torch.float64)
    plain, other = copy.deepcopy(known.net), copy.deepcopy(known.net)
    run = executor(other, known.graph, strategies, devices, batch, scheme)
    (name,) = [value for value in known.graph.user_inputs if value]
    wanted = outcome(plain, plain, x)
    found = outcome(other, lambda t: run_program(run, {name: t}), x)
    counters = {f"buffer {known.graph.buffers[c]}" for c in known.graph.counters}  # kept by Compiled
    off = {tensor: error for tensor, error in differences(found, wanted).items() if tensor not in counters}
    told = f"{scheme.value} on {devices} devices with {batch} samples: {strategies}\n{run.program.text()}"
    assert off == {}, told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(NETS))
def test_random_plans_keep_the_numbers(seed: int) -> None:
    known = drawn(seed)
    for _ in range(PLANS_PER_NET):
        devices, batch = known.draw.choice((2, 3, 4)), known.draw.choice((12, 8, 5, 2))
        check(known, random_strategies(known.graph, devices, known.draw), devices, batch, Scheme.GATHER)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(NETS))
def test_random_passes_keep_the_numbers(seed: int) -> None:
    known = drawn(seed)
    for number in range(PASSES_PER_NET):
        devices, batch = known.draw.choice((2, 3, 4, 4)), known.draw.choice((12, 8, 5, 2))
        scheme = (Scheme.BROADCAST, Scheme.INTERLEAVE)[number % 2]
        check(known, random_passes(known.graph, devices, known.draw), devices, batch, scheme)


@pytest.mark.full
def test_most_drawn_plans_have_passes() -> None:
    counts = []
    for seed in range(0, NETS, 4):
        known = drawn(seed)
        for _ in range(PASSES_PER_NET):
            strategies = random_passes(known.graph, 4, known.draw)
            counts.append(stages(known.graph, strategies, Scheme.BROADCAST).passes)
    assert sum(count > 1 for count in counts) > len(counts) / 2
    assert set(counts) >= {2, 3, 4}
