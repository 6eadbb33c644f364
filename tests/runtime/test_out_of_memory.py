"""Steps without enough memory: the plan's figures beside torch's, and a plan that needs less; later steps are right."""

from __future__ import annotations

import copy
import pickle
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.errors import RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.out_of_memory import OutOfMemory
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import mlp
from tests.runtime.ranks import run_case

ROOM = 64 << 20  # bytes that a limited process may still take
WIDTH = 512


class Wide(nn.Module):
    """(N, 8) to (N, 8), with a few activations of N x 512 in float64 between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).sin().cos())
        return result


@contextmanager
def little_memory() -> Iterator[None]:
    """The process may take `ROOM` more bytes than it has, and torch's next large tensors fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def compiled(samples: int) -> tuple[Compiled, nn.Module]:
    """A model that is planned for so many samples, and the plain one."""
    plain = Wide()
    return parplan.compile(copy.deepcopy(plain), torch.ones(samples, 8).double(), devices=["cpu"] * 2), plain


def forward(model: nn.Module, x: Tensor) -> None:
    """The forward runs out of memory."""
    with little_memory():
        model(x)


def backward(model: nn.Module, x: Tensor) -> None:
    """The backward runs out of memory."""
    loss = model(x).square().mean()
    with little_memory():
        loss.backward()


def train_step(model: Compiled, x: Tensor) -> None:
    """A step as a whole does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with little_memory():
        model.train_step(x, x, nn.functional.mse_loss, optimizer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [forward, backward, train_step])
def test_a_step_without_memory_tells_the_plans_figures_and_a_plan_that_needs_less(
    part: Callable[[Compiled, Tensor], None],
) -> None:
    samples = 30_000
    model, plain = compiled(samples)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        part(model, torch.ones(samples, 8).double())
    error, text = caught.value, str(caught.value)
    assert isinstance(error, OutOfMemory)
    assert error.args == (text,)  # those who look for a smaller batch read the text of the only argument
    assert text.startswith("device 0 (cpu): ")
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in text
    assert error.predicted_bytes is not None
    assert error.predicted_bytes >= samples * WIDTH * 8
    assert 0 < error.peak_bytes < error.limit_bytes
    wanted = re.search(r"gpus=2, memory_bytes=(\d+)\)\.plan", text)
    assert wanted is not None
    assert 0 < int(wanted[1]) < min(error.predicted_bytes, error.limit_bytes)
    assert re.search(rf"with {samples} samples on this process .*for {samples} samples", text)
    count = re.search(r"in (\d+) micro-batches the same plan is predicted to need", text)
    assert count is not None
    lighter = parplan.analyze(plain, torch.ones(samples, 8).double(), gpus=2, micro_batches=int(count[1]))
    assert max(lighter.prediction.memory_bytes) <= int(wanted[1])


def test_the_next_step_with_fewer_samples_is_right() -> None:
    model, plain = compiled(16)
    with pytest.raises(OutOfMemory, match=r"compile with as many samples as the example .*, or bring fewer"):
        backward(model, torch.ones(60_000, 8).double())
    x = torch.randn(16, 8, dtype=torch.float64)
    for one in (model, plain):
        one.zero_grad()
        one(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.module.get_parameter(name).grad, parameter.grad)


CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.89 GiB"


def raises(error: Exception) -> Callable[..., None]:
    """A function that raises."""

    def hook(*_: object, **__: object) -> None:
        raise error

    return hook


def test_an_accelerators_error_is_told_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = compiled(16)
    loss = model(torch.ones(16, 8).double()).sum()
    monkeypatch.setattr(torch.autograd, "grad", raises(torch.OutOfMemoryError(CUDA_TEXT)))
    with pytest.raises(OutOfMemory, match=re.escape(CUDA_TEXT)) as caught:
        loss.backward()
    assert type(caught.value.__cause__) is torch.OutOfMemoryError
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.predicted_bytes) == (str(caught.value), caught.value.predicted_bytes)


def test_a_plan_that_nobody_predicts_is_told_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Compiled(mlp(), planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    loss = model(torch.ones(4, 6).double()).sum()
    monkeypatch.setattr(torch.autograd, "grad", raises(torch.OutOfMemoryError(CUDA_TEXT)))
    with pytest.raises(OutOfMemory, match=r"nothing predicts its peak, this process has held up to .*bring fewer"):
        loss.backward()


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = compiled(16)
    loss, error = model(torch.ones(16, 8).double()).sum(), RuntimeError("something else")
    monkeypatch.setattr(torch.autograd, "grad", raises(error))
    with pytest.raises(RuntimeError, match="something else") as caught:
        loss.backward()
    assert caught.value is error


def _one_without_memory(rank: int, ranks: int) -> None:
    model = parplan.compile(mlp(), torch.ones(2, 6).double(), pins=["*=replicas:2"])
    own, optimizer = torch.ones(2, 6).double(), torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(result: Tensor, _: object) -> Tensor:
        loss = result.sum()
        if rank:
            loss.register_hook(raises(torch.OutOfMemoryError(CUDA_TEXT)))
        return loss

    if rank:
        with pytest.raises(OutOfMemory, match=r"^rank 1: CUDA out of memory.*(.|\n)*the plan's predicted peak is"):
            model.train_step(own, own, loss_of, optimizer)
        return  # its process leaves the group
    with pytest.raises(RuntimeFailure, match=r"^rank 0: .* failed: .*another rank has probably stopped"):
        model.train_step(own, own, loss_of, optimizer)


def test_one_rank_without_memory_ends_the_others_too() -> None:
    run_case(_one_without_memory, 2)
