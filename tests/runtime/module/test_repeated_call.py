"""Calls that repeat the one before run its program at once; whatever differs from it is seen."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.runtime.calls import ModelCall
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs.program_cache import Captured
from tests.runtime.helpers import compiled, spread


class Scaled(nn.Module):
    """A linear layer whose results an attribute, the mode and a second input change."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.scale = nn.Linear(6, 4).double(), nn.Identity(), 2.0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        result: Tensor = self.drop(self.fc(x)) * self.scale
        result = result if self.training else result.tanh()
        return result if shift is None else result + shift


def made() -> tuple[nn.Module, Compiled, list[Any]]:
    """The plain module, the compiled one after two calls, and the captures that later calls ask for."""
    torch.manual_seed(0)
    plain = Scaled()
    model = compiled(plain, spread(1, "one"), 1)
    for _ in range(2):
        model(x()).sum().backward()
    model.zero_grad()
    found: list[Any] = []
    find = model._captures.find

    def counted(call: ModelCall, training: bool) -> Captured:
        found.append(call)
        return find(call, training)

    model._captures.find = counted  # type: ignore[method-assign]
    return plain, model, found


def x(samples: int = 8) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))


def test_a_call_that_repeats_the_one_before_is_not_looked_up() -> None:
    plain, model, found = made()
    program, model.program = model.program, None
    for one in (plain, model):
        one(x() + 1).square().sum().backward()
    assert not found
    assert model.program is program
    for expected, own in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-12, atol=1e-12)


def _eval(model: nn.Module) -> None:
    model.eval()


def _part(model: nn.Module) -> None:
    model.get_submodule("drop").eval()


def _attribute(model: nn.Module) -> None:
    setattr(getattr(model, "module", model), "scale", 3.0)  # noqa: B010


def _parameter(model: nn.Module) -> None:
    model.get_submodule("fc").weight = nn.Parameter(2 * model.get_parameter("fc.weight").detach())


def _frozen(model: nn.Module) -> None:
    model.get_parameter("fc.weight").requires_grad_(False)


def _module(model: nn.Module) -> None:
    getattr(model, "module", model).drop = nn.Tanh()


def _hook(model: nn.Module) -> None:
    model.get_submodule("fc").register_forward_hook(lambda module, args, result: 3 * result)


def _moved(model: nn.Module) -> None:
    model.to(torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [_eval, _part, _attribute, _parameter, _frozen, _module, _hook, _moved])
def test_a_change_of_the_model_is_seen(change: Callable[[nn.Module], None]) -> None:
    plain, model, found = made()
    outcomes = []
    for one in (plain, model):
        change(one)
        one(x()).square().sum().backward()
        outcomes.append([one(x()), *(p.grad for p in one.parameters())])
    assert found
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Scaled. this step may need more memory")
@pytest.mark.parametrize(
    "call",
    [
        lambda one: one(x(4)),
        lambda one: one(x(), torch.ones(4, dtype=torch.float64)),
        lambda one: one(x=x()),
        lambda one: one(x().requires_grad_()),
        lambda one: one(nn.Parameter(x())),
        lambda one: torch.no_grad()(one)(x()),
        lambda one: torch.inference_mode()(one)(x()),
    ],
    ids=["samples", "another input", "by name", "gradient", "parameter", "no_grad", "inference"],
)
def test_another_call_is_seen(call: Callable[[nn.Module], Tensor]) -> None:
    plain, model, found = made()
    torch.testing.assert_close(call(model), call(plain), rtol=1e-12, atol=1e-12)
    assert found
    torch.testing.assert_close(model(x()), plain(x()), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_what_is_refused_is_refused_behind_a_call_as_well() -> None:
    _, model, _ = made()
    with pytest.raises(RuntimeFailure, match=r"torch\.func"):
        torch.func.grad(lambda given: model(given).sum())(x())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x(), torch.ones_like(x()))
        with pytest.raises(RuntimeFailure, match="tangent"):
            model(dual)


def test_every_call_is_compared_where_that_is_asked_for() -> None:
    model = compiled(Scaled(), spread(1, "one"), 1, check="always")
    for _ in range(2):
        model(x())
        assert model._captures.repeated is None


def test_an_input_is_not_kept_alive() -> None:
    plain = Scaled()
    model, given = compiled(copy.deepcopy(plain), spread(1, "one"), 1), x()
    model(given).sum().backward()
    kept = weakref.ref(given)
    del given
    assert kept() is None
