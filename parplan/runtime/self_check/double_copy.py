"""Copies a module and a call in float64, casts to shorter types included, so that rounding cannot mimic a defect."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parplan.graph.axes.experts import grouped_in_double
from parplan.runtime.calls import ModelCall

__all__ = ["double", "double_call", "double_casts", "double_copy"]

_SHORT = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_SHORT |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_CASTS = ("float", "half", "bfloat16")


def double(tensor: Tensor) -> Tensor:
    """The tensor in double precision, complex numbers too; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def double_copy(module: nn.Module) -> nn.Module:
    """A copy of the module in double precision.

    Raises:
        Exception: an attribute of the module cannot be copied.
    """
    twin: nn.Module = copy.deepcopy(module)._apply(double)
    return twin


def double_call(call: ModelCall) -> ModelCall:
    """The same call in double precision."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return double(leaf.detach()).clone().requires_grad_(leaf.requires_grad)
        return _SHORT.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return ModelCall(tuple(map(cast, call.leaves)), call.spec, call.dim, call.batch)


def double_casts(active: bool = True) -> AbstractContextManager[object]:
    """A context in which casts to shorter floating-point types are casts to float64, if `active`."""
    return _DoubleCasts() if active else nullcontext()


class _DoubleCasts(TorchFunctionMode):
    """Replaces the types that are named in calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch's."""
        if getattr(func, "__name__", "") in _CASTS and isinstance(args[0], Tensor):
            return args[0].double()
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            func = grouped_in_double
        longer = [_SHORT.get(value, value) if isinstance(value, torch.dtype) else value for value in args]
        named = {k: _SHORT.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*longer, **named)
