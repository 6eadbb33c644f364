"""Options of a layer: a strategy in a role with its costs, and its part of the step's seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, LayerCharges, LayerMemory, charges, statistics_transfer
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Layout
from parplan.lowering.segments import statistics
from parplan.lowering.stages import Stage
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy
from parplan.planner.search_space.shape import Choice, Shape
from parplan.planner.search_space.step_time.parts import NodeParts

__all__ = ["Option", "arrival_layout", "arrival_s", "node_parts", "priced_option"]


@dataclass(frozen=True, kw_only=True)
class Option(Choice):
    """A choice for one layer with its costs on each of its devices.

    `batch_norm_sync_s` is one way of exchanging batch statistics, `arrival_s` the time of bringing the user's inputs
    (of one pass).
    """

    cost: LayerCharges
    batch_norm_sync_s: float
    memory: LayerMemory
    arrival_s: float

    @property
    def own_moves_s(self) -> float:
        """Seconds of moves that no edge counts: user inputs, weights from slices, batch statistics there and back."""
        return self.arrival_s + self.cost.gathers_s + 2 * self.batch_norm_sync_s


def priced_option(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, arriving: Collection[str], layer: Layer, own: Choice,
    shape: Shape,
) -> Option:  # fmt: skip
    """A choice with its costs.

    Args:
        arriving: inputs of the user that are brought for this layer, whatever others read.
    """
    return Option(
        **vars(own),
        cost=charges(costs, layer, own.strategy, shape.passes if own.role is Stage.PASSES else 1),
        batch_norm_sync_s=_batch_norm_sync_s(layer, own.strategy, costs, graph),
        memory=costs.memory(layer, own.strategy),
        arrival_s=sum(arrival_s(graph, cluster, costs, value, layer, own, shape) for value in arriving),
    )


def arrival_s(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, value: str, layer: Layer, own: Choice, shape: Shape
) -> float:
    """Seconds to bring a layer what it takes of a user's input from where that arrives, of one pass if it is in one."""
    spec = graph.of_pass(value, shape.passes if own.role is Stage.PASSES else 1)
    moved = costs.transfer(spec, arrival_layout(graph, cluster, value), layer.layout(value, own.strategy))
    return moved.forward_s + moved.backward_s


def node_parts(options: Sequence[Option], shape: Shape) -> NodeParts:
    used = [[float(lane in one.strategy.devices) for one in options] for lane in shape.lanes]
    in_passes = np.array([float(one.role is Stage.PASSES) for one in options])
    inside = in_passes if shape.passes > 1 else np.zeros_like(in_passes)
    once = 1 - inside
    forward = np.array([one.cost.forward_s + one.batch_norm_sync_s for one in options])
    backward = np.array([one.cost.replay_s + one.cost.backward_s + one.batch_norm_sync_s for one in options])
    costs, before = [one.cost for one in options], [one.cost.before_last for one in options]
    interference = np.array([cost.compute_interference_s for cost in costs])
    arrival = np.array([one.arrival_s for one in options])
    return NodeParts(
        once_s=once * forward,
        arrival_s=(1 - in_passes) * arrival,
        backward_s=once * backward + interference,
        pass_forward_s=inside * forward,
        pass_backward_s=inside * backward,
        samples_in_s=inside * arrival,
        sum_s=np.array([cost.overlappable_s for cost in costs]),
        interference_s=interference,
        update_s=np.array([cost.update_s + cost.post_update_s for cost in costs]),
        scatter_s=np.array([cost.overlappable_s for cost in before]),
        scatter_interference_s=np.array([cost.compute_interference_s for cost in before]),
        late_scatter_s=np.array([cost.post_update_s for cost in before]),
        gather_s=np.array([cost.gather_s for cost in costs]),
        gather_interference_s=np.array([cost.gather_interference_s for cost in costs]),
        lanes=np.array(used),
        regathers=np.array([float(cost.regather_s > 0) for cost in costs]),
    )


def arrival_layout(graph: LayerGraph, cluster: Cluster, value: str) -> Layout:
    """Where a user input is before the step: on the home device of one process, else samples spread over all devices,
    anything else on each of them."""
    return StepSetting.on(cluster, graph.batch or 1).arrival(graph.batch_dims.get(value))


def _batch_norm_sync_s(layer: Layer, strategy: Strategy, costs: CostModel, graph: LayerGraph) -> float:
    """One way of exchanging batch statistics, where replicas do."""
    if not layer.mixes_batch or strategy.replicas == 1:
        return 0.0
    own = statistics(graph, layer, strategy)
    return statistics_transfer(costs, own.spec, own.layout, replace(own.layout, batch_dim=None)).forward_s
