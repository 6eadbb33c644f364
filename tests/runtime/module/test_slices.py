"""State in slices: training is the plain model's, in float64, in one process and on ranks."""

from __future__ import annotations

import pytest

from parplan.plan import Strategy
from tests.runtime.helpers import spread
from tests.runtime.ranks import run_case
from tests.runtime.slice_cases import on_ranks, trained

FOUR = (0, 1, 2, 3)


@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_in_one_process(devices: int) -> None:
    trained(spread(devices, "data"), devices)


@pytest.mark.parametrize("axis", ["out-features", "in-features"])
def test_replicas_of_shards_in_one_process(axis: str) -> None:
    cut = Strategy(2, 2, axis, FOUR)
    trained(lambda layer: cut if layer.parameters else Strategy(4, 1, None, FOUR), 4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_on_ranks(ranks: int) -> None:
    run_case(on_ranks, ranks)
