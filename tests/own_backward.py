"""Autograd Functions whose backward is not the derivative of their forward, and models that use them."""

# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Between", "Clamped", "Hooked", "Normed", "OwnBackwards", "Reversed", "Sign", "Weighted"]


class Sign(torch.autograd.Function):
    """Straight through: the gradient passes as if nothing was rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Clamped(torch.autograd.Function):
    """Clamps each element of the gradient: per sample, but not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class Normed(torch.autograd.Function):
    """Divides by the norm of the gradient of all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Weighted(torch.autograd.Function):
    """A linear layer whose three gradients are scaled each in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight, gradient.t() @ x * 3, gradient.sum(0) / 2


reverse = Reversed.apply  # held by another name, as people do


class OwnBackwards(nn.Module):
    """Functions on samples, on weights, and one that needs all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = Sign.apply(self.a(x))
        h = Weighted.apply(reverse(self.b(h), 0.3), self.weight, self.bias)
        h = Normed.apply(Clamped.apply(h.tanh()))
        return nn.functional.linear(h, Clamped.apply(Sign.apply(self.c.weight)), self.c.bias)


class Between(nn.Module):
    """Two linear layers with a function of the model and of the tensor between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 8), nn.Linear(8, 4), between
        self.scale = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.between(self, self.a(x).tanh()))
        return result


class Hooked(nn.Module):
    """A tensor that is used before and after `register` puts hooks on it, and is a result too."""

    def __init__(self, register: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.register = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4), register

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).tanh()
        before = self.b(h)
        self.register(h)
        return self.c((h + before).relu_()), h
