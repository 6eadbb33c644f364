"""Random networks under random legal plans compute what the plain model computes, whatever the plan.

One network is captured once and run under many plans; batches are even, uneven and smaller than the number of devices.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch

from parplan.graph.capture import capture
from tests.runtime.helpers import differences, executor, outcome, random_strategies
from tests.runtime.nets import RandomNet

NETS = 24
PLANS_PER_NET = 10


@pytest.mark.parametrize("seed", range(NETS))
def test_random_plans_keep_the_numbers(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = RandomNet(draw)
    graph = capture(net, (torch.zeros(12, 3, 8, 8, dtype=torch.float64, requires_grad=True),))
    for number in range(PLANS_PER_NET):
        devices, batch = draw.choice((2, 3, 4)), draw.choice((12, 8, 5, 2))
        strategies = random_strategies(graph, devices, draw)
        x = torch.randn(batch, 3, 8, 8, dtype=torch.float64)
        plain, other = copy.deepcopy(net), copy.deepcopy(net)
        run = executor(other, graph, strategies, devices, batch)
        (name,) = [value for value in graph.user_inputs if value]
        wanted = outcome(plain, plain, x)
        found = outcome(other, lambda t, run=run, name=name: run({name: t}), x)
        counters = {f"buffer {graph.buffers[c]}" for c in graph.counters}  # kept by Compiled
        off = {tensor: error for tensor, error in differences(found, wanted).items() if tensor not in counters}
        assert off == {}, f"plan {number} on {devices} devices with {batch} samples: {strategies}\n{run.program.text()}"
