"""Hooks that a forward registers on tensors see the whole gradient, and what they make of it goes on."""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parplan
from parplan.errors import CaptureError, RuleError, RuntimeFailure
from parplan.graph.capture.capture import capture
from parplan.graph.user_code.gradient_hooks import Handle
from parplan.plan import Plan, Strategy
from parplan.planner.explain.reasons import only_way
from parplan.planner.search_space.verifier import check
from parplan.runtime.module.compiled import Compiled
from parplan.verification import verify_plan
from tests.own_backward import Between, Hooked, Sign
from tests.plans import plan_by

Hook = Callable[[Tensor], Tensor | None]


def agrees(model: nn.Module, plan: str) -> None:
    """Outputs and gradients under a plan are the plain model's."""
    found = verify_plan(model, (torch.randn(8, 6).requires_grad_(),), None, partial(plan_by, plan, 2), devices=2)
    assert found.passed, found.rows


def both(h: Tensor) -> None:
    """Hooks run in the order they were registered."""
    h.register_hook(lambda gradient: gradient * 0.5)
    h.register_hook(lambda gradient: gradient + 1)


def taken_back(h: Tensor) -> None:
    h.register_hook(lambda gradient: gradient * 0.5).remove()
    with h.register_hook(lambda gradient: gradient * 7):
        pass


def written(gradient: Tensor) -> None:
    """Hooks should not write to their argument, but some do."""
    gradient.mul_(3)


REGISTER: dict[str, Callable[[Tensor], object]] = {
    "scaled": lambda h: h.register_hook(lambda gradient: gradient * 0.5),
    "across samples": lambda h: h.register_hook(lambda gradient: gradient / gradient.norm()),
    "written to": lambda h: h.register_hook(written),
    "two": both,
    "removed": taken_back,
    "the same tensor": lambda h: h.contiguous().register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
}


def reads_a_mask(h: Tensor) -> None:
    mask = h > 0
    h.register_hook(lambda gradient: gradient * mask)


def reads_what_has_a_hook(h: Tensor) -> None:
    other = (h * 3).tanh()
    other.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    shift = h.sigmoid()
    h.register_hook(partial(lambda scale, gradient, shift=shift: gradient * scale + shift, other))
    h.register_hook(lambda gradient: gradient - 1)


READING = {
    "a mask": reads_a_mask,
    "its own tensor": lambda h: h.register_hook(lambda gradient: gradient * h),
    "in a container": lambda h: h.register_hook(lambda gradient, kept={"h": [h * 2]}: gradient * kept["h"][0]),
    "what has a hook": reads_what_has_a_hook,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", READING)
def test_a_hook_reads_tensors_of_the_forward_of_its_own_step(name: str) -> None:
    agrees(Hooked(READING[name]), "data parallel")


def test_a_hook_reads_what_the_forward_makes_between_its_tensor_and_the_registration() -> None:
    class Net(Hooked):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x).tanh()
            used = self.b(h)
            other, after = self.a(x * 2).sigmoid(), used + 1
            h.register_hook(lambda gradient: gradient * other)
            return self.c((h + used).relu_() + after), h

    agrees(Net(lambda h: None), "data parallel")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", ["data parallel", "mixed"])
@pytest.mark.parametrize("name", REGISTER)
def test_a_hook_has_its_effect(name: str, plan: str) -> None:
    agrees(Hooked(REGISTER[name]), plan)


def test_a_hook_is_a_layer_on_one_device_behind_its_tensor_and_says_why() -> None:
    graph = capture(Hooked(REGISTER["scaled"]), (torch.randn(8, 6),))
    hook = graph.layers["hook"]
    assert list(graph.digraph.predecessors("hook")) == ["tanh"]
    assert set(graph.digraph.successors("hook")) == {"b", "add"}
    assert hook.outputs[0] in graph.user_outputs
    assert graph.layers["b"].batch is not None
    assert only_way(hook) == "a tensor hook is given the gradient of all samples, so it runs whole"
    strategies = {n: Strategy() for n in graph.layers} | {"hook": Strategy(2, 1, None, (0, 1))}
    with pytest.raises(RuleError, match="hook: a tensor hook is given the gradient of all samples"):
        check(Plan(graph.model, graph.fingerprint, 8, 2, strategies), graph)


def test_what_a_hook_records_is_the_whole_gradient_once() -> None:
    seen: list[Tensor] = []
    plain = Hooked(lambda h: h.register_hook(seen.append)).double()
    model = Compiled(plain, partial(plan_by, "data parallel", 2), devices=["cpu"] * 2, check="off")
    x = torch.randn(8, 6, dtype=torch.float64)
    for call in (model, plain):
        out, h = call(x)
        (out.square().sum() + h.sum()).backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-12, atol=1e-12)


def test_hooks_on_inputs_on_results_of_functions_and_on_parts_of_a_tensor() -> None:
    def forward(model: nn.Module, h: Tensor) -> Tensor:
        signs = Sign.apply(h)
        signs.register_hook(lambda gradient: gradient * 2)
        one, two = signs.chunk(2, 1)
        two.register_hook(lambda gradient: gradient * 5)
        return torch.cat([two, one], 1)

    class Input(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Between(forward)

        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda gradient: gradient - 1)
            result: Tensor = self.net(x)
            return result

    agrees(Input(), "data parallel")


def test_a_tensor_that_was_changed_before_has_one_gradient() -> None:
    def forward(model: nn.Module, h: Tensor) -> Tensor:
        h = (h * 2).relu_()
        h.register_hook(lambda gradient: gradient * 0.5)
        return h

    agrees(Between(forward), "data parallel")


def changed_later(model: nn.Module, h: Tensor) -> Tensor:
    h = h * 2
    h.register_hook(lambda gradient: gradient * 0.5)
    return h.relu_()


def viewed_before(model: nn.Module, h: Tensor) -> Tensor:
    h = h * 2
    row = h[:, :1]
    h.relu_()
    h.register_hook(lambda gradient: gradient * 0.5)
    return h + row


def on_a_parameter(model: Any, h: Tensor) -> Tensor:
    model.a.weight.register_hook(lambda gradient: gradient * 0.5)
    return h


def reads_a_draw(model: nn.Module, h: Tensor) -> Tensor:
    mask = torch.dropout(h, 0.5, True)
    h.register_hook(lambda gradient: gradient * mask)
    return h


def reads_what_changes(model: nn.Module, h: Tensor) -> Tensor:
    scale = h * 2
    h.register_hook(lambda gradient: gradient * scale)
    scale = h * 3
    return h


REFUSED = {
    "draw": (reads_a_draw, "that op cannot run twice"),
    "reads what changes": (reads_what_changes, "is changed by the forward after it is registered"),
    "changed later": (changed_later, "also changed in place"),
    "viewed before": (viewed_before, "also changed in place"),
    "parameter": (on_a_parameter, "registers a hook on a parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_one_gradient_is_refused_with_its_line(name: str) -> None:
    forward, why = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"(?s){why}.*test_gradient_hooks\.py:\d+"):
        capture(Between(forward), (torch.randn(8, 6),))


def test_a_handle_outlives_the_forward_only_to_say_so() -> None:
    handles: list[Handle] = []
    keep = handles.append
    capture(Hooked(lambda h: keep(h.register_hook(lambda gradient: gradient))), (torch.randn(8, 6),))
    with pytest.raises(RuntimeFailure, match=r"removed within that forward.*"):
        handles[0].remove()


def test_hooks_that_are_registered_only_where_there_is_a_gradient() -> None:
    """Calls without a graph come first, and record nothing; those with one have the hook all the same."""
    calls: list[bool] = []

    def register(h: Tensor) -> None:
        if h.requires_grad:
            h.register_hook(lambda gradient: calls.append(True))

    plain = Hooked(register).double()
    model = Compiled(plain, partial(plan_by, "data parallel", 2), devices=["cpu"] * 2, check="off")
    x = torch.randn(8, 6, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        model.eval()(x)
    for count, training in enumerate((True, False), 1):
        model.train(training)
        model(x)[0].sum().backward()
        assert len(calls) == count


class HookedBefore(nn.Module):
    """A hooked tensor in front of a region without gradients, or of a reentrant checkpoint."""

    def __init__(self, behind: str) -> None:
        super().__init__()
        self.a, self.b, self.behind = nn.Linear(4, 4), nn.Linear(4, 4), behind

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        h.register_hook(lambda gradient: gradient * 0.5)
        if self.behind == "checkpoint":
            result: Tensor = checkpoint(self.b, h, use_reentrant=True)
            return result
        with torch.no_grad():
            scale = h.abs().amax(1, keepdim=True)
        y: Tensor = self.b(h) / scale
        return y


@pytest.mark.sampled(1)
@pytest.mark.parametrize("behind", ["checkpoint", "no_grad"])
def test_a_hook_in_front_of_a_region_without_gradients(behind: str) -> None:
    net = HookedBefore(behind).double()
    model = parplan.compile(copy.deepcopy(net), devices=["cpu"] * 2)
    x = torch.randn(4, 4, dtype=torch.float64)
    for one in (net, model):
        one(x).square().sum().backward()
    for expected, found in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9)
