"""List scheduling of tasks that need each other's results and share resources, as plain data.

Knows nothing of devices, layers or transfers; planner/simulation/timeline.py says what they are here. Nothing is
searched: tasks come in the order in which a program takes them, and their times follow.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import heappop, heappush
from itertools import chain
from math import inf
from operator import or_
from typing import Any

__all__ = ["NOTHING", "Span", "Task", "schedule"]

NOTHING = -1
SLACK = 1e-9  # sums of parts are as exact as floats


@dataclass(frozen=True)
class Task:
    """A unit of work with its duration, resources and predecessors.

    Args:
        seconds: how long, at full rate.
        exclusive: resources that no other task has meanwhile.
        capacity: the part of each shared resource (0 to 1) that it needs to go at full rate. Tasks that together need
            more than all of one go slower by as much.
        after: tasks that must be done before; they come earlier in the list.
        low_priority: it gets the part of its shared resources that tasks without low priority leave.
    """

    seconds: float
    exclusive: tuple[Hashable, ...] = ()
    capacity: Mapping[Any, float] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    low_priority: bool = False


@dataclass(frozen=True)
class Span:
    """Start and end of a task, and the task whose end let it start (NOTHING: it starts at 0 by itself)."""

    start_s: float
    end_s: float
    critical_predecessor: int = NOTHING


def schedule(tasks: Sequence[Task]) -> tuple[Span, ...]:
    """Spans of all tasks if every resource serves, of the tasks that could run, the first in the list.

    A task starts when all it comes after are done and it is the first in the list on all its exclusive resources. One
    that waits for one of them keeps later ones from the others, so that none is overtaken for ever. A task starts at 0
    or exactly when its `critical_predecessor` ends: from task to task, every second up to an end is accounted for.

    >>> schedule([Task(2.0, ("a",)), Task(1.0, ("b",)), Task(1.0, ("a", "b"), after=(0,))])[2]
    Span(start_s=2.0, end_s=3.0, critical_predecessor=0)
    >>> [span.end_s for span in schedule([Task(1.0, capacity={"lane": 1.0}), Task(3.0, capacity={"lane": 1.0})])]
    [2.0, 4.0]

    Raises:
        ValueError: a task comes after one that is not before it in the list.
    """
    return tuple(_ListSchedule(tasks).run())


@dataclass
class _Pace:
    """Rate of a task that shares resources, and when it ends at this rate."""

    rate: float
    end_s: float
    left_s: float = 0.0


class _ListSchedule:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        numbers: dict[Hashable, int] = {}  # of resources: what follows meets numbers and bits only
        # Many tasks have one object of each in common (step_tasks.py).
        exclusive = {id(task.exclusive): task.exclusive for task in tasks}
        capacity = {id(task.capacity): task.capacity for task in tasks}
        held = {key: tuple(numbers.setdefault(one, len(numbers)) for one in own) for key, own in exclusive.items()}
        masks = {key: reduce(or_, (1 << one for one in own), 0) for key, own in held.items()}
        shared = {
            key: tuple((numbers.setdefault(one, len(numbers)), part) for one, part in own.items())
            for key, own in capacity.items()
        }
        self.masks = [masks[id(task.exclusive)] for task in tasks]
        self.capacity = [shared[id(task.capacity)] for task in tasks]
        self.missing = [0] * len(tasks)
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            needed = set(task.after)
            self.missing[index] = len(needed)
            for earlier in needed:
                if not 0 <= earlier < index:
                    raise ValueError(f"task {index} is to come after task {earlier}, which is not before it")
                self.followers[earlier].append(index)
        waiting: list[list[int]] = [[] for _ in numbers]  # by exclusive resource: heaps of tasks that are ready
        queues = {key: [waiting[one] for one in own] for key, own in held.items()}
        self.queues = [queues[id(task.exclusive)] for task in tasks]
        self.next: list[int] = []  # heap of tasks that may start now: just ready, or the first on a resource just freed
        for index, count in enumerate(self.missing):
            if count == 0:
                self._ready(index)
        self.alone: list[tuple[float, int]] = []  # tasks that share nothing, by end
        self.sharing: dict[int, _Pace] = {}
        self.needed = {low_priority: [0.0] * len(numbers) for low_priority in (False, True)}
        self.busy = 0
        self.begun = [(0.0, NOTHING)] * len(tasks)  # when each started, and its critical predecessor
        self.end_s = [0.0] * len(tasks)

    def run(self) -> list[Span]:
        now_s, ended = 0.0, list[int]()
        while self.next or self.alone or self.sharing:
            if self._start(now_s, ended):
                self._pace(now_s)
            now_s = self.alone[0][0] if self.alone else inf
            if self.sharing:
                now_s = min(now_s, *[pace.end_s for pace in self.sharing.values()])
            ended = [index for index, pace in self.sharing.items() if pace.end_s == now_s]
            shared = bool(ended)
            while self.alone and self.alone[0][0] == now_s:
                ended.append(heappop(self.alone)[1])
            for index in ended:
                self._end(index, now_s)
            if shared:
                self._pace(now_s)
        return [Span(start_s, end_s, earlier) for (start_s, earlier), end_s in zip(self.begun, self.end_s, strict=True)]

    def _start(self, now_s: float, ended: list[int]) -> bool:
        """Start all tasks that can; whether any of them shares resources.

        One that takes no time is over at once: those that come after it are before later ones in the list.
        """
        sharing = False
        while self.next:
            index = heappop(self.next)
            mask, task = self.masks[index], self.tasks[index]
            own = self.queues[index]
            if mask & self.busy or any(not queue or queue[0] != index for queue in own):
                continue
            for queue in own:
                heappop(queue)
            needed = (one for one in ended if one in task.after)
            held = (one for one in ended if self.masks[one] & mask)
            self.begun[index] = now_s, next(chain(needed, held), NOTHING)
            if task.seconds == 0:
                ended.append(index)
                self._free(index, now_s)
                continue
            self.busy |= mask
            if task.capacity:
                sharing = True
                self.sharing[index] = _Pace(1.0, now_s + task.seconds)
                self._need(index, 1.0)
            else:
                heappush(self.alone, (now_s + task.seconds, index))
        return sharing

    def _pace(self, now_s: float) -> None:
        """Those who share something go as fast as they can now."""
        for index, pace in self.sharing.items():
            rate = self._rate(index)
            if rate != pace.rate:
                left_s = pace.left_s if pace.rate == 0 else (pace.end_s - now_s) * pace.rate
                pace.rate, pace.left_s, pace.end_s = rate, left_s, now_s + left_s / rate if rate else inf

    def _rate(self, index: int) -> float:
        low_priority = self.tasks[index].low_priority
        first, own = self.needed[False], self.needed[low_priority]
        rate = 1.0
        for one, _ in self.capacity[index]:
            left = max(0.0, 1 - first[one]) if low_priority else 1.0
            if own[one] > left + SLACK:
                rate = min(rate, left / own[one])
        return rate if rate > SLACK else 0.0

    def _need(self, index: int, sign: float) -> None:
        needed = self.needed[self.tasks[index].low_priority]
        for one, part in self.capacity[index]:
            needed[one] += sign * part

    def _end(self, index: int, now_s: float) -> None:
        self.busy &= ~self.masks[index]
        if self.sharing.pop(index, None) is not None:
            self._need(index, -1.0)
        self._free(index, now_s)

    def _free(self, index: int, now_s: float) -> None:
        """A task is over: those that waited for it, or for its resources, may start."""
        self.end_s[index] = now_s
        for queue in self.queues[index]:
            if queue:
                heappush(self.next, queue[0])
        for follower in self.followers[index]:
            self.missing[follower] -= 1
            if self.missing[follower] == 0:
                self._ready(follower)

    def _ready(self, index: int) -> None:
        """All that a task comes after is over: it queues for its resources."""
        for queue in self.queues[index]:
            heappush(queue, index)
        heappush(self.next, index)
