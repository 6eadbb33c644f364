"""Values of a graph that are linear in others, as far as a short table of ops tells.

Terms of a sum may go one by one through what is linear, on the devices they lie on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass
from operator import getitem

from torch import fx

from parplan.graph.axes.row_syntax import Cut
from parplan.graph.axes.table import axes_of, is_tensor, overload, shape_of

__all__ = ["Dependence", "carried_terms", "dependence", "routed_terms"]

# Linear in the first operand while the others do not depend on the sources.
_FIRST = """alias clone contiguous detach div.Scalar div.Tensor expand mean.dim mul.Scalar neg permute reshape
    select.int slice.Tensor squeeze.dim squeeze.dims sum sum.dim_IntList t to.dtype transpose.int unsqueeze view
    _to_copy _unsafe_view"""
# Linear in one of two operands while the other one does not depend on the sources.
_EITHER = "bmm matmul mm mul.Tensor"
# Linear in both operands together.
_BOTH = "add.Tensor sub.Tensor"


def _ops(names: str) -> frozenset[object]:
    return frozenset(map(overload, names.split()))


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
        is_linear = _is_linear(node, linear.intersection(node.all_input_nodes))
        apart = node not in linear and other.isdisjoint(node.all_input_nodes)
        if apart and is_linear and is_tensor(node) and node.meta["val"].dtype.is_floating_point:
            linear.add(node)
        else:
            linear.discard(node)
            other.add(node)
    return Dependence(frozenset(linear), frozenset(other))


def _is_linear(node: fx.Node, touched: Set[fx.Node]) -> bool:
    """Whether an op is linear in those of its operands that are `touched`."""
    count = sum(argument in touched for argument in node.args if isinstance(argument, fx.Node))
    return (
        (node.target in _FIRST_OPS and count == 1 and node.args[0] in touched)
        or (node.target in _EITHER_OPS and count == 1)
        or (node.target in _BOTH_OPS and count == 2)
    )


# Finite, with a finite derivative, wherever their operands are finite: in rows of zeros too.
_SMOOTH_OPS = _ops(
    """add.Scalar add.Tensor celu chunk clamp clamp_max clamp_min clone contiguous elu erf gelu hardsigmoid hardswish
    hardtanh leaky_relu log_sigmoid mish mul.Scalar mul.Tensor neg relu relu6 reshape rsub.Scalar rsub.Tensor selu
    sigmoid silu slice.Tensor softplus split.Tensor split_with_sizes squeeze.dim sub.Scalar sub.Tensor tanh to.dtype
    transpose.int unsqueeze view _to_copy"""
)
_PRODUCTS = _ops("bmm matmul mul.Tensor")
_SPLITS = _ops("chunk split.Tensor split_with_sizes")


def routed_terms(nodes: Sequence[fx.Node], sources: Set[str], cut: Container[str]) -> frozenset[str] | None:
    """Values that are terms of a sum when every part computes the rows of its own experts.

    Where an expert has two matrices, the activation between them works row by row, so a part may go on with the rows
    that it has: rows of other experts hold anything finite until the next product makes them zeros.

    Args:
        nodes: the ops of a layer, in the order they run.
        sources: names of look-ups and products by one list of experts: rows of other experts are zeros.
        cut: tensors that are cut themselves.

    Returns:
        Names of the terms: with those of all other parts they add up to the whole value. None where an op needs the
        sum, or where rows of other experts would reach a value that is no term.
    """
    terms: dict[fx.Node, bool] = {}  # whether it is a term; else only its own rows are right
    by_row: set[fx.Node] = set()
    for node in nodes:
        touched = {operand for operand in node.all_input_nodes if operand in terms}
        if node.name in sources:
            if not touched <= by_row & {node.args[0]}:
                return None
            terms[node] = True
            by_row.add(node)
            continue
        if not touched:
            continue
        if any(operand.name in cut for operand in (node, *node.all_input_nodes)):
            return None
        rows, linear = touched <= by_row, all(terms[operand] for operand in touched)
        if node.target is not getitem:
            rows = rows and _keeps_rows(node, touched)
            linear = linear and (_is_linear(node, touched) or node.target in _SPLITS)
            # Of a product by rows one factor with zeros in the rows of others is enough.
            linear |= rows and node.target in _PRODUCTS and any(terms[operand] for operand in touched)
            if not linear and not (rows and node.target in _SMOOTH_OPS):
                return None
        terms[node] = linear
        by_row |= {node} if rows else set()
    loose = {node for node, is_term in terms.items() if not is_term}
    inside = set(nodes)
    leaving = any(user not in inside for node in loose for user in node.users)
    return None if leaving else frozenset(node.name for node, is_term in terms.items() if is_term)


def _keeps_rows(node: fx.Node, operands: Iterable[fx.Node]) -> bool:
    """Whether every row of the results follows from the same row of the operands."""
    results = [node] if is_tensor(node) else list(node.users)
    names = {tensor.name for tensor in (*operands, *results)}
    sizes = {shape_of(tensor)[0] for tensor in (*operands, *results)}
    return len(sizes) == 1 and any(
        axis.cut is Cut.MAP and not axis.outer and all(axis.dims.get(name) == 0 for name in names)
        for axis in axes_of(node)
    )


def carried_terms(nodes: Sequence[fx.Node], partial: Set[str], cut: Set[str], outputs: Sequence[str]) -> set[str]:
    """Values behind linear ops (views) that are terms of a sum as `partial` are; these where another op reads them.

    Args:
        cut: values that have the axis, which are no terms.
        outputs: of the layer; they stay terms, also where an op reads them.
    """
    found = dependence(nodes, [node for node in nodes if node.name in partial])
    carried = {node.name for node in found.linear} - partial
    inner = {source.name for node in nodes for source in node.all_input_nodes}
    return set(partial if found.other or not cut.isdisjoint(carried) else (partial | carried) - (inner - set(outputs)))
