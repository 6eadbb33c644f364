"""Memory limits as rows: which live sets can bind, and what no choice can break.

Only live sets that are maximal matter: between the start of a usage and the next end, the set only grows. Of those,
only the ones whose largest sum exceeds the limit can ever bind. Where they are too many to write down, a solver starts
from none and adds those that its choices break.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.planner.solver.problem import FloatArray, Linear, Mask, Node, Problem, Usage

__all__ = [
    "Live", "Row", "Timeline", "broken_rows", "count_terms", "drop_loose_linear", "drop_loose_memory", "limit_allowed",
    "memory_rows", "peak_rows", "rows_at", "some_rows", "timeline",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """`low <= sum of terms[node][strategy] <= high`; memory rows also say which memory and when."""

    name: str
    terms: dict[int, FloatArray]
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
    for resource in range(len(problem.limits)):
        _memory_allowed(problem, timeline(problem, resource), masks)
    for row in problem.linear:
        _linear_allowed(row, masks)
    return sum(int(mask.sum()) for mask in masks) < before


def _memory_allowed(problem: Problem, line: Timeline, masks: list[Mask]) -> None:
    least = [item.amounts[masks[item.node]].min() if masks[item.node].any() else 0.0 for item in line.live]
    floor = dict(zip(map(id, line.live), least, strict=True))
    loads = line.loads(lambda item: floor[id(item)])
    limit = problem.limits[line.resource]
    if loads.max(initial=0.0) + max((i.amounts.max() for i in line.live), default=0.0) <= limit:
        return
    for item in line.live:
        others = loads[item.first : item.last].max() - floor[id(item)]
        masks[item.node] = masks[item.node] & (item.amounts <= limit - others)


def _linear_allowed(row: Linear, masks: list[Mask]) -> None:
    if not all(masks[v].any() for v in row.terms):
        return
    least = {v: float(c[masks[v]].min()) for v, c in row.terms.items()}
    most = {v: float(c[masks[v]].max()) for v, c in row.terms.items()}
    below, above = sum(least.values()), sum(most.values())
    for v, values in row.terms.items():
        masks[v] = masks[v] & (values <= row.high - below + least[v]) & (values >= row.low - above + most[v])


def drop_loose_memory(problem: Problem) -> Problem:
    """Without usages that are only live while even the largest strategies together fit."""
    loose = {(item.node, item.place) for item in _loose_usages(problem)}
    if not loose:
        return problem
    nodes = tuple(_without(node, v, loose) for v, node in enumerate(problem.nodes))
    return replace(problem, nodes=nodes)


def _loose_usages(problem: Problem) -> Iterator[Live]:
    for resource, limit in enumerate(problem.limits):
        line = timeline(problem, resource)
        full = line.loads(lambda item: float(item.amounts.max())) > limit
        yield from (item for item in line.live if not full[item.first : item.last].any())


def _without(node: Node, v: int, loose: set[tuple[int, int]]) -> Node:
    kept: tuple[Usage, ...] = tuple(u for i, u in enumerate(node.usages) if (v, i) not in loose and u.start < u.end)
    return node if len(kept) == len(node.usages) else replace(node, usages=kept)


def drop_loose_linear(problem: Problem) -> Problem:
    """Without linear constraints that every choice meets."""
    kept = tuple(row for row in problem.linear if not _always(row))
    return problem if len(kept) == len(problem.linear) else replace(problem, linear=kept)


def _always(row: Linear) -> bool:
    least = sum(float(values.min()) for values in row.terms.values())
    most = sum(float(values.max()) for values in row.terms.values())
    return row.low <= least and most <= row.high


def memory_rows(problem: Problem) -> list[Row]:
    """One row per maximal live set that can exceed its limit."""
    return [row for resource in range(len(problem.limits)) for row in _rows_of(problem, resource)]


def _rows_of(problem: Problem, resource: int) -> Iterator[Row]:
    line, limit = timeline(problem, resource), problem.limits[resource]
    most = line.loads(lambda item: float(item.amounts.max()))
    starts: list[list[Live]] = [[] for _ in line.times]
    for item in line.live:
        starts[item.first].append(item)
    live: list[Live] = []
    for point, time in enumerate(line.times):
        live = [item for item in live if item.last > point] + starts[point]
        maximal = any(item.last == point + 1 for item in live)
        if maximal and most[point] > limit:
            yield Row(problem.resource_name(resource), _sum_terms(live), -np.inf, limit, resource, time)


def _sum_terms(live: list[Live]) -> dict[int, FloatArray]:
    terms: dict[int, FloatArray] = {}
    for item in live:
        terms[item.node] = terms[item.node] + item.amounts if item.node in terms else item.amounts
    return terms


def some_rows(problem: Problem, most_terms: int) -> list[Row]:
    """The linear constraints, and all memory rows that can bind if they have at most `most_terms` terms together."""
    linear = [Row(row.name, dict(row.terms), row.low, row.high) for row in problem.linear]
    return (memory_rows(problem) if count_terms(problem) <= most_terms else []) + linear


def broken_rows(problem: Problem, choice: Sequence[int], have: Sequence[Row]) -> list[Row]:
    """Per memory, the row at its peak if `choice` exceeds the limit there and `have` lacks the row."""
    known = {(row.resource, row.time) for row in have}
    peaks = [row for row in peak_rows(problem, choice) if (row.resource, row.time) not in known]
    return [row for row in peaks if sum(values[choice[v]] for v, values in row.terms.items()) > row.high]


def peak_rows(problem: Problem, choice: Sequence[int]) -> list[Row]:
    """Per memory in use, the row at the moment when `choice` holds most of it."""
    found = []
    for resource, limit in enumerate(problem.limits):
        line = timeline(problem, resource)
        if line.times:
            point = int(line.loads(lambda item: float(item.amounts[choice[item.node]])).argmax())
            found.append(_row(problem.resource_name(resource), line, point, limit))
    return found


def rows_at(problem: Problem, time: int) -> list[Row]:
    """Per memory in use at `time`, the row of that moment."""
    found = []
    for resource, limit in enumerate(problem.limits):
        line = timeline(problem, resource)
        point = bisect_right(line.times, time) - 1
        if point >= 0:
            found.append(_row(problem.resource_name(resource), line, point, limit))
    return found


def _row(name: str, line: Timeline, point: int, limit: float) -> Row:
    live = [item for item in line.live if item.first <= point < item.last]
    return Row(name, _sum_terms(live), -np.inf, limit, line.resource, line.times[point])


def count_terms(problem: Problem) -> int:
    """How many usages the live sets at all starts hold together: the size of `memory_rows`, at no cost."""
    lines = (timeline(problem, resource) for resource in range(len(problem.limits)))
    return sum(item.last - item.first for line in lines for item in line.live)
