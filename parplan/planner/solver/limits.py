"""Memory limits as rows: which live sets can bind, and what no choice can break.

Only live sets that are maximal matter: between the start of a usage and the next end, the set only grows. Of those,
only the ones whose largest sum exceeds the limit can ever bind. Where they are too many to write down, a solver starts
from none and adds those that its choices break.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.planner.solver.problem import FloatArray, Mask, Problem, Reduced

__all__ = [
    "LimitRow", "Live", "Timeline", "broken_rows", "count_terms", "drop_loose", "limit_allowed", "memory_rows",
    "peak_rows", "rows_at", "some_rows", "timeline",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class LimitRow:
    """`low <= sum of terms[node][strategy] <= high`; memory rows also say which memory and when."""

    terms: Mapping[int, FloatArray]
    low: float
    high: float
    resource: int | None = None
    time: int | None = None


@dataclass(frozen=True, eq=False)
class Live:
    """One usage on the compressed time axis of its memory."""

    node: int
    place: int
    resource: int
    first: int
    last: int
    amounts: FloatArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """The usages of one memory, and the time points at which a usage starts (only there can a sum grow)."""

    resource: int
    times: list[int]
    live: list[Live]

    def loads(self, amount: Callable[[Live], float]) -> FloatArray:
        """The sum of `amount` over what is live, per time point."""
        change = np.zeros(len(self.times) + 1)
        for item in self.live:
            value = amount(item)
            change[item.first] += value
            change[item.last] -= value
        return np.cumsum(change)[:-1]


def timeline(problem: Problem, resource: int) -> Timeline:
    """All usages of one memory."""
    usages = ((v, i, u) for v, node in enumerate(problem.nodes) for i, u in enumerate(node.usages))
    used = [(v, i, u) for v, i, u in usages if u.resource == resource and u.start < u.end]
    times = sorted({u.start for _, _, u in used})
    points = np.array(times)
    firsts = np.searchsorted(points, [u.start for _, _, u in used])
    lasts = np.searchsorted(points, [u.end for _, _, u in used])
    live = [
        Live(v, i, resource, int(a), int(b), u.amounts) for (v, i, u), a, b in zip(used, firsts, lasts, strict=True)
    ]
    return Timeline(resource, times, live)


def limit_allowed(problem: Problem, masks: list[Mask]) -> bool:
    """Clear, in `masks`, strategies that break a limit whatever the other nodes choose; whether any was."""
    before = sum(int(mask.sum()) for mask in masks)
    for resource, limit in enumerate(problem.limits):
        line = timeline(problem, resource)
        floor = {i: i.amounts[masks[i.node]].min() if masks[i.node].any() else 0.0 for i in line.live}
        loads = line.loads(floor.__getitem__)
        if loads.max(initial=0.0) + max((i.amounts.max() for i in line.live), default=0.0) > limit:
            for item in line.live:
                others = loads[item.first : item.last].max() - floor[item]
                masks[item.node] = masks[item.node] & (item.amounts <= limit - others)
    for row in problem.linear:
        if all(masks[v].any() for v in row.terms):
            least = {v: float(c[masks[v]].min()) for v, c in row.terms.items()}
            most = {v: float(c[masks[v]].max()) for v, c in row.terms.items()}
            below, above = sum(least.values()), sum(most.values())
            for v, values in row.terms.items():
                fits = (values <= row.high - below + least[v]) & (values >= row.low - above + most[v])
                masks[v] = masks[v] & fits
    return sum(int(mask.sum()) for mask in masks) < before


def drop_loose(problem: Problem) -> Reduced:
    """Without linear constraints that every choice meets, and usages only live while even the largest together fit."""
    loose: set[tuple[int, int]] = set()
    for resource, limit in enumerate(problem.limits):
        line = timeline(problem, resource)
        full = line.loads(lambda item: float(item.amounts.max())) > limit
        loose |= {(item.node, item.place) for item in line.live if not full[item.first : item.last].any()}
    nodes = list(problem.nodes)
    for v, node in enumerate(nodes):
        kept = tuple(u for i, u in enumerate(node.usages) if (v, i) not in loose and u.start < u.end)
        if len(kept) < len(node.usages):
            nodes[v] = replace(node, usages=kept)
    linear = []
    for row in problem.linear:
        least = sum(float(values.min()) for values in row.terms.values())
        most = sum(float(values.max()) for values in row.terms.values())
        if least < row.low or most > row.high:
            linear.append(row)
    if not loose and len(linear) == len(problem.linear):
        return Reduced(problem)
    return Reduced(replace(problem, nodes=tuple(nodes), linear=tuple(linear)))


def memory_rows(problem: Problem) -> list[LimitRow]:
    """One row per maximal live set that can exceed its limit."""
    rows = []
    for resource, limit in enumerate(problem.limits):
        line = timeline(problem, resource)
        most = line.loads(lambda item: float(item.amounts.max()))
        ends = {item.last for item in line.live}
        points = [p for p in range(len(line.times)) if p + 1 in ends and most[p] > limit]
        rows += [_row(problem, line, point) for point in points]
    return rows


def some_rows(problem: Problem, most_terms: int) -> list[LimitRow]:
    """The linear constraints, and all memory rows that can bind if they have at most `most_terms` terms together."""
    linear = [LimitRow(row.terms, row.low, row.high) for row in problem.linear]
    return (memory_rows(problem) if count_terms(problem) <= most_terms else []) + linear


def broken_rows(problem: Problem, choice: Sequence[int], have: Sequence[LimitRow]) -> list[LimitRow]:
    """Per memory, the row at its peak if `choice` exceeds the limit there and `have` lacks the row."""
    known = {(row.resource, row.time) for row in have}
    peaks = [row for row in peak_rows(problem, choice) if (row.resource, row.time) not in known]
    return [row for row in peaks if sum(values[choice[v]] for v, values in row.terms.items()) > row.high]


def peak_rows(problem: Problem, choice: Sequence[int]) -> list[LimitRow]:
    """Per memory in use, the row at the moment when `choice` holds most of it."""
    lines = [line for resource in range(len(problem.limits)) if (line := timeline(problem, resource)).times]
    loads = (line.loads(lambda item: float(item.amounts[choice[item.node]])) for line in lines)
    return [_row(problem, line, int(load.argmax())) for line, load in zip(lines, loads, strict=True)]


def rows_at(problem: Problem, time: int) -> list[LimitRow]:
    """Per memory in use at `time`, the row of that moment."""
    lines = [timeline(problem, resource) for resource in range(len(problem.limits))]
    points = [(line, bisect_right(line.times, time) - 1) for line in lines]
    return [_row(problem, line, point) for line, point in points if point >= 0]


def _row(problem: Problem, line: Timeline, point: int) -> LimitRow:
    """The limit of a memory at one of its time points, as a row over the nodes that hold some of it then."""
    terms: dict[int, FloatArray] = {}
    for item in line.live:
        if item.first <= point < item.last:
            terms[item.node] = terms[item.node] + item.amounts if item.node in terms else item.amounts
    return LimitRow(terms, -np.inf, problem.limits[line.resource], line.resource, line.times[point])


def count_terms(problem: Problem) -> int:
    """How many usages the live sets at all starts hold together: the size of `memory_rows`, at no cost."""
    lines = (timeline(problem, resource) for resource in range(len(problem.limits)))
    return sum(item.last - item.first for line in lines for item in line.live)
