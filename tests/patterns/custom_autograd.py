"""Patterns with a user's own backward: custom Functions, tensor hooks, detached values."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz_models import Reverse, StraightThrough
from benchmarks.training import Run
from tests.patterns.nets import Mlp, steps
from tests.patterns.pattern import Section

SECTION = Section("Own backward passes")


class Clamped(torch.autograd.Function):
    """The identity; gradients are clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Clamped."""
        return grad.clamp(-0.01, 0.01)


class Swish(torch.autograd.Function):
    """A derivative written by hand, in the newer style with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        """x times its sigmoid."""
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the input alone."""
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The derivative."""
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Surrogate(torch.autograd.Function):
    """A spiking neuron: a step forward, a smooth derivative backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
        """Ones above the threshold."""
        ctx.save_for_backward(x, threshold)
        return (x > threshold).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """As if a sigmoid."""
        x, threshold = ctx.saved_tensors
        own = grad / (1 + (x - threshold).abs()).square()
        return own, -own.sum(0)


class UnitNorm(torch.autograd.Function):
    """Mixes samples: every gradient is divided by the norm of the whole batch's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Of norm one, over all samples."""
        return grad / grad.norm()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.threshold = nn.Parameter(torch.zeros(8))


def _train(run: Run, module: nn.Module) -> None:
    model = run.compile(module)
    steps(run, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@SECTION("a straight-through estimator as a `torch.autograd.Function`")
def straight_through(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(StraightThrough.apply(self.body(x)))

    _train(run, Net())


@SECTION("a straight-through estimator by `detach()`")
def straight_through_detach(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = self.body(x)
            return self.head(h + (torch.round(h) - h).detach())

    _train(run, Net())


@SECTION("weights rounded by a straight-through Function (quantisation-aware training)", free=("body",))
def quantised_weights(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = nn.functional.linear(x, StraightThrough.apply(self.body.weight), self.body.bias)
            return self.head(torch.tanh(h))

    _train(run, Net())


@SECTION("gradient reversal with a constant weight")
def gradient_reversal(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(Reverse.apply(torch.tanh(self.body(x)), 0.3))

    _train(run, Net())


@SECTION("gradient reversal with a weight that grows (`model.alpha = ...`)")
def annealed_reversal(run: Run) -> None:
    class Net(_Net):
        alpha = 0.0

        def forward(self, x: Tensor) -> Any:
            return self.head(Reverse.apply(torch.tanh(self.body(x)), self.alpha))

    model = run.compile(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model.alpha = 2 / (1 + 2.718 ** (-step)) - 1
        steps(run, model, optimizer, 1)


@SECTION("gradients clamped by a Function, entry by entry")
def gradient_clamp(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(Clamped.apply(torch.tanh(self.body(x))))

    _train(run, Net())


clamp, swish = Clamped.apply, Swish.apply


@SECTION("a Function's `apply` held by another name (`clamp = Clamp.apply`)")
def held_apply(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(clamp(swish(self.body(x))))

    _train(run, Net())


@SECTION("a derivative written by hand (`setup_context`)")
def own_derivative(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(Swish.apply(self.body(x)))

    _train(run, Net())


@SECTION("a surrogate gradient, with a trained threshold")
def surrogate_gradient(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(Surrogate.apply(self.body(x), self.threshold))

    _train(run, Net())


@SECTION("a Function whose backward mixes samples (gradients of norm one over the batch)")
def mixing_function(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            return self.head(UnitNorm.apply(torch.tanh(self.body(x))))

    _train(run, Net())


@SECTION("a custom Function in a block that is called twice")
def shared_function(run: Run) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return Reverse.apply(torch.tanh(self.linear(x)), 0.5)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.block(x) + self.block(2 * x))

    _train(run, Net())


@SECTION("hooks of tensors in the forward (`h.register_hook`): scaled and clamped")
def tensor_hooks(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            if h.requires_grad:
                h.register_hook(lambda g: g * 0.5)
            out = self.head(h)
            if out.requires_grad:
                out.register_hook(lambda g: g.clamp(-0.05, 0.05))
            return out

    _train(run, Net())


@SECTION("a hook of a tensor in the forward that mixes samples (the norm of the batch's gradient)")
def mixing_tensor_hook(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            if h.requires_grad:
                h.register_hook(lambda g: g / g.norm())
            return self.head(h)

    _train(run, Net())


@SECTION("a hook of a tensor in the forward that keeps the gradient for a log")
def logging_tensor_hook(run: Run) -> None:
    seen: list[float] = []

    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            if h.requires_grad:
                h.register_hook(lambda g: seen.append(g.square().sum().item()))
            return self.head(h)

    _train(run, Net())
    run.same("gradients were seen", sum(seen) > 0)


@SECTION("`detach()` and `no_grad` in the forward (a stop-gradient)")
def stop_gradient(run: Run) -> None:
    class Net(_Net):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            with torch.no_grad():
                weight = torch.softmax(self.body(x) * 2, 1)
            return self.head(h.detach() * 0.5 + h * weight)

    _train(run, Net())


@SECTION(
    "gradients by `torch.autograd.grad` inside the forward",
    refused={"*": "the forward computes gradients"},
    why="they would need second derivatives; compute them outside of the model",
)
def gradients_inside(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.inner(given).square().sum(), given)
            return self.inner(x + 0.1 * gradient)

    _train(run, Net())
