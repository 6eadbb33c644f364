"""What parplan uses of PyTorch beyond its documentation, all in one place, each with a test.

When a new release changes one of these, it is mended here and nowhere else (tests/test_compat.py says
which). The runtime's own two, which are about autograd, are in parplan/runtime/compat.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook

__all__ = ["HOOK_FIELDS", "BackwardHook", "memory_of", "overload_name", "pytree", "schema_of"]

# Where a module keeps its hooks; the dictionaries say what was registered, by number.
HOOK_FIELDS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)


def schema_of(target: Any) -> Any:
    """The schema of an op (`name`, `arguments`, `is_mutable`), None for a target that is no op."""
    return getattr(target, "_schema", None)


def overload_name(target: Any) -> str:
    """Name of an op's overload: "Tensor" of `aten.add.Tensor`."""
    return str(target._overloadname)


def memory_of(tensor: Tensor) -> int:
    """A number that tensors which share memory have in common, fake tensors (without memory) too."""
    return int(tensor.untyped_storage()._cdata)
