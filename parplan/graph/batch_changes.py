"""What in a captured graph changes with the batch size, found by capturing at two sizes.

Sizes of results follow from the axis table. Anything else that changes (`x / x.shape[0]` bakes the
batch into a number) is invisible in one capture, and would silently change the numbers on replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from parplan.graph.layers import Owner, owner_of

__all__ = ["BatchChanges", "batch_changes"]


@dataclass(frozen=True)
class BatchChanges:
    """Calls of modules whose constants change with the batch: all of them, and those nothing explains."""

    all: frozenset[Owner] = frozenset()
    unexplained: frozenset[Owner] = frozenset()


def batch_changes(one: fx.Graph, other: fx.Graph) -> BatchChanges:
    """Compare two captures of one model at different batch sizes, node by node."""
    first, second = _calls(one), _calls(other)
    if [node.target for node in first] != [node.target for node in second]:
        everything = frozenset(owner_of(node) for node in first)
        return BatchChanges(everything, everything)
    pairs = list(zip(first, second, strict=True))
    changed = [node for node, twin in pairs if _text(node) != _text(twin)]
    unexplained = [node for node, twin in pairs if _text(node, sizes=False) != _text(twin, sizes=False)]
    return BatchChanges(frozenset(map(owner_of, changed)), frozenset(map(owner_of, unexplained)))


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _text(node: fx.Node, sizes: bool = True) -> str:
    """Arguments as text; without `sizes` a list that is the shape of the result reads as such."""
    value = node.meta.get("val")
    shape = list(value.shape) if isinstance(value, torch.Tensor) else None

    def word(argument: object) -> object:
        if isinstance(argument, fx.Node):
            return argument.name
        if isinstance(argument, (list, tuple)):
            same = not sizes and shape is not None and _fits(list(argument), shape)
            return "shape of the result" if same else [word(item) for item in argument]
        return argument

    return repr([word(argument) for argument in (*node.args, *node.kwargs.values())])


def _fits(sizes: list[object], shape: list[int]) -> bool:
    return len(sizes) == len(shape) and all(a in (b, -1) for a, b in zip(sizes, shape, strict=True))
