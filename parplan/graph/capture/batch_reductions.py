"""Reductions over the batch taken apart, so that only their last step needs all samples.

    mean(x)                  -> mean of every sample, then batch_mean
    mse_loss(x, y)           -> mse_loss without reduction, mean of every sample, then batch_mean
    cross_entropy(x, t)      -> class_terms, row_losses (a loss and a count for every row), then batch_mean

What is left of a mean is one number per sample (two for class losses: ignored targets and class weights count), so the
loss has replicas like any layer, and class_terms can be cut along the vocabulary (graph/axes/loss_ops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from parplan.compat import schema_of
from parplan.graph.axes.call import call_like, shape_of
from parplan.graph.axes.loss_ops import (
    BATCH_MEAN,
    BATCH_SUM,
    CLASS_ROWS,
    CLASS_TERMS,
    ROW_LOSSES,
    vocabulary_blocks,
    work_dtype,
)
from parplan.graph.axes.row_syntax import Place
from parplan.graph.axes.table import Call, row_of
from parplan.graph.capture.merged_samples import follow_samples
from parplan.graph.kinds import SPLIT_OFF, is_loss_op, op_name

__all__ = ["split_batch_reductions"]

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of the ways to reduce a loss
_CLASS_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
_REDUCTIONS: dict[Any, int] = {
    aten.mean.default: MEAN, aten.mean.dim: MEAN, aten.sum.default: SUM, aten.sum.dim_IntList: SUM,
}  # fmt: skip


def split_batch_reductions(
    graph: fx.Graph, samples: Mapping[str, int], grown: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> dict[str, Place]:
    """Take all such reductions apart; gives where samples lie in every value that they can be followed to.

    Args:
        samples: dimension of the samples, by user input.
        grown: dimensions that grow with the batch, by value.
    """
    places = {name: Place(name, dim) for name, dim in samples.items()}
    batch = next((shape_of(node)[samples[node.name]] for node in graph.nodes if node.name in samples), 1)

    def loss(node: fx.Node) -> fx.Node | None:
        reached = any(operand.name in places for operand in node.all_input_nodes)
        if not reached or not is_loss_op(node) or row_of(node.target) is None:
            return None
        call = Call(node)
        return _class_loss(call, places, grown) if op_name(node) in _CLASS_LOSSES else _element_loss(call)

    def reduction(node: fx.Node) -> fx.Node | None:
        place = places.get(node.all_input_nodes[0].name) if node.target in _REDUCTIONS else None
        return _reduction(Call(node), place) if place is not None else None

    for node in list(graph.nodes):
        for each in _replaced(node, loss) or [node]:
            follow_samples(each, places, batch)
    for node in list(graph.nodes):
        for each in _replaced(node, reduction):
            follow_samples(each, places, batch)
    return places


def _replaced(node: fx.Node, make: Callable[[fx.Node], fx.Node | None]) -> list[fx.Node]:
    """The nodes that `make` puts in front of one and in its place; none where it makes none."""
    before, found = node.prev, list[fx.Node]()
    with node.graph.inserting_before(node):
        made = make(node)
    if made is not None:
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)
    while made is not None and made is not before:
        found.insert(0, made)
        made = made.prev
    return found


def _make(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """An op of the module that `like` is called in."""
    made = call_like(like, target, *args, **kwargs)
    made.meta[SPLIT_OFF] = not is_loss_op(made)
    return made


def _element_loss(call: Call) -> fx.Node | None:
    """A loss without reduction, and the reduction as an op of its own."""
    reduction = call["reduction"]
    if reduction not in (MEAN, SUM):
        return None
    given, arguments = call.arguments | {"reduction": NONE}, schema_of(call.node.target).arguments
    named = {a.name: given[a.name] for a in arguments if a.kwarg_only}
    each = _make(call.node, call.node.target, *(given[a.name] for a in arguments if not a.kwarg_only), **named)
    return _make(call.node, aten.mean.default if reduction == MEAN else aten.sum.default, each)


def _class_loss(call: Call, places: Mapping[str, Place], grown: Mapping[str, tuple[int, ...]]) -> fx.Node | None:
    """Loss and count of every row, then their reduction; None where the batch is not the first dimension."""
    scores, target, reduction = call["self"], call["target"], call["reduction"]
    shape, normalised = shape_of(scores), op_name(call.node) != "cross_entropy_loss"
    place = places.get(scores.name, places.get(target.name))
    if len(shape) < 2 or place is None or place.dim != 0:
        return None
    indexed = not target.meta["val"].is_floating_point()
    # Classes that are samples themselves (a contrastive loss): their number is that of the batch.
    listed = indexed and not normalised and shape[0] != shape[1] and 1 not in grown.get(scores.name, ())
    blocks = vocabulary_blocks(shape[1]) if listed else 1
    if blocks == 1 and reduction == NONE:
        return None
    smoothing = call["label_smoothing"] or 0.0
    given = (scores, target, call["weight"], call["ignore_index"], smoothing)
    if blocks > 1:
        rows = _make(call.node, ROW_LOSSES, _make(call.node, CLASS_TERMS, *given, blocks))
    else:
        rows = _make(call.node, CLASS_ROWS, *given, normalised)
    dtype = call.node.meta["val"].dtype
    if reduction == NONE:
        losses = _make(call.node, aten.select.int, rows, -1, 0)
        same = losses.meta["val"].dtype == dtype
        return losses if same else _make(call.node, aten._to_copy.default, losses, dtype=dtype)
    if len(shape) > 2:  # [samples, ..., 2] to [samples, 2]
        rows = _make(call.node, aten.sum.dim_IntList, rows, list(range(1, len(shape) - 1)))
    return _make(call.node, BATCH_MEAN if reduction == MEAN else BATCH_SUM, rows, True, dtype)


def _reduction(call: Call, place: Place) -> fx.Node | None:
    """A number per sample, then the reduction over samples; None for a reduction of some dimensions only."""
    values, mean = call.tensors()[0], _REDUCTIONS[call.node.target] == MEAN
    rank, out = len(shape_of(values)), call.node.meta["val"]
    if out.shape != () or call.dims("dim", rank) != set(range(rank)):
        return None
    dtype = work_dtype(out.dtype)
    if rank > 1:
        others = [dim for dim in range(rank) if dim != place.dim]
        values = _make(call.node, aten.mean.dim if mean else aten.sum.dim_IntList, values, others, dtype=dtype)
    elif values.meta["val"].dtype != dtype:
        values = _make(call.node, aten._to_copy.default, values, dtype=dtype)
    return _make(call.node, BATCH_MEAN if mean else BATCH_SUM, values, False, out.dtype)
