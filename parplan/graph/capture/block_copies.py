"""Blocks in an exported graph: ops that mark what each one takes and makes, and copies of a traced one for others."""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from parplan.compat import expression_of, pytree
from parplan.graph.axes.call import is_inplace
from parplan.graph.axes.table import own_op, unfilled
from parplan.graph.export.late_writes import DETACHED, NO_GRAD

__all__ = ["MARK", "RESULTS", "Span", "UnequalBlocks", "listed", "name_in_order", "tensor_facts"]

RESULTS: dict[str, Sequence[Tensor]] = {}
"""Tensors that the results of marks look like, by the keys of the marks."""


def _results(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    """Results of a block that is not traced."""
    return unfilled(RESULTS[key])


MARK = own_op("equal_block", _results)
# What a traced block takes and makes is read off an op that nobody uses.
fx.node.has_side_effect(MARK)


class UnequalBlocks(Exception):
    """A block does what cannot be copied: the model has to be exported in full."""


def listed(mark: fx.Node) -> list[fx.Node]:
    """The values at a mark: a block takes those of the one in front of it, and makes those of the one behind."""
    return list(mark.args[0])  # type: ignore[arg-type]


def tensor_facts(tensor: Tensor | None) -> Hashable:
    """All that a trace depends on but aliases and values."""
    if tensor is None:
        return None
    sizes = (tuple(map(expression_of, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return type(tensor), *sizes, tensor.dtype, tensor.device, tensor.requires_grad


@dataclass
class Span:
    """A traced block in the program: the op on what it takes, its ops, and the op on what it makes."""

    begin: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    end: fx.Node | None = None

    def described(self) -> Hashable | None:
        """Ops with their arguments and results; None where an operand is from elsewhere, or one is no op or writes."""
        own: dict[fx.Node, Hashable] = {}
        for number, node in enumerate(listed(self.begin)):
            own[node] = (*own.get(node, ("taken",)), number)  # type: ignore[misc]

        def word(argument: Any) -> Hashable:
            if isinstance(argument, fx.Node):
                return own[argument]
            if isinstance(argument, (list, tuple)):
                return tuple(map(word, argument))
            return type(argument), repr(argument)

        found: list[Hashable] = []
        for number, node in enumerate(self.nodes):
            if not _is_plain(node) or not own.keys() >= set(node.all_input_nodes):
                return None
            named = tuple((key, word(value)) for key, value in node.kwargs.items())
            made = pytree.tree_leaves(node.meta.get("val"))
            facts = (tensor_facts(one) if isinstance(one, Tensor) else repr(one) for one in made)
            found.append((node.target, word(node.args), named, *facts))
            own[node] = number
        results = listed(self.end) if self.end is not None else None
        return None if results is None or not own.keys() >= set(results) else (*found, word(results))

    def copied_to(self, mark: fx.Node, old: str, new: str) -> list[fx.Node]:
        """Copies of the ops in front of the op that stands for another block; gives what they make.

        Args:
            old, new: paths of the two blocks.

        Raises:
            UnequalBlocks: the other block is not given the same tensors in the same places, or an op is in a module
                that is none of its block's.
        """
        own: dict[fx.Node, fx.Node] = {}
        for node, other in zip(listed(self.begin), listed(mark), strict=True):
            if own.setdefault(node, other) is not other:
                raise UnequalBlocks
        for node in self.nodes:
            with mark.graph.inserting_before(mark):
                own[node] = mark.graph.node_copy(node, own.__getitem__)
            own[node].meta["nn_module_stack"] = self._moved(node, mark, old, new)
        assert self.end is not None
        return [own[node] for node in listed(self.end)]

    def _moved(self, node: fx.Node, mark: fx.Node, old: str, new: str) -> dict[str, tuple[str, Any]]:
        """The modules that a copied op is in: those around the op that stands for its block, then the block's."""
        found, around = dict(_stack(mark)), _stack(self.begin)
        for key, (path, kind) in _stack(node).items():
            if key in around:
                continue
            name, at, call = key.partition("@")  # of a module that is called again
            if not (path == old or path.startswith(f"{old}.")) or not name.endswith(path):
                raise UnequalBlocks
            moved = new + path[len(old) :]
            found[f"{name.removesuffix(path)}{moved}{at}{call}"] = moved, kind
        return found


def _is_plain(node: fx.Node) -> bool:
    """Whether a node calls an op that writes nothing, or takes a part of a result."""
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and not is_inplace(node))


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    return node.meta.get("nn_module_stack") or {}


def name_in_order(module: fx.GraphModule) -> None:
    """Give all ops the names that tracing gives them: that of the op, with a number from the second on."""
    names, nodes = fx.Graph(), list(module.graph.nodes)
    called = (node for node in nodes if isinstance(node.target, OpOverload) or node.target is operator.getitem)
    calls = dict.fromkeys(called)
    for node in nodes:
        if node not in calls:
            names.create_node("call_function", operator.getitem, (), name=node.name)
    # Results of regions without gradients are named once more where the regions are taken apart, and detached there.
    detached = [node for node in calls if node.meta.get(DETACHED)]
    results = dict.fromkeys(source for node in detached for source in node.all_input_nodes if NO_GRAD in source.meta)
    for node in (*(node for node in calls if node not in detached), *results, *detached):
        word = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else "getitem"
        word = word[2:-2] if word.startswith("__") and word.endswith("__") else word
        word = "detach_default" if node in detached else word
        node.name = names.create_node("call_function", operator.getitem, (), name=word).name
    graph, made = module.graph, copy.deepcopy(module.graph)  # which knows these names as taken
    for node, twin in zip(graph.nodes, made.nodes, strict=True):
        twin.name = node.name  # fx gives those that are Python's (`input`) another one
    module.graph = made
