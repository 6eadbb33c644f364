"""A small simulator of a step, every device with a clock of its own, and all plans of a model simulated at once.

A layer starts when its devices are free and its inputs have arrived; a transfer holds the devices of both layers. The
backward is the forward mirrored; gradients are summed on one link, one layer after another. Written for all
combinations of strategies at once (one array entry each), so that brute force takes milliseconds; one plan is a list of
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.strategies import cluster_blocks, strategies

__all__ = ["Best", "Simulator", "best_of_all", "count_of_all"]

Array = NDArray[np.float64]
Choices = NDArray[np.intp]


@dataclass(frozen=True)
class Best:
    """The fastest of all plans, and how many there are."""

    step_s: float
    plans: int
    layers: dict[str, Strategy]


def _everywhere(graph: LayerGraph, cluster: Cluster) -> dict[str, tuple[Strategy, ...]]:
    blocks = cluster_blocks(cluster, everywhere=True)
    return {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}


def count_of_all(graph: LayerGraph, cluster: Cluster) -> int:
    """How many plans there are."""
    return prod(len(own) for own in _everywhere(graph, cluster).values())


def best_of_all(graph: LayerGraph, cluster: Cluster, costs: CostModel) -> Best:
    """Brute force: every strategy on every block of neighbouring devices, for every layer."""
    formulation = formulate(graph, cluster, costs, _everywhere(graph, cluster))
    sizes = [len(options) for options in formulation.options]
    every = np.array(list(product(*(range(size) for size in sizes))), dtype=np.intp).T
    times = step_times(graph, cluster, costs, formulation, every)
    best = int(times.argmin())
    chosen = zip(formulation.names, formulation.options, every[:, best], strict=False)
    return Best(float(times[best]), len(times), {name: options[k].strategy for name, options, k in chosen})


@dataclass
class Simulator:
    """Steps of single plans; `calls` counts them."""

    graph: LayerGraph
    cluster: Cluster
    costs: CostModel
    calls: int = 0

    def step_s(self, plan: Plan) -> float:
        """The predicted seconds of one step."""
        self.calls += 1
        alone = {name: (replace(own, update_period=None),) for name, own in plan.layers.items()}
        formulation = formulate(self.graph, self.cluster, self.costs, alone)
        zeros = np.zeros((len(alone), 1), dtype=np.intp)
        return float(step_times(self.graph, self.cluster, self.costs, formulation, zeros)[0])


def step_times(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, formulation: Formulation, choices: Choices
) -> Array:
    """Seconds of a step per choice; `choices` has a row per layer."""
    run = _Run(formulation, cluster, choices)
    for index in range(len(formulation.options)):
        run.layer(index, backward=False)
    turned = np.maximum(run.ready.max(axis=0), run.clocks.max(axis=0)) + run.ends()
    run.clocks[:] = 0.0
    for index in reversed(range(len(formulation.options))):
        run.layer(index, backward=True)
    times: Array = turned + np.maximum(run.ready.max(axis=0), run.link) + run.updates() + costs.step.overhead_s
    return times


class _Run:
    """Clocks of all choices."""

    def __init__(self, formulation: Formulation, cluster: Cluster, choices: Choices) -> None:
        self.formulation, self.choices = formulation, choices
        self.devices, count = cluster.count, choices.shape[1]
        self.clocks = np.zeros((cluster.count, count))
        self.ready = np.zeros((len(formulation.options), count))
        self.link = np.zeros(count)
        self.used = [
            np.array([[d in o.strategy.devices for o in options] for d in range(cluster.count)])
            for options in formulation.options
        ]

    def figure(self, index: int, figures: Sequence[float]) -> Array:
        """A figure of each strategy, picked for every choice."""
        picked: Array = np.array(figures, dtype=np.float64)[self.choices[index]]
        return picked

    def layer(self, index: int, backward: bool) -> None:
        """What the layer needs is brought, then it runs."""
        options = self.formulation.options[index]
        begin = np.zeros(self.choices.shape[1])
        for edge in self.formulation.problem.edges:
            end, near = (edge.source, edge.target) if backward else (edge.target, edge.source)
            if end == index and edge.target < len(self.formulation.options):
                seconds = (edge.backward_s if backward else edge.forward_s)[
                    self.choices[edge.source], self.choices[edge.target]
                ]
                begin = np.maximum(begin, self.hold((near, index), self.ready[near], seconds))
        spent = [o.cost.backward_s if backward else o.cost.forward_s for o in options]
        self.ready[index] = self.hold((index,), begin, self.figure(index, spent))
        if backward:
            sums = self.figure(index, [o.reduce_s for o in options])
            self.link = np.where(sums > 0, np.maximum(self.link, self.ready[index]) + sums, self.link)

    def hold(self, layers: Sequence[int], begin: Array, seconds: Array) -> Array:
        """Occupy all devices of these layers for so long, from when they are free; when that is over."""
        takes = seconds > 0
        own = [np.any([self.used[i][d][self.choices[i]] for i in layers], axis=0) & takes for d in range(self.devices)]
        for device in range(self.devices):
            begin = np.maximum(begin, np.where(own[device], self.clocks[device], 0.0))
        end: Array = begin + seconds
        for device in range(self.devices):
            self.clocks[device] = np.where(own[device], end, self.clocks[device])
        return end

    def ends(self) -> Array:
        """Bringing the user's inputs and delivering the results, there and back."""
        total = np.zeros(self.choices.shape[1])
        for index, options in enumerate(self.formulation.options):
            total += self.figure(index, [o.arrival_s for o in options])
        for edge in self.formulation.problem.edges:
            if edge.target == len(self.formulation.options):
                total += (edge.forward_s + edge.backward_s)[self.choices[edge.source], 0]
        return total

    def updates(self) -> Array:
        """The longest update of any device."""
        spent = np.zeros_like(self.clocks)
        for index, options in enumerate(self.formulation.options):
            seconds = self.figure(index, [o.cost.update_s for o in options])
            for device in range(self.devices):
                spent[device] += np.where(self.used[index][device][self.choices[index]], seconds, 0.0)
        longest: Array = spent.max(axis=0)
        return longest
