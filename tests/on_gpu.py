"""A pytest plugin that runs the tests of one process on the first GPU: `pytest -p tests.on_gpu tests/runtime`.

Tensors are made on the GPU and every logical CPU device lives there, on streams of its own, so that what tests compare
on CPUs is compared on CUDA's streams too. Tests that start processes or draw from a generator on the CPU are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import tests.runtime.ranks as ranks
from parplan.runtime.transport.local import LocalTransport

PLACE = torch.device(os.environ.get("PARPLAN_TEST_DEVICE", "cuda:0"))
ON_THE_CPU = ("Expected a 'cuda' device type for generator", "convert cuda:0 device type tensor to numpy")


def pytest_configure(config: pytest.Config) -> None:
    """Move what lives on the CPU to the GPU, and leave out tests of several processes."""
    begun = LocalTransport.__init__

    def begin(self: LocalTransport, devices: Sequence[torch.device]) -> None:
        begun(self, [PLACE if device.type == "cpu" else device for device in devices])

    def apart(case: object, ranks: int) -> None:
        pytest.skip("starts processes, which have no GPU each")

    LocalTransport.__init__ = begin  # type: ignore[method-assign]
    ranks.run_case = apart


@pytest.fixture(autouse=True)
def made_on_the_gpu() -> Iterator[None]:
    """Tensors without a named device are made on the GPU."""
    with PLACE:
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Any:
    """Skip a test that fails in its own generator or array on the CPU."""
    try:
        return (yield)
    except (RuntimeError, TypeError) as error:
        if any(words in str(error) for words in ON_THE_CPU):
            pytest.skip(f"its own numbers are on the CPU: {error}")
        raise
