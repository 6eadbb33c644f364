"""Python code of the user's inside a backward pass: autograd Functions, tensor hooks, checkpoints.

torch.export records a forward and differentiates the record, so it would lose what such code makes of a gradient. While
a model is captured these calls are intercepted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor

from parplan.compat import intercepted_functions
from parplan.errors import CaptureError
from parplan.graph.user_line import calling_line

__all__ = ["opaque_calls"]

_CHECKPOINT = torch.utils.checkpoint.CheckpointFunction


@contextmanager
def opaque_calls() -> Iterator[None]:
    """While it lasts, calls that put code into the backward pass are intercepted.

    Raises:
        CaptureError: of such a call.
    """
    with ExitStack() as patches:
        patches.enter_context(intercepted_functions(_apply))
        for owner, name in _REFUSED:
            patches.enter_context(mock.patch.object(owner, name, _refused(owner, name)))
        yield


def _apply(plain: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `cls.apply` gives in a capture."""
    if cls is _CHECKPOINT:
        return _checkpointed(*args)
    if cls.__module__.split(".")[0] == "torch":
        return plain(cls, *args, **kwargs)
    _refuse(
        f"{cls.__name__}.apply is a torch.autograd.Function, whose own backward would be lost",
        "write it as a torch.library.custom_op with register_autograd, which keeps its backward",
    )


def _checkpointed(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """The function itself: what a checkpoint saves is memory. Without a differentiable input it gives no gradient."""
    differentiable = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
        return function(*args)


_REFUSED: dict[tuple[Any, str], tuple[str, str]] = {
    (Tensor, "register_hook"): ("registers a hook on a tensor", "use a module's register_full_backward_hook"),
    (Tensor, "register_post_accumulate_grad_hook"): (
        "registers a hook on a leaf tensor",
        "register it once, outside of the forward",
    ),
    (Tensor, "retain_grad"): (
        "keeps the gradient of an intermediate tensor, which stays inside the step of a compiled model",
        "return the tensor from the forward and call retain_grad() on the result",
    ),
    (torch.autograd, "_engine_run_backward"): (
        "computes gradients, and would need second derivatives",
        "call it outside, on what the forward returns",
    ),
    (torch.autograd.graph, "register_multi_grad_hook"): (
        "registers a hook on several tensors",
        "use a module's register_full_backward_hook",
    ),
}


def _refused(owner: Any, name: str) -> Callable[..., NoReturn]:
    what, remedy = _REFUSED[owner, name]

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"the forward {what}", remedy)

    return refuse


def _refuse(what: str, remedy: str) -> NoReturn:
    line = calling_line()
    raise CaptureError(f"{what}\n" + (f"  at {line}\n" if line else "") + f"  {remedy}")
