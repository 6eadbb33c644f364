"""Regions without gradients beside regions with autocast, inside of a forward: gradients are the plain model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import SelfCheckError


class Regions(nn.Module):
    """A layer that is trained and one that is not, in regions one inside the other."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first, self.held, self.last, self.order = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "autocast in no_grad":
            h = self.first(x)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                t = self.held(h) * 2
            y: Tensor = self.last(h + t.float())
            return y
        with torch.autocast("cpu", torch.bfloat16):
            h = self.first(x)
            if self.order == "no_grad in autocast":
                with torch.no_grad():
                    t = self.held(h) * 2
            else:
                with torch.autocast("cpu", enabled=False), torch.no_grad():
                    t = self.held(h.float()) * 2
            y = self.last(h + t)
        return y.float()


@pytest.mark.parametrize(
    "order",
    [
        "no_grad in autocast",
        pytest.param("no autocast", marks=pytest.mark.full),
        pytest.param("autocast in no_grad", marks=pytest.mark.full),
    ],
)
def test_what_is_made_without_gradients_has_none(order: str) -> None:
    plain = Regions(order)
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu"], check="off")
    x = torch.randn(4, 8)
    for model in (plain, compiled):
        model(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        found = compiled.get_parameter(name).grad
        if parameter.grad is None:
            assert found is None or not found.any()
        else:
            assert found is not None
            assert torch.equal(found, parameter.grad)


class Islands(nn.Module):
    """Layers under the caller's autocast, and a region of another kind between or behind them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 16), nn.Linear(16, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "first":
            with torch.autocast("cpu", enabled=False):
                h = self.first(x * 1e6) / 1e6  # more than float16 holds
        else:
            h = torch.relu(self.first(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "another type"):
            if self.kind != "first":
                h = (h.float() * 1e6) @ self.last.weight.t()
        y: Tensor = self.last(h) if self.kind == "first" else h
        return y


@pytest.mark.parametrize("kind", ["first", "last", "another type"])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_regions_keep_their_types_under_autocast(kind: str, devices: int) -> None:
    """Their ops were cast by the caller's autocast once more, to infinity in float16."""
    plain = Islands(kind)
    compiled = parplan.compile(copy.deepcopy(plain), devices=["cpu"] * devices, check="off")
    x, found = torch.randn(8, 8), list[Tensor]()
    for model in (plain, compiled):
        with torch.autocast("cpu", torch.float16):
            found.append(model(x))
        (found[-1].double() / 1e6).square().mean().backward()
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[1], found[0])
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-6)


def test_the_self_check_compares_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an inexact result: its copy in float64 agrees, as rounding would."""
    monkeypatch.setattr("parplan.graph.local._without_autocast", lambda target, kind: target)
    compiled = parplan.compile(Islands("last"), devices=["cpu"])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SelfCheckError, match="types or structure"):
        compiled(torch.randn(8, 8))
