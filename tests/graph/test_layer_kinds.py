"""A layer's kind is told by whole words of its ops' names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from parplan.graph.kinds import kind_of

# Ops of the user's own library, by the word of a kind that is part of another word in their names.
OWN_OPS = ("normalizer_pooled", "reluctance", "linearize", "unviewed", "convoluted", "haystack", "addmmx", "embeddings")
KINDS = {
    "attention": "scaled_dot_product_attention bmm", "resize": "upsample_nearest2d upsample_bilinear2d",
    "conv": "conv2d conv_transpose2d convolution", "linear": "linear addmm mm bilinear",
    "recurrent": "lstm lstm_cell gru rnn_tanh rnn_relu_cell", "embedding": "embedding embedding_bag",
    "batch_norm": "batch_norm native_batch_norm", "norm": "layer_norm native_layer_norm group_norm rms_norm",
    "pool": "max_pool2d max_pool2d_with_indices adaptive_avg_pool1d max_unpool2d", "softmax": "softmax _log_softmax",
    "dropout": "dropout native_dropout feature_alpha_dropout", "concat": "cat stack hstack",
    "activation": "relu relu6 prelu leaky_relu gelu silu tanh hardtanh hardsigmoid clamp_min threshold",
    "add": "add sub", "multiply": "mul div", "reduce": "sum mean nanmean amax var",
    "reshape": "view view_as_real permute unflatten split_with_sizes index_select constant_pad_nd t",
    "loss": "cross_entropy_loss nll_loss2d", "other": "index_add cumsum linalg_vector_norm fill",
}  # fmt: skip


@pytest.fixture
def own_ops() -> Iterator[list[fx.Node]]:
    """A call of each of them."""
    with torch.library._scoped_library("house_of_kinds", "DEF") as library:
        for name in OWN_OPS:
            library.define(f"{name}(Tensor x) -> Tensor")
        graph = fx.Graph()
        x = graph.placeholder("x")
        yield [graph.call_function(getattr(torch.ops.house_of_kinds, name).default, (x,)) for name in OWN_OPS]


def test_an_op_of_ones_own_is_no_layer_of_torchs_by_a_part_of_a_word(own_ops: list[fx.Node]) -> None:
    assert {str(node.target): kind_of([node]) for node in own_ops} == {str(node.target): "other" for node in own_ops}


def test_kinds_of_torchs_ops() -> None:
    def named(op: str) -> fx.Node:
        def call() -> None: ...

        call.__name__ = op
        return fx.Graph().call_function(call)

    wrong = {
        (op, kind): kind_of([named(op)])
        for kind, ops in KINDS.items()
        for op in ops.split()
        if kind_of([named(op)]) != kind
    }
    assert wrong == {}
    assert kind_of([named("relu"), named("linear"), named("add")]) == "linear"
    assert kind_of([]) == "other"
