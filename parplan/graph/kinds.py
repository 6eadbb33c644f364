"""The field's word for what a layer is, from the ops it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from parplan.compat import schema_of

__all__ = ["is_loss_op", "kind_of", "op_name"]

# First match wins, so a layer is named after the heaviest thing in it.
# fmt: off
_WORDS: tuple[tuple[str, str], ...] = (
    ("hooks", "pre_hooks hooks gradient_hook"),
    ("function", "custom_function"),
    ("loss", """cross_entropy nll_loss mse_loss l1_loss huber_loss binary_cross_entropy kl_div soft_margin
     hinge_embedding
     margin_ranking cosine_embedding poisson_nll multi_margin multilabel_margin triplet_margin
     ctc_loss"""),
    ("attention", "scaled_dot_product_attention"),
    ("resize", "upsample"),
    ("conv", "conv1d conv2d conv3d conv_transpose convolution"),
    ("linear", "linear addmm"),
    ("recurrent", "lstm gru rnn_"),
    ("embedding", "embedding"),
    ("batch_norm", "batch_norm"),
    ("norm", "layer_norm group_norm rms_norm instance_norm"),
    ("attention", "bmm matmul"),
    ("linear", "mm"),
    ("pool", "pool"),
    ("softmax", "softmax"),
    ("dropout", "dropout"),
    ("concat", "cat stack"),
    ("activation", "relu gelu silu sigmoid tanh elu hardswish hardtanh mish softplus leaky clamp threshold"),
    ("add", "add sub"),
    ("multiply", "mul div"),
    ("reduce", "sum mean amax amin var std"),
    ("reshape", """view reshape permute transpose flatten unsqueeze squeeze expand slice select split chunk t contiguous
     clone pad constant_pad"""),
)
# fmt: on
_KINDS = tuple((kind, tuple(words.split())) for kind, words in _WORDS)


def op_name(node: fx.Node) -> str:
    """Bare name of the op: `aten.add.Tensor` is "add"."""
    schema = schema_of(node.target)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    return str(schema.name).split("::")[-1].strip("_")


def is_loss_op(node: fx.Node) -> bool:
    """Whether rule R7 speaks of this op."""
    return node.op == "call_function" and kind_of([node]) == "loss"


def kind_of(nodes: Sequence[fx.Node]) -> str:
    """The kind of a layer made of `nodes`."""
    names = [op_name(node) for node in nodes]
    for kind, words in _KINDS:
        for name in names:
            if any(_matches(name, word) for word in words):
                return kind
    return "other"


def _matches(name: str, word: str) -> bool:
    return name == word or (len(word) > 3 and word in name)
