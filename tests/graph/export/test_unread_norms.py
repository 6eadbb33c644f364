"""Batch norms whose result nobody reads keep their running statistics, as in the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from tests.graph.models import rand


class Backbone(nn.Module):
    """Two stages, of which the second, with two batch norms, is computed for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        self.second(h)
        return h.mean((2, 3))


class Twice(Backbone):
    """The same norm, read once and once not."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        self.first[1](h)
        return h.mean((2, 3))


@pytest.mark.parametrize("pins", [{"first.0": "replicas:2"}])
def test_unread_statistics_follow_the_batches(pins: dict[str, str]) -> None:
    plain = Backbone().double()
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu"] * 2, pins=pins)
    for _ in range(2):
        x = rand(4, 3, 6, 6)
        for model in (plain, compiled):
            model(x).square().sum().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer, rtol=1e-9, atol=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_statistics_that_another_call_uses_are_refused() -> None:
    with pytest.raises(CaptureError, match="nobody reads the result of a batch norm"):
        capture(Twice().double(), (rand(4, 3, 6, 6),))
