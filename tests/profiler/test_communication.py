"""Communication: how a time is taken, on a clock of the test's own; and all of it, measured by two gloo processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parplan.cost_models.measurement.in_context_timing import ProcessGroup
from parplan.cost_models.profile.records import SessionProfile
from parplan.profiler import communication
from parplan.profiler.communication import LEAST_RUNS, between_compute, measure_links
from tests.profiler.rank_cases import CASES
from tests.runtime.ranks import run_case


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str) -> None:
    run_case(CASES[case], 2)


class FakeClock:
    """Seconds go on by what is asked for; `noise` is added to each run of the reference kernel, in turns."""

    def __init__(self, *noise: float) -> None:
        self.now_s, self._noise, self._runs = 0.0, noise, 0

    def __call__(self) -> float:
        return self.now_s

    def takes(self, seconds: float) -> Callable[[], None]:
        """Work of so many seconds."""

        def run() -> None:
            self.now_s += seconds

        return run

    def seconds(self, runs: int = 1) -> float:
        """The reference kernel: one second a run, and noise."""
        before_s = self.now_s
        for _ in range(runs):
            self.now_s += 1.0 + self._noise[self._runs % len(self._noise)]
            self._runs += 1
        return self.now_s - before_s

    def wait(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("times", [1, 4])
def test_what_is_added_between_compute(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    clock = FakeClock(0.0)
    monkeypatch.setattr(communication, "perf_counter", clock)
    assert between_compute(clock.takes(0.25), clock, ProcessGroup(), times) == pytest.approx(0.25)  # type: ignore[arg-type]


def test_what_noise_hides_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute that came out slower by itself than with the message in it."""
    clock = FakeClock(0.3, -0.3)
    monkeypatch.setattr(communication, "perf_counter", clock)
    assert between_compute(clock.takes(0.01), clock, ProcessGroup(), 1) == 0  # type: ignore[arg-type]


class OneOfTwo(ProcessGroup):
    """A group of two, of which the other says the same."""

    count, member = 2, True


class Still:
    """A transport that moves nothing."""

    rank = 0

    def group(self, ranks: tuple[int, ...]) -> None:
        """No group to make."""

    def physical(self, rank: int) -> torch.device:
        """Where a rank computes."""
        return torch.device("cpu")


@pytest.mark.parametrize(("measured_s", "spread"), [(0.0, 1.0), (2e-6, 0.0)])
def test_a_zero_is_not_certain(monkeypatch: pytest.MonkeyPatch, measured_s: float, spread: float) -> None:
    monkeypatch.setattr(communication, "_added", lambda *rest: lambda: measured_s)
    profile = SessionProfile()
    measure_links(Still(), OneOfTwo(), "gloo", profile, cap_s=0.0, sizes=(1024,))  # type: ignore[arg-type]
    assert {(one.seconds, one.spread, one.runs) for one in profile.links("gloo")} == {(measured_s, spread, LEAST_RUNS)}
