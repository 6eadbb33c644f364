"""Methods of the user's module that are called on its compiled form, in each process with its own samples.

A method other than forward runs the plain module. Gradients of its parameters are averaged over processes
(runtime/sharded_state/outside_gradients.py); statistics of samples are not, and are refused.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parplan.compat import FakeTensor
from parplan.errors import PlainModuleWarning, RuntimeFailure
from parplan.runtime.self_check.checked_step import in_plain_step

__all__ = ["watched"]

# Names of their arguments, the last of which says whether the statistics are those of the samples.
_NORMS = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    torch.instance_norm: ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats"),
}


def watched(module: nn.Module, found: Any, several: bool, unplanned: Callable[[], bool] | None) -> Any:
    """An attribute of `module`; one of its methods as one that refuses statistics, or says that nothing is planned.

    Args:
        several: processes, each of which calls it with its own samples.
        unplanned: whether it is to be said that nothing is planned; None: it is not.
    """
    if not inspect.ismethod(found) or found.__self__ is not module or not (several or unplanned is not None):
        return found

    @wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if several:
                stack.enter_context(_NoStatistics(module, found.__name__))
            if unplanned is not None:
                stack.enter_context(_Unplanned(module, found.__name__, unplanned))
            return found(*args, **kwargs)

    return method


class _Unplanned(TorchFunctionMode):
    """Warning, at the first op on a parameter and another tensor, that nothing is planned."""

    def __init__(self, module: nn.Module, method: str, unplanned: Callable[[], bool]) -> None:
        super().__init__()
        self._method, self._unplanned = method, unplanned
        self._parameters = frozenset(map(id, module.parameters()))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; writes in place (initialisation, averages of weights) are no computation of the model's."""
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        weights = [tensor for tensor in tensors if id(tensor) in self._parameters]
        computes = 0 < len(weights) < len(tensors) and not getattr(func, "__name__", "_").endswith("_")
        captured = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if computes and not captured and not in_plain_step() and self._unplanned():
            warnings.warn(
                f"{self._method}() runs the plain module, as every method beside forward() does, and the compiled "
                "model itself was not called yet, so that nothing is planned and one device does all the work; call "
                "the compiled model first, or leave it uncompiled if this is all it is for",
                PlainModuleWarning,
                stacklevel=3,
            )
        return func(*args, **(kwargs or {}))


class _NoStatistics(TorchFunctionMode):
    """While it lasts, a norm that mixes samples, or keeps running statistics of them, is refused."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self._module, self._method = module, method

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it is such a norm; captures and comparisons with the plain module have all samples."""
        names = _NORMS.get(func, ())
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        running = given.get("running_mean")
        mixes = func in (F.batch_norm, torch.batch_norm) or running is not None
        if names and mixes and given[names[-1]] and not isinstance(given["input"], FakeTensor) and not in_plain_step():
            path = next((path for path, buffer in self._module.named_buffers() if buffer is running), "")
            raise RuntimeFailure(
                f"{path.rpartition('.')[0] or func.__name__} takes statistics of samples in {self._method}(), which "
                "runs the plain module in every process with that process's own samples: they would not be the whole "
                "batch's, and running ones would differ between processes. Call the compiled model itself, with an "
                "argument for which forward() returns these results, or put the layer into evaluation mode"
            )
        return func(*args, **(kwargs or {}))
