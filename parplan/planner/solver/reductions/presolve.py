"""Make a problem smaller without losing its optimum, before any search sees it.

Every reduction is one function from a problem to a smaller one with a way back; each is exact (its optimum, lifted, is
an optimum of the problem it came from) and is tested alone against brute force. `presolve` is their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from parplan.planner.solver.limits import drop_loose, limit_allowed
from parplan.planner.solver.problem import Edge, FloatArray, Mask, Problem, Reduced, restrict
from parplan.planner.solver.reductions.dominance import drop_dominated
from parplan.planner.solver.reductions.folding import fold
from parplan.planner.solver.reductions.joins import join
from parplan.planner.solver.reductions.normal import normalise

__all__ = [
    "drop_dominated",
    "drop_forbidden",
    "drop_loose",
    "fold",
    "join",
    "merge_parallel_edges",
    "normalise",
    "pair_linear",
    "possible",
    "presolve",
]


def presolve(problem: Problem, deadline: float = np.inf, brief: bool = False) -> Reduced | None:
    """All exact reductions, in order; None when no choice is feasible.

    Those that take long are left out, or end early, when `time.monotonic()` passes `deadline`.

    Args:
        brief: only the first, which take little time.
    """
    undominated, normal = partial(drop_dominated, deadline=deadline), partial(normalise, deadline=deadline)
    steps: list[Callable[[Problem], Reduced | None]] = [pair_linear, join, merge_parallel_edges, drop_forbidden]
    if not brief:
        steps += [normal, drop_loose, undominated, drop_loose, normal, fold]
        steps += [merge_parallel_edges, drop_forbidden, undominated, join]
    reduced: Reduced | None = Reduced(problem)
    for step in steps:
        if step is not fold or time.monotonic() < deadline:
            reduced = reduced and reduced.then(step)
    return reduced


def possible(reduced: Reduced, keep: Sequence[Mask]) -> tuple[frozenset[int], ...]:
    """Per node of the first problem, the strategies that some strategies of the reduced one stand for.

    Only after a brief `presolve`, where each of its nodes is one node of the reduced problem, whatever the others are.
    """
    kept = [np.flatnonzero(mask).tolist() for mask in keep]
    first = [own[0] for own in kept]
    choices = [[*first[:v], k, *first[v + 1 :]] for v, own in enumerate(kept) for k in own]
    return tuple(map(frozenset, zip(*map(reduced.lift, choices), strict=True)))


def pair_linear(problem: Problem) -> Reduced:
    """Linear constraints over one or two nodes become forbidden strategies or pairs."""
    short = [row for row in problem.linear if 1 <= len(row.terms) <= 2]
    if not short:
        return Reduced(problem)
    nodes, edges = list(problem.nodes), list(problem.edges)
    for row in short:
        first, last = min(row.terms), max(row.terms)
        one, other = row.terms[first], row.terms[last]
        total = one if first == last else one[:, None] + other
        barrier = np.where((total >= row.low) & (total <= row.high), 0.0, np.inf)
        if first == last:
            nodes[first] = replace(nodes[first], cost_s=nodes[first].cost_s + barrier)
        else:
            edges.append(Edge(first, last, barrier))
    rest = tuple(row for row in problem.linear if row not in short)
    return Reduced(replace(problem, nodes=tuple(nodes), edges=tuple(edges), linear=rest))


def merge_parallel_edges(problem: Problem) -> Reduced:
    """Edges between the same two nodes become one: their costs always fall together."""
    place: dict[tuple[int, int], int] = {}
    new = [place.setdefault((edge.source, edge.target), len(place)) for edge in problem.edges]
    if len(place) == len(problem.edges):
        return Reduced(problem)
    costs = _summed(new, {e: edge.cost_s for e, edge in enumerate(problem.edges)})
    edges = tuple(Edge(*ends, costs[e]) for ends, e in place.items())
    maxima = tuple(
        replace(maximum, rows=tuple(replace(row, edges=_summed(new, row.edges)) for row in maximum.rows))
        for maximum in problem.maxima
    )
    return Reduced(replace(problem, edges=edges, maxima=maxima))


def _summed(new: Sequence[int], values: Mapping[int, FloatArray]) -> dict[int, FloatArray]:
    """Sums by the new places of edges."""
    result: dict[int, FloatArray] = {}
    for e, seconds in values.items():
        result[new[e]] = result[new[e]] + seconds if new[e] in result else seconds
    return result


def drop_forbidden(problem: Problem) -> Reduced | None:
    """Without strategies that are forbidden, or that no strategy of some neighbour, or no limit, allows.

    None when a node has no strategy left.
    """
    masks = [node.allowed for node in problem.nodes]
    pairs = [np.isfinite(edge.cost_s) for edge in problem.edges]
    partial = [(edge, allowed) for edge, allowed in zip(problem.edges, pairs, strict=True) if not allowed.all()]
    changed = True
    while changed:
        if not all(mask.any() for mask in masks):
            return None
        changed = limit_allowed(problem, masks)
        for edge, allowed in partial:
            # Keep, at both ends, the strategies that have a partner.
            source, target = masks[edge.source], masks[edge.target]
            masks[edge.source] = source & allowed[:, target].any(axis=1)
            masks[edge.target] = target & allowed[source].any(axis=0)
            changed |= bool((masks[edge.source] != source).any() or (masks[edge.target] != target).any())
    return restrict(problem, masks)
