"""What rows on saved tensors tell of an op: what it keeps from its forward to its backward, and needs meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parplan.cost_models.op_calls import OpCall, Operand

__all__ = ["Rule", "Saved", "names"]


@dataclass(frozen=True)
class Saved:
    """Values an op keeps, by name, and bytes of its own.

    Args:
        inner_bytes: kept for the backward (masks, indices, statistics).
        forward_bytes, backward_bytes: held only while its forward or backward runs.
    """

    values: frozenset[str] = frozenset()
    inner_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


Rule = Callable[[OpCall], Saved]


def names(*operands: Operand) -> frozenset[str]:
    """Of several tensors."""
    return frozenset(operand.name for operand in operands)
