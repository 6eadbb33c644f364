"""The predicted times of a step, as plain figures: the runtime prints them and asks for no reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.runtime.measurement.trace_events import TraceSpan

__all__ = ["INPUTS", "RESULTS", "SLICES", "BothTimes", "Expected", "ExpectedLayer"]

INPUTS, RESULTS, SLICES = "(inputs)", "(results)", "(slices)"


@dataclass(frozen=True)
class BothTimes:
    """Seconds of the two directions."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of both together."""
        return self.forward_s + self.backward_s

    def __add__(self, other: BothTimes) -> BothTimes:
        """The sum by direction."""
        return BothTimes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


@dataclass(frozen=True)
class ExpectedLayer:
    """The predicted times of the slowest device's part of a layer, and where the figures come from."""

    times: BothTimes
    source: str


@dataclass(frozen=True)
class Expected:
    """One step of a plan as it was predicted.

    Args:
        layers: by name.
        transfers: by the value that moves, its moves to all readers together.
        labels: the layer each of these values comes from and those that read it, `pool5 -> fc6`.
        reduce_s: the part of the gradient sums that does not overlap with the backward.
        update_s: the optimizer's update.
        overhead_s: the runtime's own time.
        step_s: the whole step.
        spans: the predicted step over time, device by device; none where it is not simulated.
        memory_bytes: peak of every logical device.
    """

    layers: Mapping[str, ExpectedLayer] = field(default_factory=dict)
    transfers: Mapping[str, BothTimes] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    reduce_s: float = 0.0
    update_s: float = 0.0
    overhead_s: float = 0.0
    step_s: float = 0.0
    spans: tuple[TraceSpan, ...] = field(default=(), repr=False, compare=False)
    memory_bytes: tuple[int, ...] = ()
