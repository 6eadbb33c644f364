"""Dispatch rules of sharded tensors: which ops run on blocks, which are reduced over ranks, which need the whole.

Elementwise ops run on each rank's block, a whole operand being cut to it. Reductions over all elements count every
block once and are summed over ranks. Every other op gathers, computes what plain PyTorch computes, and cuts back what
it wrote. An op that is not known to be elementwise is gathered, so a new op of PyTorch is slow, never wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parplan.compat import schema_of
from parplan.errors import RuntimeFailure
from parplan.runtime.placement import Placement
from parplan.runtime.sharded_tensor import Gathered, ShardedTensor, ShardedView

__all__ = ["dispatch"]

aten = torch.ops.aten

# Elementwise ops without torch's tag for them.
_ELEMENTWISE = frozenset(
    [
        "copy_",
        "zero_",
        "fill_",
        "fill",
        "masked_fill",
        "masked_fill_",
        "_to_copy",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "_fused_sgd_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_adagrad_",
    ]
)
_FOREACH_ELEMENTWISE = frozenset(["_foreach_copy_", "_foreach_zero_", "_foreach_clone", "_fused"])
_FACTORIES = frozenset(["new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"])
_ALIASES = frozenset({"detach", "alias", "lift_fresh"})
# Arguments that are no operand of an elementwise computation.
_COUNTERS = frozenset({"state_steps"})


class _Kind(Enum):
    """How an op is computed."""

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
class _Rule:
    """What is known of an op.

    Args:
        names: its arguments.
        written: those that it writes to.
        returned: those that it returns, where it returns arguments.
        listed: it treats the tensors at one index of its lists together, apart from those at others.
        random: it draws random numbers.
    """

    kind: _Kind
    names: tuple[str, ...]
    written: frozenset[str]
    returned: tuple[str, ...]
    listed: bool
    random: bool


@cache
def _rule(func: Any) -> _Rule:
    schema, name = schema_of(func), func.overloadpacket.__name__
    written = {a.name: a.alias_info.before_set for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    returned = [r.alias_info.before_set for r in schema.returns if r.alias_info and r.alias_info.is_write]
    return _Rule(
        kind=_kind(func, name),
        names=tuple(a.name for a in schema.arguments),
        written=frozenset(written),
        returned=tuple(n for found in returned for n, own in written.items() if own == found),
        listed=name.startswith(("_foreach_", "_fused_", "_amp_foreach_")),
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _kind(func: Any, name: str) -> _Kind:
    schema = schema_of(func)
    if torch.Tag.inplace_view in func.tags or name in ("set_", "resize_", "resize_as_"):
        return _Kind.RESHAPING
    if name in _ALIASES:
        return _Kind.ALIAS
    if any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
        return _Kind.VIEW
    if func in _REDUCTIONS or func in (aten.amax.default, aten.amin.default):
        return _Kind.REDUCTION
    special = {
        aten.linalg_vector_norm.default: _Kind.NORM,
        aten._foreach_norm.Scalar: _Kind.NORM,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _Kind.UNSCALE,
        aten.is_same_size.default: _Kind.SAME_SIZE,
    }
    if func in special:
        return special[func]
    if name in _FACTORIES:
        return _Kind.FACTORY
    return _Kind.ELEMENTWISE if _is_elementwise(func, name) else _Kind.WHOLE


def _is_elementwise(func: Any, name: str) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name in _ELEMENTWISE or name in _FOREACH_ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return True
    single = getattr(aten, name.removeprefix("_foreach_"), None) if name.startswith("_foreach_") else None
    if single is None:
        return False
    # An op of lists is elementwise if the op of the same name is, in the form with as many tensors.
    return name not in _FOREACH_REDUCTIONS and any(
        torch.Tag.pointwise in getattr(single, overload).tags for overload in single.overloads()
    )


# Whose single op has elementwise forms too.
_FOREACH_REDUCTIONS = frozenset({"_foreach_max", "_foreach_min", "_foreach_norm"})


@dataclass(frozen=True)
class _Operand:
    """A tensor among an op's arguments; `index` where it is in a list."""

    argument: str
    index: int | None
    tensor: Tensor
    written: bool


class _Call:
    """One call of an op, its arguments by name."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.func, self.rule = func, _rule(func)
        self._positional = len(args)
        self.given = {**dict(zip(self.rule.names, args, strict=False)), **kwargs}
        self.operands = [
            _Operand(name, index, tensor, name in self.rule.written)
            for name, value in self.given.items()
            for index, tensor in _tensors(value)
        ]

    def run(self, tensors: Mapping[int, Tensor]) -> Any:
        """Call the op with other tensors in place of some operands, by their ids."""
        values = {name: _replaced(value, tensors) for name, value in self.given.items()}
        names = self.rule.names[: self._positional]
        rest = {name: value for name, value in values.items() if name not in names}
        return self.func(*(values[name] for name in names), **rest)

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


def _tensors(value: Any) -> list[tuple[int | None, Tensor]]:
    if isinstance(value, Tensor):
        return [(None, value)]
    if isinstance(value, (list, tuple)):
        return [(index, each) for index, each in enumerate(value) if isinstance(each, Tensor)]
    return []


def _replaced(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return [tensors.get(id(each), each) if isinstance(each, Tensor) else each for each in value]
    return value


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an op with sharded tensors, or views of them, among its arguments."""
    call = _Call(func, args, kwargs)
    views = {id(o.tensor): o for o in call.operands if isinstance(o.tensor, ShardedView)}
    if not views:
        return _HANDLERS[call.rule.kind](call)
    plain = {key: o.tensor.current() for key, o in views.items() if isinstance(o.tensor, ShardedView)}
    if call.rule.kind in (_Kind.VIEW, _Kind.ALIAS):
        source = next(o.tensor.source for o in views.values() if isinstance(o.tensor, ShardedView))
        return tree_map_only(Tensor, lambda tensor: ShardedView(tensor, source), call.run(plain))
    names, count = call.rule.names, len(args)
    given = {name: _replaced(value, plain) for name, value in call.given.items()}
    inner = _Call(func, [given[n] for n in names[:count]], {n: v for n, v in given.items() if n not in names[:count]})
    computed = _HANDLERS[call.rule.kind](inner) if inner.sharded else inner.run({})
    for operand in views.values():
        if operand.written and isinstance(operand.tensor, ShardedView):
            source = operand.tensor.source
            if call.rule.random:
                tag = f"{call.name} of a part of {source.placement.name}"
                operand.tensor.plain.copy_(source.placement.collectives.share(tag, operand.tensor.plain))
            source.write_back()
    return call.result(computed)


# -- on blocks, or on the whole --


def _elementwise(call: _Call) -> Any:
    return _computed(call, on_blocks=True)


def _whole(call: _Call) -> Any:
    return _computed(call, on_blocks=False)


def _computed(call: _Call, on_blocks: bool) -> Any:
    """Run an op, each group of operands that it treats together on blocks if that can be, else on the whole."""
    groups: dict[Hashable, list[_Operand]] = defaultdict(list)
    for operand in call.operands:
        if operand.argument not in _COUNTERS:
            apart = call.rule.listed and operand.index is None
            groups[operand.argument if apart else operand.index if call.rule.listed else None].append(operand)
    known: dict[int, Tensor] = {}
    leaders: dict[Hashable, Placement | None] = {}
    for key, operands in groups.items():
        leader = leaders[key] = _leader(operands) if on_blocks and not isinstance(key, str) else None
        for operand in operands:
            if leader is not None:
                known[id(operand.tensor)] = _on_block(operand.tensor, leader)
            elif isinstance(operand.tensor, ShardedTensor) and id(operand.tensor) not in known:
                known[id(operand.tensor)] = _gathered(call, operand.tensor)
    computed = call.run(known)
    if call.rule.random:
        computed = _drawn_alike(call, computed, known)
    _write_back(call, known, leaders)
    if call.rule.written:
        return call.result(computed)
    if call.rule.listed:
        return [_wrapped(tensor, leaders.get(index)) for index, tensor in enumerate(computed)]
    return tree_map_only(Tensor, lambda tensor: _wrapped(tensor, leaders[None]), computed)


def _leader(operands: Sequence[_Operand]) -> Placement | None:
    """The placement that an elementwise computation can follow; None if it needs the whole, or has nothing sharded."""
    sharded = [o.tensor for o in operands if isinstance(o.tensor, ShardedTensor)]
    written = [o.tensor for o in operands if o.written]
    candidates = sharded
    if written:
        placements = [t.placement for t in written if isinstance(t, ShardedTensor)]
        if len(placements) < len(written) or not all(p.same(placements[0]) for p in placements):
            return None
        candidates = [t for t in written[:1] if isinstance(t, ShardedTensor)]
    for tensor in candidates:
        shapes = {o.tensor.shape for o in operands if o.tensor.dim()} - {tensor.shape}
        # A number that not every rank holds is gathered: an empty vector would follow other rules of type promotion.
        if tensor.dim() and (not shapes or torch.broadcast_shapes(tensor.shape, *shapes) == tensor.shape):
            return tensor.placement
    return None


def _on_block(tensor: Tensor, leader: Placement) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor.local if tensor.placement.same(leader) else leader.cut(tensor.whole())
    return leader.cut(tensor) if tensor.dim() else tensor


def _gathered(call: _Call, tensor: ShardedTensor) -> Tensor:
    placement = tensor.placement
    return placement.collectives.gather(f"{call.name} of {placement.name}", tensor.local, placement)


def _wrapped(tensor: Tensor, placement: Placement | None) -> Tensor:
    return tensor if placement is None else ShardedTensor(tensor, placement)


def _write_back(call: _Call, known: Mapping[int, Tensor], leaders: Mapping[Hashable, Placement | None]) -> None:
    """Give blocks what was written to whole tensors, and count every write as torch counts its own."""
    changed = []
    for operand in call.operands:
        if operand.written and isinstance(operand.tensor, ShardedTensor):
            own, computed = operand.tensor, known[id(operand.tensor)]
            if computed is not own.local:
                if computed.shape != own.shape:
                    raise _reshaped(call, own)
                own.local.copy_(own.placement.cut(computed))
            changed.append(own.local)
    if changed:
        torch.autograd.graph.increment_version([tensor for tensor in changed if not tensor.is_inference()])


def _drawn_alike(call: _Call, computed: Any, known: Mapping[int, Tensor]) -> Any:
    """Rank 0's random numbers on all ranks, as blocks that several ranks hold must stay equal."""
    first = call.sharded[0]
    collectives, tag = first.placement.collectives, f"{call.name} of {first.placement.name}"
    for operand in call.operands:
        if operand.written:
            target = known.get(id(operand.tensor), operand.tensor)
            target.copy_(collectives.share(tag, target))
    if call.rule.written:
        return computed
    shared = tree_map_only(Tensor, lambda tensor: collectives.share(tag, tensor), computed)
    if isinstance(shared, Tensor) and shared.shape == first.shape:
        return ShardedTensor.cut(shared, first.placement)
    return shared


def _unscale(call: _Call) -> Any:
    """Unscale gradients; whether one is not finite has to be known on all ranks."""
    _computed(call, on_blocks=True)
    found, placement = call.given["found_inf"], call.sharded[0].placement
    numbers = placement.collectives.exchange("looking for infinite gradients", [float(found)])
    found.fill_(float(numbers.max()))
    return None


# -- without values, aliases and views --


def _factory(call: _Call) -> Any:
    return call.run({id(tensor): tensor.local for tensor in call.sharded})


def _same_size(call: _Call) -> bool:
    first, second = (operand.tensor.shape for operand in call.operands)
    return bool(first == second)


def _alias(call: _Call) -> Any:
    tensor = call.sharded[0]
    return tensor.like(tensor.local)


def _view(call: _Call) -> Any:
    tensor = call.sharded[0]
    if _keeps_all(call, tensor):
        return _alias(call)
    source = Gathered(tensor)
    views = call.run({id(tensor): source.whole})
    return tree_map_only(Tensor, lambda view: ShardedView(view, source), views)


def _keeps_all(call: _Call, tensor: Tensor) -> bool:
    """Whether a view is of all of a tensor, in its shape."""
    given = call.given
    if call.func in (aten.view.default, aten.expand.default):
        wanted = given.get("size", ())
        return len(wanted) == tensor.dim() and all(w in (-1, s) for w, s in zip(wanted, tensor.shape, strict=True))
    if call.func is aten.slice.Tensor:
        size = tensor.shape[given.get("dim", 0)]
        start, end = given.get("start"), given.get("end")
        return start in (None, 0) and (end is None or end >= size) and given.get("step", 1) == 1
    return False


def _refused(call: _Call) -> Any:
    raise _reshaped(call, call.sharded[0])


def _reshaped(call: _Call, tensor: ShardedTensor) -> RuntimeFailure:
    return RuntimeFailure(
        f"{call.name} would change the shape or memory of {tensor.placement.name}, which is cut over processes; "
        "work on parameter.whole(), or build the model anew and compile it"
    )


# -- reductions over all elements --


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
_REDUCTIONS = {
    aten.sum.default: _SUM,
    aten.mean.default: _SUM,
    aten.max.default: _LARGEST,
    aten.min.default: _SMALLEST,
    aten.any.default: _Reduction(lambda block, _: block.any(), 0.0, Tensor.amax),
    aten.all.default: _Reduction(lambda block, _: block.all(), 1.0, Tensor.amin),
}


def _precise(tensor: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The type to reduce blocks in: that of the result, at least float32."""
    return torch.promote_types(wanted or tensor.dtype, torch.float32)


def _reduction(call: _Call) -> Any:
    tensor, logical = call.sharded[0], call.func in (aten.any.default, aten.all.default)
    wanted = call.given.get("dtype")
    simple = logical or (tensor.is_floating_point() and (wanted is None or wanted.is_floating_point))
    if not simple or not _over_all(call, tensor):
        return _whole(call)
    extremes = {aten.amax.default: _LARGEST, aten.amin.default: _SMALLEST}
    reduction = extremes.get(call.func) or _REDUCTIONS[call.func]
    placement, local = tensor.placement, tensor.local
    own = (
        float(reduction.block(local, _precise(local, wanted)))
        if placement.counts and local.numel()
        else reduction.neutral
    )
    numbers = placement.collectives.exchange(f"{call.name} of {placement.name}", [own])
    total = reduction.total(numbers[:, 0])
    if call.func is aten.mean.default:
        total = total / tensor.numel()
    dtype = torch.bool if logical else wanted or tensor.dtype
    return total.to(device=tensor.device, dtype=dtype)


def _over_all(call: _Call, tensor: Tensor) -> bool:
    """Whether a reduction is over all elements, to one number of shape ()."""
    dims = call.given.get("dim")
    every = not dims or len({dim % max(1, tensor.dim()) for dim in dims}) == tensor.dim()
    return every and not call.given.get("keepdim", False) and tensor.numel() > 0


def _norm(call: _Call) -> Any:
    """Norms of one tensor or a list of them, in one exchange."""
    order, dtype = float(call.given.get("ord", 2)), call.given.get("dtype")
    sharded = call.sharded
    simple = all(t.is_floating_point() and (call.rule.listed or _over_all(call, t)) for t in sharded)
    if not simple or any(isinstance(o.tensor, ShardedView) for o in call.operands):
        return _whole(call)
    neutral = inf if order < 0 else 0.0
    numbers = [_block_norm(tensor, order, neutral, dtype) for tensor in sharded]
    own = torch.stack([n.to(numbers[0].device, torch.float64) for n in numbers]).tolist()
    names = ", ".join(tensor.placement.name for tensor in sharded)
    found = sharded[0].placement.collectives.exchange(f"{call.name} of {names}", own)
    totals = iter(_total_norm(found, order).unbind())

    def norm(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return next(totals).to(device=tensor.device, dtype=dtype or tensor.dtype)
        plain: Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        return plain

    norms = [norm(operand.tensor) for operand in call.operands]
    return norms if call.rule.listed else norms[0]


def _block_norm(tensor: ShardedTensor, order: float, neutral: float, dtype: torch.dtype | None) -> Tensor:
    local = tensor.local
    if not tensor.placement.counts or not local.numel():
        return local.new_full((), neutral)
    found: Tensor = torch.linalg.vector_norm(local, order, dtype=_precise(local, dtype))
    return found


def _total_norm(found: Tensor, order: float) -> Tensor:
    """Norms of whole tensors (columns) from those of blocks (rows)."""
    if order == 0:
        return found.sum(0)
    total: Tensor = torch.linalg.vector_norm(found, order, dim=0)
    return total


_HANDLERS: Mapping[_Kind, Callable[[_Call], Any]] = {
    _Kind.ALIAS: _alias,
    _Kind.VIEW: _view,
    _Kind.ELEMENTWISE: _elementwise,
    _Kind.UNSCALE: _unscale,
    _Kind.FACTORY: _factory,
    _Kind.NORM: _norm,
    _Kind.REDUCTION: _reduction,
    _Kind.SAME_SIZE: _same_size,
    _Kind.RESHAPING: _refused,
    _Kind.WHOLE: _whole,
}
