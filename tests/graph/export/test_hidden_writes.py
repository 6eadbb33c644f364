"""Writes that autograd does not see are refused where a gradient goes through what they write, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from tests.graph.models import rand


class Written(nn.Module):
    """A hidden value, written in some way."""

    kept: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(4, 4), nn.Linear(4, 2), way
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.way.startswith("autocast "):
            with torch.autocast("cpu", torch.bfloat16):
                return self.written(x, self.way.removeprefix("autocast ")).float()
        return self.written(x, self.way)

    def written(self, x: Tensor, way: str) -> Tensor:
        h = self.first(x) + 1
        if way == "data":
            h.data.clamp_(-0.5, 0.5)
        elif way == "detached part":
            h.detach()[:, 0].zero_()
        elif way == "no_grad":
            with torch.no_grad():
                h.mul_(0.5)
        elif way == "no_grad part":
            with torch.no_grad():
                h[:, 0] = 0.5
        elif way == "copy":
            h.detach().clone().mul_(0.5)
        elif way == "behind":
            z: Tensor = self.last(h)
            h.sum().detach().mul_(0.5)
            return z
        elif way == "buffer":
            with torch.no_grad():
                self.kept.add_(h.mean(0))
        elif way == "not trained":
            with torch.no_grad():
                made = torch.zeros_like(h)
                made[:, 0] = h[:, 0]
                made.mul_(2)
            h = h + made
        y: Tensor = self.last(h)
        return y


@pytest.mark.parametrize("way", ["data", "detached part", "no_grad", "no_grad part"])
def test_a_hidden_write_of_what_has_a_gradient_is_refused(way: str) -> None:
    with pytest.raises(CaptureError, match="where autograd does not see it") as refused:
        capture(Written(way), (rand(4, 4),))
    assert "test_hidden_writes.py" in str(refused.value)


@pytest.mark.parametrize("way", ["data", "detached part", "no_grad", "no_grad part"])
def test_so_it_is_inside_of_autocast(way: str) -> None:
    with pytest.raises(CaptureError, match="where autograd does not see it"):
        capture(Written(f"autocast {way}"), (rand(4, 4),))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("region", ["", "autocast "])
@pytest.mark.parametrize("way", ["copy", "behind", "buffer", "not trained"])
def test_other_writes_are_taken(way: str, region: str) -> None:
    assert capture(Written(region + way), (rand(4, 4),)).layers


def test_without_gradients_there_is_none_to_lose() -> None:
    with torch.no_grad():
        assert capture(Written("no_grad part").eval(), (rand(4, 4),), training=False).layers
