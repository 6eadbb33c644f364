"""Communication, measured by two gloo processes, which are started once for all cases."""

from __future__ import annotations

import pytest

from tests.profiler.rank_cases import CASES
from tests.runtime.ranks import run_cases


@pytest.fixture(scope="module", name="failures")
def _failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(CASES, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, failures: dict[str, str]) -> None:
    assert failures[case] == ""
