"""What the planner asks of a cost model, and the records it gets back.

Roofline, measurement and (later) stored profiles answer the same three questions, each figure with
its source, so the planner never knows which one it talks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parplan.graph.layer_graph import Layer, TensorSpec
from parplan.layout import Layout
from parplan.plan import Strategy

__all__ = ["CostModel", "LayerCost", "LayerMemory", "Source", "TransferCost", "TransferMatrix"]


class Source(Enum):
    """Where a figure comes from, best first."""

    MEASURED = "measured"
    SHIPPED = "shipped profile"
    INTERPOLATED = "interpolated"
    ESTIMATED = "estimated"


@dataclass(frozen=True)
class LayerCost:
    """Seconds one device spends on its part of a layer, with the spread (relative) where measured."""

    forward_s: float
    backward_s: float
    source: Source
    spread: float = 0.0


@dataclass(frozen=True)
class LayerMemory:
    """Bytes one device holds for its part of a layer.

    `saved_bytes` live from the layer's forward to its backward, `transient_bytes` only while it
    runs, the others all the time.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int

    @property
    def resident_bytes(self) -> int:
        """What stays for the whole step: weights, gradients and optimizer state."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


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

    def layer(self, layer: Layer, strategy: Strategy) -> LayerCost:
        """Cost of the slowest device's part of `layer`."""
        ...

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer`."""
        ...

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` from one layout to another."""
        ...

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """Times of `transfer` for all pairs of layouts at once."""
        ...

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds on the links to sum the weight gradients of `layer` over its copies."""
        ...
