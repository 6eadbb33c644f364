"""A custom autograd Function keeps its own backward under every plan, and the tables say when samples stay apart."""

# mypy: disable-error-code="no-untyped-call, no-any-return, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import CaptureError, RuleError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.sites import why_whole
from parplan.graph.user_code import opaque
from parplan.graph.user_code.function_probe import probe
from parplan.graph.user_code.functions import FunctionSite
from parplan.plan import Plan, Strategy
from parplan.planner.explain.reasons import only_way
from parplan.planner.search_space.verifier import check
from parplan.runtime.module.compiled import Compiled
from parplan.verification import verify_plan
from tests.own_backward import Between, Clamped, Normed, OwnBackwards, Reversed, Sign, Weighted
from tests.plans import plan_by

Function = torch.autograd.Function


class Several(Function):
    """Arguments and results of all kinds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, flag: bool, options: dict[str, Any], none: None) -> tuple[Any, ...]:
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        ctx.scales = options["scales"]
        return x * 2, y + 1, index, "name"

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        assert ctx.needs_input_grad == (True, True, False, False, False)
        return one * ctx.scales[0], two.clamp(-0.01, 0.01), None, None, None


def several(model: nn.Module, h: Tensor) -> Tensor:
    one, two, index, name = Several.apply(h, h * 2, True, {"scales": [3]}, None)
    assert name == "name"
    return one + two + index.unsqueeze(1)


class Separate(Function):
    """Its context is set up apart from the forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale / 2, None


class Masked(Function):
    """Stops gradients by writing to a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[x < 0] = 0
        return gradient * 2


class Step(Function):
    """Rounds to multiples of a learned step, whose gradient is a sum over everything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        steps = x / step
        return gradient * (steps.abs() < 4), ((steps.round() - steps) * gradient).sum().unsqueeze(0) * 0.1


class Within(Function):
    """Calls another one, which is part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result: Tensor = Sign.apply(x)
        return result * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        result: Tensor = Clamped.apply(gradient)
        return result * 2


class Writing(Function):
    """Writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(0.5)


class Mean(Function):
    """Divides by the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.samples = x.shape[0]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ctx.samples


class Looking(Function):
    """Its backward looks at values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 if gradient.sum() > 0 else gradient


class Loss(Function):
    """One number of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 0.7


TABLE = torch.arange(8.0)


class Constant(Function):
    """Reads a tensor of the module's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * TABLE.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Summed(Function):
    """The gradient of a weight that is no sum of the samples' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum().clamp(-0.1, 0.1).unsqueeze(0)


def without_gradient(model: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = Sign.apply(h)
    return h + fixed


Call = Callable[[Any, Tensor], Tensor]
APART: dict[str, Call] = {
    "straight through": lambda model, h: Sign.apply(h),
    "reversal": lambda model, h: Reversed.apply(h, 0.3),
    "clamped": lambda model, h: Clamped.apply(h),
    "several": several,
    "set up apart": lambda model, h: Separate.apply(h, scale=3.0),
    "masked": lambda model, h: Masked.apply(h),
    "learned step": lambda model, h: Step.apply(h, model.scale),
    "another within": lambda model, h: Within.apply(h),
    "no gradient": without_gradient,
}
WHOLE: dict[str, tuple[Call, str]] = {
    "norm": (lambda model, h: Normed.apply(h), "Normed mixes samples"),
    "writes": (lambda model, h: Writing.apply(h), "Writing changes tensors in place"),
    "samples": (lambda model, h: Mean.apply(h), "a number in the code of Mean changes with the number of samples"),
    "argument": (lambda model, h: Reversed.apply(h, 1 / h.shape[0]), "an argument of Reversed changes with the number"),
    "values": (lambda model, h: Looking.apply(h), "the code of Looking cannot be traced without values"),
    "loss": (lambda model, h: h * Loss.apply(h), "Loss mixes samples"),
    "constant": (lambda model, h: Constant.apply(h), "Constant reads a tensor that is not among its arguments"),
    "no sum": (lambda model, h: Summed.apply(h, model.scale), "Summed mixes samples"),
}


def function_of(graph: LayerGraph) -> Layer:
    """The graph's layer that is a Function."""
    return next(layer for layer in graph.layers.values() if layer.kind == "function")


def agrees(model: nn.Module, plan: str) -> None:
    """Outputs and gradients under a plan are the plain model's."""
    found = verify_plan(model, (torch.randn(8, 6).requires_grad_(),), None, partial(plan_by, plan, 2), devices=2)
    assert found.passed, found.rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", APART)
def test_samples_stay_apart_where_forward_and_backward_say_so(name: str) -> None:
    layer = function_of(capture(Between(APART[name]), (torch.randn(8, 6),)))
    assert layer.batch is not None
    assert layer.batch.units == 8
    agrees(Between(APART[name]), "data parallel")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WHOLE)
def test_all_else_is_whole_and_says_why(name: str) -> None:
    call, why = WHOLE[name]
    graph = capture(Between(call), (torch.randn(8, 6),))
    layer = function_of(graph)
    assert layer.batch is None
    assert why in only_way(layer)
    # Layers behind it go on with replicas.
    assert graph.layers["b"].batch is not None or name in ("loss", "argument")
    agrees(Between(call), "data parallel")
    strategies = {n: Strategy() for n in graph.layers} | {layer.name: Strategy(2, 1, None, (0, 1))}
    with pytest.raises(RuleError, match=why):
        check(Plan(graph.model, graph.fingerprint, 8, 2, strategies), graph)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data parallel", "model parallel", "sums", "towers", "solver"])
def test_functions_on_samples_and_weights_keep_their_backward(plan: str) -> None:
    agrees(OwnBackwards(), plan)


@pytest.mark.full
def test_a_function_of_weights_runs_everywhere_only_if_terms_of_its_gradient_may_go_through_it() -> None:
    graph = capture(OwnBackwards(), (torch.randn(8, 6),))
    linear, clamped = graph.layers["Sign_1"], graph.layers["Clamped_1"]
    assert (linear.constant, clamped.constant, clamped.reached) == (True, False, False)
    assert not why_whole(clamped.nodes)
    assert "needs the whole gradient" in only_way(clamped)


@pytest.mark.full
def test_every_call_runs_the_code_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Function itself is called, not a record of it."""
    plain = OwnBackwards().double()
    model = Compiled(plain, partial(plan_by, "data parallel", 2), devices=["cpu"] * 2)
    x = torch.randn(8, 6, dtype=torch.float64)
    model(x).sum().backward()
    monkeypatch.setattr(Reversed, "backward", staticmethod(lambda ctx, gradient: (gradient * 5, None)))
    model.zero_grad()
    model(x).sum().backward()
    assert plain.a.weight.grad is not None
    found = plain.a.weight.grad.clone()
    plain.zero_grad()
    plain(x).sum().backward()
    torch.testing.assert_close(found, plain.a.weight.grad)


@pytest.mark.full
def test_evaluation_and_gradients_that_nobody_wants() -> None:
    plain = OwnBackwards().double()
    model = Compiled(plain, partial(plan_by, "data parallel", 2), devices=["cpu"] * 2)
    x = torch.randn(8, 6, dtype=torch.float64)
    for parameter in plain.a.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(model(x), plain(x))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.eval()(x))


class Casting(Function):
    """Computes in what autocast says, forward and backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (gradient @ weight.t()) * 2, x.t() @ gradient.to(x.dtype)


def test_autocast_is_as_in_the_plain_model() -> None:
    plain = Between(lambda model, h: Casting.apply(h, model.b.weight.t()))
    plain.b = nn.Linear(8, 8)
    model = Compiled(plain, partial(plan_by, "data parallel", 2), devices=["cpu"] * 2)
    x, found = torch.randn(8, 6), []
    for call in (model, plain):
        plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = call(x)
            result.float().sum().backward()
        assert plain.a.weight.grad is not None
        found.append((result, plain.a.weight.grad.clone()))
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)


# --- refused -----------------------------------------------------------------------------------


class Counting(Function):
    """Counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Dirty(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Branching(Function):
    """Its forward looks at values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reading(Function):
    """Reads a parameter through the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        result: Tensor = x * model.scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


REFUSED: dict[str, tuple[Call, str]] = {
    "class": (lambda model, h: Counting.apply(h), r"Counting writes to its class \(calls\)"),
    "argument": (lambda model, h: Dirty.apply(h * 1), "Dirty writes to its arguments"),
    "values": (lambda model, h: Branching.apply(h), "Branching cannot run without values"),
    "reads": (lambda model, h: Reading.apply(h, model), "Reading reads scale, which is not among its arguments"),
    "in place": (lambda model, h: Reversed.apply(h, 1.0).relu_(), "Reversed.apply returns a view of its argument"),
    "vmap": (lambda model, h: torch.vmap(Separate.apply)(h), r"Separate.apply is called inside of torch\.func"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_right_is_refused_with_its_line(name: str) -> None:
    call, why = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"(?s){why}.*test_functions\.py:\d+"):
        capture(Between(call), (torch.randn(8, 6),))
    assert Counting.calls == 0


def test_calls_with_equal_arguments_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []

    def counted(site: FunctionSite, *rest: Any) -> None:
        traced.append(site.name)
        probe(site, *rest)

    def forward(model: nn.Module, h: Tensor) -> Tensor:
        return Reversed.apply(Reversed.apply(Reversed.apply(h, 0.3), 0.3), 0.7) + Sign.apply(h)

    monkeypatch.setattr(opaque, "probe", counted)
    graph = capture(Between(forward), (torch.randn(8, 6),), check_batch=False)
    assert traced == ["Reversed", "Reversed", "Sign"]
    layers = [layer for layer in graph.layers.values() if layer.kind == "function"]
    assert [layer.batch is not None for layer in layers] == [True] * 4


def test_a_torch_library_op_keeps_its_backward() -> None:
    """Alone, and where the whole graph is traced once more to make in-place changes functional."""

    def changed(model: nn.Module, h: Tensor) -> Tensor:
        row = h[:, 0]
        h = h * 1
        h[:, 1] = row
        return doubled(h)

    for call in (lambda model, h: doubled(h), changed):
        agrees(Between(call), "data parallel")


@torch.library.custom_op("parplan_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """The same numbers, and twice the gradient."""
    return x.clone()


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@pytest.mark.full
def test_a_function_stays_where_the_graph_is_traced_once_more() -> None:
    def changed(model: nn.Module, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient * 0.5)
        h = Clamped.apply(h) * 1
        h[:, 1] = h[:, 0] * 2
        result: Tensor = Reversed.apply(h, 0.3)
        return result

    assert function_of(capture(Between(changed), (torch.randn(8, 6),))).batch is not None
    agrees(Between(changed), "data parallel")


@pytest.mark.full
def test_weights_passed_to_apply_are_held_whole() -> None:
    graph = capture(OwnBackwards(), (torch.randn(8, 6),))
    (layer,) = [layer for layer in graph.layers.values() if layer.name.startswith(Weighted.__name__)]
    assert {graph.parameters[name] for name in layer.parameters} == {"weight", "bias"}
    assert layer.axes == ()
