"""Hooks that a library puts on modules of its own are a part of the forward: what they collect is in the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.graph.capture.capture import capture
from parplan.graph.user_code import module_hooks
from tests.graph.by_hand import assert_same_numbers, halves


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) to the same."""
        return torch.tanh(self.linear(x))


class _Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(), _Block())
        for block in self.blocks:
            block.register_forward_hook(self._collect)

    def _collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if _COLLECTED:
            _COLLECTED[-1].append(output)

    def forward(self, x: Tensor) -> list[Tensor]:
        """(N, 4) to the results of all blocks."""
        _COLLECTED.append([])
        self.blocks(x)
        return _COLLECTED.pop()


_COLLECTED: list[list[Tensor]] = []


def test_what_a_librarys_hooks_collect_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_hooks, "is_users", lambda filename: False)
    model, x = _Collecting().double(), torch.randn(4, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    assert not graph.sites
    assert len(graph.user_outputs) == 2
    assert_same_numbers(graph, model, (x,), choose=halves)


def test_a_users_hooks_stay_hooks() -> None:
    assert capture(_Collecting().double(), (torch.randn(4, 4, dtype=torch.float64),)).sites
