"""Buffers and attributes over processes: the plain model's on every rank, or an error on every rank."""

from __future__ import annotations

import pytest

from tests.runtime.rank_attributes import CASES
from tests.runtime.ranks import run_case


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_with_the_plain_model(case: str) -> None:
    run_case(CASES[case], 2)
