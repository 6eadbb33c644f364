"""Regions without gradients beside regions with autocast, inside of a forward: gradients are the plain model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import parplan


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
