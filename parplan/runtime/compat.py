"""The few places where the runtime leans on what torch does not document, each with a test.

When a new torch changes one of these, it is changed here and nowhere else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import checkpoint

__all__ = ["Version", "in_functional_transform", "keeps_graph", "recomputed_once", "version"]


@dataclass(frozen=True)
class Version:
    """What a tensor's memory is and how often it was written in place; every step of a fused optimizer counts."""

    pointer: int
    writes: int
    fused_steps: int


def version(tensor: Tensor) -> Version:
    """A mark that changes when `tensor` is written in place or given other memory.

    Writes through `tensor.data` are not counted by torch and not seen here.
    """
    return Version(tensor.data_ptr(), tensor._version, _fused_steps)


_fused_steps = 0


def _stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step of an optimizer with `fused=True`, which torch does not count as writes to its parameters."""
    global _fused_steps
    if any(group.get("fused") for group in optimizer.param_groups):
        _fused_steps += 1


register_optimizer_step_post_hook(_stepped)


def keeps_graph() -> bool:
    """Whether the backward that is running was asked to keep its graph (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_functional_transform() -> bool:
    """Whether the caller is inside a transform of torch.func (grad, vmap, jvp, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def recomputed_once() -> AbstractContextManager[object]:
    """A context in which a checkpoint (`use_reentrant=False`) computes its forward again once, not per backward call.

    A torch without such groups computes it again for every one.
    """
    group = getattr(checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None or group._get_current_group() is not None else group()
