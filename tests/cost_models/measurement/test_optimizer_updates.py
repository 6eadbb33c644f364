"""Updates of optimizers: what is measured, and what a model's parameters are priced at."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parplan.cost_models.measurement import optimizer_updates as updates
from parplan.cost_models.measurement.optimizer_updates import OPTIMIZERS, UpdateTimes, measure_updates
from parplan.cost_models.optimizers import OPTIMIZER_MEMORY
from parplan.cost_models.profile.records import PartEntry, SessionProfile
from parplan.cost_models.sampling import Measurement

CPU = torch.device("cpu")


def times(points: dict[int, float], scale: float = 1.0) -> UpdateTimes:
    """`points`: seconds by bytes; 0 bytes is calling the optimizer."""
    profile = SessionProfile()
    for nbytes, seconds in points.items():
        family = "update adam float32"
        profile.put(PartEntry(f"{family}[{nbytes}]", family, 0.0, nbytes, Measurement(seconds, 0.0, 0.0, 5)))
    return UpdateTimes(profile, "adam", lambda _: scale)


def test_sizes_between_beside_and_beyond() -> None:
    found = times({0: 7.0, 100: 1.0, 10_000: 200.0})
    assert found.calling_s == 7.0
    assert found.seconds([100]) == pytest.approx(1.0)
    assert found.seconds([10_000]) == pytest.approx(200.0)
    assert found.seconds([1]) == pytest.approx(1.0)  # never less than the smallest
    assert found.seconds([50_000]) == pytest.approx(1000.0)  # the largest one's rate
    assert found.seconds([1000]) == pytest.approx(1000 * (0.01 * 0.02) ** 0.5)  # halfway between the rates
    assert found.seconds([0, 100, 100]) == pytest.approx(2.0)  # nothing for no bytes
    assert times({0: 7.0, 100: 1.0}, scale=3.0).seconds([100]) == pytest.approx(3.0)


@given(
    st.dictionaries(st.integers(1, 10**8), st.floats(0, 1), min_size=1, max_size=5),
    st.integers(1, 10**9),
)
def test_a_rate_between_two_sizes_is_between_theirs(points: dict[int, float], nbytes: int) -> None:
    rate = times({0: 1.0, **points}).seconds([nbytes]) / nbytes
    pairs = [(low, high) for low, high in pairwise(sorted(points)) if low <= nbytes <= high]
    for low, high in pairs:
        ends = sorted((points[low] / low, points[high] / high))
        assert ends[0] * (1 - 1e-9) <= rate <= ends[1] * (1 + 1e-9)
    if not pairs:
        assert rate >= 0


def test_a_profile_without_what_calling_takes_loses_no_size() -> None:
    found = times({100: 1.0, 10_000: 2.0})
    assert found.calling_s == 0.0
    assert found.seconds([100]) == pytest.approx(1.0)


def test_nothing_measured_is_no_times() -> None:
    assert not times({})
    assert not times({0: 1.0})
    assert times({0: 1.0, 4: 1.0})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Only small sizes are measured; what is stepped is recorded."""
    monkeypatch.setattr(updates, "_SIZES", (4, 64))
    monkeypatch.setattr(updates, "_CACHES_BYTES", 64)
    made: list[int] = []
    real = updates._stepper

    def stepper(optimizer: str, size: int, count: int, device: torch.device) -> Callable[[], object]:
        made.append(size)
        return real(optimizer, size, count, device)

    monkeypatch.setattr(updates, "_stepper", stepper)
    return made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_measured_once(optimizer: str, small: list[int]) -> None:
    profile = SessionProfile()
    measure_updates(optimizer, CPU, profile, runs=2)
    assert sorted(entry.nbytes for entry in profile.all()) == [0.0, 16.0, 256.0]
    assert all(entry.measurement.reference_s > 0 and entry.measurement.when for entry in profile.all())
    steps = len(small)
    measure_updates(optimizer, CPU, profile, runs=2)
    assert len(small) == steps
    measure_updates(optimizer, CPU, profile, runs=2, again=True)
    assert len(small) == 2 * steps


def test_what_the_command_offers_can_be_measured_and_counted() -> None:
    assert set(OPTIMIZER_MEMORY) == set(OPTIMIZERS)
