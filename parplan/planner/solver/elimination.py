"""The exact optimum of node and edge costs alone, by eliminating one node at a time (bucket elimination).

Networks are nearly chains: a node and what is still open around it (skip edges) are two or three nodes wide, so the
tables stay small and one pass takes milliseconds. Without maxima and limits this is the answer; with them it
prices a Lagrangian relaxation (relaxation.py). A second pass gives, for every strategy, the best cost of all choices
that use it.

Strategies with equal lines in all edge matrices of a node form one class; only classes enter the tables. Tables list
the combinations of classes that no forbidden pair rules out: where all layers of a branch have to follow one placement,
those are few of all. Which ones they are depends on no price, so they are listed once.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import FloatArray, Mask, Problem
from parplan.planner.solver.rows import RowTable

__all__ = ["Classes", "Tree", "classes_of", "followed", "group_lines", "plant", "runs"]

MAX_TABLE = 2_000_000
MAX_TOTAL = 10_000_000
"""Entries of the largest table, and of all, above which a problem is too wide for elimination."""

MAX_NUMBER = 2.0**62
"""Combinations of classes above which they have no number."""

Ints = NDArray[np.intp]
Pairs = Sequence[tuple[int, int, Mask]]
"""Two nodes and which pairs of their classes may meet."""


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
class _Bucket:
    """One eliminated node and its table: an entry per combination of its class with those of the nodes in `scope`.

    Attributes:
        scope: its neighbours then, in order of elimination; the first is its parent. `sizes` are their classes.
        own: the node's class, per entry; entries of one combination of the scope's classes stand together.
        edges, senders: what is added, an edge's costs or an eliminated node's message, and the place there per entry.
        starts: the first entry of every combination of the scope's classes, and the number of entries.
        keys: the numbers of those combinations, ascending.
    """

    node: int
    scope: tuple[int, ...]
    sizes: tuple[int, ...]
    own: Ints
    edges: tuple[tuple[int, Ints], ...]
    senders: tuple[tuple[int, Ints], ...]
    starts: Ints
    keys: Ints


@dataclass(frozen=True, eq=False)
class Tables:
    """The upward pass: per node its table, and its message to its parent; none where no choice is possible."""

    value: float
    table: dict[int, FloatArray]
    message: dict[int, FloatArray]


@dataclass(frozen=True, eq=False)
class Tree:
    """An order of elimination with the entries of all tables listed; costs come with each call."""

    buckets: tuple[_Bucket, ...]
    sizes: tuple[int, ...]

    def upward(self, node_cost: Sequence[FloatArray], edge_cost: Sequence[FloatArray]) -> Tables:
        """Eliminate: node costs per class, edge costs per pair of classes. `value` is the optimum."""
        tables: dict[int, FloatArray] = {}
        messages: dict[int, FloatArray] = {}
        value = 0.0
        for bucket in self.buckets:
            if not len(bucket.own):
                return Tables(np.inf, {}, {})
            table = node_cost[bucket.node][bucket.own]
            for index, places in bucket.edges:
                table += edge_cost[index].ravel()[places]
            for sender, places in bucket.senders:
                table += messages[sender][places]
            tables[bucket.node], messages[bucket.node] = table, np.minimum.reduceat(table, bucket.starts[:-1])
            if not bucket.scope:
                value += float(messages[bucket.node][0])
        return Tables(value, tables, messages)

    def choice(self, tables: Tables) -> list[int]:
        """The optimal class of every node, the lowest where several are."""
        picked = [0] * len(self.sizes)
        for bucket in reversed(self.buckets if tables.table else ()):
            key = _number([picked[u] for u in bucket.scope], bucket.sizes)
            place = int(np.searchsorted(bucket.keys, key))
            entries = slice(*bucket.starts[place : place + 2])
            picked[bucket.node] = int(bucket.own[entries][tables.table[bucket.node][entries].argmin()])
        return picked

    def below(self, tables: Tables, cutoff: float, limit: int) -> tuple[Ints, FloatArray] | None:
        """All choices of classes that cost less than `cutoff`, shape (choices, nodes), and what each costs.

        None where they, or the beginnings of choices tried on the way, have more than `limit` entries. Tables tell what
        the best choice with a given beginning costs: every beginning that is kept has one below the cutoff.
        """
        picked, cost = np.zeros((1, len(self.sizes)), dtype=np.intp), np.array([tables.value])
        if not tables.table:
            return picked[:0], cost[:0]
        for bucket in reversed(self.buckets):
            key = _number([picked[:, u] for u in bucket.scope], bucket.sizes)
            place = np.searchsorted(bucket.keys, np.broadcast_to(key, len(picked)))
            first, last = bucket.starts[place], bucket.starts[place + 1]
            if (last - first).sum() * len(self.sizes) > limit:
                return None
            kept, entries = runs(first, last)
            whole = cost[kept] + tables.table[bucket.node][entries] - tables.message[bucket.node][place][kept]
            less = whole < cutoff
            picked, cost = picked[kept[less]], whole[less]
            picked[:, bucket.node] = bucket.own[entries[less]]
        return picked, cost

    def marginals(self, tables: Tables) -> list[FloatArray]:
        """Per node and class, the least cost of all choices that use it."""
        total: dict[int, FloatArray] = {}
        result = [np.full(size, np.inf) for size in self.sizes]
        for bucket in reversed(self.buckets if tables.table else ()):
            v = bucket.node
            rest = total[v] if bucket.scope else tables.value - tables.message[v]
            whole = tables.table[v] + np.repeat(rest, np.diff(bucket.starts))
            np.minimum.at(result[v], bucket.own, whole)
            for sender, places in bucket.senders:
                # The least cost of everything but the sender, per combination of the classes in its scope.
                least = np.full(len(tables.message[sender]), np.inf)
                np.minimum.at(least, places, whole)
                message = tables.message[sender]
                total[sender] = np.subtract(least, message, out=np.full_like(least, np.inf), where=np.isfinite(message))
        return result


@dataclass(frozen=True, eq=False)
class _Listed:
    """Combinations of classes: a column of classes per node, and per edge or sender the place of its seconds."""

    columns: dict[int, Ints]
    edges: dict[int, Ints]
    senders: dict[int, Ints]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def kept(self, pairs: Pairs) -> _Listed:
        """Combinations without those that pairs of two nodes' classes rule out."""
        keep = np.ones(len(self), dtype=bool)
        for u, w, mask in pairs:
            if u in self.columns and w in self.columns:
                keep &= mask[self.columns[u], self.columns[w]]
        parts = ({key: of[keep] for key, of in part.items()} for part in (self.columns, self.edges, self.senders))
        return _Listed(*parts)

    def joined(self, other: _Listed, sizes: Sequence[int]) -> _Listed | None:
        """Combinations of both that agree on the nodes they share; None if they are too many."""
        shared = [u for u in other.columns if u in self.columns]
        widths = [sizes[u] for u in shared]
        if np.prod(widths, dtype=float) > MAX_NUMBER:
            return None
        theirs, own = (_number([one.columns[u] for u in shared], widths) for one in (other, self))
        order = np.argsort(theirs, kind="stable")
        first, last = (np.searchsorted(theirs[order], own, side) for side in ("left", "right"))
        if (last - first).sum() > MAX_TABLE:
            return None
        kept, places = runs(first, last)
        added = order[places]

        def both(mine: dict[int, Ints], more: dict[int, Ints]) -> dict[int, Ints]:
            return {key: of[added] for key, of in more.items()} | {key: of[kept] for key, of in mine.items()}

        columns, edges = both(self.columns, other.columns), both(self.edges, other.edges)
        return _Listed(columns, edges, both(self.senders, other.senders))


def followed(problem: Problem) -> list[int]:
    """Nodes of several strategies of which every strategy of their neighbours allows one."""
    allowed: list[list[Mask]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        allowed[edge.source].append(np.isfinite(edge.cost_s))
        allowed[edge.target].append(np.isfinite(edge.cost_s).T)
    return [
        v for v, own in enumerate(allowed)
        if problem.nodes[v].size > 1 and len(own) > 1 and all((pairs.sum(axis=0) == 1).all() for pairs in own)
    ]  # fmt: skip


def plant(problem: Problem, classes: Sequence[Classes]) -> Tree | None:
    """A tree for the problem with its nodes' classes; None if its tables would be too large."""
    sizes = [len(own.first) for own in classes]
    ends = [(classes[edge.source].first, classes[edge.target].first) for edge in problem.edges]
    allowed = [np.isfinite(edge.cost_s[np.ix_(*both)]) for edge, both in zip(problem.edges, ends, strict=True)]
    order = _eliminate(problem, sizes, allowed)
    if order is None:
        return None
    place = {v: i for i, (v, _, _) in enumerate(order)}
    added: dict[int, list[_Listed]] = {v: [_Listed({v: np.arange(sizes[v])}, {}, {})] for v in place}
    for e, edge in enumerate(problem.edges):
        # An end with one class is no column of any table: the edge's costs then belong to the other end.
        v = min((edge.source, edge.target), key=lambda end: (sizes[end] == 1, place[end]))
        source, target = np.nonzero(allowed[e])
        columns = {u: of for u, of in ((edge.source, source), (edge.target, target)) if sizes[u] > 1 or u == v}
        added[v].append(_Listed(columns, {e: source * sizes[edge.target] + target}, {}))
    buckets: list[_Bucket] = []
    total = 0
    for v, near, pairs in order:
        table, *rest = added.pop(v)
        while rest:  # first what adds the fewest nodes
            other = min(rest, key=lambda one: (len(one.columns.keys() - table.columns.keys()), -len(one)))
            rest.remove(other)
            joined = table.joined(other, sizes)
            if joined is None:
                return None
            table = joined.kept(pairs)
        total += len(table)
        scope = tuple(sorted(near, key=place.__getitem__))
        widths = tuple(sizes[u] for u in scope)
        if total > MAX_TOTAL or np.prod(widths, dtype=float) > MAX_NUMBER:
            return None
        number = np.broadcast_to(_number([table.columns[u] for u in scope], widths), len(table))
        by = np.lexsort((table.columns[v], number))
        starts = np.flatnonzero(np.diff(number[by], prepend=-1))
        if scope:
            columns = {u: table.columns[u][by][starts] for u in scope}
            added[scope[0]].append(_Listed(columns, {}, {v: np.arange(len(starts))}))
        edges, senders = (tuple((key, of[by]) for key, of in part.items()) for part in (table.edges, table.senders))
        bounds, keys = np.append(starts, len(table)), number[by][starts]
        buckets.append(_Bucket(v, scope, widths, table.columns[v][by], edges, senders, bounds, keys))
    return Tree(tuple(buckets), tuple(sizes))


def runs(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The numbers from each `first` up to its `last`, one run after the other: the run of each, and the number."""
    counts = last - first
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) + (first - np.cumsum(counts) + counts)[run]


def _number(columns: Sequence[Ints | int], sizes: Sequence[int]) -> Ints:
    """Numbers of combinations of classes, in lexicographic order; 0 of none."""
    number: Ints = np.array(0)
    for column, size in zip(columns, sizes, strict=True):
        number = number * size + column
    return number


def _eliminate(
    problem: Problem, sizes: Sequence[int], allowed: Sequence[Mask]
) -> list[tuple[int, tuple[int, ...], Pairs]] | None:
    """Greedy order, smallest table first: each node with its neighbours (of several classes) at that time.

    With the pairs of classes that may meet there, of those nodes of which not all may.
    """
    near: list[dict[int, Mask]] = [{} for _ in sizes]

    def restrict(u: int, w: int, pairs: Mask) -> None:
        near[u][w] = near[u][w] & pairs if w in near[u] else pairs
        near[w][u] = near[u][w].T

    for edge, pairs in zip(problem.edges, allowed, strict=True):
        if sizes[edge.source] > 1 and sizes[edge.target] > 1:
            restrict(edge.source, edge.target, pairs)
    weigh = [_weight(v, near, sizes) for v in range(len(sizes))]
    heap = [(weight, v) for v, weight in enumerate(weigh)]
    heapq.heapify(heap)
    order: list[tuple[int, tuple[int, ...], Pairs]] = []
    gone = [False] * len(sizes)
    while heap:
        weight, v = heapq.heappop(heap)
        if gone[v] or weight != weigh[v]:
            continue
        if weight > MAX_TABLE:
            return None
        gone[v] = True
        known = ((u, w, near[u][w]) for u, w in combinations((v, *near[v]), 2) if w in near[u])
        order.append((v, tuple(near[v]), [one for one in known if not one[2].all()]))
        for u in near[v]:
            del near[u][v]
        for u, w in combinations(near[v], 2):
            one, other = near[v][u], near[v][w]
            every = one.all() or other.all()
            restrict(u, w, np.ones((sizes[u], sizes[w]), dtype=bool) if every else one.T.astype(np.float32) @ other > 0)
        for u in near[v]:
            weigh[u] = _weight(u, near, sizes)
            heapq.heappush(heap, (weigh[u], u))
    return order


def _weight(v: int, near: Sequence[Mapping[int, Mask]], sizes: Sequence[int]) -> float:
    """A guess of the entries of a table: a node has as many classes as its strictest pairs with others there leave."""
    weight, left = float(sizes[v]), {u: sizes[u] * float(pairs.mean()) for u, pairs in near[v].items()}
    while left:
        u = min(left, key=left.__getitem__)
        weight *= left.pop(u)
        if weight > MAX_TABLE:  # never eliminated: how much larger does not matter
            return 2.0 * MAX_TABLE
        for w in left.keys() & near[u].keys():
            left[w] = min(left[w], sizes[w] * float(near[u][w].mean()))
    return weight
