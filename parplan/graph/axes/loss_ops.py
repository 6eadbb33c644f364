"""Losses as ops that can be cut: class losses by rows and vocabulary, and reductions over the batch.

`cross_entropy` of [samples, classes] is, row by row, `log sum exp(scores) - scores[target]`. Every shard of the classes
gives four numbers a row: its maximum, its sum of exponentials, the target's score (zero where another shard has it) and
the target's weight. They are all that has to be exchanged (as in Megatron-LM's vocabulary-parallel loss). A mean over
samples is a sum and a count: each row carries its term and what it counts, so that ignored targets and class weights
divide by the same number as in the uncut loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.nn import functional

from parplan.graph.axes.call import text_row
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, own_op

__all__ = [
    "BATCH_MEAN", "BATCH_SUM", "CLASS_ROWS", "CLASS_TERMS", "OWN_CODE", "ROW_LOSSES",
    "join_class_losses", "run_class_terms", "vocabulary_blocks", "work_dtype",
]  # fmt: skip

# Into how many parts a vocabulary can be cut at most; the numbers of shards are those that divide it.
MOST_BLOCKS = 48
# Numbers a block gives for each row: maximum, sum of exponentials, target's score, count, and weight with smoothing.
ROW_NUMBERS = 5


def vocabulary_blocks(classes: int) -> int:
    """Parts that a vocabulary may be cut in: the most for which less is exchanged than a row of scores is long.

    >>> vocabulary_blocks(128256), vocabulary_blocks(32000), vocabulary_blocks(10), vocabulary_blocks(50257)
    (48, 16, 1, 1)
    """
    most = gcd(classes, MOST_BLOCKS)
    return max(part for part in range(1, most + 1) if most % part == 0 and (part == 1 or classes > ROW_NUMBERS * part))


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that rows are added up in: float32 for narrower ones."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


class _ClassTerms(torch.autograd.Function):
    """Terms of cross entropy over some of the classes; one temporary of the size of the scores, kept for the backward.

    The maximum only shifts the exponents: no gradient goes through it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        classes: int,
        first: int,
    ) -> Tensor:
        x = scores.to(work_dtype(scores.dtype))
        most = x.amax(1)
        shift = torch.where(most == -torch.inf, 0, most)
        shifted = x - shift.unsqueeze(1)
        counted, local = target != ignore_index, target - first
        here = counted & (local >= 0) & (local < x.shape[1])
        elsewhere = ~here & (target >= 0) & (target < classes)
        # A target that is no class stays out of range, so that the look-up refuses it as torch's loss does.
        index = torch.where(counted & ~elsewhere, local, 0)
        chosen = shifted.gather(1, index.unsqueeze(1)).squeeze(1)
        own = torch.ones_like(chosen) if weight is None else weight.to(x.dtype)[index]
        count = torch.where(here, own, 0)
        score, numbers = torch.where(here, chosen, 0) * count * (1 - smoothing), [count]
        even = None
        if smoothing:
            weights = torch.ones(x.shape[1], dtype=x.dtype, device=x.device) if weight is None else weight.to(x.dtype)
            even = weights * (smoothing / classes)
            along = even.view(-1, *(1,) * (x.dim() - 2))
            score = score + torch.where(counted, (shifted * along).sum(1), 0)
            numbers.append(count * (1 - smoothing) + counted * even.sum())
        powers = shifted.exp_()
        ctx.save_for_backward(powers, index, count * (1 - smoothing), counted, even)
        ctx.dtype = scores.dtype
        return torch.stack([most, powers.sum(1), score, *numbers], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        powers, index, chosen, counted, even = ctx.saved_tensors
        total, score = gradient[..., 1], gradient[..., 2]
        found = powers * total.unsqueeze(1)
        found.scatter_add_(1, index.unsqueeze(1), (score * chosen).unsqueeze(1))
        if even is not None:
            found += (score * counted).unsqueeze(1) * even.view(-1, *(1,) * (found.dim() - 2))
        return found.to(ctx.dtype), None, None, None, None, None, None


def run_class_terms(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    blocks: int,
    classes: int | None = None,
    first: int = 0,
) -> Tensor:
    """The terms of cross entropy that some of the classes give.

    Args:
        scores: [samples, classes, ...], the classes from `first` on, of `classes` in all.
        target: [samples, ...], integers: of all classes.
        weight: of these classes; None: 1 each.
        ignore_index: a target that does not count.
        smoothing: share of every target that is spread evenly over all classes.
        blocks: how many rows of numbers to give; the first has them, the others stand for no class.

    Returns:
        [samples, blocks, ..., 4 or (with smoothing) 5].

    Raises:
        IndexError or RuntimeError: a target is no class.
    """
    whole = scores.shape[1] if classes is None else classes
    args = (scores, target, weight, ignore_index, smoothing, whole, first)
    terms: Tensor = _ClassTerms.apply(*args)  # type: ignore[no-untyped-call]
    terms = terms.unsqueeze(1)
    if blocks == 1:
        return terms
    none = torch.zeros_like(terms[:, :1])
    none[..., 0] = -torch.inf
    return torch.cat([terms, none.expand(-1, blocks - 1, *none.shape[2:])], 1)


def run_row_losses(terms: Tensor) -> Tensor:
    """Loss and count of every row, from the numbers of all its blocks: [samples, blocks, ..., 4 or 5] -> [..., 2]."""
    total, score = terms[..., 1], terms[..., 2]
    most, count, weight = (terms[..., place].detach() for place in (0, 3, -1))
    highest = most.amax(1, keepdim=True)
    logarithm = (total * (most - highest).exp()).sum(1, keepdim=True).log()
    # A block without weight may have no class that is possible: its maximum is no number to count with.
    apart = highest - torch.where(weight == 0, highest, most)
    return torch.stack([(weight * (apart + logarithm) - score).sum(1), count.sum(1)], -1)


def run_class_rows(
    scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, normalised: bool
) -> Tensor:
    """Loss and count of every row, of all classes at once.

    Args:
        scores: [samples, classes, ...].
        target: [samples, ...] of integers, or probabilities as the scores are.
        normalised: scores are logarithms of probabilities already.

    Returns:
        [samples, ..., 2], float32 at least.
    """
    dtype = work_dtype(scores.dtype)
    if normalised:
        found = functional.nll_loss(scores, target, weight, ignore_index=ignore_index, reduction="none")
    else:
        found = functional.cross_entropy(
            scores, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
        )
    if target.is_floating_point():
        return torch.stack([found.to(dtype), torch.ones_like(found, dtype=dtype)], -1)
    counted = target != ignore_index
    own = counted if weight is None else torch.where(counted, weight[torch.where(counted, target, 0)], 0)
    return torch.stack([found.to(dtype), own.to(dtype)], -1)


def run_batch_mean(values: Tensor, counted: bool, dtype: torch.dtype) -> Tensor:
    """The mean over the batch; `counted`: of rows [..., 2] of terms and what they count."""
    if not counted:
        return values.mean().to(dtype)
    total, count = values[..., 0].sum(), values[..., 1].detach().sum()
    # Where nothing counts the mean is no number, and its gradients are zero.
    return torch.where(count == 0, torch.nan, total / torch.where(count == 0, 1, count)).to(dtype)


def run_batch_sum(values: Tensor, counted: bool, dtype: torch.dtype) -> Tensor:
    """The sum over the batch; `counted`: of the terms of rows [..., 2]."""
    return (values[..., 0] if counted else values).sum().to(dtype)


def run_class_loss(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    normalised: bool,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """The loss of all rows and classes at once, by torch's own op; arguments as of `run_class_rows`."""
    given: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    if normalised:
        return functional.nll_loss(scores, target, weight, **given).to(dtype)
    return functional.cross_entropy(scores, target, weight, label_smoothing=smoothing, **given).to(dtype)


def join_class_losses(code: fx.Graph) -> None:
    """Put a class loss whose rows and classes one device has all of together again, in place: as one op of torch it
    takes a third of the calls, and computes what the plain model does."""
    for last in list(code.nodes):
        reduction = _REDUCTIONS.get(last.target)
        if reduction is None or not last.args[1]:
            continue
        joined = [last.args[0]]
        if joined[-1].target is torch.ops.aten.sum.dim_IntList:  # over positions
            joined.append(joined[-1].args[0])
        if joined[-1].target is run_row_losses:
            joined.append(joined[-1].args[0])
        first = joined[-1]
        of_terms = first.target is run_class_terms and len(first.args) == _UNCUT_ARGS
        if (of_terms or first.target is run_class_rows) and all(len(node.users) == 1 for node in joined):
            normalised = first.args[5] if not of_terms else False
            with code.inserting_before(last):
                made = code.call_function(run_class_loss, (*first.args[:5], normalised, reduction, last.args[2]))
            last.replace_all_uses_with(made)
            for node in (last, *joined):
                code.erase_node(node)


_REDUCTIONS: Mapping[Any, str] = {run_batch_mean: "mean", run_batch_sum: "sum"}
_UNCUT_ARGS = 6  # of `run_class_terms`, where it has all classes


CLASS_TERMS = own_op("class_terms", run_class_terms)
ROW_LOSSES = own_op("row_losses", run_row_losses)
CLASS_ROWS = own_op("class_rows", run_class_rows)
BATCH_MEAN = own_op("batch_mean", run_batch_mean)
BATCH_SUM = own_op("batch_sum", run_batch_sum)

# Differentiable code of ops that are only names.
OWN_CODE: Mapping[Any, Callable[..., Tensor]] = {
    ROW_LOSSES: run_row_losses,
    CLASS_ROWS: run_class_rows,
    BATCH_MEAN: run_batch_mean,
    BATCH_SUM: run_batch_sum,
}


def _class_rows(call: Call) -> tuple[OpAxis, ...]:
    """Samples and positions; classes are needed whole."""
    target = "n v! d.." if call["target"].meta["val"].is_floating_point() else "n d.."
    return call.rows(f"n v! d.., {target}, v! -> n d.. k!", ("scores", "target", "weight"), names={"n": "batch"})


OWN_ROWS[CLASS_TERMS] = text_row(
    "n v d.., n d.., v -> n v d.. k!", "scores", "target", "weight", n="batch", v="vocabulary"
)
OWN_ROWS[ROW_LOSSES] = text_row("n v! d.. k! -> n d.. l!", "terms", n="batch")
OWN_ROWS[CLASS_ROWS] = _class_rows
OWN_ROWS[BATCH_MEAN] = OWN_ROWS[BATCH_SUM] = lambda call: ()
