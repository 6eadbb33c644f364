"""Branches on values that no input decides are taken in a capture, as at every call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.runtime.module.compiled import Compiled
from tests.graph.by_hand import assert_same_numbers, halves
from tests.runtime.helpers import compiled, planner, spread

Flag = Callable[[Tensor], Tensor]


class Branches(nn.Module):
    """Takes one of two layers, by a flag that a test computes from the input."""

    def __init__(self, flag: Flag) -> None:
        super().__init__()
        self.flag, self.yes, self.no = flag, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        layer = self.yes if self.flag(x).item() else self.no
        result: Tensor = layer(x)
        return result


def of_ones(x: Tensor) -> Tensor:
    return (torch.ones(x.shape[:1]) > 0).all()


def like_the_input(x: Tensor) -> Tensor:
    return (1.0 - torch.ones_like(x)).any()


def filled_in_place(x: Tensor) -> Tensor:
    table = torch.zeros(3)
    table[1:] = torch.tensor([1.0, 5.0])
    return table[2] > 4


def before_it_takes_inputs(x: Tensor) -> Tensor:
    table = torch.zeros(4)
    flag = table.sum() > 0
    table += x[0]
    return flag


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flag", "taken"),
    [(of_ones, "yes"), (like_the_input, "no"), (filled_in_place, "yes"), (before_it_takes_inputs, "no")],
)
def test_a_branch_that_no_input_decides_is_taken(flag: Flag, taken: str) -> None:
    model, x = Branches(flag).double(), torch.randn(6, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    assert list(graph.layers) == [taken]
    assert_same_numbers(graph, model, (x,), choose=halves)


def of_the_input(x: Tensor) -> Tensor:
    return x.sum() > 0


def written_by_the_input(x: Tensor) -> Tensor:
    table = torch.zeros(4)
    view = table[1:]
    view += x[0, 1:]
    return table.sum() > 0


def drawn(x: Tensor) -> Tensor:
    return torch.rand(()) > 0.5


OUTSIDE = torch.ones(3)


def of_a_global_tensor(x: Tensor) -> Tensor:
    return OUTSIDE.any()


def filled_with_the_input(x: Tensor) -> Tensor:
    return torch.full_like(torch.ones(3), x.sum().item())[0] > 0


@pytest.mark.parametrize("flag", [of_the_input, written_by_the_input, drawn, of_a_global_tensor, filled_with_the_input])
def test_a_branch_on_other_values_is_refused_with_its_line(flag: Flag) -> None:
    with pytest.raises(CaptureError, match=r"a branch is data-dependent(.|\n)*test_constant_values.py:\d+: layer = "):
        capture(Branches(flag), (torch.randn(6, 4),))


def test_a_number_that_follows_the_batch_is_seen_at_another_batch() -> None:
    class Divides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.ones(x.shape[0]).sum().item()

    model, x = Divides(), torch.randn(6, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    assert graph.fixed_batch
    assert_same_numbers(graph, model, (x,), choose=halves)


def test_a_branch_that_follows_the_batch_is_captured_for_each_batch() -> None:
    plain = Branches(lambda x: (torch.arange(x.shape[0]) > 20).any()).double()
    model = compiled(plain, spread(2, "data"), 2)
    for samples in (6, 40, 8):
        x = torch.randn(samples, 4, dtype=torch.float64)
        assert torch.allclose(model(x), plain(x), atol=1e-12)


class Masked(Branches):
    """Branches on a tensor in an attribute."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(lambda x: self.mask.any())
        self.mask = torch.ones(3)


def test_a_tensor_in_an_attribute_is_compared_by_its_values() -> None:
    """Also one that is written without a trace: through `.data`, a view of it, or an array that shares its memory."""
    plain, x = Masked().double(), torch.randn(6, 4, dtype=torch.float64)
    model = Compiled(plain, planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    for value in (1.0, 0.0, 1.0):
        plain.mask.data.fill_(value)
        assert torch.allclose(model(x), plain(x), atol=1e-12)


def test_it_is_taken_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        model, x = Branches(lambda x: torch.ones_like(x).sum() > 0), torch.randn(6, 4)
    assert list(capture(model, (x,)).layers) == ["yes"]
