"""A model with its loss inside: the same parameters under the same names, and a loss where targets are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from parplan.compat import HOOK_FIELDS
from parplan.errors import ModelError

__all__ = ["with_loss"]


def with_loss(model: nn.Module, loss: Callable[[Any, Any], Any]) -> nn.Module:
    """A module that returns `loss(model(*args, **kwargs), targets)`; without `targets`, the model's own results.

    It shares the model's submodules, parameters and buffers, and has its class for a base, so that state, layers and
    plans have the model's own names.

    Args:
        loss: a function of results and targets, or a module without parameters.

    Raises:
        ModelError: `loss` cannot be called or has parameters, or the model has hooks, which would see the loss.
    """
    if not callable(loss):
        raise ModelError(f"{loss!r} is no loss; give a function of results and targets")
    kind: Any = type(model)
    if any(getattr(model, name) for name in HOOK_FIELDS):
        raise ModelError(
            f"{kind.__name__} has hooks of its own, which would see the loss in place of its results; compute the loss "
            "in the model's forward instead"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ModelError(
            f"{type(loss).__name__} has parameters, which no optimizer of the model would know; make it a part of "
            "the model's forward instead"
        )

    def forward(self: nn.Module, *args: Any, targets: Any = None, **kwargs: Any) -> Any:
        results = kind.forward(self, *args, **kwargs)
        return results if targets is None else loss(results, targets)

    found = copy.copy(model)
    found.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return found
