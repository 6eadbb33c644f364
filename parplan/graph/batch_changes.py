"""Differences between captures of one model at two batch sizes.

Sizes of results follow from the axis table. Anything else that changes (`x / x.shape[0]` bakes the
batch into a number) is invisible in one capture, and would silently change the numbers on replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from parplan.graph.layers import Owner, owner_of

__all__ = ["BatchChanges", "batch_changes", "everything_changes"]


@dataclass(frozen=True)
class BatchChanges:
    """The parts of a captured graph that change with the batch size.

    Args:
        all: calls of modules with an argument that changes.
        unexplained: those of them where the argument is not simply the shape of the result.
        resized: nodes whose result has another shape.
        results: whether the model returns a number that changes (`x.shape[0]`).
        one_batch: the error of the capture at another batch size, where the model could be captured at one only.
    """

    all: frozenset[Owner] = frozenset()
    unexplained: frozenset[Owner] = frozenset()
    resized: frozenset[str] = frozenset()
    results: bool = False
    one_batch: str = ""

    def __or__(self, other: BatchChanges) -> BatchChanges:
        """The union of two sets of changes."""
        return BatchChanges(
            self.all | other.all,
            self.unexplained | other.unexplained,
            self.resized | other.resized,
            self.results or other.results,
            self.one_batch or other.one_batch,
        )


def everything_changes(graph: fx.GraphModule, one_batch: str = "") -> BatchChanges:
    """Changes of a model that cannot be captured at another batch size (`one_batch`: why), or not to the same ops."""
    everything = frozenset(owner_of(node) for node in _calls(graph))
    return BatchChanges(everything, everything, results=True, one_batch=one_batch)


def batch_changes(one: fx.GraphModule, other: fx.GraphModule) -> BatchChanges:
    """Compare two captures of one model at different batch sizes, node by node."""
    first, second = _calls(one), _calls(other)
    if [node.target for node in first] != [node.target for node in second]:
        return everything_changes(one)
    pairs = list(zip(first, second, strict=True))
    changed = [node for node, twin in pairs if _text(node) != _text(twin)]
    unexplained = [node for node, twin in pairs if _text(node, sizes=False) != _text(twin, sizes=False)]
    resized = [node.name for node, twin in pairs if _shape(node) != _shape(twin)]
    return BatchChanges(
        all=frozenset(map(owner_of, changed)),
        unexplained=frozenset(map(owner_of, unexplained)),
        resized=frozenset(resized),
        results=_text(one.graph.output_node()) != _text(other.graph.output_node()),
    )


def _shape(node: fx.Node) -> list[int] | None:
    value = node.meta.get("val")
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    """All calls, those of regions (no_grad, autocast) too, in a fixed order."""
    found: list[fx.Node] = []
    for node in module.graph.nodes:
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            found += _calls(inner)
        elif node.op == "call_function":
            found.append(node)
    return found


def _text(node: fx.Node, sizes: bool = True) -> str:
    """Arguments as text; without `sizes` a list that is the shape of the result reads as such."""
    shape = _shape(node)

    def word(argument: object) -> object:
        if isinstance(argument, fx.Node):
            return argument.name
        if isinstance(argument, (list, tuple)):
            fits = not sizes and shape is not None and len(argument) == len(shape)
            if fits and all(size in (own, -1) for size, own in zip(argument, shape or (), strict=True)):
                return "shape of the result"
            return [word(item) for item in argument]
        return argument

    return repr([word(argument) for argument in (*node.args, *node.kwargs.values())])
