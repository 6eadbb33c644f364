"""When tasks run that need each other's results and share resources: a schedule as plain data.

Knows nothing of devices, layers or transfers; planner/simulation/timeline.py says what they are here. Nothing is
searched: tasks come in the order in which a program takes them, and the clock follows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

__all__ = ["NOTHING", "Span", "Task", "schedule"]

NOTHING = -1
SLACK = 1e-9  # sums of parts are as exact as floats


@dataclass(frozen=True)
class Task:
    """Something that takes time.

    Args:
        seconds: how long, if it shares nothing with anybody.
        holds: resources that nobody else has meanwhile.
        shares: resources of which it needs a part (1: all of it) to go at its full pace. Tasks that together need more
            than there is of one all go slower by as much.
        after: tasks that must be done before; they come earlier in the list.
        yields: it has to do with what those leave of its resources that do not yield.
    """

    seconds: float
    holds: tuple[Hashable, ...] = ()
    shares: Mapping[Any, float] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    yields: bool = False


@dataclass(frozen=True)
class Span:
    """When a task runs, and the task whose end let it start (NOTHING: it starts at 0 by itself)."""

    start_s: float
    end_s: float
    behind: int = NOTHING


def schedule(tasks: Sequence[Task]) -> tuple[Span, ...]:
    """When each task runs if every resource serves, of the tasks that could run, the first in the list.

    A task starts when all it comes after are done and it is the first in the list on all it holds. One that waits for
    one of its resources keeps later ones from the others, so that none is overtaken for ever. A task starts at 0 or
    exactly when another one ends, `behind`: going back from task to task, every second up to an end is accounted for.

    >>> schedule([Task(2.0, ("a",)), Task(1.0, ("b",)), Task(1.0, ("a", "b"), after=(0,))])[2]
    Span(start_s=2.0, end_s=3.0, behind=0)
    >>> [span.end_s for span in schedule([Task(1.0, shares={"lane": 1.0}), Task(3.0, shares={"lane": 1.0})])]
    [2.0, 4.0]

    Raises:
        ValueError: a task comes after one that is not before it in the list.
    """
    return tuple(_Clock(tasks).run())


@dataclass
class _Pace:
    """How fast a task goes that shares something, and when it ends if that stays so."""

    rate: float
    end_s: float
    left_s: float = 0.0


class _Clock:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        numbers: dict[Hashable, int] = {}  # of resources: what follows meets numbers and bits only
        self.masks = [_mask(task.holds, numbers) for task in tasks]
        self.shares = [
            tuple((numbers.setdefault(one, len(numbers)), part) for one, part in task.shares.items()) for task in tasks
        ]
        self.missing = [len(set(task.after)) for task in tasks]
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for earlier in set(task.after):
                if not 0 <= earlier < index:
                    raise ValueError(f"task {index} is to come after task {earlier}, which is not before it")
                self.followers[earlier].append(index)
        self.ready = [index for index, count in enumerate(self.missing) if count == 0]
        self.alone: list[tuple[float, int]] = []  # what shares nothing, by end
        self.sharing: dict[int, _Pace] = {}
        self.needed = {yields: [0.0] * len(numbers) for yields in (False, True)}
        self.busy = 0
        self.begun = [(0.0, NOTHING)] * len(tasks)  # when each started, and behind which
        self.end_s = [0.0] * len(tasks)

    def run(self) -> list[Span]:
        now_s, ended = 0.0, list[int]()
        while self.ready or self.alone or self.sharing:
            if self._start(now_s, ended):
                self._pace(now_s)
            now_s = min(self.alone[0][0] if self.alone else inf, *(pace.end_s for pace in self.sharing.values()), inf)
            ended = [index for index, pace in self.sharing.items() if pace.end_s == now_s]
            shared = bool(ended)
            while self.alone and self.alone[0][0] == now_s:
                ended.append(heappop(self.alone)[1])
            for index in ended:
                self._end(index, now_s)
            if shared:
                self._pace(now_s)
        return [Span(start_s, end_s, behind) for (start_s, behind), end_s in zip(self.begun, self.end_s, strict=True)]

    def _start(self, now_s: float, ended: Sequence[int]) -> bool:
        """Start what can; whether any of it shares something."""
        claimed, waiting, sharing = self.busy, list[int](), False
        for index in self.ready:
            mask, task = self.masks[index], self.tasks[index]
            if mask & claimed:
                waiting.append(index)
            else:
                self.busy |= mask
                self.begun[index] = now_s, self._behind(index, ended)
                if task.shares:
                    sharing = True
                    self.sharing[index] = _Pace(1.0, now_s + task.seconds)
                    self._need(index, 1.0)
                else:
                    heappush(self.alone, (now_s + task.seconds, index))
            claimed |= mask
        self.ready = waiting
        return sharing

    def _pace(self, now_s: float) -> None:
        """Those who share something go as fast as they can now."""
        for index, pace in self.sharing.items():
            rate = self._rate(index)
            if rate != pace.rate:
                left_s = pace.left_s if pace.rate == 0 else (pace.end_s - now_s) * pace.rate
                pace.rate, pace.left_s, pace.end_s = rate, left_s, now_s + left_s / rate if rate else inf

    def _rate(self, index: int) -> float:
        yields = self.tasks[index].yields
        first, own = self.needed[False], self.needed[yields]
        rate = 1.0
        for one, _ in self.shares[index]:
            left = max(0.0, 1 - first[one]) if yields else 1.0
            if own[one] > left + SLACK:
                rate = min(rate, left / own[one])
        return rate if rate > SLACK else 0.0

    def _need(self, index: int, sign: float) -> None:
        needed = self.needed[self.tasks[index].yields]
        for one, part in self.shares[index]:
            needed[one] += sign * part

    def _behind(self, index: int, ended: Sequence[int]) -> int:
        after, mask = self.tasks[index].after, self.masks[index]
        needed = next((one for one in ended if one in after), NOTHING)
        return needed if needed != NOTHING else next((one for one in ended if self.masks[one] & mask), NOTHING)

    def _end(self, index: int, now_s: float) -> None:
        self.end_s[index] = now_s
        self.busy &= ~self.masks[index]
        if self.sharing.pop(index, None) is not None:
            self._need(index, -1.0)
        for follower in self.followers[index]:
            self.missing[follower] -= 1
            if self.missing[follower] == 0:
                insort(self.ready, follower)


def _mask(holds: Sequence[Hashable], numbers: dict[Hashable, int]) -> int:
    """A bit for each resource; resources that are new get a number."""
    mask = 0
    for one in holds:
        mask |= 1 << numbers.setdefault(one, len(numbers))
    return mask
