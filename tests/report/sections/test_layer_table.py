"""Headings of the layer table: where layers are, and when their weights are updated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.plan import Strategy
from tests.report.decisions import pinned
from tests.report.golden import printed


@pytest.mark.parametrize(
    ("period", "words"),
    [
        pytest.param(None, "on devices 0, 1;", id="not said"),
        pytest.param(1, "on devices 0, 1, weights updated after every pass;", id="every pass"),
        pytest.param(2, "on devices 0, 1, weights updated every 2 passes;", id="every other"),
    ],
)
def test_when_weights_are_updated(period: int | None, words: str) -> None:
    decision = pinned()
    first = replace(decision.layers[0], strategy=Strategy(2, 1, None, (0, 1), update_period=period))
    text = printed(replace(decision, layers=(first, *decision.layers[1:])), 120)
    assert f"2 replicas {words}" in text
