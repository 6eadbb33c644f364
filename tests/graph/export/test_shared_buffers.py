"""Buffers that a model has under several names, and views of buffers, that the forward writes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from tests.graph.models import rand


class Norm(nn.Module):
    """A running mean, and a counter of its steps."""

    mean: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean.clone()


class Tower(nn.Module):
    """A layer behind a norm that another tower has, too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc = norm, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.norm(x))
        return y


class View(nn.Module):
    """A buffer, and a part of it as another."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.fc, self.whole = nn.Linear(4, 4).double(), nn.Buffer(rand(4))
        self.part: Tensor = nn.Buffer(self.whole[1:2]) if kept else self.whole[1:2]

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1)
        y: Tensor = self.fc(x) * self.part.clone()
        return y


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", [Norm, lambda: nn.BatchNorm1d(4)])
def test_a_norm_under_two_names_is_written_by_both_calls(norm: type[nn.Module]) -> None:
    shared = norm()
    plain = nn.Sequential(nn.Linear(4, 4), Tower(shared), Tower(shared)).double()
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu"] * 2, pins={"0": "replicas:2"})
    for _ in range(2):
        x = rand(4, 4)
        for model in (plain, compiled):
            model(x).square().sum().backward()
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer, rtol=1e-9, atol=1e-12)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
def test_a_written_buffer_with_a_view_elsewhere_is_refused(kept: bool) -> None:
    with pytest.raises(CaptureError, match="share memory"):
        capture(View(kept), (rand(4, 4),))
