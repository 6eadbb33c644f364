"""Rows of the axis table for ops with weights: convolutions, norms, products, look-ups, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from parplan.graph.axes.call import Call, shape_of, text_row
from parplan.graph.axes.row_syntax import Cut, OpAxis

__all__ = [
    "addmm",
    "attention",
    "baddbmm",
    "batch_norm",
    "cell",
    "convolution",
    "einsum",
    "einsum_words",
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
    """Matrices or vectors, whose leading dimensions are broadcast from the right."""
    left, right = call["self"], call["vec"] or call["mat2"] or call["other"]
    words = [["k"], ["k"]]
    if len(shape_of(left)) > 1:
        words[0].insert(0, "m")
    if len(shape_of(right)) > 1:
        words[1].append("n")
    for word, operand in zip(words, (left, right), strict=True):
        word[:0] = [f"b{place}" for place in range(len(shape_of(operand)) - len(word), 0, -1)]
    lead = max((word[: -min(len(word), 2)] for word in words), key=len)
    return _product(
        [left, right], words, [*lead, *(letter for letter in "mn" if letter in (*words[0], *words[1]))], call
    )


def baddbmm(call: Call) -> tuple[OpAxis, ...]:
    """A product of stacks of matrices, with what is added to it: this is broadcast, and in one term alone of a sum."""
    stacks, added = [call["batch1"], call["batch2"]], call["self"]
    if added in stacks:
        return ()
    axes = []
    for axis in _product(stacks, [["b", "m", "k"], ["b", "k", "n"]], ["b", "m", "n"], call):
        dim = axis.dims.get(call.outputs[0])
        own = -1 if dim is None else dim - 3 + len(shape_of(added))
        wide = dim is not None and own >= 0 and shape_of(added)[own] == call.out_shape[dim]
        once = frozenset({added.name}) if dim is None else frozenset[str]()
        axes.append(replace(axis, dims={**axis.dims, **({added.name: own} if wide else {})}, first_only=once))
    return tuple(axes)


def einsum(call: Call) -> tuple[OpAxis, ...]:
    """Letters of the result map, those that are summed over give terms; `...` is counted from the right."""
    words, out = einsum_words(call["equation"], [len(shape_of(operand)) for operand in call["tensors"]])
    return _product(call["tensors"], words, out, call)


def einsum_words(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """A word for every dimension of the operands, and of the result.

    >>> einsum_words("...ij,jk->...ik", [3, 2])
    ([['.1', 'i', 'j'], ['j', 'k']], ['.1', 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = left.replace(",", "").replace(".", "")
    most = max(rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True))
    if not arrow:
        right = "..." * ("." in left) + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))

    def spelled(term: str, rank: int) -> list[str]:
        before, dots, behind = term.partition("...")
        count = rank - len(before) - len(behind) if dots else 0
        return [*before, *(f".{place}" for place in range(count, 0, -1)), *behind]

    words = [spelled(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    return words, spelled(right, most + len(right.replace("...", "")))


def _product(
    operands: Sequence[fx.Node], words: Sequence[Sequence[str]], out: Sequence[str], call: Call
) -> tuple[OpAxis, ...]:
    """Axes of a product by the words of its dimensions; a dimension of size 1 beside a larger one is broadcast."""
    repeated = any(len(set(each)) < len(each) for each in (*words, out))
    if repeated or len(set(operands)) < len(operands) or len(out) != len(call.out_shape):
        return ()
    sizes: dict[str, int] = {}
    for operand, each in zip(operands, words, strict=True):
        for word, size in zip(each, shape_of(operand), strict=True):
            sizes[word] = max(size, sizes.get(word, 1))
    axes = []
    for word, size in sizes.items():
        having = [(operand, each.index(word)) for operand, each in zip(operands, words, strict=True) if word in each]
        dims = {operand.name: dim for operand, dim in having if shape_of(operand)[dim] == size}
        dims |= {call.outputs[0]: out.index(word)} if word in out else {}
        axes.append(OpAxis(dims, Cut.MAP if word in out else Cut.SUM))
    return tuple(axes)


def convolution(call: Call) -> tuple[OpAxis, ...]:
    """Samples, and out- and in-channels, or groups; positions stay whole."""
    operands = ("input", "weight", "bias")
    groups = int(call["groups"])
    if groups == 1:
        names = {"n": "batch", "o": "out-channels", "i": "in-channels"}
        return call.rows("n i+ s!.., o i+ k!.., o^ -> n o t!..", operands, names=names)
    names = {"n": "batch", "g": "groups"}
    depthwise = groups == call.shape("input")[-call["weight"].meta["val"].dim() + 1] == call.shape("weight")[0]
    units = {} if depthwise else {"g": groups}  # each channel is a group of its own
    return call.rows("n g s!.., g i! k!.., g -> n g t!..", operands, names=names, units=units)


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
    """Scaled dot-product attention [..., heads, sequence, width]; several heads of queries may share one of keys."""
    operands = ("query", "key", "value")
    rank = len(call.out_shape)
    if any(len(call.shape(argument)) != rank for argument in operands):
        return ()
    mask = call.name("attn_mask")
    mask_shape = call.shape("attn_mask") if mask else ()
    sizes = {str(call.name(argument)): call.shape(argument) for argument in operands}
    axes = []
    for dim in range(rank - 2):
        dims = dict.fromkeys((*sizes, call.outputs[0]), dim)
        groups = [name for name, shape in sizes.items() if shape[dim] != call.out_shape[dim]]
        fewer = {name: dims.pop(name) for name in groups}
        shared = {name: own for name, own in fewer.items() if sizes[name][own] > 1}  # one for all is used whole
        own = dim - (rank - len(mask_shape))
        if mask and own >= 0 and mask_shape[own] > 1:
            dims[mask] = own
        axes.append(OpAxis(dims, name="heads" if dim == rank - 3 and rank == 4 else "", shared=shared))
    return tuple(axes)
