"""Measured peaks of steps whose allocations are known."""

from __future__ import annotations

import pytest
import torch

from parplan.runtime.measurement.peak_memory import held_bytes, step_peak

CPU = torch.device("cpu")


@pytest.mark.full
def test_the_most_that_is_alive_at_once_counts() -> None:
    def step() -> None:
        first = torch.empty(1000)
        second = first.clone()
        del first
        third = torch.empty(500)
        del second, third

    found = step_peak(step, [torch.zeros(10)])
    assert (found.held_bytes, found.rise_bytes, found.peak_bytes) == (40, 8000, 8040)


@pytest.mark.full
def test_the_backward_counts_and_its_releases_too() -> None:
    weight = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        for _ in range(3):  # more steps do not add up
            (weight * 2).sum().backward()
            weight.grad = None

    assert step_peak(step, [weight]).rise_bytes == step_peak(step, [weight]).rise_bytes < 3 * 4000


def test_one_memory_counts_once() -> None:
    tensor = torch.zeros(6, 4)
    assert held_bytes([tensor, tensor.t(), tensor[2:]], CPU) == 96
