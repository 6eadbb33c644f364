"""Batch norm over replicas: every replica's statistics, combined to those of the whole batch.

A replica sends count, mean and sum of squared deviations per channel, three numbers where its activations have
millions. Counts and deviations combine exactly (Chan, Golub and LeVeque, 1979), so the result is that of plain batch
norm up to rounding, also when replicas have different numbers of samples, or none. All steps are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x.to(dtype), dims, correction=0)
    return torch.stack((torch.full_like(mean, count), mean, variance * count)).unsqueeze(0)


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
    shift = -whole.mean * scale if bias is None else bias - whole.mean * scale
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = whole.variance * whole.count / (whole.count - 1)
            running_mean.lerp_(whole.mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    per_channel = (1, -1) + (1,) * (x.dim() - 2)
    return torch.addcmul(shift.view(per_channel), x.to(scale.dtype), scale.view(per_channel)).to(x.dtype)


def normaliser(layer: Layer) -> Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor]]:
    """The second half of a layer's batch norm: `normalise` of the input, the statistics, and the states by name."""
    node = next(node for node in layer.nodes if node.target is torch.ops.aten.batch_norm.default)
    names = [getattr(argument, "name", "") for argument in node.args[1:5]]
    momentum, eps = (float(str(argument)) for argument in node.args[6:8])

    def run(x: Tensor, parts: Tensor, states: Mapping[str, Tensor]) -> tuple[Tensor]:
        weight, bias, mean, variance = map(states.get, names)
        return (normalise(x, parts, weight, bias, mean, variance, momentum, eps),)

    return run
