"""Python's garbage collector while a model is captured and planned: run seldom, as nearly all that is made stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seldom_collected"]

SELDOM = (1_000_000, 10, 10)
"""Thresholds of the collector: a first look at new objects for so many of them, wider ones a tenth as often each."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Raise the thresholds of cyclic garbage collection while it lasts, a decorator, too.

    Graphs, prices and problems are many objects that live until the plan is there, and torch and a model library have
    hundreds of thousands more: going through them again and again took a fifth of the time for 32 blocks. A collector
    that is off stays so, and one that somebody made more patient than this, too.
    """
    before = gc.get_threshold()
    if before[0] == 0 or before[0] >= SELDOM[0]:  # also within another one
        yield
        return
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        if gc.get_threshold() == SELDOM:  # what others have set in the meantime is theirs
            gc.set_threshold(*before)
