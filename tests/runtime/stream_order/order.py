"""Happens-before order of streams and host threads, as vector clocks, and the races that it leaves.

A timeline is a CUDA stream or a host thread: what is queued on it runs in order. Waits join the clock of one timeline
to another one's. Two accesses to one memory, one of them a write, are a race unless the clock of the later one covers
the earlier one. Memory goes back to its allocation stream when it is freed, where it may be reused at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Clock", "Memory", "Order", "Race", "Timeline"]


@dataclass(frozen=True)
class Timeline:
    """A CUDA stream of a device, by its number there (0 is the default stream), or a host thread (no device)."""

    device: int | None
    number: int

    def __str__(self) -> str:
        return f"host thread {self.number}" if self.device is None else f"stream {self.number} of cuda:{self.device}"


Clock = Mapping[Timeline, int]  # timeline -> operations of it that are known to be done


@dataclass(frozen=True)
class _Access:
    """One access to a memory: the operation's number on its timeline."""

    timeline: Timeline
    tick: int
    where: str

    def __str__(self) -> str:
        return f"{self.where} on {self.timeline}"


@dataclass
class Memory:
    """One storage: its allocation stream, every timeline's last accesses, and the streams told by record_stream."""

    owner: Timeline
    writes: dict[Timeline, _Access] = field(default_factory=dict)
    reads: dict[Timeline, _Access] = field(default_factory=dict)
    recorded: set[Timeline] = field(default_factory=set)


@dataclass(frozen=True)
class Race:
    """Two conflicting accesses without an order."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.second} is not ordered after {self.first}"


class Order:
    """The clocks of all timelines, and the races found so far."""

    def __init__(self) -> None:
        self._clocks: dict[Timeline, dict[Timeline, int]] = defaultdict(dict)
        self.races: dict[Race, None] = {}

    def clock(self, timeline: Timeline) -> Clock:
        """A copy of a timeline's clock: what an event recorded on it now stands for."""
        return dict(self._clocks[timeline])

    def join(self, timeline: Timeline, clock: Clock) -> None:
        """What is queued on `timeline` from here on runs after everything in `clock`."""
        own = self._clocks[timeline]
        for other, tick in clock.items():
            own[other] = max(own.get(other, 0), tick)

    def enqueue(self, timeline: Timeline, host: Timeline) -> None:
        """A host thread queues one operation, which runs after all that this thread has waited for."""
        self.join(timeline, self._clocks[host])
        self._clocks[timeline][timeline] = self._clocks[timeline].get(timeline, 0) + 1

    def allocate(self, owner: Timeline, where: str) -> Memory:
        """New memory, whose earlier use ends where its allocation stream is now: that counts as a write."""
        memory = Memory(owner)
        memory.writes[owner] = self._access(owner, where)
        return memory

    def read(self, memory: Memory, timeline: Timeline, where: str) -> None:
        """The operation queued last on `timeline` reads a memory."""
        access = self._access(timeline, where)
        self._check(memory.writes, self._clocks[timeline], str(access))
        memory.reads[timeline] = access

    def write(self, memory: Memory, timeline: Timeline, where: str) -> None:
        """The operation queued last on `timeline` writes a memory."""
        access = self._access(timeline, where)
        self._check(memory.writes, self._clocks[timeline], str(access))
        self._check(memory.reads, self._clocks[timeline], str(access))
        memory.writes[timeline] = access

    def free(self, memory: Memory, host: Timeline) -> None:
        """A host thread frees a memory: its allocation stream may overwrite it at once.

        The allocator itself waits for what the streams told by record_stream hold then.
        """
        clock: dict[Timeline, int] = {}
        for known in (memory.owner, host, *memory.recorded):
            for timeline, tick in self._clocks[known].items():
                clock[timeline] = max(clock.get(timeline, 0), tick)
        for accesses in (memory.writes, memory.reads):
            self._check(accesses, clock, f"reuse of the freed memory on {memory.owner}")

    def _access(self, timeline: Timeline, where: str) -> _Access:
        return _Access(timeline, self._clocks[timeline].get(timeline, 0), where)

    def _check(self, earlier: Mapping[Timeline, _Access], clock: Clock, second: str) -> None:
        for timeline, access in earlier.items():
            if access.tick > clock.get(timeline, 0):
                self.races[Race(str(access), second)] = None
