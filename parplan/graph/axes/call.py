"""One captured call as the rows of the axis table see it: its arguments by name, its tensors' shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from parplan.compat import FakeTensor, memory_of, schema_of
from parplan.graph.axes.row_syntax import OpAxis, read_row

__all__ = [
    "Call", "Row", "call_like", "call_value", "is_inplace", "is_tensor", "memory_of_node", "nodes_in", "range_of",
    "shape_of", "text_row", "written_memories",
]  # fmt: skip


class Call:
    """One fx call with its arguments by schema name, for the rows that need them."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        schema = schema_of(node.target)
        arguments = [] if schema is None else schema.arguments
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
        self.arguments: dict[str, Any] = defaults | given | dict(node.kwargs)
        users = [user for user in node.users if user.target is operator.getitem]
        self.outputs = [user.name for user in users] if users else [node.name]
        self._users = users

    @property
    def results(self) -> dict[int, str]:
        """fx names of the results that are used, by their place in the returned tuple."""
        return {int(str(user.args[1])): user.name for user in self._users} or {0: self.node.name}

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def name(self, argument: str) -> str | None:
        """fx name of a tensor argument, None when it is missing."""
        value = self.arguments.get(argument)
        return value.name if isinstance(value, fx.Node) else None

    def shape(self, argument: str) -> tuple[int, ...]:
        """Shape of a tensor argument."""
        return shape_of(self.arguments[argument])

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return shape_of(self._users[0] if self._users else self.node)

    def tensors(self) -> list[fx.Node]:
        """All tensor operands, in order."""
        return [node for node in self.node.all_input_nodes if is_tensor(node)]

    def dim(self, value: int, rank: int) -> int:
        """A dimension argument counted from the front."""
        return value % rank if rank else 0

    def dims(self, argument: str, rank: int) -> set[int]:
        """An argument of one or several dimensions counted from the front; all of them when it is not given."""
        value = self[argument]
        if value is None or value == []:
            return set(range(rank))
        return {self.dim(int(dim), rank) for dim in (value if isinstance(value, (list, tuple)) else [value])}

    def rows(self, text: str, operands: Sequence[str], **more: Mapping[str, Any]) -> tuple[OpAxis, ...]:
        """Read a text row for these argument names."""
        tensors = [self.name(argument) for argument in operands]
        ranks = {name: len(self.shape(a)) for a in operands if (name := self.name(a)) is not None}
        ranks[self.outputs[0]] = len(self.out_shape)
        return read_row(text, tensors, self.outputs[:1], ranks, **more)


Row = Callable[[Call], tuple[OpAxis, ...]]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Whole shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def memory_of_node(node: Any) -> int:
    """Address of the memory that a node's tensor lies in; views share it."""
    return memory_of(node.meta["val"])


def is_inplace(node: fx.Node) -> bool:
    """Whether an op writes one of its operands."""
    return node.op == "call_function" and bool(getattr(schema_of(node.target), "is_mutable", False))


def nodes_in(nodes: Iterable[fx.Node], memory: int) -> list[fx.Node]:
    """Those of `nodes` whose tensors lie in `memory`."""
    return [node for node in nodes if is_tensor(node) and memory_of_node(node) == memory]


def written_memories(nodes: Iterable[fx.Node]) -> set[int]:
    """The memories of tensors that ops among `nodes` change in place."""
    return {memory_of_node(node) for node in nodes if is_tensor(node) and is_inplace(node)}


def call_value(node: fx.Node) -> Any:
    """The value of a call on the values that its operands have now."""
    values, named = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    known = (one.meta.get("val") for one in (*node.all_input_nodes, node))
    op: Any = node.target
    with next(value.fake_mode for value in known if isinstance(value, FakeTensor)):
        return op(*values, **named)


def call_like(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of an op, put where its graph inserts nodes now, with the origin of another node."""
    made = like.graph.call_function(target, args, kwargs)
    made.meta = {**like.meta, "val": call_value(made)}
    return made


def range_of(node: Any) -> tuple[Any, Any, Any] | None:
    """(start, end, step) of the call that a node makes of `arange`; None for anything else."""
    if not isinstance(node, fx.Node) or getattr(node.target, "overloadpacket", None) is not torch.ops.aten.arange:
        return None
    call = Call(node)
    return call["start"] or 0, call["end"], call["step"] or 1


def text_row(row: str, *operands: str, **names: str) -> Row:
    """A row given as text for these argument names; `names` gives words to its letters."""
    words = {letter: name.replace("_", "-") for letter, name in names.items()}
    return lambda call: call.rows(row, operands, names=words)
