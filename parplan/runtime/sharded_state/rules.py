"""Rules by which ops on sharded tensors are told apart, and calls of ops with their tensor arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from parplan.compat import schema_of
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor

__all__ = ["COUNTERS", "REDUCTIONS", "OpKind", "Rule", "ShardedCall", "TensorOperand", "replaced", "rule_of"]

aten = torch.ops.aten

# Elementwise ops without torch's tag for them.
_ELEMENTWISE = frozenset(
    {
        "copy_", "zero_", "fill_", "fill", "masked_fill", "masked_fill_", "_to_copy", "zeros_like", "ones_like",
        "empty_like", "full_like", "_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_foreach_copy_",
        "_foreach_zero_", "_foreach_clone",
    }
)  # fmt: skip
_FACTORIES = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})
_ALIASES = frozenset({"detach", "alias", "lift_fresh"})
# Ops of lists that are no elementwise ones, although the op of the same name has elementwise forms.
_FOREACH_REDUCTIONS = frozenset({"_foreach_max", "_foreach_min", "_foreach_norm"})
# Arguments that are no operand of an elementwise computation.
COUNTERS = frozenset({"state_steps"})


@dataclass(frozen=True)
class _Reduction:
    """A number of each block, and what becomes of all ranks' numbers.

    Args:
        block: of a block, computed in a type.
        neutral: the number of a rank that does not count.
    """

    block: Callable[[Tensor, torch.dtype], Tensor]
    neutral: float
    total: Callable[[Tensor], Tensor]


_SUM = _Reduction(lambda block, dtype: block.sum(dtype=dtype), 0.0, Tensor.sum)
_LARGEST = _Reduction(lambda block, _: block.max(), -inf, Tensor.amax)
_SMALLEST = _Reduction(lambda block, _: block.min(), inf, Tensor.amin)
REDUCTIONS = {
    aten.sum.default: _SUM,
    aten.mean.default: _SUM,
    aten.max.default: _LARGEST,
    aten.min.default: _SMALLEST,
    aten.amax.default: _LARGEST,
    aten.amin.default: _SMALLEST,
    aten.any.default: _Reduction(lambda block, _: block.any(), 0.0, Tensor.amax),
    aten.all.default: _Reduction(lambda block, _: block.all(), 1.0, Tensor.amin),
}


class OpKind(Enum):
    """The ways in which ops are computed."""

    ALIAS = auto()
    VIEW = auto()
    ELEMENTWISE = auto()
    UNSCALE = auto()
    FACTORY = auto()
    NORM = auto()
    REDUCTION = auto()
    SAME_SIZE = auto()
    RESHAPING = auto()
    WHOLE = auto()


@dataclass(frozen=True)
class Rule:
    """The facts of an op that decide how it is computed.

    Args:
        names: its arguments.
        written: those that it writes to.
        returned: those that it returns, where it returns arguments.
        listed: it treats the tensors at one index of its lists together, apart from those at others.
        random: it draws random numbers.
    """

    kind: OpKind
    names: tuple[str, ...]
    written: frozenset[str]
    returned: tuple[str, ...]
    listed: bool
    random: bool


@cache
def rule_of(func: Any) -> Rule:
    """The rule of an op, worked out once."""
    schema, name = schema_of(func), func.overloadpacket.__name__
    written = {a.name: a.alias_info.before_set for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    returned = [r.alias_info.before_set for r in schema.returns if r.alias_info and r.alias_info.is_write]
    return Rule(
        kind=_kind(func, name),
        names=tuple(a.name for a in schema.arguments),
        written=frozenset(written),
        returned=tuple(n for found in returned for n, own in written.items() if own == found),
        listed=name.startswith(("_foreach_", "_fused_", "_amp_foreach_")),
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _kind(func: Any, name: str) -> OpKind:
    schema = schema_of(func)
    if torch.Tag.inplace_view in func.tags or name in ("set_", "resize_", "resize_as_"):
        return OpKind.RESHAPING
    if name in _ALIASES:
        return OpKind.ALIAS
    if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
        return OpKind.VIEW
    if func in REDUCTIONS:
        return OpKind.REDUCTION
    special = {
        aten.linalg_vector_norm.default: OpKind.NORM,
        aten._foreach_norm.Scalar: OpKind.NORM,
        aten._amp_foreach_non_finite_check_and_unscale_.default: OpKind.UNSCALE,
        aten.is_same_size.default: OpKind.SAME_SIZE,
    }
    if func in special:
        return special[func]
    if name in _FACTORIES:
        return OpKind.FACTORY
    return OpKind.ELEMENTWISE if _is_elementwise(func, name) else OpKind.WHOLE


def _is_elementwise(func: Any, name: str) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return True
    single = getattr(aten, name.removeprefix("_foreach_"), None) if name.startswith("_foreach_") else None
    if single is None:
        return False
    # An op of lists is elementwise if the op of the same name is, in the form with as many tensors.
    return name not in _FOREACH_REDUCTIONS and any(
        torch.Tag.pointwise in getattr(single, overload).tags for overload in single.overloads()
    )


@dataclass(frozen=True)
class TensorOperand:
    """A tensor among an op's arguments; `index` where it is in a list."""

    argument: str
    index: int | None
    tensor: Tensor
    written: bool


class ShardedCall:
    """One call of an op, its arguments by name."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func, self.rule, self._args, self._kwargs = func, rule_of(func), args, kwargs
        self.given = {**dict(zip(self.rule.names, args, strict=False)), **kwargs}
        self.operands = [
            TensorOperand(name, index if isinstance(value, (list, tuple)) else None, tensor, name in self.rule.written)
            for name, value in self.given.items()
            for index, tensor in enumerate(value if isinstance(value, (list, tuple)) else (value,))
            if isinstance(tensor, Tensor)
        ]

    def run(self, tensors: Mapping[int, Tensor]) -> Any:
        """Call the op with other tensors in place of some operands, by their ids."""
        named = {name: replaced(value, tensors) for name, value in self._kwargs.items()}
        return self.func(*(replaced(value, tensors) for value in self._args), **named)

    def result(self, computed: Any) -> Any:
        """The op's result: the arguments themselves where it writes to them."""
        if not self.rule.written:
            return computed
        own = [self.given[name] for name in self.rule.returned]
        return None if not own else own[0] if len(own) == 1 else tuple(own)

    @property
    def sharded(self) -> list[ShardedTensor]:
        """The sharded operands."""
        return [o.tensor for o in self.operands if isinstance(o.tensor, ShardedTensor)]

    @property
    def name(self) -> str:
        """The op's name, for errors and tags."""
        return str(self.func.overloadpacket.__name__)


def replaced(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """An argument with other tensors in place of some, by their ids."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return [tensors.get(id(each), each) if isinstance(each, Tensor) else each for each in value]
    return value
