"""Rows of the axis table for ops with weights: convolutions, norms, products, look-ups, attention."""

from __future__ import annotations

from parplan.graph.axes.call import Call, text_row
from parplan.graph.axes.row_syntax import OpAxis

__all__ = [
    "addmm",
    "attention",
    "batch_norm",
    "cell",
    "convolution",
    "embedding",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "matmul",
    "prelu",
    "recurrent",
    "transposed_convolution",
]

linear = text_row("b.. i+, o i+, o^ -> b.. o", "input", "weight", "bias", o="out_features", i="in_features")
addmm = text_row("o^, b i+, i+ o -> b o", "self", "mat1", "mat2", o="out_features", i="in_features")


def matmul(call: Call) -> tuple[OpAxis, ...]:
    """Matrices with equal leading dimensions, or many times one matrix."""
    second = "other" if call.name("other") else "mat2"
    left, right = call.shape("self"), call.shape(second)
    if min(len(left), len(right)) < 2 or (len(right) > 2 and left[:-2] != right[:-2]):
        return ()
    lead = "b.. " if len(right) > 2 else ""
    return call.rows(f"b.. m k+, {lead}k+ n -> b.. m n", ("self", second))


def convolution(call: Call) -> tuple[OpAxis, ...]:
    """Samples, and out- and in-channels, or groups; positions stay whole."""
    operands = ("input", "weight", "bias")
    groups = int(call["groups"])
    if groups == 1:
        names = {"n": "batch", "o": "out-channels", "i": "in-channels"}
        return call.rows("n i+ s!.., o i+ k!.., o^ -> n o t!..", operands, names=names)
    names = {"n": "batch", "g": "groups"}
    return call.rows("n g s!.., g i! k!.., g -> n g t!..", operands, names=names, units={"g": groups})


def transposed_convolution(call: Call) -> tuple[OpAxis, ...]:
    """As a convolution; with groups only samples, because its weight lists the groups' in-channels first."""
    operands = ("input", "weight", "bias")
    if int(call["groups"]) == 1:
        names = {"n": "batch", "o": "out-channels", "i": "in-channels"}
        return call.rows("n i+ s!.., i+ o k!.., o^ -> n o t!..", operands, names=names)
    return call.rows("n g! s!.., g! i! k!.., o! -> n o! t!..", operands, names={"n": "batch"})


def batch_norm(call: Call) -> tuple[OpAxis, ...]:
    """Channels; samples are free in evaluation, and in training where statistics are shared."""
    batch, spatial = ("n*", "s!..") if call["training"] else ("n", "s..")
    row = f"{batch} c {spatial}, c, c, c, c -> {batch} c {spatial}"
    operands = ("input", "weight", "bias", "running_mean", "running_var")
    return call.rows(row, operands, names={"n": "batch", "c": "channels"})


def group_norm(call: Call) -> tuple[OpAxis, ...]:
    """Samples and channels, whole groups of them."""
    names, units = {"n": "batch", "c": "channels"}, {"c": int(call["num_groups"])}
    return call.rows("n c s!.., c, c -> n c s!..", ("input", "weight", "bias"), names=names, units=units)


def instance_norm(call: Call) -> tuple[OpAxis, ...]:
    """Samples and channels, where no statistics are kept over the batch."""
    if call["running_mean"] is not None:
        return ()
    return call.rows("n c s!.., c, c -> n c s!..", ("input", "weight", "bias"), names={"n": "batch", "c": "channels"})


def prelu(call: Call) -> tuple[OpAxis, ...]:
    """Element by element, with one weight for all channels or one for each."""
    row = "n.. -> n.." if call.shape("weight") == (1,) else "n c s.., c -> n c s.."
    return call.rows(row, ("self", "weight") if "," in row else ("self",))


def layer_norm(call: Call) -> tuple[OpAxis, ...]:
    """All but the normalised dimensions."""
    inner = " ".join(f"d{index}!" for index in range(len(call["normalized_shape"])))
    return call.rows(f"b.. {inner}, {inner}, {inner} -> b.. {inner}", ("input", "weight", "bias"))


def embedding(call: Call) -> tuple[OpAxis, ...]:
    """Look-up; gradients scaled by frequency need all indices and the whole table."""
    if call["scale_grad_by_freq"]:
        return ()
    names = {"v": "vocabulary", "f": "features"}
    return call.rows("v+ f, i.. -> i.. f", ("weight", "indices"), names=names)


def recurrent(call: Call) -> tuple[OpAxis, ...]:
    """LSTM, GRU and plain recurrent nets: sequences of different samples do not meet."""
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    if len(call.shape("input")) != 3:
        return ()
    samples = 0 if call["batch_first"] else 1
    dims = {str(call.name("input")): samples} | {state.name: 1 for state in states}
    return (OpAxis(dims | {name: 1 if index else samples for index, name in call.results.items()}, name="batch"),)


def cell(call: Call) -> tuple[OpAxis, ...]:
    """One step of a recurrent net: samples do not meet."""
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    names = [str(call.name("input")), *(state.name for state in states), *call.outputs]
    return (OpAxis(dict.fromkeys(names, 0), name="batch"),) if len(call.shape("input")) == 2 else ()


def attention(call: Call) -> tuple[OpAxis, ...]:
    """Scaled dot-product attention [..., heads, sequence, width]; heads of keys count whole."""
    operands = ("query", "key", "value")
    rank = len(call.out_shape)
    if any(len(call.shape(argument)) != rank for argument in operands):
        return ()
    mask = call.name("attn_mask")
    mask_shape = call.shape("attn_mask") if mask else ()
    axes = []
    for dim in range(rank - 2):
        dims = {str(call.name(argument)): dim for argument in operands} | {call.outputs[0]: dim}
        own = dim - (rank - len(mask_shape))
        if mask and own >= 0 and mask_shape[own] > 1:
            dims[mask] = own
        axes.append(OpAxis(dims, name="heads" if dim == rank - 3 and rank == 4 else ""))
    return tuple(axes)
