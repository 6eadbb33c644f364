"""Rendezvous of ranks through the process group's store, in front of calls that one rank may make alone.

A collective that some ranks never come to ends at the group's timeout, half an hour later. So every rank tells the
store where it is in its sequence of calls that all ranks make, and a rank that calls the model without gradients, or
gathers its state, waits here first. It ends as soon as another rank is seen to be in another call, and on rank 0, which
is the one that programs let evaluate and save alone, when the others have given no sign for some seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

from parplan.errors import RuntimeFailure
from parplan.runtime.compat import WeakGroup, default_store, group_timeout, read_all

__all__ = ["RANK_WAIT", "RankAlone", "Rendezvous", "wait_s"]

RANK_WAIT = "PARPLAN_RANK_WAIT_S"
"""Environment variable: seconds that rank 0 waits for ranks of which nothing is heard."""

# Ranks come to an evaluation apart by what their data loaders and logs differ by, which is below this; one that
# captures or plans says so and is waited for. More would leave people in front of a program that seems to hang. Other
# ranks wait for rank 0 up to the group's timeout, as it may be writing a checkpoint.
_WAIT_S = 8.0
# Of a group that does not tell its timeout: torch's own default for gloo.
_TIMEOUT_S = 1800.0
# Of the seconds before, what rank 0 waits in the next call of the same kind if the others have not moved: a loop of
# evaluation takes 8/7 of them in all, and ranks that come together again a moment apart still meet.
_AGAIN = 1 / 8
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05  # between two looks at the store
_TOGETHER = "together"


class RankAlone(RuntimeFailure):
    """A call that all ranks have to make, made by some; nothing was sent.

    Attributes:
        absent: where the others are.
    """

    def __init__(self, message: str, absent: str) -> None:
        super().__init__(message)
        self.absent = absent


@dataclass(frozen=True)
class _Position:
    """The place of a rank in its sequence of calls that all ranks make.

    Args:
        steps: calls with gradients so far, the present one included.
        others: calls without gradients since.
        busy: it is on its way to the next one (it captures or plans).
        what: the call it is in.
    """

    steps: int = 0
    others: int = 0
    busy: bool = False
    what: str = "before its first call"

    @property
    def place(self) -> tuple[int, int]:
        """The part of it that is compared."""
        return self.steps, self.others

    def text(self) -> str:
        """As the store keeps it."""
        return f"{self.steps} {self.others} {int(self.busy)} {self.what}"

    @staticmethod
    def read(text: bytes) -> _Position:
        """From the store."""
        steps, others, busy, what = text.decode().split(" ", 3)
        return _Position(int(steps), int(others), busy == "1", what)


class Rendezvous:
    """The positions of the ranks of one compiled model, each told to the others through the store.

    Args:
        group: the process group; None for the default one.
        ranks: of the group, as numbered among all.
        rank: of this process in the group.
        number: of this rendezvous, the same on all ranks and new in each of them.

    Attributes:
        latest: the largest number in this process.
    """

    latest: ClassVar[int] = 0

    def __init__(self, group: WeakGroup, ranks: Sequence[int], rank: int, number: int) -> None:
        Rendezvous.latest = number
        self._group, self._rank = group, rank
        self._others = [other for other in range(len(ranks)) if other != rank]
        self._prefix = f"parplan/{ranks[0]}/{number}/"
        self._own = _Position()
        self._joined = False
        self._settled: dict[tuple[int, int], str] = {}  # keys of verdicts, by place
        # Ranks that this one has waited for in vain, in which call, and how often since they were heard of.
        self._missing: dict[int, _Position] = {}
        self._missed_in, self._misses = "", 0
        self._publish(self._own)

    def begin_call(self) -> None:
        """A call of the model begins."""
        self._joined = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it lasts, other ranks know that this one will come, later."""
        self._publish(_Position(self._own.steps, self._own.others, True, "capturing or planning"))
        try:
            yield
        finally:
            self._publish(self._own)

    def come_together(self, what: str, gradients: bool) -> str:
        """Wait until all ranks are in this call, once per call; "" then, else where the others are.

        A call with gradients only says that it is there: it is never the call of one rank.
        """
        if self._joined:
            return ""
        self._joined = gradients
        if gradients:
            self._own = _Position(self._own.steps + 1, 0, False, what)
            self._publish(self._own)
            return ""
        try:
            absent = self._wait(self._arrive(what))
        except (RuntimeError, ValueError):  # the group or its store has gone: collectives say so
            absent = ""
        self._joined = not absent
        return absent

    def _arrive(self, what: str) -> _Position:
        """The next place that no verdict was given on: a late rank goes on from where the others are."""
        own = self._own
        while own is self._own or default_store().check([self._key(own)]):
            own = _Position(own.steps, own.others + 1, False, what)
        self._own = own
        self._publish(own)
        return own

    def _wait(self, own: _Position) -> str:
        """The outcome of waiting at a place: the same on all ranks that are there."""
        began = heard = time.monotonic()
        pause = _SHORTEST_S
        limit = wait_s() if self._rank == 0 else None
        timeout = group_timeout(self._group())
        latest = timeout.total_seconds() if timeout is not None else _TIMEOUT_S
        while not default_store().check([self._key(own)]):
            found = self._positions()
            away = {r: p for r, p in found.items() if p.place != own.place or p.busy or p.what != own.what}
            now = time.monotonic()
            if any(position.busy for position in away.values()):
                heard = now
            passed = [r for r, p in away.items() if p.place > own.place or (p.place == own.place and not p.busy)]
            told = "; ".join(f"rank {rank} is {position.what}" for rank, position in away.items())
            if not away:
                return self._settle(own, found, _TOGETHER)
            if passed:
                return self._settle(own, found, told)
            again = away == self._missing and own.what == self._missed_in
            if limit is not None and now - heard > (limit * _AGAIN**self._misses if again else limit):
                self._missing, self._missed_in, self._misses = away, own.what, self._misses + 1 if again else 1
                told += f", and has given no sign for {limit:g} s: it may have stopped ({RANK_WAIT} sets how long)"
                return self._settle(own, found, told)
            if now - began > latest:
                return self._settle(own, found, f"{told}, and has not come within {latest:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        return self._outcome(default_store().get(self._key(own)))

    def _settle(self, own: _Position, found: Mapping[int, _Position], verdict: str) -> str:
        """Settle for all ranks whether they are together in a call; the first verdict stays."""
        store, key = default_store(), self._key(own)
        settled = store.compare_set(key, "", f"{self._rank} {verdict}")
        lowest = min((own.place, *(position.place for position in found.values())))
        for place in [place for place in self._settled if place < lowest]:  # no rank will look there again
            store.delete_key(self._settled.pop(place))
        self._settled[own.place] = key
        return self._outcome(settled)

    def _outcome(self, settled: bytes) -> str:
        rank, verdict = settled.decode().split(" ", 1)
        if verdict != _TOGETHER:
            return verdict if int(rank) == self._rank else f"rank {rank} went on without the others: {verdict}"
        self._missing = {}
        return ""

    def _key(self, own: _Position) -> str:
        return f"{self._prefix}{own.steps}.{own.others}"

    def _publish(self, position: _Position) -> None:
        with suppress(RuntimeError, ValueError):  # the group or its store has gone: collectives say so
            default_store().set(f"{self._prefix}at/{self._rank}", position.text())

    def _positions(self) -> dict[int, _Position]:
        """Those of the other ranks."""
        texts = read_all(default_store(), [f"{self._prefix}at/{rank}" for rank in self._others])
        return {rank: _Position.read(text) for rank, text in zip(self._others, texts, strict=True)}


def wait_s() -> float:
    """Seconds that rank 0 waits.

    Raises:
        RuntimeFailure: the environment variable is no number.
    """
    given = os.environ.get(RANK_WAIT, "")
    try:
        wait_s = float(given) if given else _WAIT_S
    except ValueError:
        wait_s = float("nan")
    if not wait_s >= 0:  # also what no number is: nothing is longer than that
        raise RuntimeFailure(f"{RANK_WAIT} is {given!r}; give seconds, such as {_WAIT_S:g}")
    return wait_s
