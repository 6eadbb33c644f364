"""Costs times a factor: an estimate calibrated on one measured step.

A roofline may be off by a factor that is the same for all layers (the share of peak that an old library reached, say).
One measured step on one device gives it; links, and how a plan uses them, stay as they were.

    factor = measured_s / predict(graph, one_device, costs, plan).step_s
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from parplan.cost_models.costs import AdaptedCosts, CostModel, LayerCost, StepCost
from parplan.errors import ParplanError
from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy

__all__ = ["ScaledCosts"]


class ScaledCosts(AdaptedCosts):
    """The times of all layers, updates included, times `factor`; everything else as `costs` has it (a CostModel).

    Args:
        costs: whose times are scaled.
        factor: on forward, backward and update.
        overlap: the share of reductions that runs beside the backward pass, the rest coming after it, in place of what
            `costs` says, for a runtime known to hide less or more.

    Raises:
        ParplanError: `factor` is not positive, or `overlap` not between 0 and 1.
    """

    def __init__(self, costs: CostModel, factor: float, overlap: float | None = None) -> None:
        if not (isfinite(factor) and factor > 0):
            raise ParplanError(f"layer times are to be scaled by {factor}; give a factor above 0")
        if overlap is not None and not 0 <= overlap <= 1:
            raise ParplanError(f"overlap is {overlap}; it is a share of the reductions, from 0 to 1")
        super().__init__(costs)
        self.costs = costs
        self.factor = factor
        self.overlap = overlap

    @property
    def step(self) -> StepCost:
        """As `costs` has it, but for what overlaps if that was given."""
        step = self.costs.step
        return step if self.overlap is None else replace(step, overlap=1.0, late=1 - self.overlap)

    def layer(self, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCost:
        """Scaled seconds of the slowest device's part of `layer` in one pass."""
        cost = self.costs.layer(layer, strategy, passes)
        times = (cost.forward_s, cost.backward_s, cost.update_s)
        forward_s, backward_s, update_s = (self.factor * seconds for seconds in times)
        return replace(cost, forward_s=forward_s, backward_s=backward_s, update_s=update_s)
