"""The benchmark of planning at scale: its models are the sizes it says, and it says how a case ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.scale import CASES, Case, measure, plan
from benchmarks.scale_models import LLAMA_405B, block_stack, transformer_profile
from examples.export_layer_profile import format_layer_profile
from parplan.cost_models.layer_profile.text import parse_layer_profile


def test_the_profile_has_the_published_parameters() -> None:
    profile = transformer_profile(LLAMA_405B)
    assert sum(layer.parameter_bytes for layer in profile.layers) / 2 == pytest.approx(405e9, rel=0.01)
    assert len(profile.layers) == 13 * 126 + 4


def test_the_profile_is_one_that_a_file_can_hold() -> None:
    profile = transformer_profile(replace(LLAMA_405B, blocks=2, samples=16))
    assert parse_layer_profile(format_layer_profile(profile), "text") == profile


def test_a_stack_of_blocks_takes_no_memory() -> None:
    stack = block_stack(2, width=64, heads=4)
    assert all(parameter.is_meta for parameter in stack.parameters())
    assert stack(torch.zeros(3, 5, 64, device="meta")).shape == (3, 5, 64)


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.full
def test_a_case_that_ends_and_one_that_is_ended() -> None:
    small = plan(Case("blocks", 1, 2, 1), 10.0)
    assert small["status"] in ("OPTIMAL", "FEASIBLE")
    assert small["gap"] >= 0
    ended = measure(CASES[0], 10.0, kill_after_s=0.0)
    assert ended.status == "ENDED"
    assert ended.detail == "after 0 s, in phase imports"
