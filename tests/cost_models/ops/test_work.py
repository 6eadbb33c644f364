"""FLOPs and bytes of single ops, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional

from parplan.cost_models.ops.op_calls import OpCall, Operand, op_calls
from parplan.cost_models.ops.saved import Saved, saved_by
from parplan.cost_models.ops.work import Engine, Kernel, OpWork, flops_of, op_work
from parplan.cost_models.roofline import part_of
from parplan.graph.capture.capture import capture
from parplan.plan import Strategy
from tests.every_case import every_case

F32 = torch.float32


def activation(*shape: int, name: str = "x") -> Operand:
    return Operand(shape, F32, True, name)


def data(*shape: int, dtype: torch.dtype = F32, name: str = "data") -> Operand:
    return Operand(shape, dtype, name=name)


def weight(*shape: int, name: str = "w", frozen: bool = False) -> Operand:
    return Operand(shape, F32, not frozen, name, state=True)


def call(
    op: str, inputs: Sequence[Operand], *out: int, arguments: tuple[object, ...] = (), grad: bool = True
) -> OpCall:
    return OpCall(op, tuple(inputs), (Operand(out, F32, grad, "y"),), arguments)


CONV = call("conv2d", [activation(8, 64, 27, 27), weight(192, 64, 5, 5), weight(192, name="b")], 8, 192, 27, 27)
LINEAR = call("linear", [activation(32, 10), weight(20, 10), weight(20, name="b")], 32, 20)
STEM = call("conv2d", [data(8, 3, 9, 9), weight(4, 3, 3, 3)], 8, 4, 7, 7)

FLOPS = [
    (CONV, 2 * 8 * 192 * 27 * 27 * 64 * 25),
    (call("conv2d", [activation(2, 8, 5, 5), weight(8, 2, 3, 3)], 2, 8, 5, 5), 2 * 2 * 8 * 25 * 2 * 9),  # 4 groups
    (call("conv_transpose2d", [activation(2, 8, 5, 5), weight(8, 3, 2, 2)], 2, 3, 10, 10), 2 * 2 * 8 * 25 * 3 * 4),
    (LINEAR, 2 * 32 * 20 * 10),
    (call("addmm", [weight(20, name="b"), activation(32, 10), weight(10, 20)], 32, 20), 2 * 32 * 20 * 10),
    (call("bmm", [activation(6, 7, 8), activation(6, 8, 9, name="z")], 6, 7, 9), 2 * 6 * 7 * 9 * 8),
    (call("matmul", [activation(2, 3, 7, 8), activation(8, 9, name="z")], 2, 3, 7, 9), 2 * 2 * 3 * 7 * 9 * 8),
    (call("scaled_dot_product_attention", [activation(2, 4, 7, 16, name=n) for n in "qkv"], 2, 4, 7, 16),
     2 * 2 * 2 * 4 * 7 * 7 * 16),
    (call("lstm", [activation(5, 3, 8), weight(40, 8), weight(40, 10, name="h"), weight(40, name="b")], 5, 3, 10),
     2 * 15 * (40 * 8 + 40 * 10)),
    (call("relu", [activation(4, 4)], 4, 4), 0),
    (call("einsum", [activation(8, 3, 5), weight(4, 3)], 8, 4, 5, arguments=("bct,dc->bdt", [0, 1])),
     2 * 8 * 3 * 5 * 4),
    (call("einsum", [activation(8, 3), weight(3, 4, 5), weight(8, 5, name="v")], 8, 4,
          arguments=("bi,ijk,bk->bj", [0, 1, 2])), 2 * 8 * 3 * 4 * 5 + 2 * 8 * 4 * 5),
]  # fmt: skip


class SelfAttention(nn.Module):
    """Attention of a tensor to itself, or with values of its own."""

    def __init__(self, shared: int, dropout: float) -> None:
        super().__init__()
        self.shared, self.dropout = shared, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        value = x if self.shared == 3 else x + 1.0
        return functional.scaled_dot_product_attention(x, x, value, dropout_p=self.dropout)


@pytest.mark.parametrize(("shared", "dropout", "inner_bytes"), [
    (3, 0.0, 4 * 8 * 7), (2, 0.0, 4 * 8 * 7), (3, 0.1, 3 * 4 * 8 * 7 * 7 + 2 * 4 * 8 * 7 * 5),
])  # fmt: skip
def test_attention_whose_operands_are_one_tensor(shared: int, dropout: float, inner_bytes: int) -> None:
    graph = capture(SelfAttention(shared, dropout), (torch.rand(2, 4, 7, 5, requires_grad=True),))
    parts = [part_of(graph, layer, Strategy()) for layer in graph.layers.values()]
    (attention,) = [each for part in parts for each in op_calls(graph, part) if "attention" in each.op]
    assert len(attention.inputs) == 4 - shared
    assert saved_by(attention, on_cpu=True).inner_bytes == inner_bytes
    assert flops_of(attention) == 2 * 2 * 8 * 7 * 7 * 5


class Masked(nn.Module):
    """Attention of a tensor to itself with values and a mask of their own."""

    def forward(self, x: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, value, mask, dropout_p=0.1)


def test_a_mask_is_not_taken_for_the_values() -> None:
    x, value, mask = (torch.rand(2, 4, 7, size, requires_grad=size < 7) for size in (5, 6, 7))
    graph = capture(Masked(), (x, value, mask))
    (part,) = (part_of(graph, layer, Strategy()) for layer in graph.layers.values())
    (attention,) = (each for each in op_calls(graph, part) if "attention" in each.op)
    assert saved_by(attention, on_cpu=True).values == {"value"}


@every_case(("op", "expected"), FLOPS, ids=[op.op for op, _ in FLOPS])
def test_forward_flops(op: OpCall, expected: int) -> None:
    assert flops_of(op) == expected
    assert sum(kernel.flops for kernel in op_work(op).forward) == expected


def test_experts_that_are_held_multiply_their_share_of_the_rows() -> None:
    rows, chosen = activation(32, 10), data(32, dtype=torch.int64)
    held = call("expert_products", [rows, weight(2, 10, 20), chosen], 32, 20, arguments=("x", "w", "e", 8))
    assert flops_of(held) == 2 * 32 * 10 * 20 / 4
    passed = 4 * (32 * 10 + 2 * 10 * 20 + 32 * 20) + 8 * 32
    assert [kernel.nbytes for kernel in op_work(held).forward] == [passed + 2 * 4 * (32 * 10 + 32 * 20) // 4]
    assert len(op_work(held).backward) == 2
    moved = 4 * (32 * 10 + 32 * 20) // 4
    assert saved_by(held) == Saved(frozenset(), (4 * 320 + 8 * 32) // 4, 4 * 640 // 4, moved)


def test_the_backward_of_a_product_is_one_product_per_factor_that_needs_it() -> None:
    moved = 4 * (32 * 10 + 20 * 10 + 20 + 32 * 20)
    product = Kernel(Engine.GEMM, 2 * 32 * 20 * 10, moved, F32)
    bias = Kernel(Engine.MEMORY, 0, 4 * (32 * 20 + 20), F32)
    assert op_work(LINEAR) == OpWork((product,), (product, product, bias))
    assert [kernel.engine for kernel in op_work(STEM).backward] == [Engine.CONV]  # images need no gradient
    frozen = call("linear", [activation(32, 10), weight(20, 10, frozen=True)], 32, 20)
    assert len(op_work(frozen).backward) == 1
    nothing = call("linear", [data(32, 10), weight(20, 10, frozen=True)], 32, 20, grad=False)
    assert op_work(nothing).backward == ()


# op, bytes forward, bytes backward
BYTES = [
    (call("relu", [activation(4, 8)], 4, 8), 128 * 2, 128 * 3),
    (call("add", [activation(4, 8), activation(4, 8, name="z")], 4, 8), 128 * 3, 0),
    (call("add", [activation(4, 8), weight(8)], 4, 8), 128 * 2 + 32, 128 + 32),  # the bias' gradient is a sum
    (call("mystery", [activation(4, 8)], 4, 8), 128 * 2, 128 * 3),
    (call("dropout", [activation(4, 8)], 4, 8, arguments=("x", 0.5, True)), 128 * 2 + 32, 128 * 2 + 32),
    (call("dropout", [activation(4, 8)], 4, 8, arguments=("x", 0.5, False)), 0, 0),
    (call("max_pool2d", [activation(1, 2, 4, 4)], 1, 2, 2, 2), 128 + 32 + 64, 32 + 128 + 128 + 64),
    (call("batch_norm", [activation(4, 8)], 4, 8), 128 * 3 + 64, 128 * 5 + 64),
    (call("embedding", [weight(100, 8), data(5, dtype=torch.int64)], 5, 8), 2 * 160 + 40, 3200 + 3 * 160 + 40),
    (call("class_terms", [activation(4, 8), data(4, dtype=torch.int64)], 4, 2, 4), 6 * 128 + 160, 2 * 128 + 160),
    (call("view", [activation(4, 8)], 32), 0, 0),
    (call("slice", [activation(4, 8)], 2, 8), 0, 128),
    (call("slice", [data(4, 8)], 2, 8, grad=False), 0, 0),
    (call("eq", [data(4, 8)], 4, 8, grad=False), 128 * 2, 0),
    (call("zeros", [], 4, 8, grad=False), 128, 0),
]


@every_case(("op", "forward", "backward"), BYTES, ids=[op.op for op, _, _ in BYTES])
def test_bytes_of_other_ops(op: OpCall, forward: int, backward: int) -> None:
    work = op_work(op)
    assert sum(kernel.nbytes for kernel in work.forward) == forward
    assert sum(kernel.nbytes for kernel in work.backward) == backward
    assert {kernel.engine for kernel in (*work.forward, *work.backward)} <= {Engine.MEMORY}


X, Z = activation(4, 8), activation(4, 8, name="z")
SAVED = [
    (LINEAR, Saved(frozenset("x"))),
    (call("linear", [activation(32, 10), weight(20, 10, frozen=True)], 32, 20), Saved()),
    (
        STEM,
        Saved(frozenset({"data"}), forward_bytes=4 * 49 * 27, backward_bytes=4 * 49 * 27),
    ),  # one sample unfolded: 7 x 7 positions of 3 x 3 x 3
    (call("relu", [X], 4, 8), Saved(frozenset("y"))),
    (call("gelu", [X], 4, 8), Saved(frozenset("x"))),
    (call("add", [X, Z], 4, 8), Saved()),
    (call("mul", [X, Z], 4, 8), Saved(frozenset("xz"))),
    (call("mul", [X, data(4, 8)], 4, 8), Saved(frozenset({"data"}))),
    (call("mul", [X], 4, 8, arguments=(X, 2.0)), Saved()),
    (call("mul", [X], 4, 8, arguments=(X, X)), Saved(frozenset("x"))),
    (call("max_pool2d", [activation(1, 2, 4, 4)], 1, 2, 2, 2), Saved(frozenset("x"), 64)),
    (call("batch_norm", [X, weight(8)], 4, 8), Saved(frozenset("x"), 64)),
    (call("layer_norm", [X, weight(8)], 4, 8, arguments=(X, [8])), Saved(frozenset("x"), 32)),
    (call("dropout", [X], 4, 8, arguments=(X, 0.5, True)), Saved(frozenset(), 32)),
    (call("cross_entropy_loss", [X, data(4, dtype=torch.int64)]), Saved(frozenset({"data"}), 128, backward_bytes=128)),
    (call("class_terms", [X, data(4, dtype=torch.int64)], 4, 2, 4), Saved(frozenset(), 128 + 13 * 4)),
    (
        call("class_terms", [Operand((4, 8), torch.bfloat16, True, "x"), data(4, dtype=torch.int64)], 4, 2, 4),
        Saved(frozenset(), 128 + 13 * 4, 128, 128),
    ),
    (call("embedding", [weight(9, 8), data(4, dtype=torch.int64)], 4, 8), Saved(frozenset({"data"}))),
    (call("view", [X], 32), Saved()),
    (call("mystery", [X, Z], 4, 8), Saved(frozenset("xz"))),
    (call("relu", [data(4, 8)], 4, 8, grad=False), Saved()),
]


@every_case(("op", "expected"), SAVED, ids=[op.op for op, _ in SAVED])
def test_what_is_saved(op: OpCall, expected: Saved) -> None:
    assert saved_by(op) == expected
