"""What somebody predicted that a step would take, as plain figures: the runtime prints them and asks for no reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Both", "Expected", "ExpectedLayer"]


@dataclass(frozen=True)
class Both:
    """Seconds of the two directions."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: Both) -> Both:
        """The sum by direction."""
        return Both(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


@dataclass(frozen=True)
class ExpectedLayer:
    """What the slowest device's part of a layer was predicted to take, and where the figures come from."""

    times: Both
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
        low_s, high_s: the range that the step was predicted to be in.
    """

    layers: Mapping[str, ExpectedLayer] = field(default_factory=dict)
    transfers: Mapping[str, Both] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    reduce_s: float = 0.0
    update_s: float = 0.0
    overhead_s: float = 0.0
    step_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
