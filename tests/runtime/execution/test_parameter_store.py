"""Copies of parameters in other memories: up to date however the originals were written, and kept once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import parplan
from parplan.runtime.execution.parameter_store import CHUNK, _checksum
from tests.graph.models import rand

# torch puts what is sent to "cpu:1" on "cpu": another name, so that copies are made as for a second GPU.
TWO_MEMORIES = ("cpu", "cpu:1")


def _data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def _counted(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _permuted(parameter: nn.Parameter) -> None:
    parameter.data.copy_(parameter.data.flip(0))


def _numpy(parameter: nn.Parameter) -> None:
    parameter.detach().numpy()[...] += 1


WRITES = {"data": _data, "counted": _counted, "permuted": _permuted, "numpy": _numpy}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pin", ["*=replicas:2", "*=shards:2"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_copies_follow_every_write(write: Callable[[nn.Parameter], None], pin: str) -> None:
    plain, x = model(), rand(4, 6)
    compiled = parplan.compile(plain, x, devices=TWO_MEMORIES, pins=[pin])
    for turn in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-12, atol=1e-12)
        write(plain[2 * (turn % 2)].weight)  # type: ignore[arg-type]


def test_an_optimizer_that_writes_through_data_trains() -> None:
    """Old optimizers update `p.data`: torch counts no write, and every later step would use the first weights."""
    one, x = model(), rand(4, 6)
    two = model()
    two.load_state_dict(one.state_dict())
    compiled = parplan.compile(two, x, devices=TWO_MEMORIES, pins=["*=replicas:2"])
    for _ in range(4):
        for called, owner in ((one, one), (compiled, two)):
            owner.zero_grad()
            called(x).square().mean().backward()
            for parameter in owner.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)
    for expected, found in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_all_programs_of_a_model_share_their_copies() -> None:
    """A program for every batch size and mode must not each hold the parameters once more."""
    plain = model()
    compiled = parplan.compile(plain, rand(4, 6), devices=TWO_MEMORIES, pins=["*=replicas:2"])
    held = set()
    for mode in (True, False):
        compiled.train(mode)
        for batch in (4, 6, 8):
            compiled(rand(batch, 6))
            held.add(len(compiled._programs.copies))
    assert held == {4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_differs_with_any_element_and_their_order(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(4, 6) % 7).to(dtype)
    changed, known = tensor.clone(), int(_checksum(tensor))
    changed[3, 5] = 1 - changed[3, 5].to(torch.int64)
    assert int(_checksum(changed)) != known
    assert int(_checksum(tensor.flip(0))) != known
    assert int(_checksum(tensor.clone())) == known


@pytest.mark.full
def test_a_checksum_covers_what_lies_behind_its_first_chunk() -> None:
    tensor: Tensor = torch.zeros(CHUNK + 3, dtype=torch.int8)
    known = int(_checksum(tensor))
    tensor[-1] = 1
    first = int(_checksum(tensor))
    tensor[-1], tensor[2] = 0, 1
    assert len({known, first, int(_checksum(tensor))}) == 3
