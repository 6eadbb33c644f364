"""What users change of a model after it was captured: modes of parts, rates, attributes; the next call follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from tests.runtime.helpers import compiled, differences, outcome, spread


class Scaled(nn.Module):
    """Two linear layers, and everything of which users change a setting."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.drop(self.norm(self.body(x)))) * self.scale
        return y


def frozen_norm(model: Any) -> None:
    model.norm.eval()


def part_in_training(model: Any) -> None:
    model.eval()
    model.norm.train()


def everything_dropped(model: Any) -> None:
    model.drop.p = 1.0


def slower_statistics(model: Any) -> None:
    model.norm.momentum = 0.01


def other_buffer(model: Any) -> None:
    model.scale = torch.full((1,), 2.0, dtype=torch.float64)


def other_head(model: Any) -> None:
    head = nn.Linear(8, 4).double()
    with torch.no_grad():
        nn.init.constant_(head.weight, 0.5)
        nn.init.constant_(head.bias, 0.25)
    model.head = head


CHANGES: tuple[Callable[[nn.Module], None], ...] = (
    frozen_norm,
    part_in_training,
    everything_dropped,
    slower_statistics,
    other_buffer,
    other_head,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_calls_counts(change: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    plain = Scaled().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    model = compiled(plain, spread(2, "hybrid"), 2)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}
    for module in (model, plain):
        change(module)
    assert differences(outcome(model, model, x), outcome(plain, plain, x)) == {}


def test_a_part_that_is_exchanged_is_trained_and_saved() -> None:
    model = compiled(Scaled().double(), spread(2, "data"), 2)
    head = nn.Linear(8, 5).double()
    model.head = head
    assert model.module.head is head
    assert any(parameter is head.weight for parameter in model.parameters())
    assert model.state_dict()["head.weight"].shape == (5, 8)
    assert model(torch.randn(4, 6, dtype=torch.float64)).shape == (4, 5)


def test_its_own_settings_stay_its_own() -> None:
    model = compiled(Scaled().double(), spread(2, "data"), 2)
    model.report = "mine"
    assert not hasattr(model.module, "report")
    assert model.report == "mine"


def test_it_shows_the_model_it_runs() -> None:
    model = compiled(Scaled().double(), spread(2, "data"), 2)
    assert "(body): Linear(in_features=6, out_features=8, bias=True)" in repr(model)


def test_statistics_over_all_batches_so_far_are_refused_by_name() -> None:
    model = compiled(Scaled().double(), spread(2, "data"), 2)
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x)
    model.norm.momentum = None
    with pytest.raises(CaptureError, match=r"norm: .*momentum=None.*update_bn"):
        model(x)
    model.eval()
    model(x)


class MakesTensors(nn.Module):
    """Its result has the type and the device that torch gives to tensors which name none."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) to the same."""
        return torch.linspace(0, 1, 6) / 3 + torch.get_default_dtype().itemsize + 0 * x.mean()


def test_the_default_type_is_that_of_the_call() -> None:
    plain, x = MakesTensors(), torch.randn(4, 6)
    model, before = compiled(plain, spread(2, "data"), 2), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert model(x).dtype is dtype
            assert torch.equal(model(x), plain(x))
    finally:
        torch.set_default_dtype(before)


def test_a_graph_is_for_one_default_device() -> None:
    captures = compiled(MakesTensors(), spread(2, "data"), 2)._captures
    before = captures.modes(True)
    with torch.device("meta"):
        assert captures.modes(True) != before
    assert captures.modes(True) == before
