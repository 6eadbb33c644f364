"""A slice of benchmarks/verification.py and of benchmarks/plans.py; the benchmarks run the whole matrix."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module

import pytest

import parplan
from parplan.planner.decision import Decision
from parplan.verification import verify_plan
from tests.plans import plan_by

CASES = [
    ("alexnet", "hybrid", 4),
    ("alexnet", "sums", 2),
    ("two_tower", "towers", 2),
    ("two_tower", "towers", 4),
    ("vgg16", "model parallel", 3),
    ("resnet50", "data parallel", 3),
    ("resnet50", "mixed", 4),
    ("mlp", "solver", 4),
    ("gpt2", "data parallel", 3),
    ("gpt2", "mixed", 4),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("example", "name", "devices"), CASES)
def test_plans_keep_the_numbers(example: str, name: str, devices: int) -> None:
    module, inputs = import_module(f"examples.{example}").small()
    found = verify_plan(module, inputs, None, partial(plan_by, name, devices), devices=devices)
    assert found.passed, found.rows


@cache
def decided(example: str, gpus: int) -> Decision:
    module = import_module(f"examples.{example}")
    return parplan.analyze(module.build(), module.example_inputs(), gpus=gpus, tolerance=0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("example", "gpus"),
    [
        ("alexnet", 4),
        pytest.param("vgg16", 6, marks=pytest.mark.full),
        pytest.param("mlp", 7, marks=pytest.mark.full),
        pytest.param("two_tower", 2, marks=pytest.mark.full),
        pytest.param("two_tower", 4, marks=pytest.mark.full),
        pytest.param("two_tower", 8, marks=pytest.mark.full),
        pytest.param("resnet50", 8, marks=pytest.mark.full),
    ],
)
def test_full_size_plans_are_proven(example: str, gpus: int) -> None:
    assert decided(example, gpus).proof.status == "OPTIMAL"
