"""Tensors and bytes that autograd saves of an op from its forward to its backward.

One row per op, after the formulas of torch's derivatives.yaml; an op without a row is taken to keep its inputs. Where
kernels differ between devices there are two tables: CUDA's (attention: the fused kernels; dropout: a byte per element)
and the CPU's, counted with torch's profiler (torch 2.13, oneDNN 3, float32): every row is an allocation pattern, not a
fit, but for oneDNN's LSTM, whose workspace has no published size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from parplan.cost_models.ops.op_calls import OpCall, Operand

__all__ = ["CPU_RULES", "Rule", "Saved", "names", "saved_by"]


@dataclass(frozen=True)
class Saved:
    """Values an op keeps, by name, and bytes of its own.

    Args:
        inner_bytes: kept for the backward (masks, indices, statistics).
        forward_bytes, backward_bytes: held only while its forward or backward runs.
    """

    values: frozenset[str] = frozenset()
    inner_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


Rule = Callable[[OpCall], Saved]


def names(*operands: Operand) -> frozenset[str]:
    """Names of several tensors."""
    return frozenset(operand.name for operand in operands)


def saved_by(call: OpCall, on_cpu: bool = False) -> Saved:
    """Values and bytes that `call` saves for its backward; nothing when it has none, and never parameters or buffers.

    Args:
        on_cpu: of the CPU's kernels rather than CUDA's.
    """
    if not call.differentiated or call.is_view:
        return Saved()
    rule = _RULES.get(call.op, _inputs)
    saved = (CPU_RULES.get(call.op, rule) if on_cpu else rule)(call)
    state = {operand.name for operand in call.inputs if operand.state}
    return saved if saved.values.isdisjoint(state) else replace(saved, values=saved.values - state)


def _inputs(call: OpCall) -> Saved:
    return Saved(names(*call.inputs))


def _factors(call: OpCall) -> Saved:
    """Of a product, each factor is kept for the gradient of the other; a square keeps its one factor."""
    first, *others = call.inputs[:2]
    if not others:
        return _inputs(call) if call.argument(0) is call.argument(1) else Saved()
    second = others[0]
    kept = [a for a, b in ((first, second), (second, first)) if b.requires_grad]
    return Saved(names(*kept))


def _convolution(call: OpCall) -> Saved:
    """As a product; besides, what unfolding one sample takes (cuDNN chooses its workspace itself: an estimate)."""
    if len(call.inputs) < 2 or len(call.outputs[0].shape) < 2:
        return _factors(call)
    weight, out = call.inputs[1], call.outputs[0]
    positions = out.elements // max(1, out.shape[0] * out.shape[1])
    unfolded_bytes = positions * weight.elements // max(1, weight.shape[0]) * out.dtype.itemsize
    return replace(_factors(call), forward_bytes=unfolded_bytes, backward_bytes=unfolded_bytes)


def _row_statistics(call: OpCall) -> Saved:
    """Layer norm: its input, and two float32 for every row it normalises."""
    normalised = call.argument(1)
    width = prod(normalised) if isinstance(normalised, (list, tuple)) else call.inputs[0].shape[-1]
    return Saved(names(call.inputs[0]), 8 * call.inputs[0].elements // max(1, width))


def _group_statistics(call: OpCall) -> Saved:
    groups = call.argument(1)
    samples = call.inputs[0].shape[0] if call.inputs[0].shape else 1
    return Saved(names(call.inputs[0]), 8 * samples * (groups if isinstance(groups, int) else 1))


def _attention(call: OpCall) -> Saved:
    """Fused attention: queries, keys, values, the result, and one float32 per query."""
    rows = call.outputs[0].elements // max(1, call.outputs[0].shape[-1])
    return Saved(names(*call.inputs, *call.outputs), 4 * rows)


def _class_terms(call: OpCall) -> Saved:
    """Exponentials of all scores, in float32 at least; and for every row a target's place, its weight, and a flag.

    Narrower scores, and their gradients, are in between of that width too; smoothing makes another such product.
    """
    scores, target = call.inputs[:2]
    width = max(scores.dtype.itemsize, torch.float32.itemsize)
    wide_bytes = width * scores.elements
    narrow = scores.dtype.itemsize < width
    return Saved(
        inner_bytes=wide_bytes + (8 + width + 1) * target.elements,
        forward_bytes=wide_bytes if narrow or call.argument(4) else 0,
        backward_bytes=wide_bytes if narrow else 0,
    )


def _expert_products(call: OpCall) -> Saved:
    """The rows of the experts that are held, brought together by expert, and their positions; all rows are sorted."""
    rows, weight, out = call.inputs[0], call.inputs[1], call.outputs[0]
    count = call.argument(3)
    share = weight.shape[0] / count if isinstance(count, int) else 1.0
    moved_bytes = int((rows.nbytes + out.nbytes) * share)
    kept_bytes = int((rows.nbytes + 8 * rows.shape[0]) * share)
    return Saved(inner_bytes=kept_bytes, forward_bytes=int(out.nbytes * share), backward_bytes=moved_bytes)


_DROPOUTS = "dropout native_dropout feature_dropout alpha_dropout"
# Ops, and what autograd saves of each.
_ROWS: tuple[tuple[str, Rule], ...] = (
    (
        "add sub rsub neg sum mean cat stack clone contiguous to to_copy zeros_like ones_like full_like repeat pad "
        "constant_pad_nd upsample_nearest2d upsample_bilinear2d roll flip tril triu copy subtract im2col col2im unfold "
        "rand rand_like randn randn_like histc searchsorted bucketize batch_mean batch_sum",
        lambda call: Saved(),
    ),
    (
        "relu sigmoid tanh softmax safe_softmax log_softmax exp sqrt rsqrt reciprocal",
        lambda call: Saved(names(*call.outputs)),
    ),
    (
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d gelu silu "
        "hardtanh hardswish hardsigmoid elu leaky_relu mish softplus log abs sin cos relu6 clamp",
        lambda call: Saved(names(*call.inputs[:1])),
    ),
    ("linear mul multiply mm mv bmm matmul", _factors),
    ("expert_products", _expert_products),
    ("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d", _convolution),
    ("addmm baddbmm", lambda call: _factors(replace(call, inputs=call.inputs[1:], arguments=call.arguments[1:]))),
    ("div divide true_divide", lambda call: Saved(names(*call.inputs)) if len(call.inputs) > 1 else Saved()),
    (
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d",
        lambda call: Saved(names(*call.inputs), 8 * call.outputs[0].elements),
    ),
    (
        "batch_norm native_batch_norm native_batch_norm_legit native_batch_norm_legit_functional "
        "native_batch_norm_legit_no_training cudnn_batch_norm instance_norm",
        # Its input, and mean and inverse deviation per channel in float32.
        lambda call: Saved(names(call.inputs[0]), 8 * next(iter(call.inputs[0].shape[1:]), 1)),
    ),
    ("layer_norm native_layer_norm rms_norm", _row_statistics),
    ("group_norm native_group_norm", _group_statistics),
    (_DROPOUTS, lambda call: Saved(inner_bytes=call.outputs[0].elements)),
    ("scaled_dot_product_attention", _attention),
    (
        "cross_entropy_loss cross_entropy class_rows",
        # The log-probabilities it makes inside, and its targets; its backward makes their gradient.
        lambda call: Saved(names(*call.inputs[1:]), call.inputs[0].nbytes, backward_bytes=call.inputs[0].nbytes),
    ),
    ("class_terms", _class_terms),
    (
        "row_losses",
        # Its input; a power for every block and one sum for every row.
        lambda call: Saved(
            names(*call.inputs), call.inputs[0].nbytes // call.inputs[0].shape[-1] + call.outputs[0].nbytes // 2
        ),
    ),
    ("sort", lambda call: Saved(inner_bytes=8 * call.outputs[0].elements)),
    (
        "lstm gru rnn_tanh rnn_relu",
        # Inputs and results, and four gates and a state per step.
        lambda call: Saved(names(*call.inputs, *call.outputs), 5 * call.outputs[0].nbytes),
    ),
    (
        "where masked_fill embedding shard_embedding embedding_bags offset_bags index index_select gather index_add "
        "index_put scatter scatter_add",
        lambda call: Saved(names(*(each for each in call.inputs if not each.dtype.is_floating_point))),
    ),
)

_RULES: dict[str, Rule] = {op: rule for ops, rule in _ROWS for op in ops.split()}


# oneDNN reads images of so few channels as they are.
_FEW_CHANNELS = 4
# Its copies have channels in blocks: of 8 with AVX2, of 16 with AVX-512 (more only where channels are few and odd).
_CHANNEL_BLOCK = 8


def _cpu_convolution(call: OpCall) -> Saved:
    """oneDNN works in layouts of its own: copies of what it reads and writes, in turn for each of its products."""
    if len(call.inputs) < 2 or len(call.outputs[0].shape) < 2:
        return _inputs(call)
    image, weight, out = call.inputs[0], call.inputs[1], call.outputs[0]
    taken_bytes = 0 if image.shape[1] <= _FEW_CHANNELS else _blocked_bytes(image)
    given_bytes = _blocked_bytes(out)
    return replace(
        _factors(call),
        forward_bytes=max(taken_bytes + weight.nbytes + given_bytes - out.nbytes, given_bytes),
        backward_bytes=max(taken_bytes + given_bytes, weight.nbytes),
    )


def _blocked_bytes(image: Operand) -> int:
    return image.nbytes // max(1, image.shape[1]) * -(-image.shape[1] // _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def _cpu_attention(call: OpCall) -> Saved:
    """Fused without dropout; with it made of products, a softmax and noise, each the size of all pairs, in float32 at
    least."""
    if not call.argument(4, 0.0):
        return _attention(call)
    once = list(dict.fromkeys(call.arguments[:3]))  # as inputs are, fewer than three where one has several parts
    query, key, value = (call.inputs[once.index(node)] for node in call.arguments[:3])
    wider = max(1, torch.float32.itemsize // query.dtype.itemsize)
    pairs_bytes = wider * query.nbytes // max(1, query.shape[-1]) * key.shape[-2]
    inner_bytes = 3 * pairs_bytes + wider * (query.nbytes + key.nbytes)
    if wider == 1:
        return Saved(names(value), inner_bytes, backward_bytes=pairs_bytes)
    return Saved(inner_bytes=inner_bytes + wider * value.nbytes, backward_bytes=pairs_bytes)


def _layers(call: OpCall) -> int:
    layers = call.argument(4, 1)
    return layers if isinstance(layers, int) else 1


def _lstm(call: OpCall) -> Saved:
    """oneDNN's layer keeps a copy of its input and a workspace of gates and states, padded to the larger width."""
    series, out = call.inputs[0], call.outputs[0]
    directions = 2 if call.argument(7) is True else 1
    hidden = out.shape[-1] // directions
    steps = max(1, series.shape[1 if call.argument(8) is True else 0])
    inner_bytes = 0
    for layer in range(_layers(call)):
        width = max(hidden, series.shape[-1] if layer == 0 else out.shape[-1]) + 16
        floats = 4 * hidden + 16 + (6 * width + 4 * hidden) * (steps + 1) // steps
        inner_bytes += directions * floats * (out.nbytes // max(1, out.shape[-1]))
        inner_bytes += series.nbytes if layer == 0 else out.nbytes
    weights_bytes = sum(operand.nbytes for operand in call.inputs if operand.state)
    return Saved(names(out), inner_bytes, backward_bytes=21 * out.nbytes // 4 + series.nbytes + weights_bytes)


def _loop(kept: int, needed: int) -> Rule:
    """Recurrent layers that torch steps through: tensors of the size of the results, kept per layer."""

    def rule(call: OpCall) -> Saved:
        layers, nbytes = _layers(call), call.outputs[0].nbytes
        return Saved(names(*call.inputs), (kept * layers + layers - 1) * nbytes, backward_bytes=needed * nbytes)

    return rule


CPU_RULES: Mapping[str, Rule] = {
    # Dropout multiplies with noise of the values' own type.
    **dict.fromkeys(
        _DROPOUTS.split(),
        lambda call: Saved(inner_bytes=call.outputs[0].nbytes),
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _cpu_convolution),
    "scaled_dot_product_attention": _cpu_attention,
    "lstm": _lstm,
    "gru": _loop(7, 3),
    "rnn_tanh": _loop(1, 1),
    "rnn_relu": _loop(1, 1),
}
