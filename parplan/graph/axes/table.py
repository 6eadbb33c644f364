"""The axis table: for every ATen op we know, which axes exist and what cutting each one does.

One row per family of ops. A row is text (see row_syntax) where the op's dimensions are fixed, or a small
function where they follow from arguments (views, permutations, reductions). What is not in the table
is never cut, only run whole. `register_row` adds a row for an op of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from parplan.graph.axes import elementwise as rows
from parplan.graph.axes import views as view_rows
from parplan.graph.axes import weights as weight_rows
from parplan.graph.axes.call import Call, Row, is_tensor, shape_of, text_row
from parplan.graph.axes.row_syntax import Cut, OpAxis

__all__ = [
    "OWN_ROWS", "TABLE", "Call", "axes_of", "is_tensor", "overload", "own_op", "register_row", "row_of", "shape_of",
    "unfilled", "unknown_ops",
]  # fmt: skip

aten = torch.ops.aten

# fmt: off
_UNARY = """abs acos alias asin atan bernoulli.p bitwise_not ceil celu clamp clone contiguous cos cosh detach detach_
    dropout elu empty_like erf exp exp2 expm1 exponential feature_dropout fill.Scalar floor full_like gelu hardsigmoid
    hardswish hardtanh isfinite isinf isnan leaky_relu lift_fresh lift_fresh_copy log log10 log1p log2 log_sigmoid
    logical_not logit masked_fill.Scalar mish nan_to_num neg ones_like pow.Scalar pow.Tensor_Scalar reciprocal relu
    relu6 round rand_like randint_like randint_like.low_dtype randn_like real rsqrt rsub.Scalar selu sigmoid sign silu
    sin sinh softplus softshrink sqrt square tan tanh threshold to.dtype trunc _to_copy type_as uniform zeros_like"""
_BINARY = """__and__.Tensor __or__.Tensor fill.Tensor max.other min.other add.Scalar add.Tensor addcdiv addcmul atan2
    bitwise_and.Tensor bitwise_or.Tensor clamp.Tensor clamp_max clamp_min div.Scalar div.Tensor div.Tensor_mode
    eq.Scalar eq.Tensor floor_divide ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor lerp.Scalar lerp.Tensor
    logical_and logical_or logical_xor lt.Scalar lt.Tensor divide.Scalar divide.Tensor greater.Scalar greater.Tensor
    greater_equal.Scalar greater_equal.Tensor less.Scalar less.Tensor less_equal.Scalar less_equal.Tensor
    multiply.Scalar multiply.Tensor not_equal.Scalar not_equal.Tensor subtract.Scalar subtract.Tensor true_divide.Scalar
    true_divide.Tensor masked_fill.Tensor maximum minimum mul.Scalar mul.Tensor ne.Scalar ne.Tensor polar
    pow.Tensor_Tensor remainder.Scalar remainder.Tensor rsub.Tensor sub.Scalar sub.Tensor where.Scalar where.ScalarOther
    where.ScalarSelf where.self"""

_ROWS: list[tuple[Row, str]] = [
    (rows.pointwise, _UNARY),
    (rows.pointwise, _BINARY),
    (rows.reduction(Cut.SUM), "sum sum.dim_IntList"),
    (rows.reduction(Cut.BLOCKED),
     """all.dim amax amin any.dim argmax argmin linalg_vector_norm logsumexp max.dim mean.dim min.dim
     norm.ScalarOpt_dim prod.dim_int std.correction var.correction var_mean.correction"""),
    (rows.all_but("dim"), "_log_softmax _softmax cumsum log_softmax.int softmax.int sort topk"),
    (rows.all_but("dim"), "argsort argsort.stable cumprod diff sort.stable"),
    (rows.all_but("dim"),
     """fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
     fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn _fft_c2c _fft_c2r _fft_r2c"""),
    (rows.all_but("dimension"), "unfold"),
    (rows.complex_view, "view_as_complex view_as_real"),
    (rows.looked_up, "bucketize.Tensor"),
    (rows.searched, "searchsorted.Tensor"),
    (rows.counted, "histc"),
    (rows.leading(2),
     """inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_eigh linalg_inv linalg_inv_ex linalg_matrix_exp
     linalg_qr"""),
    (rows.solved, "linalg_solve"),
    (rows.cross, "linalg_cross"),
    (rows.all_but("dims"), "flip roll"),
    (rows.leading(2), "tril triu"),
    (rows.repeated, "repeat_interleave.self_int"),
    (weight_rows.prelu, "prelu"),
    (weight_rows.cell, "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"),
    (weight_rows.instance_norm, "instance_norm"),
    (rows.leading(3), "pixel_shuffle pixel_unshuffle"),

    (weight_rows.linear, "linear"),
    (weight_rows.addmm, "addmm"),
    (weight_rows.matmul, "bmm matmul mm mv"),
    (weight_rows.baddbmm, "baddbmm"),
    (weight_rows.einsum, "einsum"),
    (weight_rows.embedding, "embedding"),
    (weight_rows.attention, "scaled_dot_product_attention"),
    (weight_rows.recurrent, "gru.input lstm.input rnn_relu.input rnn_tanh.input"),
    (weight_rows.convolution, "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"),
    (weight_rows.transposed_convolution, "conv_transpose1d conv_transpose2d.input conv_transpose3d.input"),
    (weight_rows.batch_norm, "batch_norm"),
    (weight_rows.group_norm, "group_norm"),
    (weight_rows.layer_norm, "layer_norm rms_norm"),
    (rows.leading(1), "adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d max_pool1d upsample_linear1d.vec"),
    (rows.leading(1), "upsample_nearest1d.vec"),
    (rows.leading(2), "adaptive_avg_pool2d adaptive_max_pool2d _adaptive_avg_pool2d avg_pool2d max_pool2d"),
    (rows.leading(2), "_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec"),
    (rows.leading(2), "max_pool2d_with_indices upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec"),
    (rows.leading(3), "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d max_pool3d_with_indices"),
    (rows.leading(3), "upsample_nearest3d.vec"),

    (rows.element_loss,
     """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss
     margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss"""),
    (rows.class_loss, "cross_entropy_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d"),
    (rows.class_loss, "nll_loss_nd"),
    (rows.pair_loss, "cosine_embedding_loss triplet_margin_loss"),
    (rows.similarity, "cosine_similarity"),

    (view_rows.reshape,
     "flatten.using_ints reshape _reshape_copy squeeze.dim squeeze.dims unflatten.int _unsafe_view unsqueeze view"),
    (view_rows.permute, "permute"),
    (view_rows.transpose, "transpose.int"),
    (view_rows.reverse, "numpy_T t"),
    (view_rows.join, "cat"),
    (view_rows.stack, "stack"),
    (view_rows.select, "select.int unbind.int"),
    (view_rows.indexed, "index.Tensor"),
    (view_rows.put, "index_put"),
    (view_rows.scattered,
     "scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add scatter_reduce.two"),
    (view_rows.index_written, "index_add index_copy index_fill.int_Scalar"),
    (rows.columns, "col2im im2col"),
    (view_rows.index_select, "index_select"),
    (view_rows.gathered, "gather"),
    (view_rows.slice_scattered, "slice_scatter"),
    (view_rows.select_scattered, "select_scatter"),
    (view_rows.tiled, "repeat"),
    (view_rows.slices, "narrow slice.Tensor"),
    (view_rows.parts, "chunk split.Tensor split_with_sizes"),
    (view_rows.gated, "glu"),
    (view_rows.expand, "expand"),
    (view_rows.pad, "constant_pad_nd pad"),
    (rows.filled, "empty.memory_format full new_empty new_full new_ones new_zeros ones rand randn zeros"),
    (rows.filled, "randint randint.low"),
]
# fmt: on


def overload(name: str) -> Any:
    """The ATen op of a name such as "add.Tensor" or "relu"; None when this torch lacks it."""
    packet, _, overload = name.partition(".")
    found = getattr(aten, packet, None)
    return getattr(found, overload or "default", None) if found is not None else None


TABLE: dict[Any, Row] = {
    op: row for row, names in _ROWS for name in names.split() if (op := overload(name)) is not None
}


# Rows of parplan's own ops, each written and proved beside its op.
OWN_ROWS: dict[Any, Row] = {}


def own_op(name: str, run: Callable[..., Any], without_values: Callable[..., Any] | None = None) -> Any:
    """An op of parplan's own that calls `run`: also on tensors without values, for the shapes of its results.

    Args:
        without_values: called on these in place of `run`, which reads values.
    """
    made = torch.library.custom_op(f"parplan::{name}", run, mutates_args=())
    made.register_fake(without_values or run)
    return getattr(torch.ops.parplan, name).default


def unfilled(like: Iterable[Tensor]) -> list[Tensor]:
    """New tensors, of the sizes, strides, types and devices of others."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in like]


def row_of(op: Any) -> Row | None:
    """The row of an op, None for one that is not known."""
    return TABLE.get(op) or OWN_ROWS.get(op)


def unknown_ops(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Names of the ops on tensors that have no row, each once: because of them a layer may be run whole."""
    called = [node.target for node in nodes if node.op == "call_function" and node.all_input_nodes]
    unknown = [str(op) for op in called if op is not getitem and row_of(op) is None]
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in unknown))


def register_row(op: Any, row: str | Row, *operands: str, **names: str) -> None:
    """Teach parplan the axes of an op of your own.

    Args:
        op: the op overload as it appears in an exported graph (`torch.ops.mylib.scale.default`).
        row: text such as `b.. i+, o i+ -> b.. o` with the op's tensor argument names in `operands`,
            or a function of a `Call`.
        names: words for the letters (`o="out_features"`).
    """
    TABLE[op] = text_row(row, *operands, **names) if isinstance(row, str) else row


def axes_of(node: fx.Node) -> tuple[OpAxis, ...]:
    """Axes of one call; none for an op that is not in the table.

    A dimension that no returned axis mentions cannot be cut.
    """
    row = row_of(node.target)
    if row is None:
        return ()
    call = Call(node)
    if any(not isinstance(size, int) for tensor in call.tensors() for size in shape_of(tensor)):
        return ()
    return row(call)
