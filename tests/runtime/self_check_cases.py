"""What the ranks of the self-check's tests do: sound models pass, faults are found by every rank at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import SelfCheckError, UncheckedWarning
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.distributed import DistributedTransport
from tests.runtime.faulty_nets import LosesFunction, losing
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import conv_net, mlp

__all__ = ["CASES"]


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 3, 8, 8, dtype=dtype)


def checked(model: Compiled) -> list[tuple[bool, bool, str]]:
    """Mode, gradients, and why not, of every check."""
    return [(record.training, record.gradients, record.unchecked) for record in model.checked]


def sound_models_pass(rank: int, ranks: int) -> None:
    """Together where all processes meet, before and after the parameters are cut."""
    for kind in ("data", "hybrid", "out-features"):
        for dtype in (torch.float64, torch.float32):
            model = Compiled(conv_net().to(dtype), planner(spread(ranks, kind), ranks))
            model(images(dtype)).sum().backward()
            model.eval()
            model(images(dtype))
            assert checked(model) == [(True, True, ""), (False, True, "")]
            assert not model.checked[0].left_out
            assert bool(model.checked[1].left_out) == (kind == "data")  # nothing is sent: every process by itself


def later_captures_alone(rank: int, ranks: int) -> None:
    """A process that comes to a capture alone checks it by itself where it holds the whole model."""
    model = Compiled(mlp(), planner(spread(ranks, "data"), ranks))
    model(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 6, dtype=torch.float64))
        (alone,) = model.checked[1:]
        assert not alone.unchecked
        assert "it was checked in this one" in alone.left_out[-1]


class Heads(nn.Module):
    """Two heads, or one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.whole = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

    def forward(self, x: Tensor, both: bool) -> Any:
        return self.whole(x) + self.cut(x) if both else self.whole(x)


def unknown_company(rank: int, ranks: int) -> None:
    """Where nothing is exchanged, no process knows that the others are there; none holds what is cut of the model."""
    shards, replicas = spread(ranks, "out-features"), spread(ranks, "data")
    model = Compiled(Heads(), planner(lambda layer: (shards if layer.name == "cut" else replicas)(layer), ranks))
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x, True).sum().backward()
    with pytest.warns(UncheckedWarning, match="do not wait for each other .* it holds only a part of the model"):
        model.eval()(x, False)
    assert [bool(record.unchecked) for record in model.checked] == [False, True]


def lost_in_capture(rank: int, ranks: int) -> None:
    """Every rank gets the error, and the next call too."""
    model = Compiled(LosesFunction().double(), planner(spread(ranks, "data"), ranks))
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, losing(patch), pytest.raises(SelfCheckError, match="_Scaled"):
            model(torch.randn(4, 6, dtype=torch.float64))


@contextmanager
def skipped_reduction(rank: int) -> Iterator[None]:
    """No gradient is summed."""

    class Done:
        def __init__(self, held: Any) -> None:
            self.wait = lambda: held

    with mock.patch.object(DistributedTransport, "reduce", lambda self, name, group, flats: Done(flats)):
        yield


@contextmanager
def wrong_transfer(rank: int) -> Iterator[None]:
    """What rank 1 receives has its rows in another order."""
    start = DistributedTransport.start

    def rolled(self: DistributedTransport, exchange: Any, tensors: Any) -> Any:
        receiving: Any = start(self, exchange, tensors)
        held = {device: part.roll(1, 0) for device, part in receiving.wait().items()}
        receiving.parts = held if rank == 1 else receiving.parts
        return receiving

    with mock.patch.object(DistributedTransport, "start", rolled):
        yield


def faults_are_found(rank: int, ranks: int) -> None:
    """In float64 and float32, by all ranks."""
    for fault, kind in ((skipped_reduction, "data"), (wrong_transfer, "hybrid")):
        for dtype in (torch.float64, torch.float32):
            model = Compiled(conv_net().to(dtype), planner(spread(ranks, kind), ranks))
            with fault(rank), pytest.raises(SelfCheckError, match="first layer that differs is"):
                model(images(dtype))
            model(images(dtype)).sum().backward()
            assert checked(model) == [(True, True, "")]


def stale_replica(rank: int, ranks: int) -> None:
    """One rank's weights are not the others'; all ranks are told."""
    model = Compiled(mlp(), planner(spread(ranks, "data"), ranks))
    if rank == 1:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(0.5)
    with pytest.raises(SelfCheckError, match="gradients"):
        model(torch.randn(4, 6, dtype=torch.float64))


CASES = {
    case.__name__: case
    for case in (
        sound_models_pass,
        later_captures_alone,
        unknown_company,
        lost_in_capture,
        faults_are_found,
        stale_replica,
    )
}
