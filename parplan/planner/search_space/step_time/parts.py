"""Priced parts of a step's layers and edges, per option and pair of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parplan.planner.search_space.shape import Shape
from parplan.planner.solver.problem import FloatArray

__all__ = ["EdgeParts", "NodeParts", "StepParts", "edge_totals", "node_totals"]


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
        gather_s: the way of its weights from slices.
        gather_interference_s: what that takes from the compute beside it.
        regathers: 1 where weights are gathered again for the backward, else 0.
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
    gather_s: FloatArray
    gather_interference_s: FloatArray
    lanes: FloatArray
    regathers: FloatArray
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
        zero = {**none, "regathers": np.zeros_like(once_s), "lanes": np.zeros((lanes, len(once_s)))}
        return NodeParts(**{**zero, "once_s": once_s})

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


@dataclass(frozen=True, eq=False)
class EdgeParts:
    """Seconds of one edge per pair of options, shape (options of source, options of target) each; inf forbids a pair.

    Args:
        once: forward and backward of values that move once.
        within: those between layers in passes, per pass.
        inwards, outwards: those over the boundary of the passes, per pass.
        reader: the node in whose forward and backward they count, if not the target.
    """

    source: int
    target: int
    allowed: FloatArray
    once: tuple[FloatArray, FloatArray]
    within: tuple[FloatArray, FloatArray] | None = None
    inwards: tuple[FloatArray, FloatArray] | None = None
    outwards: tuple[FloatArray, FloatArray] | None = None
    reader: int | None = None

    MOVED = ("once", "within", "inwards", "outwards")

    @property
    def counted_at(self) -> int:
        """The node in whose forward and backward the seconds count."""
        return self.target if self.reader is None else self.reader

    def scaled(self, times: int | FloatArray) -> EdgeParts:
        """Parts of so many equal edges, for each option of the target if it is an array."""
        moved = {name: getattr(self, name) for name in self.MOVED}
        more: dict[str, Any] = {
            name: (times * one[0], times * one[1]) for name, one in moved.items() if one is not None
        }
        return replace(self, **more)

    def added(self, other: EdgeParts) -> EdgeParts:
        """Both between the same two nodes."""
        moved = {name: (getattr(self, name), getattr(other, name)) for name in self.MOVED}
        both: dict[str, Any] = {
            name: more if one is None else one if more is None else (one[0] + more[0], one[1] + more[1])
            for name, (one, more) in moved.items()
        }
        return replace(self, allowed=self.allowed + other.allowed, **both)


@dataclass(frozen=True, eq=False)
class StepParts:
    """All parts of a step.

    Args:
        hidden: the share of transfers over the boundary of passes that takes nothing from compute.
        phases: branches that may run at the same time, each of nodes in forward order.
        layers: nodes that are layers or the delivery; those behind decide for others.
        far_s: seconds that no step worth considering takes: what takes a layer's backward out of the rows of devices
            that it does not use, and sums out of those of gathers that it does not have. T is exact below it.
        times: how many layers a node stands for, of repeated blocks those between the first and the last.
        gather_groups: layers by gather group, in forward order.
        micro_batches: of a step; the seconds are of one of them.
    """

    nodes: Sequence[NodeParts]
    edges: Sequence[EdgeParts]
    shape: Shape
    hidden: float
    phases: Sequence[Sequence[Sequence[int]]]
    far_s: float
    layers: int
    times: Mapping[int, int]
    gather_groups: Sequence[Sequence[int]] = ()
    micro_batches: int = 1

    def copies(self, group: int) -> int:
        """How many equal gather groups one stands for."""
        return self.times.get(self.gather_groups[group][0], 1)

    def blocks_to(self, group: int) -> list[int]:
        """The gather groups of blocks that stand for several, from this one, their last, back to their first."""
        return list(takewhile(lambda one: self.copies(one) > 1, range(group, -1, -1)))


def node_totals(parts: StepParts, v: int) -> FloatArray:
    """Seconds of compute of a layer in all its passes and micro-batches, hidden or not, per option; updates and
    arrivals included."""
    own, passes, more = parts.nodes[v], parts.shape.passes, parts.micro_batches - 1
    inside = own.pass_forward_s + own.pass_backward_s + own.samples_in_s
    once, again = (one.once_s + one.arrival_s + one.backward_s + one.update_s for one in (own, own.before_last))
    gathers = (1 + more) * (1 + own.regathers) * own.gather_s
    return once + more * again + gathers + passes * inside


def edge_totals(parts: StepParts, edge: EdgeParts) -> FloatArray:
    """Seconds that the values of an edge move in all passes and micro-batches, hidden or not, per pair of options."""
    several = (moved for moved in (edge.within, edge.inwards, edge.outwards) if moved is not None)
    once = parts.micro_batches * (edge.once[0] + edge.once[1])
    return once + parts.shape.passes * sum((one[0] + one[1] for one in several), 0.0)
