"""The bound of all plans in passes at once: none takes less, whatever its replica counts and residual connections."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.solve import solve
from tests.planner.random_plans import case, plan_of, random_plans, step_time_s

WIDTHS = (16, 64, 256)


class Residual(nn.Module):
    """Two blocks with residual sums, one of them of two like readers, and a head; (N, width) to (N, 8) or a mean."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width, hidden, self.reduced = draw.choice(WIDTHS), draw.choice(WIDTHS), draw.random() < 0.4
        self.stem = nn.Linear(self.width, self.width) if draw.random() < 0.7 else nn.Identity()
        self.up, self.down = nn.Linear(self.width, hidden), nn.Linear(hidden, self.width)
        self.gate = nn.Linear(self.width, hidden) if draw.random() < 0.5 else None
        self.head = nn.Linear(self.width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The head's outputs, or their mean."""
        x = self.stem(x)
        y = self.up(x)
        y = y * self.gate(x) if self.gate is not None else torch.relu(y)
        x = x + self.down(y)
        y = self.head(x + torch.relu(x))
        result: Tensor = y.mean() if self.reduced else y
        return result


@cache
def residual(seed: int) -> tuple[LayerGraph, Cluster, CostModel]:
    """A small model with residual sums, on devices and links of any speed."""
    net = Residual(seed)
    graph = capture(net, (torch.zeros(random.Random(seed).choice((4, 8, 12)), net.width),))
    _, cluster, _ = case(seed)
    return graph, cluster, RooflineCosts(graph, cluster)


def bound_s(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> float:
    """Seconds that no plan in passes with these strategies takes less than."""
    alone = {name: (strategy,) for name, strategy in plan.layers.items()}
    found = solve(formulate(graph, cluster, costs, alone, shape=Shape(any_passes=True)).problem, 10.0)
    assert found.choice is not None, "a plan in passes has no roles in the bound"
    return found.bound


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scheme", [Scheme.INTERLEAVE, Scheme.BROADCAST])
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_in_passes_takes_less(seed: int, scheme: Scheme) -> None:
    graph, cluster, costs = residual(seed)
    for plan in islice(random_plans(graph, cluster, random.Random(seed), scheme), 12):
        step_s = step_time_s(graph, cluster, costs, plan)
        assert bound_s(graph, cluster, costs, plan) <= step_s * (1 + 1e-9)


class Squeezed(nn.Module):
    """A wide value around layers that take little of it: (N, width) to (N, 8)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.stem, self.squeeze, self.up = nn.Linear(width, width), nn.Linear(width, 8), nn.Linear(8, hidden)
        self.down, self.excite, self.head = nn.Linear(hidden, 8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The head of a residual sum."""
        x = self.stem(x)
        result: Tensor = self.head(x + self.excite(self.down(self.up(self.squeeze(x)))))
        return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bytes_per_s", [1e9, 3e9, 1e10, 1e11])
def test_a_residual_that_enters_the_passes_beside_their_compute_is_free(bytes_per_s: float) -> None:
    """Few bytes go to the layers in fewer replicas, many to the sum behind them, in as many replicas as before."""
    with torch.device("meta"):
        graph = capture(Squeezed(256, 8192), (torch.zeros(4096, 256),))
    device = Device("made up", 1 << 40, {"fp32": 1e12}, 1e15, 0.0, "made up", like="")
    cluster = Cluster.of(device, 8, (Link("link", 8, 0.0, bytes_per_s, overlap=1.0),))
    costs, draw = RooflineCosts(graph, cluster, optimizer="sgd"), random.Random(0)
    known = {name: strategies(layer, 4096, cluster_blocks(cluster, False)) for name, layer in graph.layers.items()}
    for _ in range(40):
        most, layers = draw.choice((2, 4)), {}
        for name, every in known.items():
            wanted = 1 if name in ("up", "down") else most
            layers[name] = draw.choice([own for own in every if (own.replicas, own.shards) == (wanted, 8 // wanted)])
        plan = plan_of(graph, cluster, layers, Scheme.INTERLEAVE)
        check(plan, graph)
        assert bound_s(graph, cluster, costs, plan) <= step_time_s(graph, cluster, costs, plan) * (1 + 1e-9)
