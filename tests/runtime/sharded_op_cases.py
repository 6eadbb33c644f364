"""Ops of PyTorch on sharded tensors, beside the same ops on plain ones; each case runs on every rank."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parplan.errors import RuntimeFailure
from parplan.layout import Range, Region
from parplan.runtime.sharded_state.block_placement import Placement, TaggedCollectives
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor, ShardedView
from parplan.runtime.transport.distributed import DistributedTransport
from tests.runtime.sharded_cases import same

__all__ = ["CASES"]

SHAPE = (5, 6)
Op = Callable[[Any, Any, Any], Any]


def placements(ranks: int) -> list[Placement]:
    """Blocks of a tensor: uneven rows, columns on some ranks in replicas, all of it on one rank."""
    collectives = TaggedCollectives(DistributedTransport(torch.device("cpu")))
    rows, columns = (Range(0, size) for size in SHAPE)
    bounds = [0, 3, *(5,) * (ranks - 1)]
    uneven: dict[int, Region] = {r: (Range(bounds[r], bounds[r + 1]), columns) for r in range(ranks)}
    halves: dict[int, Region] = {r: (rows, Range(3 * (r % 2), 3 * (r % 2) + 3)) for r in range(ranks)}
    lone: dict[int, Region] = {ranks - 1: (rows, columns)}
    return [Placement("weight", SHAPE, blocks, collectives) for blocks in (uneven, halves, lone)]


def _inplace(change: Callable[[Any, Any, Any], object]) -> Op:
    """An op that writes to its first tensor, which is its result."""

    def op(a: Any, b: Any, w: Any) -> Any:
        change(a, b, w)
        return a

    return op


def _through_view(change: Callable[[Any], object]) -> Op:
    """A write through a view of the first tensor, seen in the tensor and through the view."""

    def op(a: Any, b: Any, w: Any) -> Any:
        view = a.view(-1)
        change(a)
        return a * 1, view.sum(), view.clone()

    return op


# `a` and `b` are sharded alike, `w` is plain, of the whole shape.
OPS: dict[str, Op] = {
    "add": lambda a, b, w: a + b * 2 - w,
    "add a row": lambda a, b, w: a + w[0],
    "add a column": lambda a, b, w: a * w[:, :1],
    "reversed": lambda a, b, w: 1 / (w - a),
    "larger shape": lambda a, b, w: a + w.expand(2, *SHAPE),
    "where": lambda a, b, w: torch.where(a > w, a, 0.0),
    "comparison": lambda a, b, w: (a == a, a != w, (a > 0).sum(), torch.equal(a, a), torch.allclose(a, b)),
    "lerp": lambda a, b, w: a.lerp(b, 0.3).lerp(w, w),
    "masked_fill": lambda a, b, w: a.masked_fill(a > 0, 3.0),
    "clamp": lambda a, b, w: a.clamp(-0.1, 0.1).clamp(min=w),
    "matmul": lambda a, b, w: a @ b.T @ w,
    "linear": lambda a, b, w: nn.functional.linear(w, a, w[:, 0]),
    "softmax": lambda a, b, w: a.softmax(1),
    "cat": lambda a, b, w: torch.cat([a, w, b], 1),
    "stack": lambda a, b, w: torch.stack([a.norm(), b.norm(1), b.norm(float("inf"))]),
    "norms": lambda a, b, w: [
        torch.linalg.vector_norm(a, n) for n in (0, 0.5, 1, 2, 3, float("inf"), -float("inf"), -1)
    ],
    "norm along": lambda a, b, w: (
        a.norm(dim=1),
        a.norm(dim=(0, 1)),
        a.norm(keepdim=True),
        torch.linalg.matrix_norm(a),
    ),
    "norm in double": lambda a, b, w: torch.linalg.vector_norm(a.float(), dtype=torch.float64),
    "foreach norm": lambda a, b, w: torch._foreach_norm([a, w, b], 1),
    "foreach": lambda a, b, w: torch._foreach_addcmul([a, w, w], [b, a, w], [w, w, b], 0.5),
    "foreach max": lambda a, b, w: torch._foreach_max([a, w]),
    "reductions": lambda a, b, w: (
        a.sum(),
        a.mean(),
        a.max(),
        a.min(),
        a.amax(),
        a.prod(),
        a.std(),
        a.sum(0),
        a.argmax(),
    ),
    "logical": lambda a, b, w: ((a > 0).any(), (a > 0).all(), a.isnan().any(), torch.isfinite(a).all(), (a > 9).any(1)),
    "numbers": lambda a, b, w: torch.tensor([a.norm().item(), float(b.sum()), a[1, 2].item(), float(a.abs().max())]),
    "lists": lambda a, b, w: torch.tensor(a.tolist()) + torch.from_numpy(b.numpy().copy()),
    "casts": lambda a, b, w: (a.float(), a.to(torch.bfloat16), a.int(), a.type_as(w)),
    "likes": lambda a, b, w: (torch.zeros_like(a), torch.ones_like(b), torch.full_like(a, 2.0), a.new_zeros(3)),
    "random": lambda a, b, w: (torch.randn_like(a), torch.rand_like(a) + w, nn.functional.dropout(a, 0.5)),
    "views": lambda a, b, w: (
        a.view(-1),
        a.T,
        a[1],
        a[:, 2:4],
        a.flatten(),
        a.unsqueeze(0),
        a[a > 0],
        a.reshape(10, 3),
    ),
    "whole views": lambda a, b, w: (a[:], a.view(*SHAPE), a.expand(5, 6), a.view_as(w), a.contiguous(), a.data),
    "splits": lambda a, b, w: [*a.chunk(2), *a.split(2, 1), *a.unbind(), *list(a)],
    "sorting": lambda a, b, w: (a.sort(1), a.topk(2), a.flatten().kthvalue(3)),
    "einsum": lambda a, b, w: torch.einsum("ij,kj->ik", a, b),
    "norm of a plain list": lambda a, b, w: w.norm() * a,
    "in place": _inplace(lambda a, b, w: a.add_(b).mul_(w).sub_(w[0]).clamp_(max=1)),
    "copy_": _inplace(lambda a, b, w: a.copy_(w)),
    "assign": _inplace(lambda a, b, w: a.__setitem__(slice(None), w)),
    "fill": _inplace(lambda a, b, w: a.fill_(2.0)),
    "random in place": _inplace(lambda a, b, w: a.normal_()),
    "trunc_normal": _inplace(lambda a, b, w: nn.init.trunc_normal_(a)),
    "kaiming": _inplace(lambda a, b, w: nn.init.kaiming_uniform_(a)),
    "index_fill": _inplace(lambda a, b, w: a.index_fill_(0, torch.tensor([1, 4]), 7.0)),
    "cumsum in place": _inplace(lambda a, b, w: a.cumsum_(0)),
    "renorm": _inplace(lambda a, b, w: a.renorm_(2, 0, 0.5)),
    "addmm": _inplace(lambda a, b, w: a.addmm_(w @ w.T, b)),
    "out": _inplace(lambda a, b, w: torch.add(b, w, out=a)),
    "data": _inplace(lambda a, b, w: a.data.mul_(2.0).add_(w)),
    "data set": _inplace(lambda a, b, w: setattr(a, "data", w * 2)),
    "data from sharded": _inplace(lambda a, b, w: setattr(a, "data", b + 1)),
    "detached": _inplace(lambda a, b, w: a.detach().sub_(b)),
    "row": _inplace(lambda a, b, w: a[1].zero_()),
    "element": _inplace(lambda a, b, w: a.__setitem__((2, 3), 5.0)),
    "mask": _inplace(lambda a, b, w: a.__setitem__(a > 0, 0.0)),
    "columns": _inplace(lambda a, b, w: a[:, 1:3].mul_(b[:, 1:3])),
    "flat": _inplace(lambda a, b, w: a.view(-1).add_(w.view(-1))),
    "nested view": _inplace(lambda a, b, w: a.T[2].view(5, 1).normal_()),
    "transposed temporary": _inplace(lambda a, b, w: a.copy_((a * 2).T.div_(3).T)),
    "plain written": lambda a, b, w: w.clone().mul_(a).sub_(b),
    "plain row written": lambda a, b, w: w.clone()[0].add_(a[0]),
    "stale view, op": _through_view(lambda a: a.add_(1.0)),
    "stale view, other view": _through_view(lambda a: a[2].add_(1.0)),
    "deep copy": lambda a, b, w: copy.deepcopy(a).add_(1) + a,
    "views into plain": lambda a, b, w: torch.cat([a.view(-1), b.view(-1)]).norm(),
}


def plain(value: Any) -> list[Any]:
    """Tensors of any kind as plain ones."""
    return [_plain(leaf) for leaf in tree_leaves(value)]


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, ShardedTensor):
        assert leaf.local.shape == leaf.placement.cut(torch.empty(leaf.shape)).shape
        return leaf.whole()
    return leaf.current().clone() if isinstance(leaf, ShardedView) else leaf


def ops(rank: int, ranks: int) -> None:
    """Every op gives what it gives on plain tensors, under every placement, results and what was written alike."""
    wrong = []
    for placement in placements(ranks):
        for name, op in OPS.items():
            torch.manual_seed(5)
            wholes = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(3)]
            mine = [ShardedTensor.cut(whole, placement) for whole in wholes[:2]]
            torch.manual_seed(6)
            a, b, w = (whole.clone() for whole in wholes)
            wanted = op(a, b, w)
            torch.manual_seed(6)
            try:
                found = op(mine[0], mine[1], wholes[2].clone())
                for ours, theirs in zip(plain(found), plain(wanted), strict=True):
                    same(ours, theirs, name)
            except Exception as error:
                wrong.append(f"{name} by {placement.blocks}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


def gradients(rank: int, ranks: int) -> None:
    """Ops that are differentiated: the gradient of a sharded leaf is that of a plain one."""
    for placement in placements(ranks):
        for name in (
            "add",
            "reversed",
            "where",
            "lerp",
            "matmul",
            "linear",
            "softmax",
            "cat",
            "stack",
            "views",
            "splits",
        ):
            torch.manual_seed(5)
            wholes = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(3)]
            leaves = [whole.clone().requires_grad_() for whole in wholes[:2]]
            mine = [ShardedTensor.cut(whole, placement).requires_grad_() for whole in wholes[:2]]
            for a, b in (leaves, mine):
                results = [t for t in tree_leaves(OPS[name](a, b, wholes[2])) if t.requires_grad]
                torch.stack([(t * t).sum() for t in results]).sum().backward()
            for ours, theirs in zip(mine, leaves, strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    same(_plain(ours.grad), theirs.grad, f"gradient of {name}")


def two_placements(rank: int, ranks: int) -> None:
    """Tensors that are cut differently meet."""
    found = placements(ranks)
    for first in found:
        for second in found:
            a, b = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
            x, y = ShardedTensor.cut(a, first), ShardedTensor.cut(b, second)
            same(_plain(x * y), a * b, "product")
            same(_plain(x.add_(y)), a + b, "sum in place")
            same(torch._foreach_norm([x, y]), [(a + b).norm(), b.norm()], "norms")


def numbers_and_empty_shapes(rank: int, ranks: int) -> None:
    """A parameter of shape (), which one rank holds."""
    collectives = TaggedCollectives(DistributedTransport(torch.device("cpu")))
    placement = Placement("scale", (), {ranks - 1: ()}, collectives)
    scale = nn.Parameter(ShardedTensor.cut(torch.tensor(3.0, dtype=torch.float64), placement))
    same(scale.item(), 3.0, "item")
    with torch.no_grad():
        scale.mul_(2).add_(torch.ones(()))
    same(scale * torch.ones(2, dtype=torch.float64), torch.full((2,), 7.0, dtype=torch.float64), "product")
    (scale * scale).sum().backward()
    same(_plain(scale.grad), torch.tensor(14.0, dtype=torch.float64), "gradient")
    same(float(scale.detach().norm()), 7.0, "norm")


def refusals(rank: int, ranks: int) -> None:
    """Everything that would give one rank's block as the whole raises, and says what to do."""
    placement = placements(ranks)[0]
    tensor = nn.Parameter(ShardedTensor.cut(torch.randn(SHAPE), placement))
    savers: list[Callable[[Any], object]] = [pickle.dumps, lambda t: torch.save(t, io.BytesIO()), copy.copy]
    for use in savers:
        with pytest.raises(RuntimeFailure, match=r"weight is cut over processes.*state_dict\(\)"):
            use(tensor)
    for name in ("data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__"):
        with pytest.raises(RuntimeFailure, match=r"weight: the tensor is cut over processes.*whole\(\)"):
            getattr(tensor, name)()
    changes: list[Callable[[Any], object]] = [
        lambda t: t.resize_(3), lambda t: t.t_(), lambda t: t.squeeze_(), lambda t: t.set_(torch.zeros(3)),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(RuntimeFailure, match="would change the shape or memory of weight"):
            change(tensor.detach())
    with pytest.raises(RuntimeFailure, match=r"its data cannot become a tensor of shape \(3,\)"):
        tensor.data = torch.zeros(3)
    with pytest.raises(RuntimeFailure, match=r"ranks hold 6 of its 30 elements"):
        Placement("part", SHAPE, {0: (Range(0, 1), Range(0, 6))}, placement.collectives)
    assert f"rank {rank} holds" in repr(tensor)  # without a collective
    for values in (tensor.detach().numpy(), np.asarray(tensor.detach())):
        with pytest.raises(ValueError, match="read-only"):
            values[:] = 0


def ranks_that_differ(rank: int, ranks: int) -> None:
    """Ranks that run different lines get an error, and go on."""
    ones = torch.ones(SHAPE, dtype=torch.float64)
    tensor = ShardedTensor.cut(ones, placements(ranks)[0])
    with pytest.raises(RuntimeFailure, match=r"rank 0: linalg_vector_norm of weight.*; rank 1: sum of weight"):
        tensor.norm() if rank == 0 else tensor.sum()
    with pytest.raises(RuntimeFailure, match="ranks run different operations"):
        tensor.norm() if rank == 0 else tensor.view(-1)
    same(tensor.norm(), ones.norm(), "norm")
    long: list[Tensor] = [tensor] * 40
    same(torch._foreach_norm(long), [ones.norm()] * 40, "many norms")


CASES = {
    case.__name__: case
    for case in (ops, gradients, two_placements, numbers_and_empty_shapes, refusals, ranks_that_differ)
}
