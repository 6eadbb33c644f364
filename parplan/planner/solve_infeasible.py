"""Why nothing fits: find the constraint that fails and what would be missing, in terms a user can act on.

Constraints are tried from the strongest to the weakest culprit: a node with no strategy, an edge with no pair, the pairs
together, the linear constraints without memory, and last the memory limits, where the least possible excess is
searched for.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from parplan.planner.cpsat import least_excess, search
from parplan.planner.presolve import drop_forbidden, presolve
from parplan.planner.problem import Cause, Edge, FloatArray, Infeasibility, Linear, Problem, Status
from parplan.planner.solve_rows import Live, broken_rows, some_rows, timeline

__all__ = ["explain"]

MOST_NAMES = 5
"""Nodes named in a memory message."""


def explain(problem: Problem, time_limit_s: float, workers: int) -> Infeasibility | None:
    """The constraint to blame for an infeasible problem; None if the time ran out before one was found."""
    deadline = time.monotonic() + time_limit_s
    free = _without_costs(problem)
    pairs_only = replace(free, linear=(), limits=(np.inf,) * len(free.limits))
    found = _strategy(problem) or _edge(problem)
    if found is None and _fits(pairs_only, deadline, workers) is False:
        found = _conflict(pairs_only, deadline, workers)
    if found is None and _fits(replace(pairs_only, linear=free.linear), deadline, workers) is False:
        found = _linear(pairs_only, free.linear, deadline, workers)
    return found or _memory(free, deadline, workers)


def _without_costs(problem: Problem) -> Problem:
    nodes = tuple(
        replace(n, ahead=_barrier(n.ahead + n.back + n.tail), back=np.zeros(n.size), tail=np.zeros(n.size))
        for n in problem.nodes
    )
    edges = tuple(Edge(e.source, e.target, _barrier(e.ahead + e.back), np.zeros(e.ahead.shape)) for e in problem.edges)
    return replace(problem, nodes=nodes, edges=edges)


def _barrier(costs: FloatArray) -> FloatArray:
    """0 where finite, else inf."""
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _fits(problem: Problem, deadline: float, workers: int) -> bool | None:
    """Whether any choice is feasible, memory aside; None if time ran out."""
    reduced = presolve(problem)
    if reduced is None:
        return False
    rows = some_rows(reduced.problem, most_terms=0)
    found = search(reduced.problem, rows, deadline - time.monotonic(), workers, target=1.0)
    return None if found.status is Status.UNKNOWN else found.status is not Status.INFEASIBLE


def _strategy(problem: Problem) -> Infeasibility | None:
    for node in problem.nodes:
        if not node.allowed.any():
            text = f"{node.name}: all {node.size} strategies are forbidden; allow one of them"
            return Infeasibility(Cause.STRATEGY, (node.name,), text)
    return None


def _edge(problem: Problem) -> Infeasibility | None:
    for edge in problem.edges:
        first, second = problem.nodes[edge.source], problem.nodes[edge.target]
        if not np.isfinite(edge.ahead + edge.back)[np.ix_(first.allowed, second.allowed)].any():
            text = f"{first.name} -> {second.name}: every pair of strategies is forbidden; allow a strategy that both can meet"
            return Infeasibility(Cause.EDGE, (first.name, second.name), text)
    return None


def _conflict(problem: Problem, deadline: float, workers: int) -> Infeasibility | None:
    """The fewest edges whose forbidden pairs would have to be used."""
    counted = [Edge(e.source, e.target, np.isinf(e.ahead).astype(float), e.back) for e in problem.edges]
    reduced = presolve(replace(problem, edges=tuple(counted)))
    found = reduced and search(reduced.problem, [], deadline - time.monotonic(), workers, target=1.0)
    if reduced is None or not found or found.choice is None:
        return None
    choice = reduced.lift(found.choice)
    broken = [e for e in problem.edges if np.isinf(e.ahead[choice[e.source], choice[e.target]])]
    names = [problem.nodes[v].name for e in broken for v in (e.source, e.target)]
    listed = ", ".join(f"{a} -> {b}" for a, b in zip(names[::2], names[1::2], strict=True))
    text = f"{listed}: their forbidden pairs of strategies rule out every choice; allow more strategies there"
    return Infeasibility(Cause.EDGE, tuple(names), text)


def _linear(problem: Problem, rows: tuple[Linear, ...], deadline: float, workers: int) -> Infeasibility:
    """A smallest set of constraints that cannot hold together: drop each that is not needed for the conflict."""
    needed = list(rows)
    for row in rows:
        rest = tuple(other for other in needed if other is not row)
        if _fits(replace(problem, linear=rest), deadline, workers) is False:
            needed = list(rest)
    names = tuple(row.name for row in needed)
    ranges = ", ".join(f"{row.name} (from {row.low:g} to {row.high:g})" for row in needed)
    return Infeasibility(Cause.LINEAR, names, f"{ranges}: cannot be met{' together' * (len(names) > 1)}; loosen one")


def _memory(problem: Problem, deadline: float, workers: int) -> Infeasibility | None:
    reduced = drop_forbidden(replace(problem, limits=(np.inf,) * len(problem.limits)))
    if reduced is None:
        return None
    limited = replace(reduced.problem, limits=problem.limits)
    rows = some_rows(limited, most_terms=0)
    while True:  # ends: every round adds a row, and there are as many as time points
        found = least_excess(limited, rows, max(deadline - time.monotonic(), 1.0), workers)
        if found.choice is None:
            return None
        more = broken_rows(limited, found.choice, rows)
        if not more or time.monotonic() > deadline:
            return _peak(problem, reduced.lift(found.choice))
        rows += more


def _peak(problem: Problem, choice: list[int]) -> Infeasibility | None:
    """The worst memory and moment of a choice that exceeds the limits least."""
    lines = [timeline(problem, resource) for resource in range(len(problem.limits))]
    loads = [line.loads(lambda item: _held(item, choice)) for line in lines]
    over = [float(load.max(initial=0.0)) - limit for load, limit in zip(loads, problem.limits, strict=True)]
    if not over or max(over) <= 0:
        return None
    worst = int(np.argmax(over))
    point = int(loads[worst].argmax())
    live = [item for item in lines[worst].live if item.first <= point < item.last]
    live = sorted(live, key=lambda item: -_held(item, choice))[:MOST_NAMES]
    names = tuple(problem.nodes[item.node].name for item in live)
    amounts = tuple(_held(item, choice) for item in live)
    when, limit = lines[worst].times[point], problem.limits[worst]
    listed = ", ".join(f"{name} {amount:.0f}" for name, amount in zip(names, amounts, strict=True))
    text = (
        f"{problem.resource_name(worst)}: at time point {when} at least {over[worst]:.0f} bytes more than the limit of "
        f"{limit:.0f} are needed; largest: {listed}; raise the limit or lower what these hold"
    )
    return Infeasibility(Cause.MEMORY, names, text, amounts, worst, when, over[worst])


def _held(item: Live, choice: list[int]) -> float:
    return float(item.amounts[choice[item.node]])
