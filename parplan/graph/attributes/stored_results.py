"""Nested values whose tensors were taken out, and attributes of modules that such values are put into."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parplan.compat import pytree
from parplan.graph.attributes.number_inputs import container_of

__all__ = ["Stored", "Template"]


@dataclass(frozen=True)
class Template:
    """Nested values whose tensors were taken out.

    Args:
        leaves: what is no tensor, by position; tensors go to the other positions.
        spec: how leaves are nested.
    """

    leaves: Mapping[int, Any]
    spec: Any

    @staticmethod
    def of(values: Any) -> tuple[Template, list[Tensor]]:
        """Take the tensors out of nested values."""
        leaves, spec = pytree.tree_flatten(values)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return Template({i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}, spec), tensors

    def matches(self, other: Template) -> bool:
        """Whether both are built alike and have the same leaves."""
        if self.spec != other.spec or self.leaves.keys() != other.leaves.keys():
            return False
        for one, twin in ((leaf, other.leaves[place]) for place, leaf in self.leaves.items()):
            try:
                if one is not twin and not (type(one) is type(twin) and bool(one == twin)):
                    return False
            except (RuntimeError, ValueError):  # arrays, which are compared element by element
                return False
        return True

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nested values with these tensors."""
        rest = iter(tensors)
        count = len(tensors) + len(self.leaves)
        leaves = [self.leaves[i] if i in self.leaves else next(rest) for i in range(count)]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Stored:
    """Tensors that the forward leaves in an attribute.

    Args:
        path: what users call it.
        module: whose attribute it is.
        keys: from the module's attributes to the place that is written.
        template: what is written there.
        count: tensors in it.
    """

    path: str
    module: nn.Module
    keys: tuple[Hashable, ...]
    template: Template
    count: int

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Write it."""
        container_of(self.module.__dict__, self.keys)[self.keys[-1]] = self.template.filled(tensors)
