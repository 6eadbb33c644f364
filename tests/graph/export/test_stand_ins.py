"""Stand-ins for parameters: what a capture sees, and what it leaves."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
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


@pytest.mark.full
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


class Converts(nn.Module):
    """Converts its layer to the type of its input at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        self.layer = self.layer.to(x.dtype)
        result: Tensor = self.layer.to(x)(x)
        return result


def test_a_conversion_to_the_type_that_a_module_has_changes_nothing() -> None:
    model, x, plain = Converts(), torch.randn(6, 4), nn.Module.to
    graph = capture(model, (x,))
    assert list(graph.layers) == ["layer"]
    assert not graph.settled
    assert nn.Module.to is plain
    with pytest.raises(CaptureError, match=r"(?s)cannot be captured.*:\d+: self.layer = self.layer.to"):
        capture(model, (x.double(),))
