"""Sharded parameters over processes: what training code does with parameters gives plain training's numbers."""

from __future__ import annotations

import pytest

from tests.runtime.ranks import run_cases
from tests.runtime.sharded_cases import CASES

# The first test waits for all cases of two groups of processes.
pytestmark = pytest.mark.timeout(900)

Reports = dict[int, dict[str, str]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Failures, by number of ranks and case."""
    return {ranks: run_cases(CASES, ranks, tmp_path_factory.mktemp(f"sharded{ranks}")) for ranks in (2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_plain_training(reports: Reports, ranks: int, case: str) -> None:
    assert reports[ranks][case] == "", reports[ranks][case]
