"""Why nothing fits: find the constraint that fails and what would be missing, in terms a user can act on.

Constraints are tried from the strongest to the weakest culprit: a node with no strategy, an edge with no pair, the
pairs together, the linear constraints without memory, and last the memory limits: the choice nearest to fitting is the
one whose largest excess over a limit is the least, as that is what all limits would have to be raised by.

A proof that memory is too small needs prices on the limits alone. With all costs at zero, prices p >= 0 on the memory
rows make a bound: if even the cheapest choice has sum p * (load - limit) > 0, no choice meets all the limits. Equal
prices on all memories at one moment already say when the sum over the devices is too large, which no single device's
limit shows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from parplan.planner.solver.cpsat import least_excess, search
from parplan.planner.solver.limits import broken_rows, peak_rows, rows_at, some_rows, timeline
from parplan.planner.solver.local_search import BRIEF, descend, first_choice
from parplan.planner.solver.problem import (
    Cause,
    Edge,
    FloatArray,
    Infeasibility,
    Linear,
    Node,
    Problem,
    Reduced,
    Status,
)
from parplan.planner.solver.reductions.dominance import drop_dominated
from parplan.planner.solver.reductions.presolve import drop_forbidden, merge_parallel_edges, pair_linear, presolve
from parplan.planner.solver.relaxation import Priced, Prices, Relaxation, relax

__all__ = ["crowd", "explain", "overfull", "without_costs"]

ROUNDS, STEPS = 6, 15


def without_costs(problem: Problem) -> Problem:
    """The same choices, all free."""
    nodes = tuple(replace(n, cost_s=_barrier(n.cost_s)) for n in problem.nodes)
    edges = tuple(replace(e, cost_s=_barrier(e.cost_s)) for e in problem.edges)
    return replace(problem, nodes=nodes, edges=edges, maxima=())


def _barrier(costs: FloatArray) -> FloatArray:
    """0 where finite, else inf."""
    return np.where(np.isfinite(costs), 0.0, np.inf)


def overfull(problem: Problem, deadline: float, offer: Callable[[list[int]], object]) -> bool:
    """Whether it is proven that no choice of a presolved problem meets the limits.

    `offer` is given the choices met on the way, each after local search on the limits.
    """
    free = drop_dominated(without_costs(problem), deadline)
    rows = rows_at(free.problem, crowd(free.problem)[0])
    prices = np.ones(len(rows))
    for _ in range(ROUNDS):
        relaxation = relax(free.problem, rows) if rows else None
        if relaxation is None:
            return False
        found = _priced(relaxation, prices, deadline)
        if found.value > 1e-9:
            return True
        offer(free.lift(descend(free.problem, found.choice, deadline, BRIEF)))
        more = broken_rows(free.problem, found.choice, rows)
        if not more or time.monotonic() > deadline:
            return False
        prices = np.append(found.prices.limits * [row.high for row in rows], np.full(len(more), 0.1 / len(rows)))
        rows += more
    return False


def _priced(relaxation: Relaxation, weights: FloatArray, deadline: float) -> Priced:
    """The best prices found from `weights` (price times limit, per row): their sum stays 1, as only ratios matter."""
    limits = np.array([row.high for row in relaxation.rows])
    none = np.zeros(0)
    best = relaxation.at(Prices(none, weights / weights.sum() / limits))
    point = best
    for step in range(STEPS):
        if best.value > 1e-9 or time.monotonic() > deadline:
            break
        climbed = np.maximum(point.prices.limits * limits + 0.2 / (1 + step) * (point.loads - limits) / limits, 0.0)
        if not climbed.any():
            break
        point = relaxation.at(Prices(none, climbed / climbed.sum() / limits))
        best = point if point.value > best.value else best
    return best


def crowd(problem: Problem) -> tuple[int, Counter[str]]:
    """The moment when all memories together are fullest, each node at its least (in sum over them), and these bytes."""
    change: Counter[int] = Counter()
    for node in problem.nodes:
        for start, end in pairwise(sorted({point for u in node.usages for point in (u.start, u.end)})):
            least = _least(node, start)
            change[start] += least
            change[end] -= least
    times = sorted(change)
    moment = times[int(np.cumsum([change[point] for point in times]).argmax())] if times else 0
    return moment, Counter({node.name: _least(node, moment) for node in problem.nodes})


def _least(node: Node, moment: int) -> int:
    """The least bytes that a node holds of all memories together."""
    live = [usage.amounts for usage in node.usages if usage.start <= moment < usage.end]
    return int(sum(live, np.zeros(node.size))[node.allowed].min(initial=np.inf)) if node.allowed.any() else 0


LOCAL_S = 1.0
MOST_NAMES = 5
"""Nodes named in a memory message."""


def explain(problem: Problem, time_limit_s: float, workers: int) -> Infeasibility | None:
    """The constraint to blame for an infeasible problem; None if the time ran out before one was found."""
    deadline = time.monotonic() + time_limit_s
    free = without_costs(problem)
    pairs_only = replace(free, linear=(), limits=(np.inf,) * len(free.limits))
    found = _nothing_allowed(problem)
    if found is None and _fits(pairs_only, deadline, workers) is False:
        found = _conflict(pairs_only, deadline, workers)
    if found is None and _fits(replace(pairs_only, linear=free.linear), deadline, workers) is False:
        found = _linear(pairs_only, free.linear, deadline, workers)
    return found or _crowded(problem) or _memory(free, deadline, workers)


def _fits(problem: Problem, deadline: float, workers: int) -> bool | None:
    """Whether any choice is feasible, memory aside; None if time ran out."""
    reduced = presolve(problem, deadline)
    if reduced is None:
        return False
    rows = some_rows(reduced.problem, most_terms=0)
    relaxation = None if rows else relax(reduced.problem, [])
    if relaxation is not None:
        return bool(np.isfinite(relaxation.at(relaxation.start()).value))
    found = search(reduced.problem, rows, deadline, workers, target=1.0)
    return None if found.status is Status.UNKNOWN else found.status is not Status.INFEASIBLE


def _nothing_allowed(problem: Problem) -> Infeasibility | None:
    """A node without a strategy, or an edge without a pair."""
    for node in problem.nodes:
        if not node.allowed.any():
            text = f"{node.name}: all {node.size} strategies are forbidden; allow one of them"
            return Infeasibility(Cause.STRATEGY, (node.name,), text)
    for edge in problem.edges:
        first, second = problem.nodes[edge.source], problem.nodes[edge.target]
        if not np.isfinite(edge.cost_s)[np.ix_(first.allowed, second.allowed)].any():
            text = f"{first.name} -> {second.name}: every pair of strategies is forbidden; allow one that can meet"
            return Infeasibility(Cause.EDGE, (first.name, second.name), text)
    return None


def _conflict(problem: Problem, deadline: float, workers: int) -> Infeasibility | None:
    """The fewest edges whose forbidden pairs would have to be used."""
    counted = [Edge(e.source, e.target, np.isinf(e.cost_s).astype(float)) for e in problem.edges]
    reduced = presolve(replace(problem, edges=tuple(counted)), deadline)
    found = reduced and search(reduced.problem, [], deadline, workers, target=1.0)
    if reduced is None or not found or found.choice is None:
        return None
    choice = reduced.lift(found.choice)
    broken = [e for e in problem.edges if np.isinf(e.cost_s[choice[e.source], choice[e.target]])]
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


def _crowded(problem: Problem) -> Infeasibility | None:
    """Several memories that are too small together, whatever goes where."""
    (moment, held), limit = crowd(problem), float(sum(problem.limits))
    if len(problem.limits) < 2 or held.total() <= limit:
        return None
    missing, largest = held.total() - limit, held.most_common(MOST_NAMES)
    text = (
        f"at time point {moment} at least {held.total()} bytes are needed in all, and {len(problem.limits)} memories "
        f"({problem.resource_name(0)}, ...) hold {limit:.0f}: {missing:.0f} are missing; largest there: "
        f"{', '.join(f'{name} {amount}' for name, amount in largest)}; raise the limits or lower what these hold"
    )
    amounts = tuple(float(amount) for _, amount in largest)
    return Infeasibility(Cause.MEMORY, tuple(n for n, _ in largest), text, amounts, None, moment, missing)


def _memory(problem: Problem, deadline: float, workers: int) -> Infeasibility | None:
    """The least possible excess, or the least found in time."""
    allowed: Reduced | None = Reduced(replace(problem, limits=(np.inf,) * len(problem.limits)))
    for step in (pair_linear, merge_parallel_edges, drop_forbidden, partial(drop_dominated, deadline=deadline)):
        allowed = allowed and allowed.then(step)
    if allowed is None:
        return None
    limited = replace(allowed.problem, limits=problem.limits)
    choice = descend(limited, first_choice(limited), min(deadline, time.monotonic() + LOCAL_S))
    rows, proven = some_rows(limited, most_terms=0) + peak_rows(limited, choice), False
    while time.monotonic() < deadline:  # every round adds a row, and there are as many as time points
        found = least_excess(limited, rows, deadline, workers, choice)
        choice = list(found.choice) if found.choice is not None else choice
        more = broken_rows(limited, choice, rows)
        proven = found.status is Status.OPTIMAL and not more
        if not more:
            break
        rows += more
    choice = allowed.lift(choice)
    lines = [timeline(problem, resource) for resource in range(len(problem.limits))]
    loads = [line.loads(lambda item: float(item.amounts[choice[item.node]])) for line in lines]
    over = [float(load.max(initial=0.0)) - limit for load, limit in zip(loads, problem.limits, strict=True)]
    if not over or max(over) <= 0:
        return None
    worst = int(np.argmax(over))
    point = int(loads[worst].argmax())
    held = Counter[str]()
    for item in lines[worst].live:
        if item.first <= point < item.last:
            held[problem.nodes[item.node].name] += int(item.amounts[choice[item.node]])
    largest = held.most_common(MOST_NAMES)
    when, limit = lines[worst].times[point], problem.limits[worst]
    text = (
        f"{problem.resource_name(worst)}: {'even' if proven else 'as far as searched,'} the choice that needs least "
        f"exceeds the limit of {limit:.0f} bytes by {over[worst]:.0f} at time point {when}; largest there: "
        f"{', '.join(f'{name} {amount}' for name, amount in largest)}; raise the limit or lower what these hold"
    )
    names, amounts = tuple(name for name, _ in largest), tuple(float(amount) for _, amount in largest)
    return Infeasibility(Cause.MEMORY, names, text, amounts, worst, when, over[worst])
