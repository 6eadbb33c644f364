"""Ops of an exported graph in the plain form that the axis table has rows for, where that computes the same.

cat([empty, x])          a copy of x: a cache that is empty yet starts as torch.tensor([])
x[None].repeat(n, 1)     x[None].expand(n, -1): laid out once per sample, whatever their number
x[:, [2]]                x[:, 2:3]: a section of a dimension of which other sections may be cut
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from parplan.compat import FakeTensor
from parplan.errors import CaptureError
from parplan.graph.axes.call import is_inplace, memory_of_node, shape_of, written_memories
from parplan.graph.kinds import op_name
from parplan.graph.user_line import code_line

__all__ = ["plain_forms"]

aten = torch.ops.aten


def plain_forms(graph: fx.Graph, constants: Mapping[str, Any]) -> None:
    """Rewrite all such ops in an exported graph.

    Args:
        constants: values of the placeholders of constants.

    Raises:
        CaptureError: an op writes several tensors at once.
    """
    for node in graph.nodes:
        if is_inplace(node) and isinstance(node.args[0], (list, tuple)):
            line = code_line(node, installed=True)
            raise CaptureError(f"{op_name(node)} writes several tensors at once; write each by itself\n  at {line}")
    written = written_memories(graph.nodes)
    for node in list(graph.nodes):
        if node.target is aten.cat.default:
            tensors = node.args[0]
            # torch skips tensors of shape [0] in a concatenation, whatever the rank of the others.
            kept = [tensor for tensor in tensors if _sizes(tensor) != [0]]
            if (
                not kept
                or len(kept) == len(tensors)
                or any(t.meta["val"].dtype != node.meta["val"].dtype for t in kept)
            ):
                continue
            if len(kept) == 1:
                node.target, node.args, node.kwargs = aten.clone.default, (kept[0],), {}
            else:
                node.args = (kept, *node.args[1:])
        elif node.target is aten.repeat.default:
            source, repeats = node.args
            lead = len(repeats) - len(shape_of(source))
            once = all(n == 1 or dim < lead or _sizes(source)[dim - lead] == 1 for dim, n in enumerate(repeats))
            # An expansion shares memory along what it repeats, which nobody may write.
            if once and memory_of_node(node) not in written:
                node.target, node.args = aten.expand.default, (source, list(shape_of(node)))
        elif node.target is aten.index.Tensor:
            source, indices = node.args
            places = [place for place, index in enumerate(indices) if index is not None]
            place, index = places[0], indices[places[0]]
            number, size = _number(index, constants) if len(places) == 1 else None, _sizes(source)[place]
            if number is not None and size and written.isdisjoint(map(memory_of_node, (source, index, node))):
                node.target, node.args = aten.slice.Tensor, (source, place, number % size, number % size + 1)


def _number(index: fx.Node, constants: Mapping[str, Any]) -> int | None:
    """The one number of an index that is a list in the model's code; None for any other index."""
    while index.target in (aten.lift_fresh_copy.default, aten.detach.default):
        index = index.all_input_nodes[0]
    value = constants.get(index.name)
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.shape != (1,):
        return None
    return int(value) if value.dtype is torch.int64 and value.device.type != "meta" else None


def _sizes(node: fx.Node) -> list[int | None]:
    """A tensor's shape, with None for sizes that depend on values: comparing those raises."""
    sizes: Iterable[int | torch.SymInt] = shape_of(node)
    return [size if isinstance(size, int) else None for size in sizes]
