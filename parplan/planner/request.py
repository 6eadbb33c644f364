"""What is asked of the planner, and whom it tells while it works."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from parplan.pins import Pin
from parplan.plan import Plan

__all__ = ["Progress", "Request"]


class Progress(Protocol):
    """What the driver tells while it works; see report/progress.py."""

    def phase(self, name: str) -> None:
        """A phase begins: "capture", "costs" or "solve"."""
        ...

    def advance(self, done: int, total: int) -> None:
        """So much of the phase is done."""
        ...

    def solver(self, objective: float, bound: float) -> None:
        """Best step time and bound so far, in seconds."""
        ...


@dataclass(frozen=True)
class Request:
    """What is asked of the planner.

    Args:
        rules: "default" or "strict" reading of the divisibility rules.
        plan: a plan to review instead of the solver's own.
        time_limit_s: for all searches together; the best plan found is returned with its gap.
        notes: what the reader must know first.
        capture_s: how long capture took, for the record.
        times_from: the file that layers' times come from, if any.
        pins: what is decided by hand; only the rest is searched.
        price_pins: find out what each costs, for a report; that takes a search for every pin.
        scheme: how samples get from many replicas to fewer: "gather", "broadcast", "interleave", or as is fastest.
    """

    precision: str = "fp32"
    optimizer: str = "adam"
    rules: str = "default"
    plan: Plan | None = None
    time_limit_s: float = 60.0
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    times_from: str = ""
    pins: tuple[Pin, ...] = ()
    scheme: str = "auto"
    price_pins: bool = True
