"""What trainers ask of a compiled model: its forward's arguments, DDP's context, and not to be wrapped once more."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import parplan
from parplan.errors import ModelError, RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from tests.runtime.helpers import compiled, planner, spread
from tests.runtime.ranks import run_case


class NetForQuestionAnswering(nn.Module):
    """A model whose arguments have names, defaults and keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, features: Tensor, labels: Tensor | None = None, *, scale: float = 1.0, **other: Any) -> Tensor:
        """(N, 6) to (N, 4)."""
        result: Tensor = scale * self.head(torch.tanh(self.body(features)))
        return result if labels is None else mse_loss(result, labels)


@pytest.mark.parametrize("copied", [False, True])
def test_the_signature_is_the_modules_own(copied: bool) -> None:
    model = compiled(NetForQuestionAnswering(), spread(2, "data"), 2)
    model = copy.deepcopy(model) if copied else model
    own = inspect.signature(model.module.forward)
    assert [*own.parameters] == ["features", "labels", "scale", "other"]
    assert inspect.signature(model.forward) == inspect.signature(model) == own
    assert [*inspect.signature(type(model).forward).parameters][1:] == [*own.parameters]
    assert type(model).__name__ == "NetForQuestionAnswering"
    assert isinstance(model, Compiled)
    assert repr(model).startswith("Compiled(NetForQuestionAnswering(")


def test_two_models_have_each_its_own_signature() -> None:
    first, second = compiled(NetForQuestionAnswering(), spread(2, "data"), 2), compiled(nn.Tanh(), spread(2, "data"), 2)
    assert [*inspect.signature(second.forward).parameters] == ["input"]
    assert "labels" in inspect.signature(first.forward).parameters


def accumulation(rank: int, ranks: int) -> None:
    """Under `no_sync`, gradients after the last backward are those of DistributedDataParallel; two rounds of it."""
    for kind in ("data", "hybrid"):
        net = NetForQuestionAnswering().double()
        model = Compiled(copy.deepcopy(net), planner(spread(ranks, kind), ranks))
        ddp = DistributedDataParallel(net)
        x, y = torch.randn(6, 3 * ranks, 6, dtype=torch.float64), torch.randn(6, 3 * ranks, 4, dtype=torch.float64)
        for number in range(6):
            own = slice(3 * rank, 3 * rank + 3)
            for trained in (model, ddp):
                with contextlib.nullcontext() if number % 3 == 2 else trained.no_sync():
                    mse_loss(trained(x[number, own]), y[number, own]).backward()
            if number % 3 == 2:
                for (name, ours), theirs in zip(model.named_parameters(), ddp.parameters(), strict=True):
                    found = ours.grad
                    assert found is not None
                    assert theirs.grad is not None
                    torch.testing.assert_close(found + torch.zeros_like(theirs), theirs.grad, msg=name)


def wrapped(rank: int, ranks: int) -> None:
    """Around a compiled model and inside of one, torch's wrappers are refused before they communicate."""
    model = Compiled(NetForQuestionAnswering(), planner(spread(ranks, "data"), ranks))
    for wrapper in (DistributedDataParallel, nn.DataParallel):
        with pytest.raises(RuntimeFailure, match=rf"^a compiled model is wrapped in {wrapper.__name__}, which parplan"):
            wrapper(model)
    with pytest.raises(RuntimeFailure, match=r"^a compiled model is wrapped in FSDP\w+, which parplan replaces"):
        fully_shard(model)
    with pytest.raises(ModelError, match=r"^the model is wrapped in FSDP\w+, which parplan replaces"):
        parplan.compile(fully_shard(NetForQuestionAnswering()))  # type: ignore[arg-type]
    net = NetForQuestionAnswering()
    net.body = DistributedDataParallel(net.body)  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"^body is wrapped in DistributedDataParallel, which parplan replaces"):
        parplan.compile(net)
    with pytest.raises(ModelError, match=r"^the model is wrapped in DistributedDataParallel, which parplan replaces"):
        parplan.analyze(DistributedDataParallel(NetForQuestionAnswering()), torch.randn(4, 6))


CASES = {"accumulation": accumulation, "wrapped": wrapped}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_on_two_processes(case: str) -> None:
    run_case(CASES[case], 2)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, FullyShardedDataParallel])
def test_wrappers_are_refused_by_name(wrapper: type[nn.Module]) -> None:
    model = compiled(NetForQuestionAnswering(), spread(2, "data"), 2)
    around = wrapper.__new__(wrapper)
    nn.Module.__init__(around)
    with pytest.raises(RuntimeFailure, match=rf"^a compiled model is wrapped in {wrapper.__name__}, which parplan"):
        around.module = model
    around.module = NetForQuestionAnswering()
    with pytest.raises(ModelError, match=rf"^the model is wrapped in {wrapper.__name__}, which parplan replaces"):
        parplan.compile(around)


def test_a_compiled_part_of_a_model_is_no_wrapper() -> None:
    whole = nn.Sequential(compiled(nn.Linear(4, 4), spread(2, "data"), 2), nn.Tanh())
    whole(torch.randn(4, 4)).sum().backward()
    assert whole[0].weight.grad is not None
