"""Options of a layer: a strategy in a role with its costs, and its part of the step's seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, LayerCharges, LayerMemory, charges, statistics_transfer
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Layout
from parplan.lowering.segments import statistics
from parplan.lowering.stages import Stage
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy
from parplan.planner.search_space.shape import Choice, Shape
from parplan.planner.solver.problem import FloatArray

__all__ = ["NodeParts", "Option", "arrival_layout", "arrival_s", "node_parts", "priced_option"]


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


@dataclass(frozen=True, eq=False)
class NodeParts:
    """Seconds of one layer per option, shape (options,) each.

    Args:
        once_s: what counts once and hides nothing: forward outside of passes, batch statistics.
        arrival_s: inputs of the user that come once; they are on all devices, which they hold.
        pass_forward_s, pass_backward_s: compute of one pass, of layers in passes.
        backward_s: compute of the backward outside of passes, with what gradient sums take from it.
        samples_in_s: inputs of the user that one pass brings in.
        sum_s: the gradient sum, as far as it runs beside the backward.
        interference_s: what gradient sums take from the backward, which has it.
        update_s: the optimizer's update and the part of the sum after it.
        scatter_s, scatter_interference_s, late_scatter_s: of sums to slices, which all micro-batches take: the same.
        replay_s: forward again, and its gathers of weights, before the layer's unit goes back.
        regathers, replays: 1 where weights are gathered, and where it runs forward, again for the backward, else 0.
        lanes: whether an option uses each lane, shape (lanes, options).
        beside: of layers of branches, whether each lane's time has an option: its own, and what runs one after another.
        order: of layers of branches, per option all lanes by how much its placement gives them to do, the most first.
    """

    once_s: FloatArray
    arrival_s: FloatArray
    backward_s: FloatArray
    pass_forward_s: FloatArray
    pass_backward_s: FloatArray
    samples_in_s: FloatArray
    sum_s: FloatArray
    interference_s: FloatArray
    update_s: FloatArray
    scatter_s: FloatArray
    scatter_interference_s: FloatArray
    late_scatter_s: FloatArray
    replay_s: FloatArray
    lanes: FloatArray
    regathers: FloatArray
    replays: FloatArray
    beside: FloatArray | None = None
    order: NDArray[np.intp] | None = None

    def each(self, change: Callable[[FloatArray], FloatArray]) -> NodeParts:
        """The same with all seconds changed."""
        names = (own.name for own in fields(self) if own.name.endswith("_s"))
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def scaled(self, times: int) -> NodeParts:
        """Parts of so many equal layers."""
        return self.each(lambda seconds: times * seconds)

    @staticmethod
    def alone(once_s: FloatArray, lanes: int) -> NodeParts:
        """Parts of a decision that is no layer: what counts once, on no device."""
        none: dict[str, Any] = {own.name: np.zeros_like(once_s) for own in fields(NodeParts) if own.name.endswith("_s")}
        zero = {**none, **dict.fromkeys(("regathers", "replays"), np.zeros_like(once_s))}
        return NodeParts(**{**zero, "once_s": once_s, "lanes": np.zeros((lanes, len(once_s)))})

    @property
    def before_last(self) -> NodeParts:
        """Parts in a micro-batch behind which others come."""
        return replace(
            self,
            backward_s=self.backward_s - self.interference_s + self.scatter_interference_s,
            sum_s=self.scatter_s,
            interference_s=self.scatter_interference_s,
            update_s=self.late_scatter_s,
        )


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
    """Seconds of a layer per option, by what they hide behind and when they come."""
    used = [[float(lane in one.strategy.devices) for one in options] for lane in shape.lanes]
    in_passes = np.array([float(one.role is Stage.PASSES) for one in options])
    inside = in_passes if shape.passes > 1 else np.zeros_like(in_passes)
    once = 1 - inside
    forward = np.array([one.cost.gather_s + one.cost.forward_s + one.batch_norm_sync_s for one in options])
    replays = np.array([float(one.strategy.saved == "replay") for one in options])
    regather = np.array([one.cost.regather_s for one in options])
    backward = np.array([one.cost.backward_s + one.batch_norm_sync_s for one in options]) + (1 - replays) * regather
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
        replay_s=np.array([cost.replay_s for cost in costs]) + replays * regather,
        lanes=np.array(used),
        regathers=(regather > 0).astype(float),
        replays=replays,
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
