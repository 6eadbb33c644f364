"""Rows of all maxima in one numbering, as arrays per node and edge, and the selections of rows that make up T.

T is the largest, over all selections of one row per maximum, of a linear function: the base costs plus every row's own
seconds times its multiplicity, which follows from weights and factors (a maximum that no selected row uses has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import FloatArray, Problem, Row

__all__ = ["RowTable", "Terms", "least", "row_table", "without_rows"]


@dataclass(frozen=True, eq=False)
class Terms:
    """The rows that a node or an edge has seconds in: their numbers, and the seconds, shape (rows, *costs.shape)."""

    rows: NDArray[np.intp]
    seconds: FloatArray

    def weighted(self, multiplicity: FloatArray) -> FloatArray:
        """Sum of the seconds times their rows' multiplicities, of the costs' shape."""
        count, *shape = self.seconds.shape
        result: FloatArray = (multiplicity[self.rows] @ self.seconds.reshape(count, prod(shape))).reshape(shape)
        return result


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of a problem's maxima.

    Attributes:
        first: the first row of every maximum, and the number of rows as last entry.
        constant: seconds of each row whatever is chosen.
        uses: per row, the maxima before its own that it uses, with factors > 0.
        owner: the maximum of each row.
        users: per maximum, those that use it.
        nodes: per node, its terms.
        edges: per edge, its terms.
    """

    problem: Problem
    first: tuple[int, ...]
    constant: FloatArray
    uses: tuple[tuple[tuple[int, float], ...], ...]
    owner: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    nodes: tuple[Terms, ...]
    edges: tuple[Terms, ...]

    def seconds(self, choice: Sequence[int] | NDArray[np.intp]) -> FloatArray:
        """The own seconds of every row (without the maxima that it uses), shape (rows,).

        Of many choices, shape (nodes, choices), at once: shape (rows, choices).
        """
        total: FloatArray = np.multiply.outer(self.constant, np.ones(np.shape(choice)[1:]))
        for terms, k in zip(self.nodes, choice, strict=True):
            if len(terms.rows):
                total[terms.rows] += terms.seconds[:, k]
        for terms, edge in zip(self.edges, self.problem.edges, strict=True):
            if len(terms.rows):
                total[terms.rows] += terms.seconds[:, choice[edge.source], choice[edge.target]]
        return total

    def maxima(self, seconds: FloatArray) -> tuple[FloatArray, list[int]]:
        """The value of every maximum and the row that reaches it (the first of equals), given the rows' own seconds."""
        values = np.zeros(len(self.first) - 1)
        reached: list[int] = []
        for m in range(len(values)):
            best, chosen = -np.inf, self.first[m]
            for row in range(self.first[m], self.first[m + 1]):
                value = seconds[row]
                for other, factor in self.uses[row]:
                    value += factor * values[other]
                if value > best:
                    best, chosen = value, row
            values[m] = best
            reached.append(chosen)
        return values, reached

    def multiplicity(self, selection: Sequence[int], top: int) -> FloatArray:
        """How often every row counts in T through maximum `top`, if each maximum takes its selected row."""
        reach = np.zeros(len(selection))
        reach[top] = self.problem.maxima[top].weight
        result = np.zeros(len(self.constant))
        for m in range(top, -1, -1):
            if reach[m] > 0:
                result[selection[m]] = reach[m]
                for other, factor in self.uses[selection[m]]:
                    reach[other] += factor * reach[m]
        return result

    def critical(self, seconds: FloatArray) -> FloatArray:
        """`multiplicity` of the rows that reach the maxima, given the own seconds of all, shape (tops, rows)."""
        reached = self.maxima(seconds)[1]
        lines = [self.multiplicity(reached, top) for top in self.tops]
        return np.array(lines).reshape(len(lines), len(self.constant))

    def objectives(self, choices: NDArray[np.intp]) -> FloatArray:
        """T of many choices, shape (choices, nodes), whatever limits they break; shape (choices,)."""
        seconds, total = self.seconds(choices.T), np.zeros(len(choices))
        for node, own in zip(self.problem.nodes, choices.T, strict=True):
            total += node.cost_s[own]
        for edge in self.problem.edges:
            total += edge.cost_s[choices[:, edge.source], choices[:, edge.target]]
        values = np.zeros((len(self.problem.maxima), len(choices)))
        for m, maximum in enumerate(self.problem.maxima):
            for row in range(self.first[m], self.first[m + 1]):
                for other, factor in self.uses[row]:
                    seconds[row] += factor * values[other]
            values[m] = seconds[self.first[m] : self.first[m + 1]].max(axis=0)
            total += maximum.weight * values[m]
        return total

    @property
    def tops(self) -> list[int]:
        """The maxima with a weight: T adds up their values."""
        return [m for m, maximum in enumerate(self.problem.maxima) if maximum.weight > 0]

    def selections(self) -> list[int]:
        """In how many ways rows can be selected for each maximum and those below it that it then uses."""
        counts: list[int] = []
        for m in range(len(self.first) - 1):
            rows = range(self.first[m], self.first[m + 1])
            counts.append(sum(prod(counts[other] for other, _ in self.uses[row]) for row in rows))
        return counts

    def all_multiplicities(self, top: int) -> FloatArray:
        """`multiplicity` of every selection of rows for maximum `top`, shape (selections, rows)."""
        done: list[tuple[FloatArray, FloatArray]] = []
        reach, lines = np.zeros((1, top + 1)), np.zeros((1, len(self.constant)))
        reach[0, top] = self.problem.maxima[top].weight
        for m in range(top, -1, -1):
            parts = [(reach[:, m] == 0, None), *((reach[:, m] > 0, r) for r in range(self.first[m], self.first[m + 1]))]
            grown = []
            for here, row in parts:
                more, line = reach[here], lines[here]
                if row is not None:
                    line[:, row] = more[:, m]
                    for other, factor in self.uses[row]:
                        more[:, other] += factor * more[:, m]
                open_ = more[:, :m].any(axis=1)
                done.append((more[~open_], line[~open_]))
                grown.append((more[open_], line[open_]))
            reach, lines = (np.vstack(arrays) for arrays in zip(*grown, strict=True))
        return np.vstack([lines for _, lines in done])


def least(problem: Problem) -> float:
    """A lower bound on T: every cost and every row at its least, whatever fits together; 0 if nothing is allowed."""
    costs = [node.cost_s for node in problem.nodes] + [edge.cost_s for edge in problem.edges]
    total = sum(float(cost.min()) for cost in costs)
    values: list[float] = []
    for maximum in problem.maxima:
        sums = []
        for row in maximum.rows:
            own = sum(float(seconds.min()) for seconds in (*row.nodes.values(), *row.edges.values()))
            sums.append(row.constant_s + own + sum(factor * values[m] for m, factor in row.maxima.items()))
        values.append(max(sums))
        total += maximum.weight * values[-1]
    return total - 1e-12 * abs(total) if np.isfinite(total) else 0.0


def without_rows(problem: Problem, counted: FloatArray) -> Problem:
    """The problem without rows of weighted maxima that `counted`, a number per row of all maxima, has as 0.

    Its T is a lower bound. A maximum keeps all of its rows where none of them counts, and has one of zero seconds
    where no maximum that is left uses it.
    """
    rows = iter(counted > 0)
    kept = [[row for row in own.rows if next(rows) or not own.weight] or own.rows for own in problem.maxima]
    used = {m for m, own in enumerate(problem.maxima) if own.weight}
    for m in range(len(kept) - 1, -1, -1):
        used.update(*(row.maxima for row in kept[m] if m in used))
    maxima = (replace(own, rows=tuple(kept[m]) if m in used else (Row(),)) for m, own in enumerate(problem.maxima))
    return replace(problem, maxima=tuple(maxima))


@lru_cache(maxsize=1)
def row_table(problem: Problem) -> RowTable:
    """Number the rows of a problem."""
    rows = [row for maximum in problem.maxima for row in maximum.rows]
    at_node: list[dict[int, FloatArray]] = [{} for _ in problem.nodes]
    at_edge: list[dict[int, FloatArray]] = [{} for _ in problem.edges]
    for number, row in enumerate(rows):
        for v, seconds in row.nodes.items():
            if seconds.any():
                at_node[v][number] = seconds
        for e, seconds in row.edges.items():
            if seconds.any():
                at_edge[e][number] = seconds
    uses = tuple(tuple((m, f) for m, f in sorted(row.maxima.items()) if f > 0) for row in rows)
    owner = tuple(m for m, maximum in enumerate(problem.maxima) for _ in maximum.rows)
    users: list[dict[int, None]] = [{} for _ in problem.maxima]
    for own, used in zip(owner, uses, strict=True):
        for m, _ in used:
            users[m][own] = None
    return RowTable(
        problem,
        tuple(np.cumsum([0, *(len(maximum.rows) for maximum in problem.maxima)]).tolist()),
        np.array([row.constant_s for row in rows], dtype=np.float64),
        uses,
        owner,
        tuple(tuple(of) for of in users),
        tuple(_terms(found, node.cost_s.shape) for found, node in zip(at_node, problem.nodes, strict=True)),
        tuple(_terms(found, edge.cost_s.shape) for found, edge in zip(at_edge, problem.edges, strict=True)),
    )


def _terms(found: dict[int, FloatArray], shape: tuple[int, ...]) -> Terms:
    return Terms(np.array(list(found), dtype=np.intp), np.array(list(found.values())).reshape(-1, *shape))
