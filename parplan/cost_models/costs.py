"""The interface of cost models, and the records they give.

Roofline, measurements and layer profiles price layers, transfers and memory alike, each figure with its source, so the
planner never knows which of them it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parplan.graph.layer_graph import Layer, TensorSpec
from parplan.layout import IntArray, Layout
from parplan.plan import Strategy

__all__ = [
    "AdaptedCosts", "CostModel", "LayerCharges", "LayerCost", "LayerMemory", "Source", "StepCost", "TransferCost",
    "TransferMatrix", "charges", "statistics_transfer",
]  # fmt: skip


class Source(Enum):
    """Where a figure comes from, best first."""

    MEASURED = "measured"
    SHIPPED = "shipped profile"
    INTERPOLATED = "interpolated"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class LayerCost:
    """Seconds one device spends on its part of a layer.

    Args:
        forward_s, backward_s: its ops.
        source: where these two come from.
        spread: how far they may be off, relative (one standard deviation, where figures are measured).
        update_s: the optimizer's update of the parameters that the device holds.
    """

    forward_s: float
    backward_s: float
    source: Source
    spread: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerCharges(LayerCost):
    """Seconds of a layer in a step, on each of its devices: forward and backward of one pass, all else once.

    Args:
        reduce_s: the sum of its gradients over the links.
        compute_interference_s: the part of that which holds up the backward pass beside it.
        post_update_s: the part that comes after the update.
        scatter_s: the part of the sum that goes to slices, in every micro-batch; the rest is summed in the last one.
        gather_s, regather_s: the way of its weights from slices, for its forward, and again for its backward.
        gather_interference_s: what either of them takes from the compute beside it.
        replay_s: its forward again, before its backward.
    """

    reduce_s: float
    compute_interference_s: float
    post_update_s: float
    scatter_s: float
    gather_s: float
    regather_s: float
    gather_interference_s: float
    replay_s: float

    @property
    def overlappable_s(self) -> float:
        """The part of the gradient sum that runs beside the backward."""
        return max(0.0, self.reduce_s - self.post_update_s - self.compute_interference_s)

    @property
    def gathers_s(self) -> float:
        """Both gathers of its weights."""
        return self.gather_s + self.regather_s

    @property
    def before_last(self) -> LayerCharges:
        """Those in a micro-batch behind which others come: sums to slices alone, and no update."""
        part = self.scatter_s / self.reduce_s if self.reduce_s else 0.0
        return replace(
            self,
            reduce_s=self.scatter_s,
            compute_interference_s=part * self.compute_interference_s,
            post_update_s=part * self.post_update_s,
            update_s=0.0,
        )


@dataclass(frozen=True)
class StepCost:
    """Costs of a whole step, beside those of its layers and transfers.

    Args:
        overhead_s: what the runtime itself takes (Python, autograd), in every step.
        overlap: share of the gradient reductions that takes nothing from the backward pass beside it; 1 on links and
            devices that work independently, towards 0 where the processor that computes also has to carry and sum,
            below it where compute and sums hinder each other, so that both are done sooner one after the other.
        spread: how far times of transfers and reductions may be off, relative.
        links: where the times of transfers and reductions come from.
        late: share of the reductions that comes after the optimizer's update, where nothing is left to hide behind
            (`Link.overlap` is the rest); `overlap` is of what comes before it.
        batch_norm_s: what a batch norm over replicas takes, forward and backward, beside its parts and messages.
        micro_batches: of a step, one after another; layers, transfers, memory and overhead are priced for one of them.
    """

    overhead_s: float = 0.0
    overlap: float = 1.0
    spread: float = 0.0
    links: Source = Source.ESTIMATED
    late: float = 0.0
    batch_norm_s: float = 0.0
    micro_batches: int = 1

    @property
    def hidden(self) -> float:
        """The share of what goes on beside compute that takes nothing from it."""
        return min(1.0, max(0.0, self.overlap))

    @property
    def most_hidden(self) -> float:
        """The most of a reduction that the backward pass can hide, as a share."""
        return max(0.0, self.overlap) * (1 - self.late)


@dataclass(frozen=True)
class Moments:
    """The points of a training step of `layers` layers, at which memory is counted: which task is at which.

    Layers go forward, the results are delivered, the loss is taken, layers go backward, and the optimizer updates the
    parameters of one after another, or those of all together with the first. Tasks are at odd points; at the even one
    before each, what was made by then travels.
    """

    layers: int

    def forward(self, layer: int) -> int:
        """When a layer runs forward."""
        return 2 * layer + 1

    @cached_property
    def delivery(self) -> int:
        """When the results are delivered."""
        return self.forward(self.layers)

    @cached_property
    def loss(self) -> int:
        """When the loss is taken and its gradient begins."""
        return self.delivery + 2

    def backward(self, layer: int) -> int:
        """When a layer runs backward; one behind the last stands for the loss."""
        return self.loss + 2 * (self.layers - layer)

    @cached_property
    def passed(self) -> int:
        """The point after the last backward."""
        return self.backward(0) + 1

    def in_slices(self, point: int) -> int:
        """When gradients that a backward at `point` gave are summed to slices: after the next backward."""
        return min(point + 3, self.passed)

    def update(self, layer: int = 0) -> int:
        """When the parameters of a layer are updated one by one; without one, when all are."""
        return self.passed + 1 + 2 * layer

    @property
    def end(self) -> int:
        """The point after the last task."""
        return self.passed + 2 * max(1, self.layers)

    def text(self, point: int, names: Sequence[str]) -> str:
        """A point in words, such as "in the backward of fc6"; `names` of the layers."""
        task = point // 2
        if task < self.layers:
            return f"in the forward of {names[task]}"
        if point <= self.loss:
            return "when the results are delivered" if point <= self.delivery else "in the loss"
        if point <= self.backward(0):
            return f"in the backward of {names[2 * self.layers + 1 - task]}"
        return "in the optimizer's update"


@dataclass(frozen=True)
class Held:
    """Bytes held at the points [start, end) of a step (see Moments).

    Args:
        estimated: they depend on what other layers do, and a plan may do without.
    """

    start: int
    end: int
    nbytes: int
    estimated: bool = False


@dataclass(frozen=True)
class LayerMemory:
    """Bytes one device holds for its part of a layer.

    Args:
        saved_bytes: what lives from its forward into the backward.
        transient_bytes: what it holds besides at the moment it holds most.
        held: all of it by time, which is what a peak is the sum of; the intervals are the same for all strategies,
            each at most once, and once estimated.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int
    held: tuple[Held, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Weights, gradients and optimizer state: what is there at the update."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def most_bytes(self) -> int:
        """The most that is held at one moment."""
        held = self.held
        return max((sum(one.nbytes for one in held if one.start <= own.start < one.end) for own in held), default=0)


@dataclass(frozen=True)
class TransferCost:
    """Seconds to change a tensor's layout, forward and (transposed) backward.

    `kind` is the field's word for it ("all-gather", "copy", ... or "none"), `nbytes` the most any
    one device receives in the forward direction.
    """

    forward_s: float
    backward_s: float
    nbytes: int
    kind: str


@dataclass(frozen=True, eq=False)
class TransferMatrix:
    """Seconds to change a tensor's layout for every pair, shape (source layouts, target layouts)."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]


class CostModel(Protocol):
    """Prices layers, transfers and gradient reductions on one cluster."""

    @property
    def step(self) -> StepCost:
        """Costs of whole steps."""

    def layer(self, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCost:
        """Cost of the slowest device's part of `layer`, in one of so many passes over the batch (update: of all)."""

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer`."""

    def peaks(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...] | None:
        """Peak bytes per device of a whole plan; None where no more is known than what its layers add up to."""

    def memory_over_step(self, strategies: Mapping[str, Strategy]) -> IntArray | None:
        """Bytes by point of the step and device (memory/plan_peaks.py); None where peaks are not known either."""

    def memory_by_layer(
        self, strategies: Mapping[str, Strategy], points: Sequence[int], device: int
    ) -> Sequence[Mapping[str, int]]:
        """Bytes of that on one device at some points, by the layer that has them."""

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` from one layout to another."""

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """Times of `transfer` for all pairs of layouts at once."""

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds on the links to sum the weight gradients of `layer` over its copies, or to slices."""

    def runs_again(self, layer: Layer) -> bool:
        """Whether a layer has to run forward again where its unit is replayed: the last ones need not."""

    def gather(self, layer: Layer, strategy: Strategy) -> tuple[float, float]:
        """Seconds on the links to put the weights of `layer` together from slices, and to sum gradients to those."""


def charges(costs: CostModel, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCharges:
    """The seconds of a layer that runs in so many passes, which T adds up and the simulation schedules."""
    step, reduce_s = costs.step, costs.reduction(layer, strategy)
    post_update_s, (gather_s, scatter_s) = step.late * reduce_s, costs.gather(layer, strategy)
    own = costs.layer(layer, strategy, passes)
    return LayerCharges(
        **vars(own),
        reduce_s=reduce_s,
        compute_interference_s=(1 - step.overlap) * (reduce_s - post_update_s),
        post_update_s=post_update_s,
        scatter_s=scatter_s,
        gather_s=gather_s,
        regather_s=gather_s if strategy.state == "gathered" else 0.0,
        gather_interference_s=(1 - step.overlap) * gather_s,
        replay_s=own.forward_s if strategy.saved == "replay" and costs.runs_again(layer) else 0.0,
    )


def statistics_transfer(costs: CostModel, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
    """Cost of exchanging batch statistics, with half of what a batch norm over replicas takes beside its messages."""
    moved, more_s = costs.transfer(value, source, target), costs.step.batch_norm_s / 2
    return replace(moved, forward_s=moved.forward_s + more_s, backward_s=moved.backward_s + more_s)


class AdaptedCosts:
    """Base of cost models that price layers and steps in their own way, and all else as another one does."""

    def __init__(self, base: CostModel) -> None:
        self.memory, self.peaks, self.reduction = base.memory, base.peaks, base.reduction
        self.memory_over_step, self.memory_by_layer = base.memory_over_step, base.memory_by_layer
        self.gather, self.runs_again = base.gather, base.runs_again
        self.transfer, self.transfer_matrix = base.transfer, base.transfer_matrix
