"""Models with packed projections, cut by heads, train as the plain model: in one process and under torchrun."""

from __future__ import annotations

import random

import pytest
import torch

from parplan.graph.capture.capture import capture
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from tests.packed_models import GROUPED, PACKED
from tests.runtime.helpers import compiled, differences, outcome, random_strategies
from tests.runtime.packed_cases import CASES, cut_widely, train_alike
from tests.runtime.ranks import run_case

MODELS = {**PACKED, **{f"grouped_{name}": make for name, make in GROUPED.items() if name not in PACKED}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [2, 4])
def test_three_steps_are_the_plain_models(name: str, devices: int) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]().double()
    train_alike(compiled(plain, cut_widely(devices), devices), plain, slice(None), 4)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_any_plan_gives_the_plain_models_numbers(name: str) -> None:
    """Layouts with sections meet every other layout: shards of other axes and counts, replicas, single devices."""
    torch.manual_seed(3)
    plain, x = MODELS[name]().double(), torch.randn(4, 5, 16, dtype=torch.float64)
    graph = capture(plain, (x,))
    for seed in range(4):
        draw = random.Random(seed)
        strategies = random_strategies(graph, 4, draw)
        model = compiled(plain, strategies, 4)
        assert not differences(outcome(model.module, model, x), outcome(plain, plain, x)), seed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt2", "vit", "adapted", "grouped_enabled", "grouped_normalised"])
def test_nothing_moves_between_projections_and_their_attention(name: str) -> None:
    graph = capture(MODELS[name]().double(), (torch.randn(4, 5, 16, dtype=torch.float64),))
    strategies = {layer.name: cut_widely(4)(layer) for layer in graph.layers.values()}
    program = lower(graph, strategies, StepSetting.per_process(4, 4))
    (attention,) = (layer for layer in graph.layers.values() if layer.kind == "attention")
    moved = {transfer.given.value for transfer in program.transfers}
    assert strategies[attention.name].axis == "heads"
    assert moved.isdisjoint(attention.inputs)


@pytest.mark.full
@pytest.mark.parametrize(("case", "ranks"), [("trained", 2), ("checkpointed", 4), ("shared", 4)])
def test_ranks_train_as_one(case: str, ranks: int) -> None:
    run_case(CASES[case], ranks)
