"""Networks whose capture can be made to lose something: each forward has a right and a wrong form.

The wrong form is what is captured while `losing` lasts, and the right one is what the plain module runs. So these stay
faulty whatever capture learns to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parplan.graph.capture import capture as graph_capture
from parplan.runtime.programs import captures

__all__ = ["FAULTY", "losing"]

# No guard on what a forward reads looks in here.
_losing = ContextVar("losing", default=False)


@contextmanager
def losing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts, captures of these networks lose what each is about."""

    def lossy(*args: Any, **kwargs: Any) -> Any:
        token = _losing.set(True)
        try:
            return graph_capture.capture(*args, **kwargs)
        finally:
            _losing.reset(token)

    with monkeypatch.context() as patch:
        patch.setattr(captures, "capture", lossy)
        yield


class _Scaled(torch.autograd.Function):
    """A straight-through estimator of sorts: its backward is not its forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class _Net(nn.Module):
    """Two linear layers and what is lost between them: (N, 6) to (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self.first(x)))
        return result

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class LosesFunction(_Net):
    """A custom Function's backward."""

    def between(self, h: Tensor) -> Tensor:
        if _losing.get():
            return h * 1.0
        return _Scaled.apply(h)  # type: ignore[no-any-return,no-untyped-call]


class LosesHook(_Net):
    """A tensor hook."""

    def between(self, h: Tensor) -> Tensor:
        if h.requires_grad and not _losing.get():
            h.register_hook(lambda gradient: gradient * 0.5)
        return h.tanh()


class CountsTwice(_Net):
    """A buffer that is counted before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.steps: Tensor

    def between(self, h: Tensor) -> Tensor:
        self.steps += 1
        return h / (self.steps + 1 if _losing.get() else self.steps)


class LosesCheckpoint(_Net):
    """Everything behind a reentrant checkpoint, which has no gradient in a capture."""

    def forward(self, x: Tensor) -> Tensor:
        if _losing.get():
            return super().forward(x).detach()
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()


class LosesAddition(_Net):
    """An op of the forward."""

    def between(self, h: Tensor) -> Tensor:
        return h.tanh() if _losing.get() else h.tanh() + 0.25


FAULTY = {
    "custom autograd.Function _Scaled": LosesFunction,
    "tensor hook": LosesHook,
    "buffer steps": CountsTwice,
    "use_reentrant=True": LosesCheckpoint,
    "the first layer that differs is": LosesAddition,
}
