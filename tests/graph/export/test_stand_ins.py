"""Stand-ins for parameters: what a capture sees, and what it leaves."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from parplan.graph.capture.capture import capture
from parplan.graph.export.stand_ins import stand_ins


class Tied(nn.Module):
    """Two names of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_parameter("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3) to (N, 3)."""
        result: torch.Tensor = self.second(self.first(x))
        return result


def test_stand_ins_share_memory_and_ties_and_are_gone_afterwards() -> None:
    model = Tied()
    own = dict(model.named_parameters(remove_duplicate=False))
    with stand_ins(model):
        weight = model.first.weight
        assert weight is not own["first.weight"]
        assert weight is model.second.weight
        assert weight.data_ptr() == own["first.weight"].data_ptr()
        assert not model.first.bias.requires_grad
    assert all(parameter is own[name] for name, parameter in model.named_parameters(remove_duplicate=False))


def test_a_capture_leaves_no_reference_to_the_parameters() -> None:
    model = Tied()
    capture(model, (torch.zeros(4, 3),))
    for parameter in model.parameters():
        assert weakref.getweakrefcount(parameter) == 0
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(1)))


def test_stand_ins_are_gone_after_an_error() -> None:
    model = Tied()
    weight = model.first.weight
    try:
        with stand_ins(model):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert model.first.weight is weight
