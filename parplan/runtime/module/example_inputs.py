"""Inputs like those a model was called with last, without keeping those alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parplan.compat import pytree
from parplan.runtime.calls import Call

__all__ = ["Example"]

_SEED = 0


@dataclass(frozen=True)
class _Numbers:
    """Shape and kind of a tensor of real or complex numbers, whose values do not matter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def made(self, generator: torch.Generator) -> Tensor:
        """Numbers between 0 and 1, which every loss takes."""
        values = torch.rand(self.shape, generator=generator, dtype=_drawn(self.dtype)).to(self.device, self.dtype)
        return values.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Example:
    """A call without the values of its numbers; whole numbers (classes, indices) and flags are kept.

    Args:
        leaves, spec: the flattened (args, kwargs).
        sampled: per leaf whether it has samples.
        dim: the dimension that samples lie along.
    """

    leaves: tuple[Any, ...]
    spec: Any
    sampled: tuple[bool, ...]
    dim: int

    @staticmethod
    def of(call: Call) -> Example:
        """What to remember of a call."""
        sampled = tuple(call.has_samples(leaf) for leaf in call.leaves)
        return Example(tuple(_remembered(leaf) for leaf in call.leaves), call.spec, sampled, call.dim)

    def call(self, batch: int | None) -> Call:
        """A call like it with `batch` samples; the same numbers every time."""
        generator = torch.Generator().manual_seed(_SEED)
        made = [leaf.made(generator) if isinstance(leaf, _Numbers) else leaf for leaf in self.leaves]
        leaves = [
            self._resized(leaf, batch) if has and batch is not None else leaf
            for leaf, has in zip(made, self.sampled, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return Call.of(args, kwargs, self.dim)

    def _resized(self, leaf: Tensor, batch: int) -> Tensor:
        size = leaf.shape[self.dim]
        if size == batch or size == 0:
            return leaf
        again = torch.arange(batch, device=leaf.device) % size
        return leaf.detach().index_select(self.dim, again).requires_grad_(leaf.requires_grad)


def _remembered(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
        return _Numbers(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf


def _drawn(dtype: torch.dtype) -> torch.dtype:
    """A type that random numbers are made in."""
    return dtype if dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else torch.float32
