"""The slow truth: every choice, all at once as arrays; `evaluate`, which works apart, has the last word on the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from parplan.planner.solver.problem import FloatArray, Problem, evaluate

__all__ = ["Optimum", "brute_force", "every_choice", "from_the_best", "objectives"]


@dataclass(frozen=True)
class Optimum:
    """The first best choice and its objective; no choice and inf if none is feasible."""

    objective: float
    choice: tuple[int, ...] | None


def brute_force(problem: Problem) -> Optimum:
    """The optimum of a problem of some ten thousand choices at most."""
    found = objectives(problem)
    near = np.flatnonzero(np.isfinite(found) & (found <= found.min() + 1e-9 * abs(found.min()) + 1e-15))
    best = Optimum(np.inf, None)
    for choice in (_choice(problem, index) for index in near):
        exactly = evaluate(problem, choice)
        assert exactly.feasible
        if exactly.objective < best.objective:
            best = Optimum(exactly.objective, choice)
    return best


def from_the_best(problem: Problem) -> Iterator[tuple[int, ...]]:
    """All feasible choices, the fastest first."""
    found = objectives(problem)
    for index in np.argsort(found, kind="stable"):
        if not np.isfinite(found[index]):
            return
        yield _choice(problem, index)


def _choice(problem: Problem, index: np.intp) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(index, problem.sizes))


def every_choice(sizes: Sequence[int]) -> list[NDArray[np.intp]]:
    """Per node its strategy in every choice, in the order of itertools.product."""
    return list(np.indices(sizes).reshape(len(sizes), prod(sizes)))


def objectives(problem: Problem, picked: Sequence[NDArray[np.intp]] | None = None) -> FloatArray:
    """The objective of the choices `picked`, by default of all; inf where one is not feasible."""
    picked = every_choice(problem.sizes) if picked is None else picked
    total = np.zeros(len(picked[0]))
    for node, k in zip(problem.nodes, picked, strict=True):
        total += node.cost_s[k]
    for edge in problem.edges:
        total += edge.cost_s[picked[edge.source], picked[edge.target]]
    values: list[FloatArray] = []
    for maximum in problem.maxima:
        sums = []
        for term in maximum.rows:
            sums.append(np.full(len(total), term.constant_s))
            for v, seconds in term.nodes.items():
                sums[-1] += seconds[picked[v]]
            for e, seconds in term.edges.items():
                sums[-1] += seconds[picked[problem.edges[e].source], picked[problem.edges[e].target]]
            for other, factor in term.maxima.items():
                sums[-1] += factor * values[other]
        values.append(np.max(sums, axis=0))
        total += maximum.weight * values[-1]
    allowed = np.isfinite(total)
    for row in problem.linear:
        terms = sum((values[picked[node]] for node, values in row.terms.items()), np.zeros(len(total)))
        allowed &= (row.low <= terms) & (terms <= row.high)
    for resource, limit in enumerate(problem.limits):
        allowed &= _peak(problem, picked, resource) <= limit
    return np.where(allowed, total, np.inf)


def _peak(problem: Problem, picked: Sequence[NDArray[np.intp]], resource: int) -> FloatArray:
    """The most that any time point holds of a memory, for every choice."""
    of = [(use, k) for node, k in zip(problem.nodes, picked, strict=True) for use in node.usages]
    live = [(use, use.amounts[k]) for use, k in of if use.resource == resource and use.start < use.end]
    peak = np.zeros(len(picked[0]))
    for time in {use.start for use, _ in live}:
        held = sum((amounts for use, amounts in live if use.start <= time < use.end), np.zeros(len(picked[0])))
        peak = np.maximum(peak, held)
    return peak
