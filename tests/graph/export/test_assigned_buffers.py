"""Buffers that the forward of a submodule assigns, against the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parplan
from parplan.errors import CaptureError
from tests.graph.models import rand


class Counts(nn.Module):
    """A layer that assigns its buffer twice, reads it, and still holds the tensor that it was before."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        before = self.count
        self.count = self.count + 1
        self.count = self.count * 2
        y: Tensor = self.fc(x) / self.count + before
        return y


@pytest.mark.full
@pytest.mark.parametrize("pin", ["*=replicas:2", "*=shards:2"])
def test_a_submodules_assignment_is_a_write(pin: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Counts(), nn.Tanh())).double()
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu"] * 2, pins={"0": pin.split("=")[1]})
    for _ in range(3):
        x = rand(4, 4)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        compiled.eval(), plain.eval()
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-9)
    assert compiled.get_buffer("1.0.count").item() == plain.get_buffer("1.0.count").item() == 30.0
    assert type(plain[1][0].count) is type(compiled.module[1][0].count) is Tensor  # type: ignore[index]


@pytest.mark.full
def test_a_recomputed_forward_assigns_again() -> None:
    plain = nn.Sequential(Counts(), nn.Tanh()).double()
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu"] * 2)
    for _ in range(2):
        x = rand(4, 4)
        for model in (plain, compiled):
            checkpoint(model, x, use_reentrant=False).sum().backward()
        assert compiled.get_buffer("0.count").item() == plain.get_buffer("0.count").item()


def test_a_module_of_several_names_is_refused() -> None:
    counts = Counts()
    with pytest.raises(CaptureError, match=r"count of Counts, a module that the model has under several names"):
        parplan.compile(nn.Sequential(counts, nn.Tanh(), counts), rand(4, 4), devices=["cpu"])


class Buffers(nn.Module):
    """Two buffers that trade places, or of which one follows the other."""

    last: Tensor
    latest: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("latest", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.last
        if self.way == "swap":
            self.last, self.latest = self.latest, self.last
        elif self.way == "follow":
            self.last = self.latest
            self.latest = y.detach().mean(0)
        else:
            self.last, self.latest = self.latest[:4], self.last + 1
        return y


@pytest.mark.parametrize("way", ["swap", "follow", "view"])
def test_a_buffer_may_take_the_place_of_another(way: str) -> None:
    """What another buffer has is read before that one is written."""
    plain = Buffers(way)
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu", "cpu"], check="off")
    for _ in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(compiled(x), plain(x))
    for name, wanted in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), wanted)
