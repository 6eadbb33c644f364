"""Checkpoints inside a forward disappear in a capture, and the report says so."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parplan
from parplan.graph.capture.capture import capture
from parplan.report.as_json import to_json


class Checkpointed(nn.Module):
    """Two blocks of which the backward computes the activations again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            y: Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
            x = y.relu()
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_counted_by_line(reentrant: bool) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    graph = capture(Checkpointed(reentrant), (x,))
    ((line, calls),) = graph.checkpoints.items()
    assert calls == 2
    assert "y: Tensor = checkpoint(" in line


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_report_says_that_memory_is_priced_without_them(reentrant: bool) -> None:
    decision = parplan.analyze(Checkpointed(reentrant), torch.randn(4, 6), gpus=2)
    (note,) = (note for note in decision.notes if "checkpoint" in note)
    assert note.startswith("2 calls of torch.utils.checkpoint in the forward (")
    assert note.endswith("(pins saved:replay).")
    assert note in json.loads(to_json(decision))["notes"]


def test_nothing_is_said_of_models_without_one() -> None:
    assert not capture(nn.Linear(6, 6), (torch.randn(4, 6),)).checkpoints
