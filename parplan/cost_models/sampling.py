"""Times a forward and its backward on a device until the median is known well enough.

On CUDA, events are recorded between forward and backward and read after a batch of runs: nothing waits inside the timed
region. On a CPU one thread is used, as by a logical CPU device at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, sqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch

__all__ = ["Effort", "Measurement", "Trial", "one_thread", "sample"]


@dataclass(frozen=True)
class Measurement:
    """Median seconds of forward and backward over `runs`, with the spread of their sum relative to its median.

    The spread is 1.48 times the median distance from the median, a standard deviation if runs were normal; 1.0, that
    is unknown, when there was time for a single run.

    Args:
        reference_s: what the reference kernel took in the same second; 0 where none was run.
        saved_bytes: what autograd kept from forward to backward; None where that was not measured.
        peak_bytes: the most that was allocated at once; None where that was not measured.
        when: UTC, ISO 8601, to the second.
    """

    forward_s: float
    backward_s: float
    spread: float
    runs: int
    reference_s: float = 0.0
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    when: str = ""


@dataclass(frozen=True)
class Effort:
    """How long to go on: until the median's standard error is below `error` (relative), or for `cap_s` seconds."""

    error: float = 0.02
    cap_s: float = 1.0
    least_runs: int = 5
    most_runs: int = 200


@dataclass(frozen=True)
class Trial:
    """What is timed: `forward()` gives what `backward` takes."""

    forward: Callable[[], Any]
    backward: Callable[[Any], None]


@dataclass(frozen=True)
class _Run:
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def sample(trial: Trial, device: torch.device, effort: Effort | None = None) -> Measurement:
    """Run `trial` on `device` over and over and report the medians."""
    effort = effort or Effort()
    runs_of = _cuda_runs if device.type == "cuda" else _cpu_runs
    started = perf_counter()
    with one_thread(device):
        runs = runs_of(trial, 1)
        if perf_counter() - started < effort.cap_s:  # a first run is a warm-up when there is time for a second
            runs = runs_of(trial, 1)
        while _goes_on(runs, effort, perf_counter() - started):
            runs += runs_of(trial, min(max(1, len(runs)), 20))
    forward_s, backward_s = median(r.forward_s for r in runs), median(r.backward_s for r in runs)
    return Measurement(forward_s, backward_s, _spread(runs), len(runs))


def _goes_on(runs: Sequence[_Run], effort: Effort, spent_s: float) -> bool:
    if spent_s >= effort.cap_s or len(runs) >= effort.most_runs:
        return False
    # standard error of a median: 1.25 sigma / sqrt(n)
    return len(runs) < effort.least_runs or 1.25 * _spread(runs) / sqrt(len(runs)) > effort.error


def _spread(runs: Sequence[_Run]) -> float:
    if len(runs) < 2:
        return 1.0
    middle = median(run.total_s for run in runs)
    return 1.4826 * median(abs(run.total_s - middle) for run in runs) / middle if middle > 0 else inf


def _cpu_runs(trial: Trial, count: int) -> list[_Run]:
    return [_cpu_run(trial) for _ in range(count)]


def _cpu_run(trial: Trial) -> _Run:
    start = perf_counter()
    result = trial.forward()
    between = perf_counter()
    trial.backward(result)
    return _Run(between - start, perf_counter() - between)


def _cuda_runs(trial: Trial, count: int) -> list[_Run]:
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(3)) for _ in range(count)]
    for before, between, after in marks:
        before.record()
        result = trial.forward()
        between.record()
        trial.backward(result)
        after.record()
    torch.cuda.synchronize()
    return [_Run(b.elapsed_time(m) / 1e3, m.elapsed_time(a) / 1e3) for b, m, a in marks]


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
