"""Rows of the axis table that follow from shapes and dimension arguments: element-wise ops, reductions, losses."""

from __future__ import annotations

from collections.abc import Iterable

from parplan.graph.axes.call import Call, Row, shape_of
from parplan.graph.axes.row_syntax import Cut, OpAxis
from parplan.graph.kinds import op_name

__all__ = [
    "all_but", "class_loss", "columns", "complex_view", "counted", "cross", "element_loss",
    "filled", "leading", "looked_up", "pair_loss", "pointwise", "reduction", "repeated", "same_dims", "searched",
    "similarity", "solved",
]  # fmt: skip


def pointwise(call: Call) -> tuple[OpAxis, ...]:
    """Element by element, operands broadcast from the right."""
    out = call.out_shape
    axes = []
    for dim, size in enumerate(out):
        dims = dict.fromkeys(call.outputs, dim)
        for tensor in call.tensors():
            shape = shape_of(tensor)
            own = dim - (len(out) - len(shape))
            if own >= 0 and shape[own] == size:
                dims[tensor.name] = own
        axes.append(OpAxis(dims))
    return tuple(axes)


def same_dims(call: Call, dims: Iterable[int]) -> tuple[OpAxis, ...]:
    """Dimensions that the first operand and all results have at the same place."""
    return tuple(OpAxis(dict.fromkeys((call.tensors()[0].name, *call.outputs), dim)) for dim in dims)


def all_but(argument: str) -> Row:
    """Maps every dimension of the operands, which are joined along them, but those that `argument` lists."""

    def row(call: Call) -> tuple[OpAxis, ...]:
        names, rank = (*(operand.name for operand in call.tensors()), *call.outputs), len(shape_of(call.tensors()[0]))
        return tuple(OpAxis(dict.fromkeys(names, dim)) for dim in sorted(set(range(rank)) - call.dims(argument, rank)))

    return row


def leading(kept: int) -> Row:
    """Maps all but the last `kept` dimensions (pooling, resizing: spatial dimensions stay whole)."""

    def row(call: Call) -> tuple[OpAxis, ...]:
        return same_dims(call, range(len(shape_of(call.tensors()[0])) - kept))

    return row


def repeated(call: Call) -> tuple[OpAxis, ...]:
    """Every element several times along `dim`: neighbouring parts of the result may repeat the same element."""
    if call["dim"] is None:
        return ()
    source, out, rank = call.tensors()[0].name, call.outputs[0], len(call.out_shape)
    repeated = call.dim(int(call["dim"]), rank)
    axes = same_dims(call, (dim for dim in range(rank) if dim != repeated))
    shared = {source: repeated} if shape_of(call.tensors()[0])[repeated] > 1 else {}
    return (*axes, OpAxis({out: repeated}, shared=shared))


def reduction(cut: Cut) -> Row:
    """Reductions over `dim`: kept dimensions map; contracted ones are `cut`."""

    def row(call: Call) -> tuple[OpAxis, ...]:
        source = call.tensors()[0]
        rank = len(shape_of(source))
        gone = call.dims("dim", rank)
        axes, position = [], 0
        for dim in range(rank):
            kept = dict.fromkeys(call.outputs, position) if dim not in gone else {}
            axes.append(OpAxis({source.name: dim} | kept, cut=Cut.MAP if kept else cut))
            position += bool(kept or call["keepdim"])
        return tuple(axes)

    return row


def similarity(call: Call) -> tuple[OpAxis, ...]:
    """One number for each pair of vectors along `dim`, which stays whole; the rest is broadcast from the right."""
    first, second = call.shape("x1"), call.shape("x2")
    rank = len(first)
    if len(second) != rank:
        return ()
    gone = call.dim(int(call["dim"]), rank)
    axes = []
    for dim in range(rank):
        new = dim - (dim > gone)
        if dim != gone:
            sides = [name for name in ("x1", "x2") if call.shape(name)[dim] == call.out_shape[new]]
            axes.append(OpAxis({str(call.name(side)): dim for side in sides} | {call.outputs[0]: new}))
    return tuple(axes)


def looked_up(call: Call) -> tuple[OpAxis, ...]:
    """Maps every dimension of one operand: each element is compared with a list that all parts have whole."""
    names = str(call.name("self")), *call.outputs
    return tuple(OpAxis(dict.fromkeys(names, dim)) for dim in range(len(call.shape("self"))))


def searched(call: Call) -> tuple[OpAxis, ...]:
    """`searchsorted` in one list, or in a list for each row: then these rows go with it."""
    lists = call.shape("sorted_sequence")
    if len(lists) == 1 or call["self"] is call["sorted_sequence"] or call["sorter"] is not None:
        return looked_up(call) if call["sorter"] is None and len(lists) == 1 else ()
    names = str(call.name("self")), *call.outputs
    rows = [*names, str(call.name("sorted_sequence"))]
    last = len(lists) - 1
    return tuple(OpAxis(dict.fromkeys(rows if dim < last else names, dim)) for dim in range(len(lists)))


def counted(call: Call) -> tuple[OpAxis, ...]:
    """Histogram between fixed bounds: counts of parts add up. Bounds that follow from the values need all of them."""
    source = call.tensors()[0]
    if not call["max"] > call["min"]:
        return ()
    return tuple(OpAxis({source.name: dim}, Cut.SUM) for dim in range(len(shape_of(source))))


def complex_view(call: Call) -> tuple[OpAxis, ...]:
    """Complex numbers as pairs, or pairs as complex numbers: every dimension but that of the pair."""
    return same_dims(call, range(min(len(shape_of(call.tensors()[0])), len(call.out_shape))))


def solved(call: Call) -> tuple[OpAxis, ...]:
    """`A x = b` for matrices along leading dimensions that both have; the columns of `b` are solved one by one."""
    matrix, right = (str(call.name(argument)) for argument in ("A", "B"))
    left_shape, right_shape = call.shape("A"), call.shape("B")
    if left_shape[:-2] != right_shape[:-2] or len(left_shape) != len(right_shape) or not call["left"]:
        return ()
    lead = [OpAxis(dict.fromkeys((matrix, right, *call.outputs), dim)) for dim in range(len(left_shape) - 2)]
    return (*lead, OpAxis(dict.fromkeys((right, *call.outputs), len(right_shape) - 1)))


def cross(call: Call) -> tuple[OpAxis, ...]:
    """Products of vectors along `dim`, element by element otherwise."""
    vectors = call.dim(int(call["dim"]), len(call.out_shape))
    return tuple(axis for axis in pointwise(call) if axis.dims[call.outputs[0]] != vectors)


def columns(call: Call) -> tuple[OpAxis, ...]:
    """Windows of images as columns [samples, channels * window, windows], or back: samples, and whole channels."""
    source, out = call.tensors()[0], call.outputs[0]
    image = source if op_name(call.node) == "im2col" else call.node
    channel = len(shape_of(image)) - 3
    samples = [OpAxis({source.name: 0, out: 0})] if channel else []
    return (*samples, OpAxis({source.name: channel, out: channel}, name="channels", units=shape_of(image)[channel]))


def filled(call: Call) -> tuple[OpAxis, ...]:
    """A new tensor of one value: any dimension, by its size argument; a tensor it is modelled on is not read."""
    made = [OpAxis({call.outputs[0]: dim}) for dim in range(len(call.out_shape))]
    unread = [OpAxis({tensor.name: dim}) for tensor in call.tensors() for dim in range(len(shape_of(tensor)))]
    return tuple(made + unread)


# --- losses: samples map where nothing is averaged over them ---
# With a reduction the result depends on all samples at once: a capture takes the reduction off, as far as it can
# (graph/capture/batch_reductions.py), and what is left is taken whole.


def element_loss(call: Call) -> tuple[OpAxis, ...]:
    """Element by element."""
    return pointwise(call) if call["reduction"] == 0 else ()


def class_loss(call: Call) -> tuple[OpAxis, ...]:
    """Scores [samples, classes, ...] against targets [samples, ...]; class weights are needed whole."""
    return _samples(call, "self", "target", least_rank=2)


def pair_loss(call: Call) -> tuple[OpAxis, ...]:
    """Vectors [samples, features] against each other."""
    first = "input1" if call.name("input1") else "anchor"
    others = ("input2", "target") if first == "input1" else ("positive", "negative")
    return _samples(call, first, *others, least_rank=2)


def _samples(call: Call, first: str, *others: str, least_rank: int) -> tuple[OpAxis, ...]:
    shape = call.shape(first)
    fits = len(shape) >= least_rank and all(call.shape(other)[:1] == shape[:1] for other in others)
    if call["reduction"] != 0 or not fits or call.out_shape[:1] != shape[:1]:
        return ()
    names = [str(call.name(argument)) for argument in (first, *others)]
    return (OpAxis(dict.fromkeys((*names, call.outputs[0]), 0), name="batch"),)
