"""Small models, clusters and plans drawn at random, every plan of a small model, and T of any plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import keeps_apart, stages
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search.branches import sections
from parplan.planner.search.context import shape_of
from parplan.planner.search_space.formulation import Formulation, InfeasibleShape, formulate
from parplan.planner.search_space.shape import Placement, Shape
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.problem import evaluate
from tests.planner.oracle import every_choice, objectives

__all__ = ["FAR_S", "EveryPlan", "case", "kind_of", "plan_of", "random_plans", "small_model", "step_time_s"]

WIDTHS = (8, 64, 256)
FAR_S = 1e3
TRIES = 300


class Rows(nn.Module):
    """Layers on one input, two rows of others side by side, and a last layer on both: (N, width) to (N, 8)."""

    def __init__(self, first: int, stem: bool, *ends: int) -> None:
        super().__init__()
        self.stem = nn.Linear(first, first) if stem else nn.Identity()
        self.a, self.b = (nn.Linear(first, end) for end in ends)
        self.last = nn.Linear(sum(ends), 8)

    def forward(self, x: Tensor) -> Tensor:
        """Both rows, then the last layer."""
        x = self.stem(x)
        result: Tensor = self.last(torch.cat((self.a(x), self.b(x)), 1))
        return result


class Recurrent(nn.Module):
    """LSTM after LSTM: (steps, N, width) to the same."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's outputs."""
        for layer in self.layers:
            x = layer(x)[0]
        return x


def kind_of(seed: int) -> str:
    """The kind of model that a seed stands for."""
    return ("linear", "conv", "linear", "lstm", "rows")[seed % 5]


def small_model(seed: int) -> LayerGraph:
    """A model of two to five layers: linear and element-wise ones, convolutions, LSTMs, or two rows of layers."""
    draw, kind = random.Random(seed), kind_of(seed)
    batch = draw.choice((1, 4, 8, 12))
    if kind == "rows":
        return _captured(kind, batch, draw.choice(WIDTHS), draw.random() < 0.5, *(draw.choice(WIDTHS) for _ in "ab"))
    if kind == "lstm":
        return _captured(kind, batch, draw.choice((16, 64, 256)), draw.choice((2, 3, 4)))
    if kind == "conv":
        channels = [draw.choice((4, 16, 32)) for _ in range(draw.choice((1, 2)))]
        return _captured(kind, batch, *channels, draw.choice((8, 512)))
    widths = [draw.choice(WIDTHS) for _ in range(draw.choice((3, 4)))]
    pairs = [*pairwise(widths), *([None] if draw.random() < 0.5 else [])]
    draw.shuffle(pairs) if len(set(widths)) == 1 else None
    return _captured(kind, batch, *pairs)


@cache
def _captured(kind: str, batch: int, *sizes: Any) -> LayerGraph:
    """The model of one kind and these sizes; captured once for all seeds that draw them.

    Args:
        sizes: of rows and LSTMs, as their classes take them; channels, and the width of the end; or the widths of a
            linear layer, None for a ReLU.
    """
    if kind == "rows":
        return capture(Rows(*sizes), (torch.zeros(batch, sizes[0]),))
    if kind == "lstm":
        return capture(Recurrent(*sizes), (torch.zeros(3, batch, sizes[0]),))
    if kind == "conv":
        *channels, end = sizes
        body = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise([3, *channels])]
        net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * channels[-1], end))
        return capture(net, (torch.zeros(batch, 3, 8, 8),))
    layers = [nn.ReLU() if pair is None else nn.Linear(*pair) for pair in sizes]
    return capture(nn.Sequential(*layers), (torch.zeros(batch, next(pair[0] for pair in sizes if pair)),))


def case(seed: int, most_devices: int = 4) -> tuple[LayerGraph, Cluster, CostModel]:
    """A small model with two to `most_devices` devices of any speed on links of any speed."""
    draw = random.Random(-1 - seed)
    graph = small_model(seed)
    device = Device(
        "made up", 1 << 30, {"fp32": draw.choice((2e9, 1e10, 1e12))}, draw.choice((1e9, 1e10, 1e11)),
        draw.choice((0.0, 1e-7, 1e-5)), "made up", like="",
    )  # fmt: skip
    count = draw.randint(2, most_devices)
    link = Link(
        "link",
        count,
        draw.choice((0.0, 1e-6, 1e-5)),
        draw.choice((1e8, 1e9, 1e10)),
        overlap=draw.choice((0.0, 0.6, 1.0)),
    )
    cluster = Cluster.of(device, count, (link,))
    return graph, cluster, RooflineCosts(graph, cluster, optimizer=draw.choice(("sgd", "momentum", "adam")))


def plan_of(
    graph: LayerGraph, cluster: Cluster, layers: Mapping[str, Strategy], scheme: Scheme = Scheme.GATHER
) -> Plan:
    """A plan with these strategies."""
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, cluster.count, dict(layers), scheme=scheme)


def step_time_s(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> float:
    """T of a plan, by the problem of its shape with one option per layer."""
    alone = {name: (strategy,) for name, strategy in plan.layers.items()}
    formulation = formulate(graph, cluster, costs, alone, shape=shape_of(plan, graph, cluster), far_s=FAR_S)
    choice = formulation.choice(plan.layers, stages(graph, plan.layers, plan.scheme).of)
    return evaluate(formulation.problem, choice).objective


@dataclass(frozen=True, eq=False)
class EveryPlan:
    """All plans of a model: every strategy on every aligned block, with gather or interleave, every role, and branches
    at the same time on every pair of equal or disjoint blocks, with T of each.

    Args:
        uneven: replicas of plans in one pass may have parts of the batch that differ by one sample.
        on_all: of plans with branches at the same time only those whose branches use all devices, the rest the first.
    """

    graph: LayerGraph
    cluster: Cluster
    costs: CostModel
    uneven: bool = False
    on_all: bool = False

    @cached_property
    def known(self) -> dict[str, tuple[Strategy, ...]]:
        """Strategies by layer."""
        return self.strategies(Shape(anywhere=True, uneven=self.uneven))

    def strategies(self, shape: Shape) -> dict[str, tuple[Strategy, ...]]:
        """Strategies by layer, before placements add theirs."""
        blocks, batch = cluster_blocks(self.cluster, shape.anywhere), self.graph.batch or 1
        return {name: strategies(own, batch, blocks, uneven=shape.uneven) for name, own in self.graph.layers.items()}

    @cached_property
    def count(self) -> int:
        """Plans in one pass; branches at the same time are counted again, per placement."""
        return prod(
            len(own) * (len(self.homes[0]) if any(name in b for home in self.homes for b, _ in home[0]) else 1)
            for name, own in self.known.items()
        )

    @cached_property
    def homes(self) -> tuple[tuple[Placement, ...], ...]:
        """Every placement of the branches of every phase."""
        blocks = cluster_blocks(self.cluster, everywhere=True)
        phases = [phase for section in sections(self.graph) for phase in section.phases if len(phase) > 1]
        found = []
        for phase in phases:
            every = product(blocks, repeat=len(phase))
            apart = [own for own in every if len(set(own)) > 1 and sum(map(len, set(own))) == len(set().union(*own))]
            found.append(tuple(tuple(zip(phase, own, strict=True)) for own in apart))
        return tuple(own for own in found if own)

    def shapes(self, passes: bool = True) -> Iterator[Shape]:
        """One pass with branches one after another or at the same time; then interleaved passes."""
        lanes = tuple(range(self.cluster.count))
        every = Shape(lanes=lanes, anywhere=True, uneven=self.uneven)
        yield replace(every, homes=() if self.on_all else self.homes)
        whole = [[one for one in own if len(set().union(*(b for _, b in one))) == len(lanes)] for own in self.homes]
        if self.on_all and whole:
            yield replace(every, homes=tuple(map(tuple, whole)), anywhere=False)
        counts = {own.replicas for n, every in self.known.items() for own in every if keeps_apart(self.graph.layers[n])}
        for most, few in product(counts, counts):
            if passes and most > few and most % few == 0:
                yield Shape(Scheme.INTERLEAVE, most, few, lanes, anywhere=True)

    @staticmethod
    def free_sizes(every: Formulation) -> list[int]:
        """Options of every node, 1 of those that follow from others."""
        follow = {reuse.node for reuse in every.reused}
        return [1 if v in follow else size for v, size in enumerate(every.problem.sizes)]

    def best(self, passes: bool = True) -> Iterator[tuple[float, Plan]]:
        """T and plan of all that are legal and fit without their transfers, the fastest first."""
        found = []
        for shape in self.shapes(passes):
            known = self.strategies(shape)
            try:
                every = formulate(self.graph, self.cluster, self.costs, known, shape=shape, far_s=FAR_S)
            except InfeasibleShape:
                continue
            known_s = objectives(every.problem, every.followed(every_choice(self.free_sizes(every))))
            feasible = np.flatnonzero(np.isfinite(known_s))
            found += [(float(known_s[index]), int(index), every) for index in feasible]
        for step_s, index, every in sorted(found, key=lambda one: one[0]):
            choice = [int(k) for k in np.unravel_index(index, self.free_sizes(every))]
            scheme = every.shape.scheme if every.shape.passes > 1 else Scheme.GATHER
            yield step_s, plan_of(self.graph, self.cluster, every.strategies(choice), scheme)


def random_plans(
    graph: LayerGraph, cluster: Cluster, draw: random.Random, scheme: Scheme, *, everywhere: bool = False,
    all_devices: bool = False,
) -> Iterator[Plan]:  # fmt: skip
    """Legal plans; neighbours often have the same strategy.

    Args:
        everywhere: layers on any aligned block of devices, not only the first ones.
        all_devices: layers on all devices.
    """
    blocks = cluster_blocks(cluster, everywhere)
    known = {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}
    if all_devices:
        every = {name: [one for one in own if len(one.devices) == cluster.count] for name, own in known.items()}
        known = {name: tuple(every[name]) or own for name, own in known.items()}
    for _ in range(TRIES):
        again, layers, last = draw.choice((0.2, 0.5, 0.9)), dict[str, Strategy](), None
        for name, own in known.items():
            alike = [one for one in own if last is not None and _spread(one) == _spread(last)]
            layers[name] = last = draw.choice(alike if alike and draw.random() < again else own)
        plan = plan_of(graph, cluster, layers, scheme)
        try:
            check(plan, graph)
        except PlanError:
            continue
        if scheme is Scheme.GATHER or stages(graph, layers, scheme).passes > 1:
            yield plan


def _spread(strategy: Strategy) -> tuple[object, ...]:
    return strategy.replicas, strategy.shards, strategy.devices
