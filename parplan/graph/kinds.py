"""The field's word for what a layer is, from the ops it is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from parplan.compat import schema_of

__all__ = [
    "SPLIT_OFF",
    "gives_new_gradients",
    "is_batch_reduction",
    "is_loss_op",
    "is_split_off",
    "kind_of",
    "op_name",
    "writes_statistics",
]

# Meta entry of an op that was taken off another one (graph/capture/batch_reductions.py).
SPLIT_OFF = "parplan_split_off"

# First match wins, so a layer is named after the heaviest thing in it.
# fmt: off
_WORDS: tuple[tuple[str, str], ...] = (
    ("hooks", "pre_hooks hooks gradient_hook"),
    ("function", "custom_function"),
    ("loss", """binary_cross_entropy binary_cross_entropy_with_logits class_rows class_terms cosine_embedding_loss
     cross_entropy cross_entropy_loss ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss
     margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
     nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd poisson_nll_loss smooth_l1_loss
     soft_margin_loss triplet_margin_loss"""),
    ("experts", "expert_products"),
    ("attention", "scaled_dot_product_attention"),
    ("resize", "upsample"),
    ("conv", "conv convolution"),
    ("linear", "linear bilinear trilinear addmm"),
    ("recurrent", "lstm gru rnn_tanh rnn_relu"),
    ("embedding", "embedding"),
    ("batch_norm", "batch_norm"),
    ("norm", "layer_norm group_norm rms_norm instance_norm"),
    ("attention", "baddbmm bmm matmul"),
    ("linear", "mm"),
    ("pool", "pool unpool"),
    ("softmax", "softmax"),
    ("dropout", "dropout"),
    ("concat", "cat stack hstack vstack dstack"),
    ("activation", """relu prelu rrelu gelu silu sigmoid hardsigmoid tanh hardtanh elu hardswish mish softplus leaky
     clamp threshold"""),
    ("add", "add sub"),
    ("multiply", "mul div"),
    ("reduce", "batch_mean batch_sum row_losses sum mean nanmean amax amin var std"),
    ("reshape", """view reshape permute transpose flatten unflatten unsqueeze squeeze expand slice select split hsplit
     vsplit dsplit chunk t contiguous clone pad constant_pad"""),
    ("other", ""),
)
# fmt: on
# Kinds that decide what is legal are told by the whole name, and so are short words: `index_add` is no addition. Other
# words may be some of a name's: `native_layer_norm`, `max_pool2d_with_indices`.
_EXACT = ("function", "hooks", "loss")
_LEAST_LETTERS = 4


def op_name(node: fx.Node) -> str:
    """Bare name of the op: `aten.add.Tensor` is "add"."""
    return _name(node.target)


@cache  # asked some ten times of every node
def _name(target: Any) -> str:
    schema = schema_of(target)
    return getattr(target, "__name__", str(target)) if schema is None else str(schema.name).split("::")[-1].strip("_")


def is_loss_op(node: fx.Node) -> bool:
    """Whether rule R7 speaks of this op."""
    return node.op == "call_function" and kind_of([node]) == "loss"


def is_batch_reduction(node: fx.Node) -> bool:
    """Whether this op alone needs all samples at once, and no layer in front of it does."""
    return node.op == "call_function" and op_name(node) in ("batch_mean", "batch_sum")


def is_split_off(nodes: Sequence[fx.Node]) -> bool:
    """Whether all of them were taken off a loss or a mean: what is said of its module is not meant for them."""
    return bool(nodes) and all(node.meta.get(SPLIT_OFF, False) for node in nodes)


def kind_of(nodes: Sequence[fx.Node]) -> str:
    """The kind of a layer made of `nodes`."""
    return _WORDS[min((_rank(op_name(node)) for node in nodes), default=-1)][0]


@cache
def _rank(op: str) -> int:
    """The first entry of the table that an op's name belongs to."""
    own = f"_{re.sub('[0-9]+d?(?=_|$)', '', op)}_"  # "_max_pool_with_indices_"

    def named(kind: str, word: str) -> bool:
        return op == word or (kind not in _EXACT and len(word) >= _LEAST_LETTERS and f"_{word}_" in own)

    found = (rank for rank, (kind, words) in enumerate(_WORDS) if any(named(kind, word) for word in words.split()))
    return next(found, len(_WORDS) - 1)


# Sums over samples or positions, whose memory is nobody else's: not of sums of tensors, which pass gradients on.
_NEW_GRADIENTS = frozenset({"linear", "mm", "conv1d", "conv2d", "conv3d", "embedding"})


def gives_new_gradients(node: fx.Node) -> bool:
    """Whether an op's backward makes the gradients of weights in memory of their own."""
    return op_name(node) in _NEW_GRADIENTS


def writes_statistics(node: fx.Node) -> bool:
    """Whether an op writes running statistics, its fourth and fifth argument: the sixth says so."""
    return node.target in _NORMS and bool(node.args[5])


_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
