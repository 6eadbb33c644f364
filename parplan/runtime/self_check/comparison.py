"""Compares two runs of one training step, tensor by tensor: results, gradients of a fixed projection, buffers.

The projection weighs every element of every result differently, so that rows which changed places, a gradient that was
scaled and one that is missing all show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.runtime.transport.streams import sent

__all__ = ["GroupDifference", "compare_group", "largest_of", "projected", "projection_weights", "relative_difference"]


def projection_weights(results: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Weights between 0 and 1 without a pattern for every element of every result, fixed by shapes and seed.

    They come from no generator: the step may run where random draws are replaced by constants.
    """
    weights = []
    for index, result in enumerate(results):
        shape = _real(result).shape
        places = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        weights.append((torch.sin(places * 12.9898 + (1 + seed + index) * 78.233) * 43758.5453).frac().abs())
    return weights


def projected(results: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """A loss: the weighed sum of all elements in float64; infinities and NaN count as 0, whole numbers not at all."""
    loss = torch.zeros((), dtype=torch.float64)
    for result, weight in zip(results, weights, strict=True):
        real = _real(result)
        if real.is_floating_point():
            # A mask of -inf is compared as a result; in a sum it would hide everything else.
            term = (real.nan_to_num(0.0, 0.0, 0.0) * weight.to(real.device)).sum()
            loss = loss.to(term.device) + term
    return loss


@dataclass(frozen=True)
class GroupDifference:
    """The largest relative difference in one group of tensors.

    Args:
        group: such as "gradients".
        count: how many tensors were compared.
        difference: relative to the tensor's largest element, or to a share of the group's where that is more; infinite
            where shapes, whole numbers, or the places of infinities and NaN differ.
        worst: the tensor that has it.
        differences: that of every tensor.
    """

    group: str
    count: int
    difference: float
    worst: str
    differences: Mapping[str, float]


def compare_group(
    group: str, expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None], floor: float
) -> GroupDifference:
    """Compare the tensors of one group by name; None counts as zeros.

    Args:
        floor: what a tensor's difference is measured against at least, such as a share of the group's largest element:
            a tensor far smaller than the others is rounding noise (the gradient of a bias in front of a batch norm).
    """
    found: dict[str, float] = {}
    for name, tensor in expected.items():
        other = actual[name]
        if tensor is None and other is None:
            found[name] = 0.0
            continue
        wanted = tensor if tensor is not None else torch.zeros_like(other)  # type: ignore[arg-type]
        given = other if other is not None else torch.zeros_like(wanted)
        found[name] = relative_difference(wanted, given, floor)
    worst = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name], default="")
    return GroupDifference(group, len(found), found.get(worst, 0.0), worst, found)


def relative_difference(expected: Tensor, actual: Tensor, floor: float) -> float:
    """The largest absolute difference relative to the largest finite element of `expected`, at least to `floor`.

    Infinite where shapes, the places of infinities and of NaN, or whole numbers differ: these have no rounding.
    """
    if expected.shape != actual.shape:
        return math.inf
    if expected.dtype == actual.dtype and not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, actual.to(expected.device)) else math.inf
    if not expected.numel():
        return 0.0
    wanted, given = _exact(expected.detach()), _exact(actual.detach())
    given = given.to(wanted.device)
    difference = float((wanted - given).abs().max())
    if not math.isfinite(difference):
        if not torch.equal(_infinite(wanted), _infinite(given)):
            return math.inf
        both = wanted.isfinite() & given.isfinite()
        difference = float((wanted - given)[both].abs().max()) if bool(both.any()) else 0.0
    scale = max(size_of(wanted), floor)
    return difference / scale if scale > 0 else difference


def largest_of(*groups: Mapping[str, Tensor | None]) -> float:
    """The largest absolute value of a finite element in groups of tensors."""
    return max((size_of(tensor) for group in groups for tensor in group.values() if tensor is not None), default=0.0)


def size_of(tensor: Tensor) -> float:
    """The largest absolute value of a finite element."""
    if not tensor.numel():
        return 0.0
    exact = _exact(tensor.detach())
    largest = float(exact.abs().max())
    if math.isfinite(largest):
        return largest
    finite = exact[exact.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _exact(tensor: Tensor) -> Tensor:
    """In float64; on the host where the tensor's device may not compute in that."""
    known = tensor if tensor.device.type in ("cpu", "cuda") else sent(tensor, torch.device("cpu"))
    return known if known.is_complex() else known.double()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _infinite(tensor: Tensor) -> Tensor:
    """Masks of the elements that are NaN, infinity and minus infinity."""
    real = _real(tensor)
    return torch.stack([real.isnan(), real.isposinf(), real.isneginf()])
