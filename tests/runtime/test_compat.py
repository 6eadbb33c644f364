"""What the runtime expects of torch beyond its documentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.runtime.compat import in_functional_transform, keeps_graph, version, without_tensor_hooks


def test_a_version_changes_when_the_tensor_is_written() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    marks = [version(parameter)]
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(3)
    optimizer.step()
    marks.append(version(parameter))
    with torch.no_grad():
        parameter.detach()[1:].zero_()  # through a view
    marks.append(version(parameter))
    kept = parameter.data
    parameter.data = torch.ones(3)  # given other memory
    marks.append(version(parameter))
    assert kept.tolist() == [-1.0, 0.0, 0.0]
    assert len(set(marks)) == 4
    assert version(parameter) == marks[-1]


class _Asks(torch.autograd.Function):
    answers: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Asks.answers.append(keeps_graph())
        return gradient


@pytest.mark.parametrize("keep", [True, False])
def test_a_backward_knows_whether_its_graph_is_kept(keep: bool) -> None:
    _Asks.answers.clear()
    x = torch.ones(1, requires_grad=True)
    y: Tensor = _Asks.apply(x)  # type: ignore[no-untyped-call]
    y.backward(retain_graph=keep)
    assert _Asks.answers == [keep]


def test_a_transform_of_torch_func_is_seen_from_inside() -> None:
    seen: list[bool] = []

    def total(x: Tensor) -> Tensor:
        seen.append(in_functional_transform())
        return x.sum()

    torch.func.grad(total)(torch.ones(2))
    total(torch.ones(2))
    assert seen == [True, False]


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_step_changes_the_version_of_its_parameters(fused: bool) -> None:
    """Copies in other memories are brought up to date by it; torch does not count what fused optimizers write."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        optimizer = kind([parameter], lr=0.1, fused=fused)
        before = version(parameter)
        optimizer.step()
        assert version(parameter) != before, kind


def test_tensor_hooks_rest_and_come_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    calls: list[str] = []
    handle = parameter.register_hook(lambda gradient: calls.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    with without_tensor_hooks([parameter]):
        parameter.sum().backward()
    assert calls == []
    parameter.sum().backward()
    assert calls == ["gradient", "accumulated"]
    handle.remove()
    parameter.sum().backward()
    assert calls == ["gradient", "accumulated", "accumulated"]
