"""The few places where the runtime leans on what torch does not document, each with a test.

When a new torch changes one of these, it is changed here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import checkpoint

__all__ = ["Version", "keeps_graph", "recomputed_once", "version", "without_tensor_hooks"]


@dataclass(frozen=True)
class Version:
    """What a tensor's memory is and how often it was written in place."""

    pointer: int
    writes: int


def version(tensor: Tensor) -> Version:
    """A mark that changes when `tensor` is written in place or given other memory.

    Writes through `tensor.data` are not counted by torch and not seen here.
    """
    return Version(tensor.data_ptr(), tensor._version)


def keeps_graph() -> bool:
    """Whether the backward that is running was asked to keep its graph (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def recomputed_once() -> AbstractContextManager[object]:
    """A context in which a checkpoint (`use_reentrant=False`) computes its forward again once, not per backward call.

    A torch without such groups computes it again for every one.
    """
    group = getattr(checkpoint, "GraphExecGroup", None)
    return nullcontext() if group is None or group._get_current_group() is not None else group()


@contextmanager
def without_tensor_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """While it lasts, hooks of `register_hook` and `register_post_accumulate_grad_hook` on these are not called."""
    fields = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [found for leaf in leaves for field in fields if (found := getattr(leaf, field))]
    # autograd reads these dictionaries when it comes to the leaf, and handles remove their hooks from them.
    saved = [(found, dict(found)) for found in hooks]
    for found, _ in saved:
        found.clear()
    try:
        yield
    finally:
        for found, before in saved:
            found.update(before)
