"""Code of the user's inside a backward pass is kept, or refused by name and line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from parplan.errors import CaptureError
from parplan.graph.capture.capture import capture
from parplan.runtime.module.compiled import Compiled
from parplan.verification import verify_plan
from tests.plans import plan_by


class Net(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        got = self.between(h)
        result: Tensor = self.b(got if isinstance(got, Tensor) else h)
        return result


def second_derivative(h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return gradient


def packed(h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda saved: saved.float()):
        return h.tanh()


def node_hook(h: Tensor) -> None:
    assert h.grad_fn is not None
    h.grad_fn.register_hook(lambda given, taken: None)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "autograd.grad": (second_derivative, "autograd.grad"),
    "backward": (lambda h: h.sum().backward(), r"backward\(\)"),
    "retain_grad": (lambda h: h.retain_grad(), r"h\.retain_grad"),
    "node hook": (node_hook, r"grad_fn\.register_hook"),
    "saved tensors": (packed, "saved_tensors_hooks"),
    "multi-grad hook": (
        lambda h: torch.autograd.graph.register_multi_grad_hook((h,), lambda g: None),
        "register_multi_grad_hook",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_record_of_a_forward_holds_is_refused_with_its_line(name: str) -> None:
    between, code = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"test_opaque\.py:\d+: .*{code}"):
        capture(Net(between), (torch.randn(4, 6),))


def test_nothing_stays_replaced() -> None:
    plain = vars(torch.autograd.Function)["apply"]
    with pytest.raises(CaptureError):
        capture(Net(second_derivative), (torch.randn(4, 6),))
    assert vars(torch.autograd.Function)["apply"] is plain
    assert {"retain_grad", "grad_fn"}.isdisjoint(vars(Tensor))


def test_hooks_for_all_modules_are_refused_whenever_they_come() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model = Compiled(plain, partial(plan_by, "data parallel", 2), devices=["cpu"] * 2)
    model(torch.randn(4, 6))
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, given, taken: None)
    try:
        with pytest.raises(CaptureError, match="hooks for all modules"):
            model(torch.randn(4, 6))
    finally:
        handle.remove()
    model(torch.randn(4, 6))


class Checkpointed(nn.Module):
    """Three layers, computed again in the backward."""

    def __init__(self, call: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), call

    def forward(self, h: Tensor) -> Tensor:
        return self.call(self.inner, h)


CHECKPOINTS: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "reentrant": lambda inner, h: checkpoint(inner, h, use_reentrant=True),
    "sequential": lambda inner, h: checkpoint_sequential(inner, 2, h, use_reentrant=True),
    "not reentrant": lambda inner, h: checkpoint(inner, h, use_reentrant=False),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_in_the_forward_gives_the_gradients_of_what_it_runs(name: str) -> None:
    net = Net(Checkpointed(CHECKPOINTS[name]))
    found = verify_plan(net, (torch.randn(4, 6),), None, partial(plan_by, "data parallel", 2), devices=2)
    assert found.passed, found.rows


def test_a_reentrant_checkpoint_of_an_input_gives_no_gradient_as_in_torch() -> None:
    """Nothing in front of it needs a gradient, so torch's own checkpoint leaves its parameters without one."""
    first = Checkpointed(CHECKPOINTS["reentrant"])
    graph = capture(nn.Sequential(first, nn.Linear(8, 4)), (torch.randn(4, 8),))
    assert not any(graph.values[value].requires_grad for value in graph.layers["1"].inputs)
