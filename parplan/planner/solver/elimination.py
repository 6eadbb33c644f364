"""The exact optimum of node and edge costs alone, by eliminating one node at a time (bucket elimination).

Networks are nearly chains: a node and what is still open around it (skip edges) are two or three nodes wide, so the
tables stay small and one pass takes milliseconds. Without maxima and limits this is the answer; with them it
prices a Lagrangian relaxation (relaxation.py). A second pass gives, for every strategy, the best cost of all choices
that use it.

Strategies with equal lines in all edge matrices of a node form one class; only classes enter the tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import FloatArray, Problem
from parplan.planner.solver.rows import RowTable

__all__ = ["Classes", "Tree", "classes_of", "group_lines", "plant"]

MAX_TABLE = 1_000_000
MAX_TOTAL = 10_000_000
"""Entries of the largest table, and of all, above which a problem is too wide for elimination."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of a node's strategies that look alike to all its neighbours.

    Attributes:
        of: class of each strategy, numbered by first appearance.
        first: the first strategy of each class.
    """

    of: NDArray[np.intp]
    first: NDArray[np.intp]

    def least(self, cost: FloatArray) -> FloatArray:
        """The least cost in each class."""
        result = np.full(len(self.first), np.inf)
        np.minimum.at(result, self.of, cost)
        return result

    def cheapest(self, cost: FloatArray, which: int) -> int:
        """The first cheapest strategy of class `which`."""
        return int(np.where(self.of == which, cost, np.inf).argmin())


def classes_of(table: RowTable) -> list[Classes]:
    """The classes of every node of a problem: equal in edge costs and in what rows add to the edges."""
    lines: list[list[FloatArray]] = [[np.zeros((terms.seconds.shape[1], 1))] for terms in table.nodes]
    for edge, terms in zip(table.problem.edges, table.edges, strict=True):
        for matrix in (edge.cost_s, *terms.seconds):
            lines[edge.source].append(matrix)
            lines[edge.target].append(matrix.T)
    return [group_lines(np.hstack(parts)) for parts in lines]


def group_lines(lines: FloatArray) -> Classes:
    """Equal lines (rows of `lines`) form one class."""
    seen: dict[bytes, int] = {}
    of = np.array([seen.setdefault(line.tobytes(), len(seen)) for line in np.ascontiguousarray(lines)], dtype=np.intp)
    return Classes(of, np.array([int(np.flatnonzero(of == c)[0]) for c in range(len(seen))], dtype=np.intp))


@dataclass(frozen=True, eq=False)
class _Factor:
    """Something added into a bucket: an edge (its index) or a message (its sender), and the shape it takes there."""

    index: int
    shape: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class _Bucket:
    """One eliminated node: `scope` are its neighbours then, in order of elimination; the first is its parent."""

    node: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    edges: tuple[_Factor, ...]
    senders: tuple[_Factor, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The upward pass: per node (in order of elimination) its table, and what it sends to its parent."""

    value: float
    table: dict[int, FloatArray]
    message: dict[int, FloatArray]


@dataclass(frozen=True, eq=False)
class Tree:
    """An order of elimination with all shapes worked out; costs come with each call."""

    buckets: tuple[_Bucket, ...]

    def upward(self, node_cost: Sequence[FloatArray], edge_cost: Sequence[FloatArray]) -> Tables:
        """Eliminate: node costs per class, edge costs per pair of classes. `value` is the optimum."""
        tables: dict[int, FloatArray] = {}
        messages: dict[int, FloatArray] = {}
        value = 0.0
        for bucket in self.buckets:
            table = node_cost[bucket.node].reshape(bucket.shape[:1] + (1,) * len(bucket.scope))
            for factor in bucket.edges:
                cost = edge_cost[factor.index]
                table = table + (cost.T if factor.transposed else cost).reshape(factor.shape)
            for factor in bucket.senders:
                table = table + messages[factor.index].reshape(factor.shape)
            tables[bucket.node], messages[bucket.node] = table, table.min(axis=0)
            if not bucket.scope:
                value += float(messages[bucket.node])
        return Tables(value, tables, messages)

    def choice(self, tables: Tables) -> list[int]:
        """The optimal class of every node, the lowest where several are."""
        picked: dict[int, int] = {}
        for bucket in reversed(self.buckets):
            line = np.moveaxis(tables.table[bucket.node], 0, -1)[tuple(picked[u] for u in bucket.scope)]
            picked[bucket.node] = int(line.argmin())
        return [picked[v] for v in range(len(picked))]

    def marginals(self, tables: Tables) -> list[FloatArray]:
        """Per node and class, the least cost of all choices that use it."""
        total: dict[int, FloatArray] = {}
        result: dict[int, FloatArray] = {}
        for bucket in reversed(self.buckets):
            v = bucket.node
            rest = tables.value - float(tables.message[v]) if not bucket.scope else total[v]
            whole = tables.table[v] + rest
            result[v] = whole.reshape(bucket.shape[0], -1).min(axis=1)
            for factor in bucket.senders:
                # The least cost of everything but the sender, in the shape of its message.
                message = tables.message[factor.index]
                away = tuple(axis for axis, size in enumerate(factor.shape) if size == 1 and whole.shape[axis] != 1)
                least = whole.min(axis=away, keepdims=True).reshape(message.shape)
                with np.errstate(invalid="ignore"):
                    total[factor.index] = np.where(np.isfinite(message), least - message, np.inf)
        return [result[v] for v in range(len(result))]


def plant(problem: Problem, sizes: Sequence[int]) -> Tree | None:
    """A tree for the problem with `sizes` classes per node; None if its tables would be too large."""
    order = _eliminate(problem, sizes)
    if order is None:
        return None
    place = {v: i for i, (v, _) in enumerate(order)}
    scopes = {v: tuple(sorted(near, key=place.__getitem__)) for v, near in order}
    edges: dict[int, list[_Factor]] = {v: [] for v in scopes}
    senders: dict[int, list[_Factor]] = {v: [] for v in scopes}
    for index, edge in enumerate(problem.edges):
        # An end with one class is no axis of any table: the edge's costs then belong to the other end.
        v, u = sorted((edge.source, edge.target), key=lambda end: (sizes[end] == 1, place[end]))
        edges[v].append(_Factor(index, _shape((v, *scopes[v]), {v, u}, sizes), v == edge.target))
    for v, scope in scopes.items():
        if scope:
            senders[scope[0]].append(_Factor(v, _shape((scope[0], *scopes[scope[0]]), set(scope), sizes)))
    shapes = {v: tuple(sizes[u] for u in (v, *scope)) for v, scope in scopes.items()}
    return Tree(tuple(_Bucket(v, scopes[v], shapes[v], tuple(edges[v]), tuple(senders[v])) for v, _ in order))


def _shape(axes: Sequence[int], present: set[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes[u] if u in present else 1 for u in axes)


def _eliminate(problem: Problem, sizes: Sequence[int]) -> list[tuple[int, set[int]]] | None:
    """Greedy order, smallest table first: each node with its neighbours (of several classes) at that time."""
    near: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        if sizes[edge.source] > 1 and sizes[edge.target] > 1:
            near[edge.source].add(edge.target)
            near[edge.target].add(edge.source)
    weigh = [_weight(v, near, sizes) for v in range(len(sizes))]
    heap = [(weight, v) for v, weight in enumerate(weigh)]
    heapq.heapify(heap)
    order: list[tuple[int, set[int]]] = []
    total, gone = 0.0, [False] * len(sizes)
    while heap:
        weight, v = heapq.heappop(heap)
        if gone[v] or weight != weigh[v]:
            continue
        total += weight
        if weight > MAX_TABLE or total > MAX_TOTAL:
            return None
        gone[v] = True
        order.append((v, near[v]))
        for u in near[v]:
            near[u] = (near[u] | near[v]) - {u, v}
        for u in near[v]:
            weigh[u] = _weight(u, near, sizes)
            heapq.heappush(heap, (weigh[u], u))
    return order


def _weight(v: int, near: list[set[int]], sizes: Sequence[int]) -> float:
    weight = float(sizes[v])
    for u in near[v]:
        weight *= sizes[u]
        if weight > MAX_TABLE:  # never eliminated: how much larger does not matter
            return 2.0 * MAX_TABLE
    return weight
