"""Buffers and attributes over processes: the plain model's on every rank, or an error on every rank."""

from __future__ import annotations

import pytest

from tests.runtime.rank_attributes import CASES
from tests.runtime.ranks import run_cases


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed, by case."""
    return run_cases(CASES, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_the_plain_model(reports: dict[str, str], case: str) -> None:
    assert reports[case] == "", reports[case]
