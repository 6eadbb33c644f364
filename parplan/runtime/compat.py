"""The few places where the runtime leans on what torch does not document, each with a test.

When a new torch changes one of these, it is changed here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Version", "keeps_graph", "version"]


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
