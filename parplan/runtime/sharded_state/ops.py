"""Dispatch of ops on sharded tensors: on blocks, as a reduction over ranks, or on the gathered whole.

Elementwise ops run on each rank's block, a whole operand being cut to it. Reductions over all elements count every
block once and are summed over ranks. Every other op gathers, computes what plain PyTorch computes, and cuts back what
it wrote. An op that is not known to be elementwise is gathered, so a new op of PyTorch is slow, never wrong.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from parplan.compat import pytree
from parplan.errors import RuntimeFailure
from parplan.runtime.calls import digest
from parplan.runtime.compat import in_backward
from parplan.runtime.sharded_state.block_placement import Placement
from parplan.runtime.sharded_state.outside_gradients import averaged
from parplan.runtime.sharded_state.rules import (
    COUNTERS,
    REDUCTIONS,
    OpKind,
    Rule,
    ShardedCall,
    TensorOperand,
    replaced,
    rule_of,
)
from parplan.runtime.sharded_state.sharded_tensor import Gathered, ShardedTensor, ShardedView, check_copies

__all__ = ["dispatch"]

aten = torch.ops.aten

_BLOCKWISE = (OpKind.ELEMENTWISE, OpKind.ALIAS)

# Elementwise ops whose results are no part of a term, or the same as what they are given.
_COPIES = frozenset({"clone", "_to_copy", "zeros_like", "ones_like", "empty_like"})


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an op with sharded tensors, or views of them, among its arguments."""
    rule = rule_of(func)
    if rule.kind in _BLOCKWISE and not (kwargs and any(isinstance(value, Tensor) for value in kwargs.values())):
        local, placement = _blocks(args)
        if placement is not None:
            if torch.is_grad_enabled() and rule.kind is OpKind.ELEMENTWISE:
                _check_alike(ShardedCall(func, args, kwargs), placement)
            return _on_blocks(func, rule, args, local, kwargs, placement)
    call = ShardedCall(func, args, kwargs)
    for operand in call.operands:
        if operand.written:
            check_copies(operand.tensor)
    views = {id(o.tensor): o for o in call.operands if isinstance(o.tensor, ShardedView)}
    if not views:
        return _HANDLERS[call.rule.kind](call)
    plain = {key: o.tensor.current() for key, o in views.items() if isinstance(o.tensor, ShardedView)}
    if call.rule.kind in (OpKind.VIEW, OpKind.ALIAS):
        source = next(o.tensor.source for o in views.values() if isinstance(o.tensor, ShardedView))
        return pytree.tree_map_only(Tensor, lambda tensor: ShardedView(tensor, source), call.run(plain))
    named = {name: replaced(value, plain) for name, value in kwargs.items()}
    inner = ShardedCall(func, [replaced(value, plain) for value in args], named)
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


def _blocks(args: Sequence[Any]) -> tuple[list[Any], Placement | None]:
    """Arguments with blocks in place of sharded tensors; a placement only if all tensors are of that one."""
    local: list[Any] = []
    placement: Placement | None = None
    for given in args:
        if type(given) is ShardedTensor:
            if placement is not None and given.placement is not placement:
                return local, None
            placement = given.placement
            local.append(given.local)
        elif isinstance(given, (Tensor, list, tuple)):
            return local, None
        else:
            local.append(given)
    return local, placement if placement is not None and placement.shape else None


def _on_blocks(
    func: Any, rule: Rule, args: Sequence[Any], local: Sequence[Any], kwargs: Mapping[str, Any], placement: Placement
) -> Any:
    """The usual case in short: an optimizer's step on tensors of one placement."""
    if rule.kind is OpKind.ALIAS:
        return args[0].like(local[0])
    if not rule.written:
        computed = func(*local, **kwargs)
        return pytree.tree_map_only(Tensor, lambda tensor: ShardedTensor(tensor, placement), computed)
    check_copies(args[0])
    if local[0].numel():  # of a pipeline, each process holds a part of the layers, and updates all
        func(*local, **kwargs)
    if not local[0].is_inference():
        torch.autograd.graph.increment_version(local[0])
    return args[0]


def _computed(call: ShardedCall, on_blocks: bool) -> Any:
    """Run an op, each group of operands that it treats together on blocks if that can be, else on the whole."""
    groups: dict[Hashable, list[TensorOperand]] = defaultdict(list)
    for operand in call.operands:
        if operand.argument not in COUNTERS:
            apart = call.rule.listed and operand.index is None
            groups[operand.argument if apart else operand.index if call.rule.listed else None].append(operand)
    known: dict[int, Tensor] = {}
    leaders: dict[Hashable, Placement | None] = {}
    for key, operands in groups.items():
        leader = leaders[key] = _leader(operands) if on_blocks and not isinstance(key, str) else None
        if leader is not None and torch.is_grad_enabled():
            _check_alike(call, leader)
        for operand in operands:
            if leader is not None:
                known[id(operand.tensor)] = _on_block(call, operand.tensor, leader)
            elif isinstance(operand.tensor, ShardedTensor) and id(operand.tensor) not in known:
                own = operand.tensor.placement
                tag = f"{call.name} of {own.name}"
                known[id(operand.tensor)] = own.collectives.gather(tag, operand.tensor.local, own)
    computed = call.run(known)
    if call.rule.random:
        computed = _drawn_alike(call, computed, known)
    _write_back(call, known, leaders)
    if call.rule.written:
        return call.result(computed)
    if call.rule.listed:
        return [_wrapped(tensor, leaders.get(index)) for index, tensor in enumerate(computed)]
    return pytree.tree_map_only(Tensor, lambda tensor: _wrapped(tensor, leaders[None]), computed)


def _leader(operands: Sequence[TensorOperand]) -> Placement | None:
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


def _check_alike(call: ShardedCall, placement: Placement) -> None:
    """Refuse a term of a loss for which processes would compute different things, each for its own block.

    Of what comes after a sum, a factor above all, the backward takes the mean (`_on_block`).
    """
    if call.name in _COPIES or not any(operand.tensor.requires_grad for operand in call.operands):
        return
    given = ", ".join(f"{name}={_told(value)}" for name, value in call.given.items())
    number = int.from_bytes(hashlib.blake2b(f"{call.name} {given}".encode(), digest_size=6).digest(), "big")
    tag = f"{call.name} of {placement.name}"
    told = placement.collectives.exchange(tag, [float(number)])
    if not bool((told == told[0]).all()):
        raise RuntimeFailure(
            f"a term of the loss computes {tag}, which is cut over processes, with values that are not the same on all "
            f"(here: {given}), so that they would hold for a part of it each; multiply the sum instead, as in "
            "`factor * weight.square().sum()`, of which processes take the mean, or use the same values on all"
        )


def _told(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, ShardedTensor):
        return value.placement.name
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"a tensor of shape {tuple(value.shape)}, {digest(value).hex()}"
    return str(value.item() if isinstance(value, Tensor) else value)


def _on_block(call: ShardedCall, tensor: Tensor, leader: Placement) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor.local if tensor.placement.same(leader) else leader.cut(tensor.whole())
    if in_backward() and (tensor.is_floating_point() or tensor.is_complex()):
        # The gradient of this process's term, or one made of it: autograd has expanded that of a sum.
        few = tensor[tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())]
        tag = f"the gradient of a term of the loss with {leader.name} ({call.name})"
        tensor = averaged(tag, few, leader.collectives).expand(tensor.shape)
    return leader.cut(tensor) if tensor.dim() else tensor


def _wrapped(tensor: Tensor, placement: Placement | None) -> Tensor:
    return tensor if placement is None else ShardedTensor(tensor, placement)


def _write_back(call: ShardedCall, known: Mapping[int, Tensor], leaders: Mapping[Hashable, Placement | None]) -> None:
    """Give blocks what was written to whole tensors, and count every write as torch counts its own."""
    changed = []
    for operand in call.operands:
        if operand.written and isinstance(operand.tensor, ShardedTensor):
            own, computed = operand.tensor, known[id(operand.tensor)]
            if computed is not own.local:
                if computed.shape != own.shape:
                    _refuse_reshaping(call, own)
                own.local.copy_(own.placement.cut(computed))
            changed.append(own.local)
    if changed:
        torch.autograd.graph.increment_version([tensor for tensor in changed if not tensor.is_inference()])


def _drawn_alike(call: ShardedCall, computed: Any, known: Mapping[int, Tensor]) -> Any:
    """Rank 0's random numbers on all ranks, as blocks that several ranks hold must stay equal."""
    first = call.sharded[0]
    collectives, tag = first.placement.collectives, f"{call.name} of {first.placement.name}"
    for operand in call.operands:
        if operand.written:
            target = known.get(id(operand.tensor), operand.tensor)
            target.copy_(collectives.share(tag, target))
    if call.rule.written:
        return computed
    shared = pytree.tree_map_only(Tensor, lambda tensor: collectives.share(tag, tensor), computed)
    if isinstance(shared, Tensor) and shared.shape == first.shape:
        return ShardedTensor.cut(shared, first.placement)
    return shared


def _unscale(call: ShardedCall) -> Any:
    """Unscale gradients; whether one is not finite has to be known on all ranks."""
    _computed(call, on_blocks=True)
    found, placement = call.given["found_inf"], call.sharded[0].placement
    numbers = placement.collectives.exchange("looking for infinite gradients", [float(found)])
    found.fill_(float(numbers.max()))
    return None


# -- reductions: a number of each block, counted once, and one exchange of them --


def _precise(tensor: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The type to reduce blocks in: that of the result, at least float32."""
    return torch.promote_types(wanted or tensor.dtype, torch.float32)


def _reduction(call: ShardedCall) -> Tensor | None:
    """A sum, mean, extreme or logical reduction over all elements; None where it needs the whole tensor."""
    tensor, logical = call.sharded[0], call.func in (aten.any.default, aten.all.default)
    wanted = call.given.get("dtype")
    simple = logical or (tensor.is_floating_point() and (wanted is None or wanted.is_floating_point))
    if not simple or not _over_all(call, tensor):
        return None
    rule = REDUCTIONS[call.func]
    placement, local = tensor.placement, tensor.local
    own = float(rule.block(local, _precise(local, wanted))) if placement.counts and local.numel() else rule.neutral
    numbers = placement.collectives.exchange(f"{call.name} of {placement.name}", [own])
    total = rule.total(numbers[:, 0])
    if call.func is aten.mean.default:
        total = total / tensor.numel()
    dtype = torch.bool if logical else wanted or tensor.dtype
    return total.to(device=tensor.device, dtype=dtype)


def _over_all(call: ShardedCall, tensor: Tensor) -> bool:
    """Whether a reduction is over all elements, to one number of shape ()."""
    dims = call.given.get("dim")
    every = not dims or len({dim % max(1, tensor.dim()) for dim in dims}) == tensor.dim()
    return every and not call.given.get("keepdim", False) and tensor.numel() > 0


def _norm(call: ShardedCall) -> Tensor | list[Tensor] | None:
    """Norms of one tensor or a list of them, in one exchange; None where they need the whole tensors."""
    order, dtype = float(call.given.get("ord", 2)), call.given.get("dtype")
    sharded = call.sharded
    simple = all(t.is_floating_point() and (call.rule.listed or _over_all(call, t)) for t in sharded)
    if not simple or any(isinstance(o.tensor, ShardedView) for o in call.operands):
        return None
    neutral = inf if order < 0 else 0.0
    numbers = [
        torch.linalg.vector_norm(t.local, order, dtype=_precise(t.local, dtype))
        if t.placement.counts and t.local.numel()
        else t.local.new_full((), neutral)
        for t in sharded
    ]
    own = torch.stack([n.to(numbers[0].device, torch.float64) for n in numbers]).tolist()
    names = ", ".join(tensor.placement.name for tensor in sharded)
    found = sharded[0].placement.collectives.exchange(f"{call.name} of {names}, order {order:g}", own)
    # Norms of whole tensors (columns) from those of blocks (rows).
    totals = iter((found.sum(0) if order == 0 else torch.linalg.vector_norm(found, order, dim=0)).unbind())

    def total(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return next(totals).to(device=tensor.device, dtype=dtype or tensor.dtype)
        plain: Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        return plain

    norms = [total(operand.tensor) for operand in call.operands]
    return norms if call.rule.listed else norms[0]


# -- without values, aliases and views --


def _alias(call: ShardedCall) -> Any:
    tensor = call.sharded[0]
    return tensor.like(tensor.local)


def _view(call: ShardedCall) -> Any:
    tensor, given, all_of_it = call.sharded[0], call.given, False
    if call.func in (aten.view.default, aten.expand.default):
        wanted = given.get("size", ())
        same = (size in (-1, own) for size, own in zip(wanted, tensor.shape, strict=False))
        all_of_it = len(wanted) == tensor.dim() and all(same)
    elif call.func is aten.slice.Tensor:
        start, end = given.get("start"), given.get("end")
        whole = end is None or end >= tensor.shape[given.get("dim", 0)]
        all_of_it = start in (None, 0) and whole and given.get("step", 1) == 1
    if all_of_it:
        return _alias(call)
    source = Gathered(tensor)
    views = call.run({id(tensor): source.whole})
    return pytree.tree_map_only(Tensor, lambda view: ShardedView(view, source), views)


def _refuse_reshaping(call: ShardedCall, tensor: ShardedTensor | None = None) -> Any:
    tensor = tensor if tensor is not None else call.sharded[0]
    raise RuntimeFailure(
        f"{call.name} would change the shape or memory of {tensor.placement.name}, which is cut over processes; "
        "work on parameter.whole(), or build the model anew and compile it"
    )


def _reduced(reduce: Callable[[ShardedCall], Any], call: ShardedCall) -> Any:
    found = reduce(call)
    return _computed(call, on_blocks=False) if found is None else found


_HANDLERS: Mapping[OpKind, Callable[[ShardedCall], Any]] = {
    OpKind.ALIAS: _alias,
    OpKind.VIEW: _view,
    OpKind.ELEMENTWISE: lambda call: _computed(call, on_blocks=True),
    OpKind.UNSCALE: _unscale,
    OpKind.FACTORY: lambda call: call.run({id(tensor): tensor.local for tensor in call.sharded}),
    OpKind.NORM: lambda call: _reduced(_norm, call),
    OpKind.REDUCTION: lambda call: _reduced(_reduction, call),
    OpKind.SAME_SIZE: lambda call: len({operand.tensor.shape for operand in call.operands}) == 1,
    OpKind.RESHAPING: _refuse_reshaping,
    OpKind.WHOLE: lambda call: _computed(call, on_blocks=False),
}


ShardedTensor.dispatch = staticmethod(dispatch)
