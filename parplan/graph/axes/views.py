"""Rows of the axis table for ops that only move elements: views, permutations, joins, slices, fills.

A view maps axes through merges and splits: in a group of dimensions with equal products those that begin
at the same element are the same axis. The leading ones cut memory in equal blocks; the others are merged
behind something ([tokens * samples]), which is fine inside a layer and not where tensors change hands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import torch
from torch import fx

from parplan.graph.axes.call import Call, shape_of
from parplan.graph.axes.elementwise import same_dims
from parplan.graph.axes.row_syntax import Cut, OpAxis, Place, Section
from parplan.graph.kinds import op_name


def reshape(call: Call) -> tuple[OpAxis, ...]:
    """Merges and splits: dimensions that begin at the same element of a matching group are the same axis."""
    source, out = call.tensors()[0], call.outputs[0]
    # `squeeze(dim)` leaves a dimension alone for its size, which a part of it need not have.
    kept = call.dims("dim", len(shape_of(source))) if op_name(call.node) == "squeeze" else set()
    pairs = [pair for group in _groups(shape_of(source), call.out_shape) for pair in group.pairs()]
    repeated = _repeated(source)
    axes = []
    for own, new in pairs:
        outer = {name: size for name, size in {source.name: own.outer, out: new.outer}.items() if size > 1}
        merged = repeated is not None and own.dim == repeated.dim - 1 and call.out_shape[new.dim] == repeated.merged
        if repeated is not None and merged and not outer:
            repeats = dict.fromkeys(repeated.tensors, repeated.dim)
            axes.append(OpAxis({out: new.dim}, shared={source.name: own.dim}, repeats=repeats))
        elif own.dim not in kept:
            axes.append(OpAxis({source.name: own.dim, out: new.dim}, outer=outer))
    return tuple(axes)


@dataclass(frozen=True)
class _Repeated:
    """A dimension behind another one, all along which `expand` repeats what there is once.

    Args:
        merged: size of both together.
        tensors: that have it, and no reader but the next one of them, or the reshape that merges both.
    """

    dim: int
    merged: int
    tensors: tuple[str, ...]


def _repeated(node: fx.Node) -> _Repeated | None:
    """The repetition of every head of keys for the heads of queries that share it, just before both are merged."""
    names = [node.name]
    while op_name(node) in ("clone", "contiguous") and len(node.users) == 1:
        node = node.all_input_nodes[0]
        names.append(node.name)
    if op_name(node) != "expand" or len(node.users) > 1:
        return None
    before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
    grown = [dim for dim in range(1, len(after)) if len(before) == len(after) and before[dim] == 1 < after[dim]]
    if len(grown) != 1:
        return None
    (dim,) = grown
    return _Repeated(dim, after[dim - 1] * after[dim], tuple(names))


@dataclass(frozen=True)
class _Begin:
    """Where an axis begins: a dimension, and the size of what is merged in front of it there."""

    dim: int
    outer: int


@dataclass(frozen=True)
class _Group:
    """Dimensions of both sides (first dimension and sizes) that hold the same elements."""

    left: int
    left_sizes: tuple[int, ...]
    right: int
    right_sizes: tuple[int, ...]

    def pairs(self) -> list[tuple[_Begin, _Begin]]:
        """Axes of the group, by where they begin on the left and on the right.

        >>> _Group(0, (2, 6), 0, (12,)).pairs()
        [(_Begin(dim=0, outer=1), _Begin(dim=0, outer=1)), (_Begin(dim=1, outer=1), _Begin(dim=0, outer=2))]
        """
        starts = sorted(
            {*accumulate(self.left_sizes[:-1], mul, initial=1), *accumulate(self.right_sizes[:-1], mul, initial=1)}
        )
        ends = [(_begin(self.left, self.left_sizes, at), _begin(self.right, self.right_sizes, at)) for at in starts]
        return [(own, new) for own, new in ends if own is not None and new is not None]


def _begin(first: int, sizes: tuple[int, ...], at: int) -> _Begin | None:
    """The place on one side at which `at` steps are in front of the axis; None where no axis can begin."""
    in_front = 1
    for dim, size in enumerate(sizes, first):
        # Dimensions of size 1 do not carry an axis.
        if size > 1 and in_front <= at < in_front * size:
            fits = at % in_front == 0 and size % (at // in_front) == 0
            return _Begin(dim, at // in_front) if fits else None
        in_front *= size
    return None


def _groups(left: tuple[int, ...], right: tuple[int, ...]) -> list[_Group]:
    """The smallest groups of dimensions with equal products, without those of size 1.

    >>> [(g.left_sizes, g.right_sizes) for g in _groups((2, 3, 4), (2, 12))]
    [((2,), (2,)), ((3, 4), (12,))]
    """
    found: list[_Group] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, a, b = (i, j), left[i], right[j]
        i, j = i + 1, j + 1
        while a != b and (i < len(left) or j < len(right)):
            if (a < b and i < len(left)) or j >= len(right):
                a, i = a * left[i], i + 1
            else:
                b, j = b * right[j], j + 1
        if a != b:
            return []
        if a > 1:
            found.append(_Group(start[0], left[start[0] : i], start[1], right[start[1] : j]))
    return found


def _ordered(call: Call, order: Sequence[int]) -> tuple[OpAxis, ...]:
    """Dimension `new` of the result is dimension `order[new]` of the operand."""
    source = call.tensors()[0]
    rank = len(shape_of(source))
    pairs = [(new, call.dim(int(old), rank)) for new, old in enumerate(order)]
    return tuple(OpAxis({source.name: old, call.outputs[0]: new}) for new, old in pairs)


def permute(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions in the order of `dims`."""
    return _ordered(call, call["dims"])


def transpose(call: Call) -> tuple[OpAxis, ...]:
    """Two dimensions change places."""
    rank = len(call.out_shape)
    if rank == 0:
        return ()
    order = list(range(rank))
    a, b = call.dim(int(call["dim0"]), rank), call.dim(int(call["dim1"]), rank)
    order[a], order[b] = order[b], order[a]
    return _ordered(call, order)


def reverse(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions in reverse order."""
    return _ordered(call, list(reversed(range(len(call.out_shape)))))


def join(call: Call) -> tuple[OpAxis, ...]:
    """Concatenation: every dimension; the joined one has a section for each operand."""
    rank, out = len(call.out_shape), call.outputs[0]
    if any(len(shape_of(tensor)) != rank for tensor in call.tensors()):
        return ()
    names, joined = [*(tensor.name for tensor in call.tensors()), out], call.dim(int(call["dim"]), rank)
    ends = list(accumulate((shape_of(operand)[joined] for operand in call["tensors"]), initial=0))
    axes = [OpAxis(dict.fromkeys(names, dim)) for dim in _others(call, rank)]
    for operand, section in zip(call["tensors"], map(Section, ends, ends[1:]), strict=True):
        sections = {out: section} if section != Section(0, ends[-1]) else {}
        axes += [OpAxis({operand.name: joined, out: joined}, sections=sections)] if section.stop > section.start else []
    return tuple(axes)


def _others(call: Call, rank: int) -> list[int]:
    """All dimensions but the one that the argument `dim` names."""
    named = call.dim(int(call["dim"]), rank)
    return [dim for dim in range(rank) if dim != named]


def stack(call: Call) -> tuple[OpAxis, ...]:
    """Every dimension but the new one."""
    kept, tensors = _others(call, len(call.out_shape)), [tensor.name for tensor in call.tensors()]
    return tuple(OpAxis(dict.fromkeys(tensors, old) | {call.outputs[0]: new}) for old, new in enumerate(kept))


def select(call: Call) -> tuple[OpAxis, ...]:
    """Every dimension but the one of which one index is taken, or all of them apart (`unbind`)."""
    source = call.tensors()[0]
    kept = _others(call, len(shape_of(source)))
    return tuple(OpAxis({source.name: old} | dict.fromkeys(call.outputs, new)) for new, old in enumerate(kept))


def indexed(call: Call) -> tuple[OpAxis, ...]:
    """`x[:, i, j]`: dimensions without an index, and those of the indices, which look up by themselves.

    `weights[experts]` looks up tensors of experts: each part those that it holds, zeros for others.
    Where indices are apart (`x[i, :, j]`) or are masks, results lie otherwise, and nothing is cut.
    """
    indices = call["indices"]
    places = [place for place, index in enumerate(indices) if index is not None]
    apart = places != list(range(places[0], places[-1] + 1)) if places else True
    if apart or any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        return ()
    source, out, looked = call.tensors()[0], call.outputs[0], [indices[place] for place in places]
    if source in looked:
        return ()
    first, rank = places[0], max(len(shape_of(index)) for index in looked)
    kept = [(dim, dim if dim < first else dim + rank - len(places)) for dim in range(len(shape_of(source)))]
    axes = [OpAxis({source.name: old, out: new}) for old, new in kept if old not in places]
    for dim in range(rank):
        size = call.out_shape[first + dim]
        own = {index.name: dim - rank + len(shape_of(index)) for index in looked}
        sized = {index.name for index in looked if own[index.name] >= 0 and shape_of(index)[own[index.name]] == size}
        axes.append(OpAxis({name: at for name, at in own.items() if name in sized} | {out: first + dim}))
    if places == [0] and any(map(_looks_up_experts, (call.node, *looked[0].users))) and _is_table(source):
        axes.append(OpAxis({source.name: 0}, Cut.SUM, "experts", routed_by=looked[0].name))
    return tuple(axes)


def _looks_up_experts(node: fx.Node) -> bool:
    """Whether a call takes matrices of experts by a list of experts: `weights[experts]`, or their products."""
    if op_name(node) == "expert_products":
        return True
    source: Any = node.args[0]
    return node.target is torch.ops.aten.index.Tensor and len(shape_of(source)) > 2 and _is_table(source)


def _is_table(node: Any) -> bool:
    """Whether a value is a parameter or an input, maybe cast or transposed."""
    while op_name(node) in ("to", "to_copy", "transpose", "permute"):
        node = node.all_input_nodes[0]
    return bool(node.op == "placeholder" and node.meta["val"].dtype.is_floating_point)


def put(call: Call) -> tuple[OpAxis, ...]:
    """`x[:, i] = values`: dimensions without an index, those that the values have in step with them.

    `x[mask] = value`: every dimension, those of the mask in step with it, where the same is put everywhere.
    """
    source, indices, out = call.tensors()[0], call["indices"], call.outputs[0]
    places = [place for place, index in enumerate(indices) if index is not None]
    masks = [indices[place] for place in places]
    whole = not any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in masks)
    if whole and places == list(range(places[0], places[-1] + 1)):
        looked = max(len(shape_of(index)) for index in masks)
        values, missing = call["values"], len(shape_of(source)) + looked - len(places) - len(shape_of(call["values"]))
        axes = []
        for dim in (dim for dim in range(len(shape_of(source))) if dim not in places):
            own = dim + (looked - len(places) if dim > places[0] else 0) - missing
            wide = own >= 0 and shape_of(values)[own] == shape_of(source)[dim]
            axes.append(OpAxis({source.name: dim, out: dim} | ({values.name: own} if wide else {})))
        return tuple(axes) if len({source, values, *masks}) == 2 + len(masks) else ()
    values, mask = call["values"], masks[0]
    first, last = indices.index(mask), indices.index(mask) + len(shape_of(mask))
    behind = len(shape_of(source)) - len(shape_of(values))  # dimension that the first one of the values goes with
    everywhere = values.meta["val"].numel() == 1 or behind >= last
    if len(masks) != 1 or mask.meta["val"].dtype is not torch.bool or not everywhere:
        return ()
    axes = []
    for dim, size in enumerate(shape_of(source)):
        wide = dim >= max(behind, last) and size > 1 and shape_of(values)[dim - behind] == size
        masked = {mask.name: dim - first} if first <= dim < last else {}
        axes.append(OpAxis({source.name: dim, out: dim} | masked | ({values.name: dim - behind} if wide else {})))
    return tuple(axes)


def index_select(call: Call) -> tuple[OpAxis, ...]:
    """Every dimension but `dim`; that one in the index and the result alone, each index looks up by itself."""
    source, index, out = call.tensors()[0], str(call.name("index")), call.outputs[0]
    rank = len(shape_of(source))
    axes = [OpAxis({source.name: dim, out: dim}) for dim in _others(call, rank)]
    selected = OpAxis({index: 0, out: call.dim(int(call["dim"]), rank)})
    return (*axes, selected) if call.shape("index") else tuple(axes)


def gathered(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions in which all of the operand is looked at in step with the index; `dim` in index and result alone."""
    source, index, out = call.tensors()[0], str(call.name("index")), call.outputs[0]
    rank = len(call.out_shape)
    looked = call.dim(int(call["dim"]), rank)
    axes = []
    for dim in range(rank):
        if dim == looked:
            axes.append(OpAxis({index: dim, out: dim}))
        elif shape_of(source)[dim] == call.out_shape[dim]:
            axes.append(OpAxis({source.name: dim, index: dim, out: dim}))
    return tuple(axes)


def scattered(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions in which operand, index and source go in step; `dim`, along which elements are moved, stays whole."""
    operands = [name for name in ("self", "index", "src") if call.name(name)]
    shape = call.out_shape
    kept = _others(call, len(shape)) if shape else []
    names = [str(call.name(name)) for name in operands]
    return tuple(
        OpAxis(dict.fromkeys((*names, call.outputs[0]), dim))
        for dim in kept
        if all(call.shape(name)[dim] == shape[dim] for name in operands)
    )


def index_written(call: Call) -> tuple[OpAxis, ...]:
    """Every dimension but `dim`. What is added at an index may be cut in terms, of which one has what was there."""
    source, out, rank = call.tensors()[0], call.outputs[0], len(call.out_shape)
    written = call.name("source")
    names = [source.name, out, *([written] if written else [])]
    if not rank or len(set(names)) < len(names):
        return ()
    axes = [OpAxis(dict.fromkeys(names, dim)) for dim in _others(call, rank)]
    if op_name(call.node) == "index_add" and written and call.shape("index"):
        added = {str(call.name("index")): 0, written: call.dim(int(call["dim"]), rank)}
        axes.append(OpAxis(added, Cut.SUM, first_only=frozenset({source.name})))
    return tuple(axes)


def slice_scattered(call: Call) -> tuple[OpAxis, ...]:
    """`x[:, 1:] = y`: every dimension but the sliced one; that one too where open ends take all of it."""
    source, put, out = call.tensors()[0], str(call.name("src")), call.outputs[0]
    shape = shape_of(source)
    sliced = call.dim(int(call["dim"] or 0), len(shape))
    open_ended = call["end"] is None or call["end"] >= _OPEN_END
    whole = open_ended and call["step"] == 1 and call.shape("src")[sliced] == shape[sliced]
    kept = [dim for dim in range(len(shape)) if dim != sliced or whole]
    return tuple(OpAxis({source.name: dim, put: dim, out: dim}) for dim in kept)


# What torch.export writes for the end of `x[1:]`.
_OPEN_END = 2**63 - 1


def select_scattered(call: Call) -> tuple[OpAxis, ...]:
    """`x[:, 0] = y`: every dimension but the one of which one index is replaced."""
    source, put, out = call.tensors()[0], str(call.name("src")), call.outputs[0]
    kept = _others(call, len(shape_of(source)))
    return tuple(OpAxis({source.name: old, put: new, out: old}) for new, old in enumerate(kept))


def tiled(call: Call) -> tuple[OpAxis, ...]:
    """Copies one behind the other: the copies are an axis of the result alone, what is copied is merged behind them."""
    source, out = call.tensors()[0], call.outputs[0]
    repeats = list(call["repeats"])
    lead = len(repeats) - len(shape_of(source))
    axes = []
    for dim, times in enumerate(repeats):
        if dim >= lead and shape_of(source)[dim - lead] > 1:
            axes.append(OpAxis({source.name: dim - lead, out: dim}, outer={out: times} if times > 1 else {}))
        if times > 1:
            axes.append(OpAxis({out: dim}, units=times))
    return tuple(axes)


def slices(call: Call) -> tuple[OpAxis, ...]:
    """Every dimension; the sliced one as a section of the operand's, unless all of it is taken.

    Sections that other slices of the same operand take are not touched here, and may be cut as well.
    """
    source, shape = call.tensors()[0], shape_of(call.tensors()[0])
    own = _sliced(call)
    if own is None:
        sliced = call.dim(int(call["dim"] or 0), len(shape))
        return same_dims(call, (dim for dim in range(len(shape)) if dim != sliced))
    if own.section is None:
        return same_dims(call, range(len(shape)))
    axes = same_dims(call, (dim for dim in range(len(shape)) if dim != own.dim))
    beside = [_sliced(Call(user)) for user in source.users if user is not call.node and user.target in _SLICES]
    others = {
        other.section
        for other in beside
        if other is not None and other.dim == own.dim and other.section is not None
        if other.section.stop <= own.section.start or other.section.start >= own.section.stop
    }
    untouched = [OpAxis({source.name: own.dim}, sections={source.name: section}) for section in others]
    dims = dict.fromkeys((source.name, call.outputs[0]), own.dim)
    return (*axes, OpAxis(dims, sections={source.name: own.section}), *untouched)


_SLICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.narrow.default)


def _sliced(call: Call) -> Place | None:
    """The section that a slice takes; None for one in steps, of nothing, or of unknown bounds."""
    shape = call.shape("self")
    dim = call.dim(int(call["dim"] or 0), len(shape))
    size, length = shape[dim], call.out_shape[dim]
    start = call["start"] or 0
    known = all(isinstance(value, int) for value in (size, length, start)) and length > 0
    if call["step"] not in (1, None) or not known:
        return None
    start = min(start + size if start < 0 else start, size)
    section = Section(start, start + length) if length != size else None
    return Place(call.tensors()[0].name, dim, section=section)


def parts(call: Call) -> tuple[OpAxis, ...]:
    """`split` and `chunk`: every dimension; the one that is split has a section for each part, used or not."""
    source, rank = call.tensors()[0], len(shape_of(call.tensors()[0]))
    split = call.dim(int(call["dim"] or 0), rank)
    axes = same_dims(call, (dim for dim in range(rank) if dim != split))
    ends = list(accumulate((part.shape[split] for part in call.node.meta["val"]), initial=0))
    found, results = [], {index: name for index, name in call.results.items() if name != call.node.name}
    for index, (start, stop) in enumerate(pairwise(ends)):
        dims = {source.name: split} | ({results[index]: split} if index in results else {})
        found += [OpAxis(dims, sections={source.name: Section(start, stop)})] if stop > start else []
    return (*axes, *found)


def gated(call: Call) -> tuple[OpAxis, ...]:
    """`glu`: every dimension; along `dim` the operand is two halves, value and gate."""
    source, out, rank = call.tensors()[0], call.outputs[0], len(call.out_shape)
    halved = call.dim(int(call["dim"]), rank)
    axes = same_dims(call, (dim for dim in range(rank) if dim != halved))
    return (*axes, OpAxis({source.name: halved, out: halved}, outer={source.name: 2}))


def expand(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions that are repeated may be cut in the result alone: the size argument is put right."""
    source, out, shape = call.tensors()[0], call.outputs[0], call.out_shape
    lead = len(shape) - len(shape_of(source))
    axes = []
    for dim, size in enumerate(shape):
        same = dim >= lead and shape_of(source)[dim - lead] == size
        axes.append(OpAxis({out: dim} | ({source.name: dim - lead} if same else {})))
    return tuple(axes)


def pad(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions that nothing is put before or behind."""
    rank = len(call.out_shape)
    padded = {rank - 1 - place // 2 for place, size in enumerate(call["pad"]) if size != 0}
    return same_dims(call, sorted(set(range(rank)) - padded))
