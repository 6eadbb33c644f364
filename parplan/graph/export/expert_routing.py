"""Rows sorted by expert for `grouped_mm`, put back into their own order: products of rows with their experts' matrices.

A mixture of experts sorts its rows by expert, multiplies each group with its expert's matrix, and sorts back. What
happens between is done row by row, so it is the same in the rows' own order, in which samples can be told apart:

    sorted_experts, order = sort(experts)
    out = act(grouped_mm(x[order // k], w, cumsum(histc(sorted_experts))))[inverse(order)]
    -> out = act(expert_products(repeat_interleave(x, k), w, experts))
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from parplan.graph.axes.call import (
    Call,
    is_inplace,
    is_tensor,
    memory_of_node,
    nodes_in,
    range_of,
    shape_of,
    written_memories,
)
from parplan.graph.axes.experts import EXPERT_PRODUCTS
from parplan.graph.axes.row_syntax import Cut
from parplan.graph.axes.table import axes_of
from parplan.graph.export.functionalise import out_of_place
from parplan.graph.kinds import op_name

__all__ = ["unsort_experts"]

aten = torch.ops.aten
_CASTS = ("to", "to_copy")
_EMPTY = ("empty_like", "zeros_like", "new_empty", "new_zeros")


def unsort_experts(graph: fx.Graph) -> None:
    """Rewrite all such sorts in an exported graph; a sort of which anything else is read stays as it is."""
    gone = set[fx.Node]()
    for node in [node for node in graph.nodes if op_name(node) in ("sort", "argsort")]:
        if node not in gone and len(Call(node).shape("self")) == 1:
            region = _Region(graph, Call(node)["self"])
            if region.follow(node):
                region.replace_results()
                gone |= region.members.keys()
            else:
                for made in reversed(region.made):
                    graph.erase_node(made)


@dataclass
class _Region:
    """All values that follow from one sort of the rows' experts, by what they hold.

    Args:
        graph: the exported graph.
        experts: [rows], the expert of each row, in the rows' own order.
        members: all nodes that follow from the sort, up to the results.
        order: positions of the sorted rows among the rows.
        inverse: positions of the rows among the sorted rows.
        tokens: positions divided by the number of rows of a token; with that number.
        counts: rows of each expert, and what is made of them.
        twins: for values with rows in sorted order, the same in the rows' own order.
        results: values in which the order of the rows is lost again; with the same made of the rows' own order.
        made: new nodes.
    """

    graph: fx.Graph
    experts: fx.Node
    members: dict[fx.Node, None] = field(default_factory=dict)
    order: set[fx.Node] = field(default_factory=set)
    inverse: set[fx.Node] = field(default_factory=set)
    tokens: dict[fx.Node, int] = field(default_factory=dict)
    counts: set[fx.Node] = field(default_factory=set)
    twins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    results: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: list[fx.Node] = field(default_factory=list)

    def follow(self, sort: fx.Node) -> bool:
        """Whether every reader of the order is understood, and products with experts are among them."""
        if Call(sort)["descending"]:
            return False
        self.members[sort] = None
        self.order |= {sort} if op_name(sort) == "argsort" else set()
        rules = self._orders, self._counts, self._moves_rows, self._multiplies, self._adds_up, self._works_by_row
        for node in list(self.graph.nodes):
            reads = any(operand in self.members and operand not in self.results for operand in node.all_input_nodes)
            if not reads or node in self.members or "assert" in str(node.target):
                continue
            sized = all(
                isinstance(size, int) for each in (node, *node.users) if is_tensor(each) for size in shape_of(each)
            )
            if (
                node.op != "call_function"
                or not sized
                or not self._alone(node)
                or not any(rule(node) for rule in rules)
            ):
                return False
            self.members[node] = None
            changed: Any = node.args[0]
            if is_inplace(node):  # whoever reads the changed value from here on reads the new one
                self.inverse |= {changed} if node in self.inverse else set()
                self.twins |= {changed: self.twins[node]} if node in self.twins else {}
        return bool(self.results) and any(made.target is EXPERT_PRODUCTS for made in self.made)

    def _alone(self, node: fx.Node) -> bool:
        """Whether nobody reads a view of what an op changes in place."""
        if not is_inplace(node):
            return True
        held = nodes_in(self.graph.nodes, memory_of_node(node))
        return all(user <= node for n in held if n < node and n is not node.args[0] for user in n.users)

    def _orders(self, node: fx.Node) -> bool:
        """The order and its inverse, and the token of each row."""
        call = Call(node)
        source: Any = node.args[0]
        if node.target is operator.getitem and op_name(source) == "sort":
            if source.args[0] in self.order:
                self.inverse |= {node} if node.args[1] == 1 else set()
            elif node.args[1] == 0:
                self.twins[node] = self.experts
            else:
                self.order.add(node)
        elif op_name(node) in ("sort", "argsort") and source in self.order and not call["descending"]:
            self.inverse |= {node} if op_name(node) == "argsort" else set()
        elif op_name(node) in ("floor_divide", "div") and source in self.order:
            if not isinstance(node.args[1], int) or (op_name(node) == "div" and not node.kwargs.get("rounding_mode")):
                return False
            self.tokens[node] = node.args[1]
        elif op_name(node) == "index_put" and len(call["indices"]) == 1 and call["indices"][0] in self.order:
            rows = shape_of(self.experts)
            if range_of(call["values"]) != (0, *rows, 1) or shape_of(source) != rows or call["accumulate"]:
                return False
            self.inverse.add(node)
        else:
            return op_name(node) in _EMPTY and source in self.order
        return True

    def _counts(self, node: fx.Node) -> bool:
        """Rows of each expert."""
        known = node.args[0] in self.counts or (op_name(node) == "histc" and self._lists_experts(node.args[0]))
        if not known or op_name(node) not in ("histc", "cumsum", *_CASTS):
            return False
        self.counts.add(node)
        return True

    def _lists_experts(self, node: Any) -> bool:
        while op_name(node) in _CASTS:
            node = node.all_input_nodes[0]
        return node is self.experts or self.twins.get(node) is self.experts

    def _moves_rows(self, node: fx.Node) -> bool:
        """Rows brought into sorted order, put back, or looked up by their experts."""
        source, indices = Call(node)["self"], Call(node)["indices"]
        if node.target is not aten.index.Tensor or len(indices) != 1:
            return False
        (index,) = indices
        if index in self.inverse and source in self.twins:
            self.results[node] = self.twins[source]
        elif source in self.members:
            return False
        elif self.twins.get(index) is self.experts:
            self._make(node, aten.index.Tensor, (source, [self.experts]))
        elif index in self.tokens or index in self.order:
            times = self.tokens.get(index, 1)
            written = written_memories(n for n in self.graph.nodes if n > node)
            if shape_of(source)[0] * times != shape_of(node)[0] or memory_of_node(source) in written:
                return False
            if times == 1:
                self.twins[node] = source
            else:
                self._make(node, aten.repeat_interleave.self_int, (source, times, 0))
        else:
            return False
        return True

    def _multiplies(self, node: fx.Node) -> bool:
        """`grouped_mm` of sorted rows with one matrix for each expert."""
        if op_name(node) not in ("grouped_mm", "grouped_mm_fallback", "grouped_products"):
            return False
        rows, weight, ends, *more = Call(node).arguments.values()
        if rows not in self.twins or len(shape_of(weight)) != 3 or any(more):
            return False
        path: list[Any] = [ends]
        while op_name(path[-1]) in ("cumsum", *_CASTS):
            path.append(path[-1].all_input_nodes[0])
        counts = Call(path[-1])
        bins = counts["min"], counts["max"], counts["bins"]
        experts = shape_of(weight)[0]
        sums = sum(op_name(each) == "cumsum" for each in path)
        if op_name(path[-1]) != "histc" or bins != (0, experts - 1, experts) or sums != 1:
            return False
        if not self._lists_experts(counts["self"]):
            return False
        self._make(node, EXPERT_PRODUCTS, (self.twins[rows], weight, self.experts, experts))
        return True

    def _adds_up(self, node: fx.Node) -> bool:
        """`index_add` of all rows of a token."""
        if op_name(node) != "index_add":
            return False
        call = Call(node)
        source, rows, times = call["self"], call["source"], self.tokens.get(call["index"])
        if source in self.members or rows not in self.twins or times is None or call["dim"] or call["alpha"] != 1:
            return False
        tokens, *shape = shape_of(source)
        if tokens * times != shape_of(rows)[0]:
            return False
        split = self._make(node, aten.view.default, (self.twins[rows], [tokens, times, *shape]))
        split.meta["val"] = rows.meta["val"].new_empty((tokens, times, *shape))
        summed = self._make(node, aten.sum.dim_IntList, (split, [1]))
        zeros = op_name(source) in ("zeros", "zeros_like", "new_zeros")
        self.results[node] = summed if zeros else self._make(node, aten.add.Tensor, (source, summed))
        del self.twins[node]
        return True

    def _works_by_row(self, node: fx.Node) -> bool:
        """An op on sorted rows that works row by row does the same to rows in their own order."""
        read = [operand for operand in node.all_input_nodes if operand in self.members]
        if any(operand not in self.twins for operand in read):
            return False
        if node.target is operator.getitem:
            self._make(node, operator.getitem, (self.twins[read[0]], node.args[1]))
            return True
        target: Any = out_of_place(node.target) if is_inplace(node) else node.target
        if target is None:
            return False
        results = [node] if is_tensor(node) else list(node.users)
        fits = not any(shape_of(each)[:1] != shape_of(self.experts) for each in (*read, *results))
        own = self.graph.call_function(target, node.args, node.kwargs) if target is not node.target else node
        own.meta = dict(node.meta)
        rows = {each.name for each in (*read, *(results if own is node else [own]))}
        whole = {operand.name for operand in node.all_input_nodes} - rows
        along = [axis for axis in axes_of(own) if axis.cut is Cut.MAP and not axis.outer]
        fits &= any(all(a.dims.get(name) == 0 for name in rows) and whole.isdisjoint(a.dims) for a in along)
        if own is not node:
            self.graph.erase_node(own)
        if fits:
            self._make(node, target, *fx.node.map_arg((node.args, node.kwargs), lambda n: self.twins.get(n, n)))
        return fits

    def _make(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """The twin of a node, in front of it."""
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, tuple(args), dict(kwargs or {}))
        made.meta = dict(node.meta)
        self.made.append(made)
        self.twins[node] = made
        return made

    def replace_results(self) -> None:
        """Let readers of the results read them in the rows' own order; what was sorted goes."""
        for node, twin in self.results.items():
            changed: Any = node.args[0]
            node.replace_all_uses_with(twin)
            for user in [user for user in changed.users if is_inplace(node) and user > node]:
                user.replace_input_with(changed, twin)
        for node in reversed(list(self.graph.nodes)):
            checks = "assert" in str(node.target) and not self.members.keys().isdisjoint(node.all_input_nodes)
            if checks or node in self.members:
                sources = node.all_input_nodes
                self.graph.erase_node(node)
                for source in sources:
                    if source.op == "call_function" and not source.users and source not in self.members:
                        self.graph.erase_node(source)
