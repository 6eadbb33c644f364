"""Views by strides (`x.as_strided(...)`), which read memory as it lies, made to read a copy in the captured layout.

A tensor that was gathered from devices, or made by another op than in the plain model, has the same values and other
strides. So the operand is brought into the order that it had in memory, flat and contiguous, and viewed there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from parplan.errors import CaptureError
from parplan.graph.axes.call import call_like
from parplan.graph.user_line import code_line

__all__ = ["lay_out_strided"]

aten = torch.ops.aten


def lay_out_strided(graph: fx.Graph) -> None:
    """Rewrite all such views in a graph without in-place changes.

    Raises:
        CaptureError: a view reaches memory that is not its operand's, or is written in place.
    """
    for node in list(graph.nodes):
        if node.target is aten.as_strided_scatter.default:
            raise CaptureError("the forward writes into an as_strided view in place; use slices, or index_put")
        if node.target not in (aten.as_strided.default, aten.as_strided_copy.default):
            continue
        source, size, stride, *rest = node.args
        value: Tensor = source.meta["val"]
        strides, sizes = list(value.stride()), list(value.shape)
        order = sorted(range(len(sizes)), key=[(-step, -n) for step, n in zip(strides, sizes, strict=True)].__getitem__)
        start = (rest[0] if rest and rest[0] is not None else value.storage_offset()) - value.storage_offset()
        last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if not (_is_dense(value, order) and start >= 0 and last < max(1, value.numel())):
            line = code_line(node, installed=True)
            raise CaptureError(
                f"as_strided of a tensor of shape {list(value.shape)} and strides {list(value.stride())} reads memory "
                f"beside it{f' at {line}' if line else ''}; use slices, expand or unfold"
            )

        with graph.inserting_before(node):
            flat = source if order == sorted(order) else call_like(node, aten.permute.default, source, order)
            flat = call_like(node, aten.reshape.default, flat, [value.numel()])
            flat = call_like(node, aten.clone.default, flat, memory_format=torch.contiguous_format)
        node.target, node.args = aten.as_strided.default, (flat, size, stride, start)


def _is_dense(value: Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor's elements fill its memory, in the order of these dimensions."""
    behind = [math.prod(value.shape[dim] for dim in order[i + 1 :]) for i in range(len(order))]
    return all(value.shape[dim] == 1 or value.stride(dim) == step for dim, step in zip(order, behind, strict=True))
