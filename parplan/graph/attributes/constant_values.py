"""Constant folding inside a running export: values of tensors that no input, parameter or buffer of the model decides.

A branch on such a value (`mask.any().item()` of a mask of ones) is the same at every call, so the export may take it.
The ops recorded so far that the value comes from are run on real tensors, in-place ones in their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from parplan.compat import FakeTensor, memory_of, schema_of, traced_node, without_modes

__all__ = ["ConstantNodes", "constant_nodes", "constant_value", "formula", "needed_nodes", "run_nodes", "writes"]

aten = torch.ops.aten
# Their results take a shape and a type from an operand, and no values.
_LIKE = (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
)  # fmt: skip
# Of a tensor that the forward makes from numbers (`torch.tensor([1.0, 2.0])`).
_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default)
# Of a larger tensor a formula says which one it is.
_TOLD_ELEMENTS = 4096


def constant_value(tensor: Tensor, watched: Callable[[Tensor], bool]) -> tuple[Tensor, str] | None:
    """The value of a tensor of a running export, and its formula.

    None where an input, a parameter or a buffer may decide it, or a tensor from outside of the forward (a global one)
    that nobody would see change.

    Args:
        watched: whether changes of a tensor that the forward has not made are seen.
    """
    found = traced_node(tensor)
    if found is None:
        return None
    node, root = found
    constant = constant_nodes(node.graph, root)
    if node not in constant.last:
        return None
    needed = needed_nodes([node], constant.order)
    for one in needed:
        made = any(user.target in _LIFTS for user in one.users)
        if one.op == "get_attr" and not made and not watched(getattr(root, str(one.target))):
            return None
    value = run_nodes(needed, root)[node]
    return (value, formula(needed, root)) if (value.shape, value.dtype) == (tensor.shape, tensor.dtype) else None


def formula(nodes: Sequence[fx.Node], root: nn.Module) -> str:
    """The text of a computation: ops, sizes and values of constants."""
    texts = []
    for node in nodes:
        held = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, Tensor) and not isinstance(held, FakeTensor):
            with without_modes():
                values = held.tolist() if held.numel() <= _TOLD_ELEMENTS else id(held)
                texts.append(f"{held.dtype}{tuple(held.shape)}{values}")
        else:
            shapes = [tuple(like.meta["val"].shape) for like in node.all_input_nodes if node.target in _LIKE]
            texts.append(f"{node.target}{node.args}{node.kwargs}{shapes}")
    return "; ".join(texts)


@dataclass(frozen=True)
class ConstantNodes:
    """The nodes of a graph whose values follow from the graph alone.

    Args:
        order: all that do when they are computed.
        last: those that still do where the graph ends, as nothing else has changed them in place.
    """

    order: Sequence[fx.Node]
    last: Set[fx.Node]


def constant_nodes(graph: fx.Graph, root: nn.Module, known: Iterable[fx.Node] = ()) -> ConstantNodes:
    """The nodes of a graph that are constant where `known` placeholders are.

    Args:
        root: has the tensors that `get_attr` nodes name.
    """
    given, found, order = set(known), dict[fx.Node, int](), list[fx.Node]()
    for node in graph.nodes:
        shaped = node.target in _LIKE and node.all_input_nodes == [node.args[0]]  # and filled with a plain number
        operands = [] if shaped else node.all_input_nodes
        if node in given or (_is_pure(node, root) and all(operand in found for operand in operands)):
            found[node] = _memory(node)
            order.append(node)
        elif writes(node):
            changed = {_memory(operand) for operand in node.all_input_nodes}
            found = {other: memory for other, memory in found.items() if memory not in changed}
    return ConstantNodes(order, found.keys())


def needed_nodes(wanted: Sequence[fx.Node], known: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of the nodes `known`, in order, that the values `wanted` come from: operands, and changes in place."""
    kept, before = set(wanted), 0
    while len(kept) > before:
        before = len(kept)
        memories = {_memory(node) for node in kept}
        for node in reversed(known):
            if writes(node) and any(_memory(operand) in memories for operand in node.all_input_nodes):
                kept.add(node)
            if node in kept and node.target not in _LIKE:
                kept.update(node.all_input_nodes)
    return [node for node in known if node in kept]


def run_nodes(
    nodes: Sequence[fx.Node], root: nn.Module, known: Mapping[fx.Node, Tensor] | None = None
) -> dict[fx.Node, Any]:
    """The values of nodes, run in this order on real tensors; `known` are those of placeholders among them."""
    values: dict[fx.Node, Any] = dict(known or {})

    def value(argument: Any) -> Any:
        if argument in (torch.device("meta"), "meta"):  # which has no values
            return torch.device("cpu")
        if not isinstance(argument, fx.Node) or argument in values:
            return values.get(argument, argument) if isinstance(argument, fx.Node) else argument
        made = argument.meta["val"]  # the operand of `zeros_like` and its like: a shape and a type
        return torch.empty((), dtype=made.dtype).expand(made.shape)

    with without_modes(), torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                values[node] = getattr(root, str(node.target)).clone()
            elif node not in values:
                assert callable(node.target)
                args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value)
                values[node] = node.target(*args, **kwargs)
    return values


def _is_pure(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is an op of torch's that draws no random numbers, or a tensor that the forward has made."""
    if node.op == "get_attr":
        held = getattr(root, str(node.target), None)
        return isinstance(held, Tensor) and not isinstance(held, FakeTensor) and not held.requires_grad
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_function"
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    return getattr(node.target, "namespace", "") == "aten" and not drawn and not number


def writes(node: fx.Node) -> bool:
    """Whether an op may write its operands in place, as one with a graph of its own may (`torch.no_grad()`)."""
    operands = node.all_input_nodes if node.op == "call_function" else ()
    own_graph = any(operand.op == "get_attr" and "val" not in operand.meta for operand in operands)
    region = own_graph and any(isinstance(operand.meta.get("val"), Tensor) for operand in operands)
    return region or getattr(schema_of(node.target), "is_mutable", False)


def _memory(node: fx.Node) -> int:
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, Tensor) else id(node)
