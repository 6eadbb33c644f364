"""Values of a graph that are linear in others, as far as a short table of ops tells.

Terms of a sum may go one by one through what is linear, on the devices they lie on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from parplan.graph.axes.table import is_tensor

__all__ = ["Dependence", "dependence"]

aten = torch.ops.aten

# Linear in the first operand while the others do not depend on the sources.
_FIRST = """alias clone contiguous detach div.Scalar div.Tensor expand mean.dim mul.Scalar neg permute reshape
    select.int slice.Tensor squeeze.dim squeeze.dims sum sum.dim_IntList t transpose.int unsqueeze view
    _to_copy _unsafe_view"""
# Linear in one of two operands while the other one does not depend on the sources.
_EITHER = "bmm matmul mm mul.Tensor"
# Linear in both operands together.
_BOTH = "add.Tensor sub.Tensor"


def _ops(names: str) -> frozenset[object]:
    parts = [name.partition(".") for name in names.split()]
    return frozenset(getattr(getattr(aten, packet), overload or "default") for packet, _, overload in parts)


_FIRST_OPS, _EITHER_OPS, _BOTH_OPS = _ops(_FIRST), _ops(_EITHER), _ops(_BOTH)


@dataclass(frozen=True)
class Dependence:
    """The nodes that depend on some others.

    Args:
        linear: in all of them together, without a constant term; the others themselves too.
        other: in any other way, or in one that the table does not know.
    """

    linear: frozenset[fx.Node]
    other: frozenset[fx.Node]

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.linear or node in self.other


def dependence(nodes: Iterable[fx.Node], sources: Iterable[fx.Node]) -> Dependence:
    """How `nodes`, in the order they run, depend on `sources`; a source that depends on another one is not linear."""
    linear, other = set(sources), set[fx.Node]()
    for node in nodes:
        if (linear | other).isdisjoint(node.all_input_nodes):
            continue
        touched = linear.intersection(node.all_input_nodes)
        count = sum(argument in touched for argument in node.args if isinstance(argument, fx.Node))
        is_linear = (
            (node.target in _FIRST_OPS and count == 1 and node.args[0] in touched)
            or (node.target in _EITHER_OPS and count == 1)
            or (node.target in _BOTH_OPS and count == 2)
        )
        apart = node not in linear and other.isdisjoint(node.all_input_nodes)
        if apart and is_linear and is_tensor(node) and node.meta["val"].dtype.is_floating_point:
            linear.add(node)
        else:
            linear.discard(node)
            other.add(node)
    return Dependence(frozenset(linear), frozenset(other))
