"""One call of a model: nested arguments, flattened, and which of their tensors carry samples.

Two calls of one signature differ only in how many samples they bring; they share a captured graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils.weak import WeakTensorKeyDictionary

from parplan.accelerators import as_current
from parplan.compat import in_functional_transform, pytree
from parplan.errors import RuntimeFailure
from parplan.graph.attributes.containers import containers_in, register_caches
from parplan.graph.capture.capture import batch_of, check_dense
from parplan.runtime.compat import writes

__all__ = ["ModelCall", "digest"]

_SEED = 0


@dataclass(frozen=True)
class ModelCall:
    """One call of a model.

    Args:
        leaves: the flattened (args, kwargs).
        spec: how they were nested; `nesting` is its text, made where it is not given.
        dim: the dimension that samples lie along.
        batch: samples this process brings; None when no tensor has that dimension, or inputs are said to hold none.
        containers: the caller's caches among the arguments.
    """

    leaves: tuple[Any, ...]
    spec: Any
    dim: int
    batch: int | None
    containers: tuple[Any, ...] = ()
    nesting: str = ""

    def __post_init__(self) -> None:
        if not self.nesting:
            object.__setattr__(self, "nesting", str(self.spec))

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any], dim: int | None) -> ModelCall:
        """Read a call; without `dim` its inputs hold no samples.

        Raises:
            RuntimeFailure: no tensor has dimension `dim`, or torch.func or a tangent is involved.
            CaptureError: a tensor is sparse.
        """
        if in_functional_transform():
            raise RuntimeFailure(
                "a compiled model was called inside a transform of torch.func (grad, vmap, jvp, ...), which does not "
                "reach its devices; use the plain model there, `module` of the compiled one, or loss.backward()"
            )
        register_caches()
        leaves: Sequence[Any] = (*args, *kwargs.values())
        flat = all(isinstance(leaf, Tensor) or type(leaf) in _LEAVES for leaf in leaves)
        if flat:  # as most calls are, whose nesting need not be found anew
            spec, nesting = _flat(len(args), tuple(kwargs))
        else:
            leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
            nesting = str(spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        check_dense(leaves)
        if any(unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise RuntimeFailure(
                "a compiled model was called with a tangent (torch.autograd.forward_ad), which does not reach its "
                "devices; use the plain model there, `module` of the compiled one, or a backward"
            )
        if dim and tensors and all(tensor.dim() <= dim for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3])
            raise RuntimeFailure(
                f"samples are said to lie along dimension {dim}, which no input has (shapes {shapes}); give another dim"
            )
        batch = batch_of(leaves, dim)
        containers = () if flat else tuple(containers_in((args, kwargs)))
        return ModelCall(tuple(leaves), spec, dim or 0, batch, containers, nesting)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def named(self, names: Sequence[str | None]) -> dict[str, Tensor]:
        """The tensors among the arguments by the names of their values in a graph; None: it does not use that one."""
        given = zip(names, self.leaves, strict=True)
        return {name: leaf for name, leaf in given if name is not None and isinstance(leaf, Tensor)}

    @cached_property
    def signature(self) -> Hashable:
        """The facts that calls which share a captured graph have in common: all but the number of samples."""

        def mark(leaf: Any) -> Hashable:
            if not isinstance(leaf, Tensor):
                return (type(leaf).__name__, repr(leaf))
            shape = [None if self.has_samples(leaf) and d == self.dim else size for d, size in enumerate(leaf.shape)]
            return (tuple(shape), leaf.dtype, leaf.requires_grad)

        return (self.nesting, tuple(map(mark, self.leaves)))

    @cached_property
    def form(self) -> Hashable:
        """The facts that calls have in common which differ in sizes and numbers alone, as steps of decoding do."""

        def mark(leaf: Any) -> Hashable:
            if isinstance(leaf, Tensor):
                return (leaf.dim(), self.has_samples(leaf), leaf.dtype, leaf.requires_grad)
            return (type(leaf).__name__, "" if type(leaf) in (int, float) else repr(leaf))

        return (self.nesting, tuple(map(mark, self.leaves)))

    def has_samples(self, leaf: Any) -> bool:
        """Whether a leaf is a tensor that is cut over replicas; others are shared."""
        return isinstance(leaf, Tensor) and leaf.dim() > self.dim and leaf.shape[self.dim] == self.batch

    def without_numbers(self) -> ModelCall:
        """The call without the values of its numbers, which it does not keep alive; whole numbers (classes, indices)
        and flags are kept.
        """
        leaves = tuple(_like(leaf, leaf.shape) if _is_numbers(leaf) else leaf for leaf in self.leaves)
        return replace(self, leaves=leaves, containers=())

    def drawn(self, batch: int | None) -> ModelCall:
        """A call like this one with `batch` samples and numbers between 0 and 1, which every loss takes; the same ones
        every time.
        """
        generator = torch.Generator().manual_seed(_SEED)
        leaves = []
        for leaf in self.leaves:
            made = leaf
            if _is_numbers(leaf):
                drawable = leaf.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
                dtype = leaf.dtype if drawable else torch.float32
                values = torch.rand(leaf.shape, generator=generator, dtype=dtype)
                made = values.to(leaf.device, leaf.dtype).requires_grad_(leaf.requires_grad)
            if self.has_samples(leaf) and batch is not None and made.shape[self.dim] not in (batch, 0):
                again = torch.arange(batch, device=made.device) % made.shape[self.dim]
                made = made.detach().index_select(self.dim, again).requires_grad_(made.requires_grad)
            leaves.append(made)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return ModelCall.of(args, kwargs, self.dim if self.batch is not None else None)

    def resized(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the same signature with `batch` samples; their values mean nothing."""

        def like(leaf: Any) -> Any:
            if not self.has_samples(leaf):
                return leaf
            return _like(leaf, [batch if d == self.dim else size for d, size in enumerate(leaf.shape)])

        args, kwargs = pytree.tree_unflatten(list(map(like, self.leaves)), self.spec)
        return args, kwargs

    def first(self, samples: int | None) -> ModelCall:
        """A call of its own tensors, detached, with the first `samples` samples; None for all of them."""
        whole = samples is None or self.batch is None

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            part = leaf if whole or not self.has_samples(leaf) else leaf.narrow(self.dim, 0, samples or 0)
            return part.detach().clone().requires_grad_(leaf.requires_grad)

        return ModelCall(tuple(map(own, self.leaves)), self.spec, self.dim, self.batch if whole else samples)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs), nested again."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def check(self, samples: int) -> None:
        """Refuse a step that has tensors with samples but no sample.

        Raises:
            RuntimeFailure: no samples in any process.
        """
        if self.batch is not None and samples < 1:
            raise RuntimeFailure(f"a batch of {samples} samples along dimension {self.dim}: bring at least 1")


_LEAVES = frozenset({int, float, bool, str, type(None)})


@lru_cache(maxsize=64)
def _flat(positional: int, names: tuple[str, ...]) -> tuple[Any, str]:
    """How arguments are nested that are leaves, and its text."""
    spec = pytree.tree_structure(((0,) * positional, dict.fromkeys(names, 0)))
    return spec, str(spec)


def _is_numbers(leaf: Any) -> bool:
    """Whether a leaf is a tensor of real or complex numbers, whose values do not matter."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another shape, of zeros that take no memory."""
    with as_current(tensor.device):
        one = torch.zeros([1] * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    return one.expand(shape).requires_grad_(tensor.requires_grad)


def digest(tensor: Tensor) -> bytes:
    """A hash of a tensor's shape and values, bit by bit.

    Of one that was not written since it was asked for it is known: a copy to the host would wait for the device.
    """
    known, count = _digests.get(tensor, (b"", -1)), -1 if tensor.is_inference() else writes(tensor)
    if not known[0] or count < 0 or count != known[1]:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found = hashlib.blake2b(repr(tuple(tensor.shape)).encode() + values.tobytes(), digest_size=8).digest()
        _digests[tensor] = known = found, count
    return known[0]


_digests: MutableMapping[Tensor, tuple[bytes, int]] = WeakTensorKeyDictionary()
