"""Batch norm over replicas: every replica's statistics, combined to those of the whole batch.

A replica sends count, mean and sum of squared deviations per channel, three numbers where its activations have
millions. Counts and deviations combine exactly (Chan, Golub and LeVeque, 1979), so the result is that of plain batch
norm up to rounding, also when replicas have different numbers of samples, or none. All steps are differentiable once.

The two that go over all activations have backwards of their own: recorded op by op they go over memory twice as often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parplan.graph.layer_graph import Layer

__all__ = ["Combined", "combine", "normalise", "normaliser", "statistics"]


def statistics(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Count, mean and sum of squared deviations of (N, C, ...) per channel, as [1, 3, C] of `dtype`."""
    channels = x.shape[1]
    count = x.numel() // max(channels, 1)
    if count == 0:
        return x.new_zeros((1, 3, channels), dtype=dtype)
    mean, variance = _Moments.apply(x.to(dtype))  # type: ignore[no-untyped-call]
    return torch.stack((torch.full_like(mean, count), mean, variance * count)).unsqueeze(0)


class _Moments(torch.autograd.Function):
    """Mean and biased variance of (N, C, ...) per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.device.type == "cpu":  # as plain batch norm takes them, in a fifth of the time
            mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        else:
            variance, mean = torch.var_mean(x, [dim for dim in range(x.dim()) if dim != 1], correction=0)
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        count = x.numel() // x.shape[1]
        factor = of_variance * (2 / count)
        return torch.addcmul(_along(of_mean / count - factor * mean, x), x, _along(factor, x))


class _Scaled(torch.autograd.Function):
    """`(x - mean) * scale + shift` of (N, C, ...), by channel: a batch norm with a variance of 1, as torch has for that
    one pass over the gradient that gives all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, mean, scale)
        return torch.addcmul(_along(shift - mean * scale, x), x, _along(scale, x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, mean, scale = ctx.saved_tensors
        if x.numel() == 0:  # which torch's would divide by
            return gradient, *(torch.zeros_like(scale) for _ in range(3))
        if torch.is_grad_enabled():  # create_graph=True
            samples = [dim for dim in range(x.dim()) if dim != 1]
            of_x, of_shift = gradient * _along(scale, x), gradient.sum(samples)
            of_scale = (gradient * (x - _along(mean, x))).sum(samples)
        else:
            kept = (mean, torch.ones_like(scale)) * 2  # those of training are not read
            of_x, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
                gradient, x, scale, *kept, train=False, eps=0.0, output_mask=[True] * 3
            )
        return of_x, -scale * of_shift, of_scale, of_shift


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """A view of [C] that lies along the channels of `x`."""
    return channels.view(1, -1, *(1,) * (x.dim() - 2))


@dataclass(frozen=True)
class Combined:
    """Statistics of the whole batch: `count` [C], `mean` [C], `variance` [C] (biased)."""

    count: Tensor
    mean: Tensor
    variance: Tensor


def combine(parts: Tensor) -> Combined:
    """Join statistics [replicas, 3, C] into those of all samples."""
    counts, means, deviations = parts.unbind(1)
    counts = counts.detach()
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    squared = deviations.sum(0) + (counts * (means - mean) ** 2).sum(0)
    return Combined(total, mean, squared / total)


def normalise(
    x: Tensor,
    parts: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch norm of (N, C, ...) in training with the statistics [replicas, 3, C] of all replicas.

    Running statistics move by `momentum` towards the mean and the unbiased variance of the whole batch.
    """
    whole = combine(parts)
    scale = torch.rsqrt(whole.variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = torch.zeros_like(scale) if bias is None else bias.to(scale.dtype)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = whole.variance * whole.count / (whole.count - 1)
            running_mean.lerp_(whole.mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    found: Tensor = _Scaled.apply(x.to(scale.dtype), whole.mean, scale, shift)  # type: ignore[no-untyped-call]
    return found.to(x.dtype)


def normaliser(layer: Layer) -> Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor]]:
    """The second half of a layer's batch norm: `normalise` of the input, the statistics, and the states by name."""
    node = next(node for node in layer.nodes if node.target is torch.ops.aten.batch_norm.default)
    names = [getattr(argument, "name", "") for argument in node.args[1:5]]
    momentum, eps = (float(str(argument)) for argument in node.args[6:8])

    def run(x: Tensor, parts: Tensor, states: Mapping[str, Tensor]) -> tuple[Tensor]:
        weight, bias, mean, variance = map(states.get, names)
        return (normalise(x, parts, weight, bias, mean, variance, momentum, eps),)

    return run
