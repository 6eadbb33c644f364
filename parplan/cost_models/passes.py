"""Costs of a given plan whose last layers run in several passes: hybrid parallelism as cuda-convnet2 runs it.

Where a plan has K replicas in front and one set of shards behind, the layers behind may run K times on 1/K of the
samples while the next samples are on their way (schemes.py). Kernels are then smaller, messages between shards more,
and what crosses the boundary is partly hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.collectives import Topology
from parplan.cost_models.costs import CostModel, LayerCost, LayerMemory, StepCost, TransferCost, TransferMatrix
from parplan.cost_models.schemes import exposed, rounds
from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec
from parplan.layout import Layout
from parplan.plan import Plan, Scheme, Strategy

__all__ = ["PassCosts"]


class PassCosts:
    """Costs of `plan` when its layers with fewer replicas run in passes (a CostModel).

    Memory is that of one pass over the whole batch, which is the most it can be.

    Args:
        costs: at the whole batch.
        of_pass: at one pass's samples, on the same cluster.
        graph: the model captured at one pass's samples, which `of_pass` prices.
        plan: layers have one of two numbers of replicas, the larger a multiple of the smaller.
        scheme: how samples cross; GATHER is a single pass, over the whole batch.
        update_each_pass: update the weights of layers that run in passes after each instead of once.
        hide: whether samples travel while others are computed.

    Raises:
        PlanError: `plan` has other numbers of replicas.
    """

    def __init__(
        self,
        costs: CostModel,
        of_pass: CostModel,
        graph: LayerGraph,
        plan: Plan,
        cluster: Cluster,
        scheme: Scheme,
        update_each_pass: bool = False,
        hide: bool = True,
    ) -> None:
        counts = sorted({strategy.replicas for strategy in plan.layers.values()})
        if len(counts) != 2 or counts[1] % counts[0]:
            raise PlanError(
                f"{plan.model}: layers have {counts} replicas; passes need two such numbers, one dividing the other"
            )
        self.costs, self.of_pass, self.graph, self.plan = costs, of_pass, graph, plan
        self.topology = Topology(cluster)
        self.scheme = scheme
        self.passes = plan.passes
        self.most = counts[1]
        self.update_each_pass = update_each_pass
        self.hide = hide

    @property
    def step(self) -> StepCost:
        """As at the whole batch."""
        return self.costs.step

    @cached_property
    def beside_s(self) -> float:
        """Seconds of compute in one pass, forward and backward."""
        behind = [(n, s) for n, s in self.plan.layers.items() if s.replicas < self.most]
        costs = [self.of_pass.layer(self.graph.layers[name], strategy) for name, strategy in behind]
        return sum(cost.forward_s + cost.backward_s for cost in costs)

    def layer(self, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCost:
        """Seconds of all passes of the slowest device's part of `layer`."""
        if strategy.replicas == self.most:
            return self.costs.layer(layer, strategy)
        cost = self._behind(layer, strategy)
        return replace(cost, update_s=self.passes * cost.update_s) if self.update_each_pass else cost

    def _behind(self, layer: Layer, strategy: Strategy) -> LayerCost:
        if self.scheme is Scheme.GATHER:
            return self.costs.layer(layer, strategy)
        cost = self.of_pass.layer(self.graph.layers[layer.name], strategy)
        return replace(cost, forward_s=self.passes * cost.forward_s, backward_s=self.passes * cost.backward_s)

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer`, for the whole batch."""
        return self.costs.memory(layer, strategy)

    def peaks(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...] | None:
        """Peak bytes per device of a whole plan, in one pass."""
        return self.costs.peaks(strategies)

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` (of all passes) from one layout to another, as far as it holds up the step."""
        replicas = {source.grid.replicas, target.grid.replicas}
        if self.scheme is Scheme.GATHER or replicas == {self.most}:
            return self.costs.transfer(value, source, target)
        if self.most in replicas:
            return self._across(value, source, target)
        return self._between(value, source, target)

    def _across(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        whole = self.costs.transfer(value, source, target)
        round_s = [time.seconds(value.nbytes) for time in rounds(self.topology, self.scheme, source, target)]
        held_up = exposed(round_s, self.beside_s if self.hide else None)
        backward_s = held_up.backward_s if value.requires_grad else 0.0
        return replace(whole, forward_s=held_up.forward_s, backward_s=backward_s)

    def _between(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        one = self.costs.transfer(replace(value, shape=(value.elements // self.passes,)), source, target)
        forward_s, backward_s = self.passes * one.forward_s, self.passes * one.backward_s
        return replace(one, forward_s=forward_s, backward_s=backward_s, nbytes=self.passes * one.nbytes)

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """Times of `transfer` for all pairs of layouts."""
        moved = [[self.transfer(value, source, target) for target in targets] for source in sources]
        forward_s = np.array([[cost.forward_s for cost in row] for row in moved])
        return TransferMatrix(forward_s, np.array([[cost.backward_s for cost in row] for row in moved]))

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds on the links to sum the weight gradients of `layer` over its copies, once a step."""
        return self.costs.reduction(layer, strategy)
