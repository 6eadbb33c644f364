"""Mixtures of experts: every row times the matrix of its own expert, as one op with axes for rows and for experts.

`grouped_mm` wants its rows sorted by expert, so samples are lost in it. Captured as one op on rows in their own order
(export/expert_routing.py), rows stay apart, and the experts can be cut: each shard multiplies the rows of its own
experts, all others are zeros, and the shards' results add up. No row is dropped and none is padded.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from parplan.graph.axes.call import Call
from parplan.graph.axes.row_syntax import Cut, OpAxis
from parplan.graph.axes.table import OWN_ROWS, own_op

__all__ = ["EXPERT_PRODUCTS", "GroupedInDouble", "grouped_in_double", "run_expert_products"]


def _all_products(rows: Tensor, weight: Tensor, experts: Tensor, count: int) -> Tensor:
    """Every row times the matrix of its expert; see `run_expert_products`. `count` is the number of all experts."""
    return run_expert_products(rows, weight, experts)


def _without_values(rows: Tensor, weight: Tensor, *more: Any) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2]))


EXPERT_PRODUCTS = own_op("expert_products", _all_products, _without_values)


def run_expert_products(rows: Tensor, weight: Tensor, experts: Tensor, first: int = 0) -> Tensor:
    """Multiply every row with the matrix of its expert.

    Args:
        rows: [rows, in].
        weight: [experts held, in, out].
        experts: [rows], the expert of each row, among all experts.
        first: number of the first expert that is held.

    Returns:
        [rows, out]; zeros for rows of experts that are not held, so that the results of all shards add up.
    """
    held, local = weight.shape[0], experts - first
    group = torch.where((local >= 0) & (local < held), local, held)
    group, order = group.sort(stable=True)
    ends = torch.searchsorted(group, torch.arange(held, device=group.device), right=True)
    if _has_kernel(rows, weight):
        # The kernel leaves rows behind the last group as they are in memory, in the backward too.
        mine = (group < held).unsqueeze(1)
        gathered = torch.where(mine, rows[order], 0.0)
        found = functional.grouped_mm(gathered, weight, offs=ends.to(torch.int32))
        return torch.zeros_like(found).index_copy(0, order, torch.where(mine, found, 0.0))
    bounds = [0, *ends.tolist()]
    chosen = order[: bounds[-1]]
    sizes = [end - start for start, end in pairwise(bounds)]
    products = [part @ own for part, own in zip(rows[chosen].split(sizes), weight.unbind(0), strict=True)]
    return rows.new_zeros(rows.shape[0], weight.shape[2]).index_copy(0, chosen, torch.cat(products))


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether one kernel does all groups, without waiting for their sizes: in bfloat16, on rows of 16 bytes."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return rows.is_cuda and rows.dtype is weight.dtype is torch.bfloat16 and aligned


def _axes(call: Call) -> tuple[OpAxis, ...]:
    """Rows; in- and out-features; experts, of which every part computes its own rows."""
    rows, weight, experts, out = *(str(call.name(a)) for a in ("rows", "weight", "experts")), call.outputs[0]
    if len({rows, weight, experts}) < 3:
        return ()
    return (
        OpAxis({rows: 0, experts: 0, out: 0}),
        OpAxis({weight: 0}, Cut.SUM, "experts", routed_by=experts),
        OpAxis({rows: 1, weight: 1}, Cut.SUM, "in-features"),
        OpAxis({weight: 2, out: 1}, name="out-features"),
    )


OWN_ROWS[EXPERT_PRODUCTS] = _axes


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` of [rows, in] with [experts, in, out] in any precision; rows of expert `e` end at `ends[e]`."""
    return run_expert_products(rows, weight, _expert_of_rows(rows, ends))


def _expert_of_rows(rows: Tensor, ends: Tensor) -> Tensor:
    return torch.searchsorted(ends.long(), torch.arange(rows.shape[0], device=rows.device), right=True)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = context.saved_tensors
    experts = _expert_of_rows(rows, ends)
    with torch.enable_grad():
        operands = rows.detach().requires_grad_(), weight.detach().requires_grad_()
        found = run_expert_products(*operands, experts)
    of_rows, of_weight = torch.autograd.grad(found, operands, gradient)
    return of_rows, of_weight, None


GROUPED_PRODUCTS = own_op("grouped_products", _grouped, _without_values)
torch.library.register_autograd(
    GROUPED_PRODUCTS, _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def grouped_in_double(rows: Tensor, weight: Tensor, **more: Any) -> Tensor:
    """`grouped_mm`; in float64, which torch's kernel does not have, one product for each expert.

    Args:
        rows: [rows, in].
        weight: [experts, in, out].
        more: `offs`, the end of each expert's rows, and further arguments of `grouped_mm`.
    """
    if rows.dtype is torch.float64 and weight.dim() == 3 and more.get("offs") is not None:
        found: Tensor = GROUPED_PRODUCTS(rows, weight, more["offs"])
        return found
    return functional.grouped_mm(rows, weight, **more)


class GroupedInDouble(TorchFunctionMode):
    """Replaces `grouped_mm` in calls of torch's, so that a model of experts runs in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch's."""
        wanted = getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm")
        return (grouped_in_double if wanted else func)(*args, **(kwargs or {}))
