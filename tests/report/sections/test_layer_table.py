"""Headings of the layer table: where layers are, and when their weights are updated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.plan import Strategy
from parplan.report.terminal import Detail
from tests.report.decisions import alexnet, pinned
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


def test_a_reason_that_many_lines_have_is_said_once() -> None:
    decision = alexnet()
    why = "no other split of it is legal in 4 passes"
    layers = tuple(replace(layer, why=why) if layer.strategy.replicas > 1 else layer for layer in decision.layers)
    lines = sum(layer.strategy.replicas > 1 for layer in layers)
    text = printed(replace(decision, layers=layers), 80, detail=Detail.FULL)
    assert text.count("legal in 4 passes") == 1
    assert f"{why}; so for the next {lines - 1} lines" in text
