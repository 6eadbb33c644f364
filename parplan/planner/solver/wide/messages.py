"""Sequential tree-reweighted message passing (TRW-S): a lower bound and good choices on graphs of any width.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. Nodes are walked through in
order and back; each sends, along every edge ahead, the least cost of its side per strategy of the other end, with its
own costs shared evenly among the chains that pass through it. The bound never falls while costs stay as they are; on
trees it is the optimum. Nodes of one level (the longest path of edges that leads there) have no edges between them and
are done together, so a pass is a few calls of numpy per level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parplan.planner.solver.problem import FloatArray
from parplan.planner.solver.wide.arrays import Arrays, Ints, ragged, starts_of

__all__ = ["Messages", "Pass"]


@dataclass(frozen=True, eq=False)
class Pass:
    """Result of a pass there and back: a lower bound on all costs, and per slot on every choice that uses it."""

    bound: float
    marginals: FloatArray


@dataclass(frozen=True, eq=False)
class _Step:
    """The nodes of one level and the messages that they send one way, edge after edge.

    Attributes:
        nodes, sizes: the level's nodes and their numbers of strategies.
        slots, firsts: their slots, and where each node's slots start there.
        edges: the edges that they send along.
        out, share, answered: per sender and strategy: its slot, the share of its costs that goes along this edge, and
            the place of the message it got along it.
        cells, spread: per cell, the receiver's strategy first: its seconds, and the sender's place in `out`.
        lines: where each line of cells starts, one per strategy of a receiver.
        sent, into: the messages' places, and the slots that they are added to.
        starts, lengths: where each edge's messages start, and how many they are.
    """

    nodes: Ints
    sizes: Ints
    slots: Ints
    firsts: Ints
    edges: Ints
    out: Ints
    share: FloatArray
    answered: Ints
    cells: FloatArray
    spread: Ints
    lines: Ints
    sent: slice
    into: Ints
    starts: Ints
    lengths: Ints


class Messages:
    """The messages along all edges, both ways, and the passes that improve them."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        a, nodes = arrays, len(arrays.size)
        before: list[list[int]] = [[] for _ in range(nodes)]
        for u, v in zip(a.source.tolist(), a.target.tolist(), strict=True):
            before[v].append(u)
        level = [0] * nodes
        for v in range(nodes):
            level[v] = 1 + max((level[u] for u in before[v]), default=-1)
        self.level: Ints = np.array(level, dtype=np.intp)
        out_degree, in_degree = np.bincount(a.source, minlength=nodes), np.bincount(a.target, minlength=nodes)
        self.share = 1.0 / np.maximum(np.maximum(out_degree, in_degree), 1)
        # Messages ahead (to targets) stand in order of their senders' levels, those back in the opposite order.
        orders = np.argsort(self.level[a.source], kind="stable"), np.argsort(-self.level[a.target], kind="stable")
        counts = a.size[a.target], a.size[a.source]
        self.places = [np.empty_like(a.source), np.empty_like(a.source)]
        for places, order, count in zip(self.places, orders, counts, strict=True):
            places[order] = starts_of(count[order])
        self.values = [np.zeros(int(count.sum())) for count in counts]
        self.into = [
            ragged(a.start[a.target[orders[0]]], counts[0][orders[0]]),
            ragged(a.start[a.source[orders[1]]], counts[1][orders[1]]),
        ]
        walk = np.argsort(self.level, kind="stable")
        levels = np.split(walk, np.flatnonzero(np.diff(self.level[walk])) + 1)
        self.forward_steps = self._steps(0, orders[0], levels)
        self.backward_steps = self._steps(1, orders[1], levels[::-1])

    def _steps(self, way: int, order: Ints, levels: list[Ints]) -> list[_Step]:
        a = self.arrays
        ends = (a.source, a.target) if way == 0 else (a.target, a.source)
        level = self.level[ends[0]][order] if way == 0 else -self.level[ends[0]][order]
        steps = []
        for nodes in levels:
            here = int(self.level[nodes[0]]) if way == 0 else -int(self.level[nodes[0]])
            edges = order[slice(*np.searchsorted(level, [here, here + 1]))]
            senders, receivers = ends[0][edges], ends[1][edges]
            many, each = a.size[receivers], a.size[senders]
            widths = np.repeat(each, many)
            cells = ragged(a.cell_start[edges], many * each)
            if way == 0:  # cells are row-major, source first: a receiver's line is a column
                rows = np.repeat(ragged(a.cell_start[edges], many), widths)
                cells = rows + ragged(np.zeros_like(widths), widths) * np.repeat(many, many * each)
            first = int(self.places[way][edges[0]]) if len(edges) else 0
            steps.append(
                _Step(
                    nodes, a.size[nodes], ragged(a.start[nodes], a.size[nodes]), starts_of(a.size[nodes]), edges,
                    ragged(a.start[senders], each), np.repeat(self.share[senders], each),
                    ragged(self.places[1 - way][edges], each), a.cells[cells],
                    ragged(np.repeat(starts_of(each), many), widths).astype(np.int32), starts_of(widths),
                    slice(first, first + int(many.sum())), ragged(a.start[receivers], many), starts_of(many), many,
                )
            )  # fmt: skip
        return steps

    def sweep(self, costs: FloatArray) -> Pass:
        """A pass ahead and one back, at seconds per slot `costs`."""
        floor, _ = self._pass(costs, 0)
        bound, own = self._pass(costs, 1)
        # A choice that uses a slot costs at least the bound when its node was walked through, which is not below that
        # of the pass before, and what the slot costs above the node's best one.
        return Pass(bound, floor + own)

    def _pass(self, costs: FloatArray, way: int) -> tuple[float, FloatArray]:
        """The bound, and per slot its cost above the best of its node, both as the pass found them."""
        held = costs + sum(np.bincount(into, v, len(costs)) for into, v in zip(self.into, self.values, strict=True))
        above = np.empty_like(held)
        sent, answered = self.values[way], self.values[1 - way]
        bound = 0.0
        for step in self.backward_steps if way else self.forward_steps:
            here = held[step.slots]
            least = np.minimum.reduceat(here, step.firsts)
            above[step.slots] = here = here - np.repeat(least, step.sizes)
            bound += float(least.sum())
            if len(step.edges):
                held[step.slots] = here
                own = held[step.out] * step.share - answered[step.answered]
                message = np.minimum.reduceat(step.cells + own[step.spread], step.lines)
                least = np.minimum.reduceat(message, step.starts)
                bound += float(least.sum())
                message -= np.repeat(least, step.lengths)
                np.add.at(held, step.into, message - sent[step.sent])
                sent[step.sent] = message
        return bound, above

    def decode(self, costs: FloatArray) -> Ints:
        """A choice made level by level: each node's best given nodes before it and messages from those after."""
        a = self.arrays
        held = costs + np.bincount(self.into[1], self.values[1], len(costs))
        choice = np.zeros(len(a.size), dtype=np.intp)
        for step in self.forward_steps:
            here = held[step.slots]
            least = np.minimum.reduceat(here, step.firsts)
            best = np.flatnonzero(here == np.repeat(least, step.sizes))
            choice[step.nodes] = best[np.searchsorted(best, step.firsts)] - step.firsts
            first = a.cell_start[step.edges] + choice[a.source[step.edges]] * step.lengths
            np.add.at(held, step.into, a.cells[ragged(first, step.lengths)])
        return choice
