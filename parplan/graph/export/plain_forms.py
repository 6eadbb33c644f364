"""Ops of an exported graph in the plain form that the axis table has rows for, where that computes the same.

cat([empty, x])          a copy of x: a cache that is empty yet starts as torch.tensor([])
x[None].repeat(n, 1)     x[None].expand(n, -1): laid out once per sample, whatever their number
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node, shape_of

__all__ = ["plain_forms"]

aten = torch.ops.aten


def plain_forms(graph: fx.Graph) -> None:
    """Rewrite all such ops in an exported graph."""
    written = {memory_of_node(node.args[0]) for node in graph.nodes if is_inplace(node) and is_tensor(node.args[0])}
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


def _sizes(node: fx.Node) -> list[int | None]:
    """A tensor's shape, with None for sizes that depend on values: comparing those raises."""
    sizes: Iterable[int | torch.SymInt] = shape_of(node)
    return [size if isinstance(size, int) else None for size in sizes]
