"""Exact joins: nodes whose strategies fix each other become one node, before any other reduction.

Compilers' problems are full of edges that allow each strategy of one end with exactly one strategy of the other (an
elementwise op takes its input's sharding). Along such one-to-one edges a choice at one node is a choice at all of
them: a connected set of nodes is one node that adds up their costs, edges, usages, and terms of rows. Local search
cannot cross forbidden pairs; after the joins few or none are left.

A node with one strategy left decides nothing: its edges become costs of its neighbours, and all such nodes are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import Edge, FloatArray, Node, Problem, Reduced, Row, Usage

__all__ = ["join"]

Places = NDArray[np.intp]


def join(problem: Problem) -> Reduced | None:
    """Joins along one-to-one edges until none is left; None if a node keeps no strategy."""
    reduced: Reduced | None = Reduced(problem)
    while reduced is not None:
        before = reduced.problem
        reduced = reduced.then(_join_once)
        if reduced is not None and reduced.problem is before:
            break
    return reduced


@dataclass(frozen=True, eq=False)
class _Groups:
    """Groups of nodes that become one each.

    Attributes:
        group: the group of each node, numbered by first member.
        strategy: per node, its strategy for each strategy of its group.
        first: the first member of each group.
    """

    group: list[int]
    strategy: list[Places]
    first: list[int]

    def size(self, group: int) -> int:
        """The number of strategies of a group."""
        return len(self.strategy[self.first[group]])

    def lift(self, choice: Sequence[int]) -> list[int]:
        """The strategy of each node."""
        return [int(places[choice[g]]) for g, places in zip(self.group, self.strategy, strict=True)]


def _join_once(problem: Problem) -> Reduced | None:
    """One join of every connected set, without strategies that lack a partner or cost inf."""
    groups = _grouped(problem)
    if groups is None:
        return Reduced(problem)
    joined = _Joined(problem, groups)
    kept = [np.flatnonzero(np.isfinite(cost)) for cost in joined.node_cost_s]
    if not all(len(places) for places in kept):
        return None
    if any(len(places) < groups.size(g) for g, places in enumerate(kept)):
        strategy = [s[kept[g]] for g, s in zip(groups.group, groups.strategy, strict=True)]
        joined = _Joined(problem, groups := replace(groups, strategy=strategy))
    return Reduced(joined.problem(), groups.lift)


def _partners(problem: Problem) -> dict[int, list[tuple[int, Places]]]:
    """Per node, its neighbours along one-to-one edges: with the partner of each strategy, -1 where it has none."""
    result: dict[int, list[tuple[int, Places]]] = {}
    allowed = [node.allowed for node in problem.nodes]
    for edge in problem.edges:
        finite = np.isfinite(edge.cost_s)
        if finite.all() and finite.size > 1:
            continue
        finite &= allowed[edge.source][:, None] & allowed[edge.target]
        if finite.sum(axis=0).max() <= 1 and finite.sum(axis=1).max() <= 1:
            for v, u, pairs in ((edge.source, edge.target, finite), (edge.target, edge.source, finite.T)):
                result.setdefault(v, []).append((u, np.where(pairs.any(axis=1), pairs.argmax(axis=1), -1)))
    return result


def _grouped(problem: Problem) -> _Groups | None:
    """The sets connected by one-to-one edges, and all fixed nodes as one set; None if nothing can be joined."""
    fixed = [v for v, node in enumerate(problem.nodes) if node.size == 1]
    partners = _partners(problem)
    ends = [end for edge in problem.edges for end in (edge.source, edge.target)]
    if not partners and len(fixed) < 2 and not set(fixed) & set(ends):
        return None
    group = [-1] * len(problem.nodes)
    first: list[int] = []
    strategy: list[Places] = [np.zeros(1, dtype=np.intp)] * len(problem.nodes)
    for root in range(len(problem.nodes)):
        if group[root] >= 0:
            continue
        members = fixed if problem.nodes[root].size == 1 else [root]
        for v in members:
            group[v] = len(first)
            strategy[v] = np.arange(problem.nodes[v].size)
        if members is not fixed:
            for v in members:  # grows while it is walked through
                for u, partner in partners.get(v, ()):
                    if group[u] < 0 and problem.nodes[u].size > 1:
                        group[u] = group[root]
                        strategy[u] = np.where(strategy[v] >= 0, partner[strategy[v]], -1)
                        members.append(u)
            whole = np.logical_and.reduce([strategy[v] >= 0 for v in members])
            for v in members:
                strategy[v] = strategy[v][whole]
        first.append(root)
    return _Groups(group, strategy, first)


class _Joined:
    """The problem of the groups: every cost, usage and term of a member counts at its group, by the member's strategy.

    An edge inside a group, or at a group with one strategy, is a cost of a node.
    """

    def __init__(self, source: Problem, groups: _Groups) -> None:
        self.source, self.groups = source, groups
        self.node_cost_s: list[FloatArray] = [np.zeros(groups.size(g)) for g in range(len(groups.first))]
        for v, node in enumerate(source.nodes):
            self.node_cost_s[groups.group[v]] += node.cost_s[groups.strategy[v]]
        self.edge_cost_s: dict[tuple[int, int], FloatArray] = {}
        for edge in range(len(source.edges)):
            ends, values = self.placed(edge, source.edges[edge].cost_s)
            if len(ends) == 1:
                self.node_cost_s[ends[0]] += values
            else:
                key = ends[0], ends[1]
                self.edge_cost_s[key] = self.edge_cost_s[key] + values if key in self.edge_cost_s else values

    def placed(self, edge: int, values: FloatArray) -> tuple[tuple[int, ...], FloatArray]:
        """Values per pair of an edge as values per strategy of one group, or per pair of two (in ascending order)."""
        ends = self.source.edges[edge].source, self.source.edges[edge].target
        a, b = (self.groups.group[end] for end in ends)
        rows, columns = (self.groups.strategy[end] for end in ends)
        if a == b:
            return (a,), values[rows, columns]
        if self.groups.size(a) == 1:
            return (b,), values[rows[0], columns]
        if self.groups.size(b) == 1:
            return (a,), values[rows, columns[0]]
        pairs = values[rows[:, None], columns]
        return ((a, b), pairs) if a < b else ((b, a), pairs.T)

    def problem(self) -> Problem:
        """The smaller problem, its parallel edges merged."""
        names = [self.source.nodes[v].name for v in self.groups.first]
        usages = self.usages()
        nodes = tuple(map(Node, names, self.node_cost_s, usages))
        index = {key: place for place, key in enumerate(sorted(self.edge_cost_s))}
        edges = tuple(Edge(*key, self.edge_cost_s[key]) for key in index)
        linear = tuple(replace(row, terms=self.terms(row.terms)) for row in self.source.linear)
        maxima = tuple(
            replace(maximum, rows=tuple(self.row(row, index) for row in maximum.rows)) for maximum in self.source.maxima
        )
        return replace(self.source, nodes=nodes, edges=edges, linear=linear, maxima=maxima)

    def usages(self) -> list[tuple[Usage, ...]]:
        """Per group, its members' usages; those of one memory and interval as one."""
        amounts: list[dict[tuple[int, int, int], FloatArray]] = [{} for _ in self.groups.first]
        for v, node in enumerate(self.source.nodes):
            mine = amounts[self.groups.group[v]]
            for usage in node.usages:
                if usage.start < usage.end:
                    key, held = (usage.resource, usage.start, usage.end), usage.amounts[self.groups.strategy[v]]
                    mine[key] = mine[key] + held if key in mine else held
        return [tuple(Usage(*key, held) for key, held in mine.items()) for mine in amounts]

    def terms(self, terms: Mapping[int, FloatArray]) -> dict[int, FloatArray]:
        """Values per strategy of nodes as values per strategy of groups."""
        result: dict[int, FloatArray] = {}
        for v, values in terms.items():
            g, placed = self.groups.group[v], values[self.groups.strategy[v]]
            result[g] = result[g] + placed if g in result else placed
        return result

    def row(self, row: Row, index: Mapping[tuple[int, int], int]) -> Row:
        """A row of a maximum over groups and the edges between them, which `index` places."""
        nodes, edges = self.terms(row.nodes), dict[int, FloatArray]()
        for edge, values in row.edges.items():
            ends, placed = self.placed(edge, values)
            terms, key = (nodes, ends[0]) if len(ends) == 1 else (edges, index[ends[0], ends[1]])
            terms[key] = terms[key] + placed if key in terms else placed
        return replace(row, nodes=nodes, edges=edges)
