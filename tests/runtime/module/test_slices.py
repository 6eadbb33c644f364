"""State in slices: training is the plain model's, in float64, in one process and on ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner, spread
from tests.runtime.micro_batch_cases import Rows
from tests.runtime.ranks import run_case
from tests.runtime.slice_cases import (
    by_collectives,
    decoder_in_less_memory,
    in_every_state_under_autocast,
    on_ranks,
    on_ranks_under_autocast,
    sharded,
    trained,
)  # fmt: skip

FOUR = (0, 1, 2, 3)


@pytest.mark.full
@pytest.mark.parametrize("state", ["sharded", "gathered"])
@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_in_one_process(devices: int, state: str) -> None:
    trained(spread(devices, "data"), devices, state)


@pytest.mark.full
@pytest.mark.parametrize("state", ["sharded", "gathered"])
@pytest.mark.parametrize("axis", ["out-features", "in-features"])
def test_replicas_of_shards_in_one_process(axis: str, state: str) -> None:
    cut = Strategy(2, 2, axis, FOUR)
    trained(lambda layer: cut if layer.parameters else Strategy(4, 1, None, FOUR), 4, state)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_on_ranks(ranks: int) -> None:
    run_case(on_ranks, ranks)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks_by_collectives(ranks: int) -> None:
    run_case(by_collectives, ranks)


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 3])
def test_under_autocast_in_one_process(devices: int) -> None:
    in_every_state_under_autocast(devices)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_under_autocast_on_ranks(ranks: int) -> None:
    run_case(on_ranks_under_autocast, ranks)


@pytest.mark.full
def test_a_decoder_in_less_memory() -> None:
    run_case(decoder_in_less_memory(2), 2)


# ---- weights that are freed behind their forward ---------------------------------------------------------------------


class Widened(nn.Module):
    """A layer whose result is a view of its weights, beside one that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(8, 8).double()), nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(x), self.weight.t()


def gathered(net: nn.Module) -> tuple[Compiled, nn.Module]:
    """The net with gathered state on two devices, and a plain one."""
    plain = copy.deepcopy(net)
    return Compiled(net, planner(sharded(spread(2, "data"), "gathered"), 2), devices=["cpu"] * 2), plain


def test_a_result_that_shows_weights_keeps_them() -> None:
    model, plain = gathered(Widened())
    x = torch.randn(4, 8).double()
    for own in (model, plain):
        result, weight = own(x)
        (result.sum() + (weight * torch.arange(64.0).view(8, 8)).sum()).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)


def test_two_backwards_of_one_forward() -> None:
    model, plain = gathered(Rows())
    x = torch.randn(4, 8).double()
    for own in (model, plain):
        loss = own(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)


def test_weights_written_before_the_backward_are_refused() -> None:
    """As torch refuses it of the plain model, which holds the weights that it needs itself."""
    model, _ = gathered(Rows())
    loss = model(torch.randn(4, 8).double()).square().mean()
    with torch.no_grad():
        model.module.get_parameter("net.2.weight").mul_(2)
    with pytest.raises(RuntimeFailure, match=r"net\.2\.weight was written between a forward and its backward"):
        loss.backward()
