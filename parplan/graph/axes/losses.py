"""Rows of the axis table for losses: samples map where nothing is averaged over them.

With a reduction the result depends on all samples at once, and is taken whole: the mean of means is
not the mean where targets are ignored, weighted or uneven. Losses are never sharded (R7).
"""

from __future__ import annotations

from parplan.graph.axes.call import Call
from parplan.graph.axes.elementwise import pointwise
from parplan.graph.axes.row_syntax import OpAxis

__all__ = ["class_loss", "element_loss", "pair_loss"]


def element_loss(call: Call) -> tuple[OpAxis, ...]:
    """Element by element."""
    return pointwise(call) if call["reduction"] == 0 else ()


def class_loss(call: Call) -> tuple[OpAxis, ...]:
    """Scores [samples, classes, ...] against targets [samples, ...]; class weights are needed whole."""
    return _samples(call, "self", "target", least_rank=2)


def pair_loss(call: Call) -> tuple[OpAxis, ...]:
    """Vectors [samples, features] against each other."""
    first = "input1" if call.name("input1") else "anchor"
    others = ("input2", "target") if first == "input1" else ("positive", "negative")
    return _samples(call, first, *others, least_rank=2)


def _samples(call: Call, first: str, *others: str, least_rank: int) -> tuple[OpAxis, ...]:
    shape = call.shape(first)
    fits = len(shape) >= least_rank and all(call.shape(other)[:1] == shape[:1] for other in others)
    if call["reduction"] != 0 or not fits or call.out_shape[:1] != shape[:1]:
        return ()
    names = [str(call.name(argument)) for argument in (first, *others)]
    return (OpAxis(dict.fromkeys((*names, call.outputs[0]), 0), name="batch"),)
