"""How a model was called: nested arguments, flattened, and which of their tensors carry samples.

Two calls of one signature differ only in how many samples they bring; they share a captured graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parplan.compat import pytree
from parplan.errors import RuntimeFailure

__all__ = ["Call", "content"]


@dataclass(frozen=True)
class Call:
    """One call of a model.

    Args:
        leaves: the flattened (args, kwargs).
        spec: how they were nested.
        dim: the dimension that samples lie along.
        batch: samples this process brings; None when no tensor has that dimension.
    """

    leaves: tuple[Any, ...]
    spec: Any
    dim: int
    batch: int | None

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> Call:
        """Read a call.

        Raises:
            RuntimeFailure: no tensor has dimension `dim`.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if dim and tensors and all(tensor.dim() <= dim for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3])
            raise RuntimeFailure(
                f"samples are said to lie along dimension {dim}, which no input has (shapes {shapes}); give another dim"
            )
        sizes = (leaf.shape[dim] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > dim)
        return Call(tuple(leaves), spec, dim, next(sizes, None))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @cached_property
    def signature(self) -> Hashable:
        """What has to agree for two calls to share a captured graph: all but the number of samples."""
        return (str(self.spec), tuple(self._mark(leaf) for leaf in self.leaves))

    def has_samples(self, leaf: Any) -> bool:
        """Whether a leaf is a tensor that is cut over replicas; others are shared."""
        return isinstance(leaf, Tensor) and leaf.dim() > self.dim and leaf.shape[self.dim] == self.batch

    def resized(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the same signature with `batch` samples; their values mean nothing."""
        changed = [self._like(leaf, batch) if self.has_samples(leaf) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(changed, self.spec)
        return args, kwargs

    def first(self, samples: int | None) -> Call:
        """A call of its own tensors, detached, with the first `samples` samples; None for all of them."""
        whole = samples is None or self.batch is None

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            part = leaf if whole or not self.has_samples(leaf) else leaf.narrow(self.dim, 0, samples or 0)
            return part.detach().clone().requires_grad_(leaf.requires_grad)

        return Call(tuple(map(own, self.leaves)), self.spec, self.dim, self.batch if whole else samples)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs), nested again."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def _mark(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, Tensor):
            return (type(leaf).__name__, repr(leaf))
        shape = [None if self.has_samples(leaf) and d == self.dim else size for d, size in enumerate(leaf.shape)]
        return (tuple(shape), leaf.dtype, leaf.requires_grad)

    def _like(self, leaf: Tensor, batch: int) -> Tensor:
        shape = [batch if d == self.dim else size for d, size in enumerate(leaf.shape)]
        one = torch.zeros([1] * leaf.dim(), dtype=leaf.dtype, device=leaf.device)
        return one.expand(shape).requires_grad_(leaf.requires_grad)

    def check(self, samples: int) -> None:
        """Refuse a step that has tensors with samples but no sample.

        Raises:
            RuntimeFailure: no samples in any process.
        """
        if self.batch is not None and samples < 1:
            raise RuntimeFailure(f"a batch of {samples} samples along dimension {self.dim}: bring at least 1")


def content(tensor: Tensor) -> bytes:
    """The values of an input, bit by bit; of one on another device, a copy to the host waits for that device."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
