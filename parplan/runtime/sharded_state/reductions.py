"""Reductions of sharded tensors over all elements: a number of each block, counted once, and one exchange of them."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from parplan.runtime.sharded_state.rules import REDUCTIONS, ShardedCall
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor, ShardedView

__all__ = ["norm", "reduction"]

aten = torch.ops.aten


def _precise(tensor: Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The type to reduce blocks in: that of the result, at least float32."""
    return torch.promote_types(wanted or tensor.dtype, torch.float32)


def reduction(call: ShardedCall) -> Tensor | None:
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


def norm(call: ShardedCall) -> Tensor | list[Tensor] | None:
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
