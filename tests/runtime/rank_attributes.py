"""What ranks do with buffers and attributes that a forward reads and writes; compared with the plain model on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan.errors import RuntimeFailure, UncheckedWarning
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import planner, spread
from tests.runtime.test_attributes import Keeper, divided, mixed_in, skipping
from tests.runtime.test_written_buffers import Written, assigned_last, averaged, counted, queued, read_before_and_after

__all__ = ["CASES"]

SAMPLES = 4


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    """Refuse what is further off than rounding."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def train(
    plain: nn.Module, kind: str, rank: int, change: Callable[[Any, int], None], count: int = 4
) -> tuple[Any, Any]:
    """Steps beside the plain model, with what `change` does to both before each; an attribute `penalty` is a loss."""
    ranks = dist.get_world_size()
    net = copy.deepcopy(plain)
    model = Compiled(net, planner(spread(ranks, kind), ranks))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
    for step in range(count):
        change(net, step)
        change(plain, step)
        x = torch.randn(SAMPLES * ranks, 6, dtype=torch.float64)
        own = slice(SAMPLES * rank, SAMPLES * rank + SAMPLES)
        for m, optimizer, given in zip((model, plain), optimizers, (x[own], x), strict=True):
            optimizer.zero_grad()
            loss = m(given).square().mean()
            (loss + getattr(m, "penalty", 0.0)).backward()
            optimizer.step()
        state, wanted = model.state_dict(), plain.state_dict()
        for name, tensor in wanted.items():
            same(state[name].double(), tensor.double(), f"{name} after step {step}")
        same(model(x[own]), plain(x)[own], f"result of step {step}")
    return model, plain


def nothing(model: Any, step: int) -> None:
    """No change."""


def buffers(rank: int, ranks: int) -> None:
    """Counters, averages and queues are the same on all ranks, whoever computes what is written."""
    cases = {
        counted: "data",
        read_before_and_after: "hybrid",
        averaged: "data",
        assigned_last: "hybrid",
        queued: "hybrid",
    }
    for forward, kind in cases.items():
        model, plain = train(Written(forward).double(), kind, rank, nothing, 2)
        for name, buffer in plain.named_buffers():
            same(model.module.get_buffer(name).double(), buffer.double(), name)


def annealed(rank: int, ranks: int) -> None:
    """A number that changes in every step, and a flag that toggles."""

    def change(model: Any, step: int) -> None:
        model.temperature = 1.0 + step / 3
        model.config.scale = 0.5 * step
        model.skip = step % 2 == 0

    for forward in (divided, mixed_in, skipping):
        train(Keeper(forward).double(), "hybrid" if forward is not skipping else "data", rank, change, 4)


def penalised(m: Any, x: Tensor) -> Any:
    """Leaves its own samples' features and a penalty on all samples."""
    h = m.a(x)
    m.last = h
    m.penalty = h.square().mean()
    return m.b(h)


def stored(rank: int, ranks: int) -> None:
    """Attributes are delivered as results are, with gradients."""
    for kind in ("data", "hybrid"):
        model, plain = train(Keeper(penalised).double(), kind, rank, nothing, 3)
        own = slice(SAMPLES * rank, SAMPLES * rank + SAMPLES)
        same(model.last, plain.last[own], "own features")
        same(model.penalty, plain.penalty, "penalty")


def different(rank: int, ranks: int) -> None:
    """Ranks with different attributes are told, all of them."""
    net = Keeper(divided).double()
    model = Compiled(net, planner(spread(ranks, "hybrid"), ranks))
    x = torch.randn(SAMPLES, 6, dtype=torch.float64)
    model(x)
    model.temperature = 2.0 + rank
    with pytest.raises(RuntimeFailure, match=r"set them alike: temperature is 2\.0 on rank 0, 3\.0 on rank 1$"):
        model(x)
    model.temperature = 2.0
    model(x)


class Asserts(nn.Module):
    """Asserts something of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) to the same."""
        if (x > 100).any():
            raise ValueError("too large")
        result: Tensor = self.fc(x)
        return result


def refused_inputs(rank: int, ranks: int) -> None:
    """Inputs of one rank that the model refuses: its own error there, and on all ranks where they exchange values."""
    for kind in ("data", "hybrid"):
        model = Compiled(Asserts().double(), planner(spread(ranks, kind), ranks))
        x = torch.randn(SAMPLES, 6, dtype=torch.float64)
        with torch.no_grad():
            good = model(x)
            if rank == 1:
                with pytest.raises((ValueError, RuntimeFailure), match=r"too large|refuses these inputs"):
                    model(x + 200)
            elif kind == "hybrid":
                with pytest.raises(RuntimeFailure, match="refuses the inputs of rank 1"):
                    model(x)
            same(model(x), good, "the next step")


class CountsSamples(Asserts):
    """Asserts something of all samples of a call."""

    def forward(self, x: Tensor) -> Tensor:
        assert (x > 100).sum() < x.shape[0]
        result: Tensor = self.fc(x)
        return result


def refused_sizes(rank: int, ranks: int) -> None:
    """An assertion with the number of samples, of which each rank has a part."""
    model = Compiled(CountsSamples().double(), planner(spread(ranks, "data"), ranks))
    with pytest.raises(RuntimeFailure, match=f"whole batch, {SAMPLES * ranks} samples"):
        model(torch.randn(SAMPLES, 6, dtype=torch.float64))


class Branches(Asserts):
    """Chooses by the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x if x.shape[0] > 20 else x * 3)
        return result


def branched(rank: int, ranks: int) -> None:
    """A branch on the number of samples of all ranks; one on which ranks cannot agree is refused by all."""
    for kind in ("data", "hybrid"):
        plain = Branches().double()
        model = Compiled(copy.deepcopy(plain), planner(spread(ranks, kind), ranks))
        for samples in (3, 11, 4, 30):
            x = torch.randn(samples * ranks, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
            own = slice(samples * rank, samples * rank + samples)
            # Processes that exchange nothing are compared one by one, which are 11 samples and not 22.
            alone = kind == "data" and samples == 11
            with pytest.warns(UncheckedWarning, match="may take another branch") if alone else nullcontext():
                same(model(x[own]), plain(x)[own], f"{samples} samples per rank")
    with pytest.raises(RuntimeFailure, match=r"another branch for other numbers of samples.* bring [\d, ]+9"):
        model(torch.randn(12 - 3 * (rank == ranks - 1), 6, dtype=torch.float64))


CASES = {
    case.__name__: case for case in (buffers, annealed, stored, different, refused_inputs, refused_sizes, branched)
}
