"""Measurements: their figures, the rule that stops them, the spread of runs, and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

__all__ = ["Measurement", "StoppingRule", "one_thread", "spread_of"]


@dataclass(frozen=True)
class Measurement:
    """Mean seconds of forward and backward over `runs`, with the spread of their sum.

    Parts are added up to a step, and means add up: where runs scatter upwards, as beside other processes, medians of
    parts come to less than the median of the step. The spread is 1.48 times the median distance from the median, a
    standard deviation if runs were normal; 1.0, that is unknown, when there was time for a single run.

    Args:
        reference_s: what the reference kernel took in the same second; 0 where none was run.
        when: UTC, ISO 8601, to the second.
    """

    forward_s: float
    backward_s: float
    spread: float
    runs: int
    reference_s: float = 0.0
    when: str = ""


@dataclass(frozen=True)
class StoppingRule:
    """Stop measuring when the median's standard error is below `error` (relative), or after `cap_s` seconds."""

    error: float = 0.02
    cap_s: float = 1.0
    least_runs: int = 5
    most_runs: int = 200


def spread_of(times: Sequence[float], middle: float) -> float:
    """1.48 times the median distance of `times` from `middle`, relative to it; 1.0 where that says nothing."""
    if len(times) < 2 or middle <= 0:
        return 1.0
    return 1.4826 * median(abs(time - middle) for time in times) / middle


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """One thread for CPU ops, and the number it was afterwards; nothing on other devices."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
