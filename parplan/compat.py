"""What parplan uses of PyTorch beyond its documentation, all in one place, each with a test.

When a new release changes one of these, it is mended here and nowhere else (tests/test_compat.py says
which). The runtime's own two, which are about autograd, are in parplan/runtime/compat.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["memory_of", "overload_name", "pytree", "schema_of"]


def schema_of(target: Any) -> Any:
    """The schema of an op (`name`, `arguments`, `is_mutable`), None for a target that is no op."""
    return getattr(target, "_schema", None)


def overload_name(target: Any) -> str:
    """Name of an op's overload: "Tensor" of `aten.add.Tensor`."""
    return str(target._overloadname)


def memory_of(tensor: Tensor) -> int:
    """A number that tensors which share memory have in common, fake tensors (without memory) too."""
    return int(tensor.untyped_storage()._cdata)
