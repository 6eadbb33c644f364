"""Many compiled models in one process: in two threads at the same time, and one after the other."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import parplan


def _trained(number: int) -> int:
    """How many gradients of three steps of a model are not those of the plain model."""
    draws = torch.Generator().manual_seed(number)
    plain = nn.Sequential(nn.Linear(8, 16 + number), nn.Tanh(), nn.Linear(16 + number, 4)).double()
    model = parplan.compile(copy.deepcopy(plain), devices=["cpu"] * 2)
    wrong = 0
    for _ in range(3):
        x = torch.randn(8, 8, generator=draws, dtype=torch.float64)
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            wrong += not torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    assert model.plan is not None  # it ran by one
    return wrong


@pytest.mark.full
def test_two_threads_compile_and_train_at_the_same_time() -> None:
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(_trained, range(20))) == [0] * 20


def test_other_threads_keep_their_log_records(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as other:
                other.submit(logging.getLogger("a.library").error, "from another thread").result()
            logging.getLogger("a.library").error("from the model")
            return torch.as_tensor(self.linear(x))

    parplan.analyze(Net(), (torch.randn(4, 4),), gpus=2)
    assert {record.message for record in caplog.records} == {"from another thread"}


@pytest.mark.full
def test_no_parameter_outlives_its_model() -> None:
    parameters = []
    for _ in range(20):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        parameters += [weakref.ref(parameter) for parameter in model.parameters()]
        compiled = parplan.compile(model, devices=["cpu"] * 2)
        compiled(torch.randn(4, 8)).sum().backward()
        del model, compiled
    gc.collect()
    assert sum(parameter() is not None for parameter in parameters) == 0
