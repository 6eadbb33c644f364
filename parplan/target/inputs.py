"""A target, and its example inputs: from a file, or from shapes on the command line; and their batch.

Planning needs shapes and types, not values, so a batch is one sample's memory seen many times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from parplan.compat import pytree
from parplan.errors import TargetError
from parplan.pins import Pin

__all__ = ["DTYPES", "Inputs", "Target", "from_example", "from_options", "with_batch"]

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)
}  # fmt: skip
_OPTION = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_SEED = 0
# Elements of one sample, which are made here (4 GiB in fp32), and of all of them, which are only counted.
_MOST_SAMPLE = 2**30
_MOST = 2**44


@dataclass(frozen=True)
class Target:
    """A model and one call of it.

    Args:
        name: the model's class name, or the file's name where the class is one of torch.nn's containers.
        module: the model.
        args, kwargs: the example inputs of one training step.
        pins: what the target itself says of where layers run (`gpu=` in a layer file).
        gpus: how many logical devices those pins need.
        notes: what a reader of a plan should know of the target.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pins: tuple[Pin, ...] = ()
    gpus: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def from_example(value: Any, where: str) -> Inputs:
    """Inputs as a file gives them: a tensor, a tuple or list of arguments, or a dict of keyword arguments.

    Raises:
        TargetError: it is something else, with `where` it stood.
    """
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return Inputs((), dict(value))
    if isinstance(value, tuple | list):
        return Inputs(tuple(value), {})
    if isinstance(value, Tensor):
        return Inputs((value,), {})
    raise TargetError(f"{where}: {type(value).__name__} is not inputs; give a tensor, a tuple of arguments or a dict "
                      "of keyword arguments")  # fmt: skip


def from_options(options: Sequence[str]) -> Inputs | None:
    """Inputs of the shapes given, such as `64x3x224x224`, `64x128:int64` or `mask=64x128:bool`; None without any.

    Floats are random numbers (the same every time), whole numbers zeros, which index every table.

    Raises:
        TargetError: a shape, a type or a name that is none.
    """
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    for option in options:
        found = _OPTION.fullmatch(option)
        if not found:
            raise TargetError(f"--input {option}: write sizes with x between them, then a type if it is not float32: "
                              "64x3x224x224, 64x128:int64, mask=64x128:bool")  # fmt: skip
        shape, name = [int(size) for size in found["shape"].split("x")], found["name"]
        dtype = DTYPES.get(found["dtype"] or "float32")
        if dtype is None:
            raise TargetError(f"--input {option}: there is no type {found['dtype']}; use {', '.join(DTYPES)}")
        if min(shape) < 1:
            raise TargetError(f"--input {option}: a size of 0 leaves nothing to compute; use 1 or more")
        _refuse_too_large(f"--input {option}", shape)
        sample, generator = (1, *shape[1:]), torch.Generator().manual_seed(_SEED)
        floats = dtype.is_floating_point
        one = torch.randn(sample, generator=generator).to(dtype) if floats else torch.zeros(sample, dtype=dtype)
        tensor = one.expand(shape)
        if name in kwargs:
            raise TargetError(f"--input {option}: {name} is given twice")
        if name:
            kwargs[name] = tensor
        else:
            args.append(tensor)
    return Inputs(tuple(args), kwargs) if options else None


def _refuse_too_large(option: str, shape: Sequence[int]) -> None:
    sample = prod(shape[1:])
    if sample > _MOST_SAMPLE or prod(shape) > _MOST:
        raise TargetError(f"{option}: {prod(shape):,} elements, {sample:,} in one sample, are more than devices hold; "
                          "use smaller sizes")  # fmt: skip


def with_batch(inputs: Inputs, batch: int) -> Inputs:
    """The same call with `batch` samples, in the memory it has now.

    The examples' batch is dimension 0 of their first tensor; every tensor of that size in dimension 0 is changed.

    Raises:
        TargetError: there is no such tensor.
    """
    leaves, spec = pytree.tree_flatten((inputs.args, inputs.kwargs))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise TargetError(f"--batch {batch}: the example inputs hold no tensor with a batch dimension")
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == sizes[0]:
            _refuse_too_large(f"--batch {batch}", (batch, *leaf.shape[1:]))
            fewer = batch <= leaf.shape[0]
            leaves[index] = leaf[:batch] if fewer else leaf[:1].expand(batch, *leaf.shape[1:])
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return Inputs(args, kwargs)
