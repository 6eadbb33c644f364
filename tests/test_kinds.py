"""Models of the kinds people bring keep their numbers under every kind of plan."""

from __future__ import annotations

from functools import partial

import pytest

from parplan.graph.capture.capture import capture
from parplan.verification import verify_plan
from tests.kinds import KINDS
from tests.plans import PLANS, plan_by


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_kept(kind: str, plan: str, devices: int) -> None:
    model, args = KINDS[kind].build(), KINDS[kind].args()
    found = verify_plan(model, args, None, partial(plan_by, plan, devices), devices=devices)
    assert found.passed, found.rows


@pytest.mark.full
@pytest.mark.parametrize(("kind", "whole"), [("language", {"batch_mean"}), ("encoder", set()), ("unet", set())])
def test_samples_can_be_spread_over_replicas_but_for_the_mean_of_a_loss(kind: str, whole: set[str]) -> None:
    graph = capture(KINDS[kind].build(), KINDS[kind].args())
    assert not graph.fixed_batch
    assert {layer.name for layer in graph.layers.values() if layer.batch is None and not layer.constant} == whole


def test_a_number_of_the_batch_bars_replicas() -> None:
    graph = capture(KINDS["functions"].build(), KINDS["functions"].args())
    assert graph.fixed_batch
