"""Arithmetic and memory traffic of every op, forward and backward, at the sizes one device sees.

Products (convolutions, matrix products, attention) are counted in FLOPs, two per multiply-add, and in bytes; all other
ops by the bytes they read and write, which is what they take their time for. An op without a row is counted by its
inputs and outputs. The backward of a product is one product of the same size per factor that needs a gradient; that of
another op reads the gradients of its outputs and what it saved and writes the gradients of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from math import prod

import torch

from parplan.cost_models.ops.op_calls import SLICES, OpCall, Operand, total_bytes
from parplan.cost_models.ops.saved import saved_by
from parplan.graph.axes.weights import einsum_words

__all__ = ["Engine", "Kernel", "OpWork", "flops_of", "op_work"]


class Engine(Enum):
    """The resource that bounds a kernel's speed."""

    GEMM = "matrix product"
    CONV = "convolution"
    MEMORY = "memory"


@dataclass(frozen=True)
class Kernel:
    """One kernel: what it computes, how much, and the bytes it moves to and from memory."""

    engine: Engine
    flops: float
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class OpWork:
    """The kernels of an op."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()


def op_work(call: OpCall) -> OpWork:
    """The kernels one op runs, forward and backward."""
    if call.op in _CONVOLUTIONS or call.op in _PRODUCTS:
        return _product(call)
    if call.op in SLICES:
        return OpWork(backward=_memory(call, total_bytes(_differentiable(call)))) if call.differentiated else OpWork()
    if call.is_view or not call.outputs:
        return OpWork()
    traffic = _TRAFFIC.get(call.op, _pass_over)(call)
    backward_bytes = traffic.backward_bytes if call.differentiated else 0
    return OpWork(_memory(call, traffic.forward_bytes), _memory(call, backward_bytes))


def flops_of(call: OpCall) -> float:
    """FLOPs of an op's forward; 0 for ops that are bound by memory."""
    count = _CONVOLUTIONS.get(call.op) or _PRODUCTS.get(call.op)
    return count(call) if count else 0.0


def _product(call: OpCall) -> OpWork:
    engine = Engine.CONV if call.op in _CONVOLUTIONS else Engine.GEMM
    moved = total_bytes(call.inputs) + total_bytes(call.outputs)
    if call.op == "expert_products":  # rows are brought together by expert before it, and put back after
        moved += int(2 * (call.inputs[0].nbytes + call.outputs[0].nbytes) * _share_of_experts(call))
    forward = Kernel(engine, flops_of(call), moved, call.outputs[0].dtype)
    if not call.differentiated:
        return OpWork((forward,))
    if call.op in _BACKWARD_FACTOR:
        factor = _BACKWARD_FACTOR[call.op]
        return OpWork((forward,), (Kernel(engine, factor * forward.flops, 2 * moved, forward.dtype),))
    factors = call.inputs[1:3] if call.op in ("addmm", "baddbmm") else call.inputs[:2]
    backward = [forward for operand in factors if operand.requires_grad]
    biases = [operand for operand in call.inputs if operand not in factors and operand.requires_grad]
    backward += [Kernel(Engine.MEMORY, 0, call.outputs[0].nbytes + bias.nbytes, forward.dtype) for bias in biases]
    return OpWork((forward,), tuple(backward))


def _convolution(call: OpCall, transposed: bool = False) -> float:
    weight, image = call.inputs[1], call.inputs[0] if transposed else call.outputs[0]
    return 2.0 * image.elements * weight.elements / max(1, weight.shape[0])


def _expert_products(call: OpCall) -> float:
    """Every row times one matrix, of the share of the experts that is held: rows are taken to be spread evenly."""
    return _contracted(call) * _share_of_experts(call)


def _share_of_experts(call: OpCall) -> float:
    count = call.argument(3)
    return call.inputs[1].shape[0] / count if isinstance(count, int) else 1.0


_transposed_convolution = partial(_convolution, transposed=True)


def _contracted(call: OpCall) -> float:
    """Products of rows with columns: the last dimension of the first factor is summed over."""
    return 2.0 * call.outputs[0].elements * call.inputs[0].shape[-1]


def _einsum(call: OpCall) -> float:
    """Operands multiplied one after another; letters that only one of them has are summed over first."""
    operands, equation = call.argument(1, ()), str(call.argument(0))
    if len(operands) != len(call.inputs):
        return 2.0 * call.outputs[0].elements
    words, out = einsum_words(equation, [len(operand.shape) for operand in call.inputs])
    sizes = {
        word: size for each, x in zip(words, call.inputs, strict=True) for word, size in zip(each, x.shape, strict=True)
    }
    flops, held = 0.0, set(words[0])
    for place, word in enumerate(words[1:], 1):
        flops += 2.0 * prod(sizes[letter] for letter in held | set(word))
        held = (held | set(word)) & {*out, *(letter for later in words[place + 1 :] for letter in later)}
    return flops


def _attention(call: OpCall) -> float:
    """Queries x keys, then weights x values; a causal mask is not subtracted (not every kernel gains by it)."""
    query, key = call.inputs[:2] if len(call.inputs) > 1 else (call.inputs[0], call.inputs[0])
    return 2.0 * (query.elements + call.outputs[0].elements) * key.shape[-2]


def _recurrent(call: OpCall) -> float:
    """Every weight matrix meets every token once."""
    tokens = call.inputs[0].elements // max(1, call.inputs[0].shape[-1])
    return 2.0 * tokens * sum(operand.elements for operand in call.inputs if operand.state and len(operand.shape) == 2)


Count = Callable[[OpCall], float]

_CONVOLUTIONS: dict[str, Count] = {
    "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution, 
    "convolution": lambda call: _convolution(call, transposed=call.argument(6) is True),
    "conv_transpose1d": _transposed_convolution, "conv_transpose2d": _transposed_convolution,
    "conv_transpose3d": _transposed_convolution,
}  # fmt: skip

_PRODUCTS: dict[str, Count] = {
    "einsum": _einsum,
    "linear": _contracted, "mm": _contracted, "bmm": _contracted, "matmul": _contracted, "mv": _contracted,
    **dict.fromkeys(("addmm", "baddbmm"), lambda call: _contracted(replace(call, inputs=call.inputs[1:]))),
    "expert_products": _expert_products, "scaled_dot_product_attention": _attention,
    "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent, "rnn_relu": _recurrent,
}  # fmt: skip

# Fused attention computes its weights again in the backward: five products for the forward's two.
_BACKWARD_FACTOR = {"scaled_dot_product_attention": 2.5, "lstm": 2.0, "gru": 2.0, "rnn_tanh": 2.0, "rnn_relu": 2.0}


@dataclass(frozen=True)
class _Traffic:
    forward_bytes: int
    backward_bytes: int


def _memory(call: OpCall, nbytes: int) -> tuple[Kernel, ...]:
    return (Kernel(Engine.MEMORY, 0.0, nbytes, call.outputs[0].dtype),) if nbytes else ()


def _differentiable(call: OpCall) -> Sequence[Operand]:
    return [operand for operand in call.inputs if operand.requires_grad]


def _pass_over(call: OpCall) -> _Traffic:
    """Once over inputs and outputs; back over the outputs' gradients and what was saved, to the inputs' gradients."""
    saved = saved_by(call)
    known = {operand.name: operand for operand in (*call.inputs, *call.outputs)}
    reads = total_bytes(known[name] for name in saved.values) + saved.inner_bytes
    gradients = total_bytes(call.outputs) + total_bytes(_differentiable(call))
    return _Traffic(total_bytes(call.inputs) + total_bytes(call.outputs) + saved.inner_bytes, gradients + reads)


def _passed_on(call: OpCall) -> _Traffic:
    """Sums hand the gradient on as it is, unless an input was broadcast and has to be summed up."""
    out = call.outputs[0]
    summed = [operand for operand in _differentiable(call) if operand.elements != out.elements]
    return _Traffic(total_bytes(call.inputs) + out.nbytes, sum(out.nbytes + operand.nbytes for operand in summed))


def _twice_over(call: OpCall) -> _Traffic:
    """Batch norm: statistics first, then the result; backward the same over input and gradient."""
    once, x = _pass_over(call), call.inputs[0].nbytes
    return _Traffic(once.forward_bytes + x, once.backward_bytes + 2 * x)


def _look_up(call: OpCall) -> _Traffic:
    """Embedding: reads the rows it writes; backward fills a gradient of the whole table, then adds rows to it."""
    rows, table = total_bytes(call.outputs), total_bytes(_differentiable(call))
    indices = total_bytes(operand for operand in call.inputs if not operand.state)
    return _Traffic(2 * rows + indices, table + 3 * rows + indices)


def _bag_look_up(call: OpCall) -> _Traffic:
    """Bags of rows: reads all rows of a bag and writes one; backward reads the bag's gradient for each of them."""
    table, indices, *_ = call.inputs
    rows = indices.elements * call.outputs[0].nbytes // max(1, call.outputs[0].shape[0])
    given = total_bytes(operand for operand in call.inputs if not operand.state)
    gradient = table.nbytes if table.requires_grad else 0
    return _Traffic(rows + total_bytes(call.outputs) + given, gradient + 2 * rows + total_bytes(call.outputs) + given)


def _class_terms(call: OpCall) -> _Traffic:
    """Cross entropy's shares of a vocabulary: maximum, difference, exponential and sum, each over all scores.

    Backward one product of them. Smoothing adds a weighted sum forward and an addition backward.
    """
    scores, smoothed = call.inputs[0], bool(call.argument(4))
    wide = max(scores.dtype.itemsize, torch.float32.itemsize) * scores.elements
    cast = scores.nbytes + wide if scores.nbytes < wide else 0
    rows = total_bytes(call.inputs[1:]) + total_bytes(call.outputs)
    return _Traffic((6 + 3 * smoothed) * wide + cast + rows, (2 + 2 * smoothed) * wide + cast + rows)


_TRAFFIC: dict[str, Callable[[OpCall], _Traffic]] = {
    "add": _passed_on, "sub": _passed_on, "subtract": _passed_on,
    "class_terms": _class_terms, "embedding": _look_up, "shard_embedding": _look_up, "embedding_bags": _bag_look_up,
    "offset_bags": _bag_look_up,
    "batch_norm": _twice_over, "native_batch_norm": _twice_over, "native_batch_norm_legit_functional": _twice_over,
    "native_batch_norm_legit": _twice_over, "instance_norm": _twice_over,
}  # fmt: skip
