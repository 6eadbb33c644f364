"""A layer's own ops at the sizes one device sees: generated code, not an interpreter.

Sizes are baked into a captured graph (`view(2, 1024, 32, 128)`). Given the strategy of each layer
and the samples a device gets, `local_module` copies the nodes with those sizes put right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.nn import functional

from parplan.compat import schema_of
from parplan.graph.axes.bags import EMBEDDING_BAGS, OFFSET_BAGS, run_bags
from parplan.graph.axes.call import range_of
from parplan.graph.axes.experts import EXPERT_PRODUCTS, run_expert_products
from parplan.graph.axes.loss_ops import CLASS_TERMS, OWN_CODE, join_class_losses, run_class_terms
from parplan.graph.axes.table import Call, overload
from parplan.graph.layer_graph import UNCAST, Axis, Layer, LayerGraph
from parplan.graph.packed_sequences import RNN_PACKED, run_packed
from parplan.graph.user_code.functions import CUSTOM_FUNCTION, function_of
from parplan.plan import Strategy

__all__ = ["LocalLayer", "Marks", "is_resized", "local_args", "local_module", "local_shape"]

aten = torch.ops.aten

# Position of the share that is dropped, by op.
_DROP_RATES: dict[Any, int] = {
    aten.dropout.default: 1,
    aten.feature_dropout.default: 1,
    aten.alpha_dropout.default: 1,
    aten.feature_alpha_dropout.default: 1,
    aten.scaled_dot_product_attention.default: 4,
    RNN_PACKED: 6,
}


@dataclass(frozen=True)
class LocalLayer:
    """One device's part of a layer.

    Args:
        layer: the whole layer.
        strategy: how it is spread.
        column: which shard this device holds.
        batch: how many samples this device gets (its own, not all).
    """

    layer: Layer
    strategy: Strategy
    column: int
    batch: int

    @cached_property
    def axis(self) -> Axis | None:
        """The axis that is cut, None when the layer has one shard."""
        return self.layer.axis(self.strategy.axis) if self.strategy.shards > 1 else None

    @property
    def shares_statistics(self) -> bool:
        """Whether it is batch norm over replicas: it runs alone and holds its result until its backward."""
        return self.layer.mixes_batch and self.strategy.replicas > 1


class Marks(Protocol):
    """Functions that the code of several layers calls between them."""

    def before(self, layer: str) -> Callable[[], None]:
        """Called in front of a layer."""

    def after(self, layer: str) -> Callable[[Sequence[Tensor]], None]:
        """Called behind a layer, with its outputs."""


def local_shape(graph: LayerGraph, local: LocalLayer, value: str) -> tuple[int, ...]:
    """Shape this device sees of `value`: an input, parameter, buffer, intermediate or output."""
    shape = list(graph.values[value].shape)
    batch, axis = local.layer.batch, local.axis
    grown = (graph.grown or {}).get(value, ()) if batch is None else (batch.dims[value],) if value in batch.dims else ()
    for dim in grown if graph.batch else ():
        shape[dim] = shape[dim] * local.batch // (graph.batch or 1)
    if axis is not None and value in axis.dims and value not in axis.partial:
        dim, shards, sections = axis.dims[value], local.strategy.shards, axis.sections.get(value)
        limited = sections is not None and any(sections.limits)
        shape[dim] = sections.local_bounds(shape[dim], shards)[-1] if sections and limited else shape[dim] // shards
    if axis is not None and value in axis.repeats:
        repeats = axis.repeats[value]
        shape[repeats.dim] //= local.strategy.shards // min(local.strategy.shards, repeats.limit)
    return tuple(shape)


def local_module(
    graph: LayerGraph,
    parts: Sequence[LocalLayer],
    inputs: Sequence[str],
    outputs: Sequence[str],
    dropout: bool = True,
    marks: Marks | None = None,
    place: torch.device | None = None,
) -> fx.GraphModule:
    """Code for consecutive layers on one device, taking `inputs` in order and returning a tuple of `outputs`.

    `inputs` names every value, parameter and buffer the layers take from outside; tensors are passed already local (cut
    as the layers need them). Batch norm updates its buffers in place. With `dropout` False nothing is dropped (for
    verification). With `marks` the code tells when it comes to a layer and when it has done it; without, ops of several
    layers may become one. Devices that the model names (`x.to("cuda:0")`, `zeros(3, device=...)`) become `place`, the
    one the code runs on; None leaves them as they were captured.
    """
    code = fx.Graph()
    made = {name: code.placeholder(name) for name in inputs}
    for part in parts:
        if marks is not None:
            code.call_function(marks.before(part.layer.name))
        for node in part.layer.nodes:
            made[node.name] = _copy(graph, part, node, code, made, dropout)
        if marks is not None:
            code.call_function(marks.after(part.layer.name), (tuple(made[value] for value in part.layer.outputs),))
    code.output(tuple(made[name] for name in outputs))
    if marks is None:
        join_class_losses(code)
    if place is not None:
        # Where a plan puts a layer is where it runs, whatever device the model's code names.
        for node in code.nodes:
            args = (node.args, node.kwargs)
            node.args, node.kwargs = fx.node.map_aggregate(args, lambda a: place if isinstance(a, torch.device) else a)
    return fx.GraphModule(torch.nn.Module(), code)


def shard_embedding(weight: Tensor, indices: Tensor, first_row: int, padding_index: int = -1) -> Tensor:
    """Look up the rows this shard holds; rows of other shards give zeros.

    Args:
        weight: [rows, features], rows `first_row` to `first_row + rows` of the whole table.
        indices: integers of any shape, into the whole table.
        padding_index: row of the whole table that gets no gradient; -1 for none.

    Returns:
        [*indices, features]; summed over the shards it is the whole look-up (as in Megatron-LM).
    """
    local = indices - first_row
    here = (local >= 0) & (local < weight.shape[0])
    padding = padding_index - first_row
    padding_here = padding if 0 <= padding < weight.shape[0] else None
    found = functional.embedding(torch.where(here, local, 0), weight, padding_idx=padding_here)
    return torch.where(here.unsqueeze(-1), found, 0.0)


def shard_lookup(weight: Tensor, indices: Tensor, first_row: int, rows: int) -> Tensor:
    """`weight[indices]` of the rows this shard holds, of `rows` altogether; zeros for rows of other shards."""
    local = torch.where(indices < 0, indices + rows, indices) - first_row
    here = (local >= 0) & (local < weight.shape[0])
    found = weight[torch.where(here, local, 0)]
    return torch.where(here.reshape(*here.shape, *(1,) * (found.dim() - here.dim())), found, 0.0)


def _copy(
    graph: LayerGraph, part: LocalLayer, node: fx.Node, code: fx.Graph, made: dict[str, fx.Node], dropout: bool
) -> fx.Node:
    target: Any = node.target
    args, kwargs = local_args(graph, part, node)
    axis = part.axis
    rows_cut = False  # of a table: then the result is a term of a sum, or else what a linear op behind makes of it
    if axis is not None and args and isinstance(args[0], fx.Node):
        rows_cut = axis.dims.get(args[0].name) == 0 and (node.name in axis.partial or node.name not in axis.dims)
    if target is aten.embedding.default and rows_cut:
        rows = local_shape(graph, part, args[0].name)[0]
        target, args = shard_embedding, [*args[:2], part.column * rows, *args[2:3]]
    if target in (EMBEDDING_BAGS, OFFSET_BAGS):
        target, args = run_bags, [*args, part.column * local_shape(graph, part, args[0].name)[0] if rows_cut else None]
    if target is CLASS_TERMS:
        classes, here = graph.values[args[0].name].shape[1], local_shape(graph, part, args[0].name)[1]
        place = [classes, part.column * here] if here < classes else []
        target, args = run_class_terms, [*args[:5], local_shape(graph, part, node.name)[1], *place]
    target = OWN_CODE.get(target, target)
    if target is EXPERT_PRODUCTS or (target is aten.index.Tensor and rows_cut):
        table = args[1] if target is EXPERT_PRODUCTS else args[0]
        held, cut = local_shape(graph, part, table.name)[0], axis is not None and axis.dims.get(table.name) == 0
        column = part.column if cut else 0
        if target is EXPERT_PRODUCTS:
            target, args = run_expert_products, [*args[:3], column * held]
        else:
            target, args = shard_lookup, [table, args[1][0], column * held, graph.values[table.name].shape[0]]
    if target is aten.view.default:
        # Whether a view is possible depends on strides, which a transfer does not keep.
        target = aten.reshape.default
    if not dropout and len(args) > _DROP_RATES.get(target, len(args)):
        args[_DROP_RATES[target]] = 0.0
    if target is RNN_PACKED:
        target = run_packed  # differentiable, where the op is only a name
    if target is CUSTOM_FUNCTION:
        target, args = function_of(node), args[:1]
    # Operands that only the first shard may use are None in the others, or zeros where the op needs a tensor.
    own: dict[str, fx.Node | None] = dict(made)
    names = axis.first_only if axis is not None and part.column > 0 else frozenset()
    schema = schema_of(node.target)
    optional = {a.name for a in schema.arguments if isinstance(a.type, torch.OptionalType)} if schema else set()
    given = {value.name: name for name, value in Call(node).arguments.items() if isinstance(value, fx.Node)}
    for name in sorted(names & given.keys()):
        zeros = aten.zeros_like.default
        own[name] = None if given[name] in optional else code.call_function(zeros, (made[name],))
    made_args: Any = fx.node.map_arg(tuple(args), lambda source: own[source.name])
    made_kwargs: Any = fx.node.map_arg(kwargs, lambda source: own[source.name])
    if kind := node.meta.get(UNCAST):
        target = _without_autocast(target, kind)
    return code.create_node("call_function", target, made_args, made_kwargs, name=node.name)


@cache
def _without_autocast(target: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """An op with the types of its operands, whatever autocast the caller has set for a kind of devices."""

    def uncast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, enabled=False):
            return target(*args, **kwargs)

    return uncast


SAME = "parplan_same"  # in the meta of a node: its arguments do not change with the number of samples

Sizes = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class _LocalSizes:
    """Sizes of the tensors of one device's part of a layer."""

    graph: LayerGraph
    part: LocalLayer

    def __call__(self, name: str) -> tuple[int, ...]:
        return local_shape(self.graph, self.part, name)

    def is_kept(self, node: fx.Node, dim: int) -> bool:
        """Whether the bounds along a dimension of the operand are those of the model's code (`x[2:3]`, `x[-1:]`).

        They are where neither they nor the length grow with the samples, and no shards cut the dimension.
        """
        source = node.all_input_nodes[0].name
        cut = self.part.axis is not None and self.part.axis.dims.get(source) == dim
        return not cut and SAME in node.meta and self(node.name)[dim] == self.graph.values[node.name].shape[dim]

    def index(self, name: str, dim: int, index: int) -> int:
        """The index of a boundary of sections in the part."""
        axis, size, own = self.part.axis, self.graph.values[name].shape[dim], self(name)[dim]
        sections = axis.sections.get(name) if axis is not None and axis.dims.get(name) == dim else None
        if sections is not None and index in sections.bounds(size):
            return sections.local_bounds(size, self.part.strategy.shards)[sections.bounds(size).index(index)]
        found, rest = divmod(index * own, size) if own != size else (index, 0)
        if rest:
            raise ValueError(f"{name}: index {index} of {size} is no boundary of sections in a part of {own}")
        return found


Fix = Callable[[fx.Node, list[Any], Sizes, _LocalSizes], list[Any]]


def local_args(graph: LayerGraph, part: LocalLayer, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a node with sizes put right for one device; nodes stand for themselves."""
    fix = _FIXES.get(node.target)
    args = list(node.args)
    if fix is not None:
        args = fix(node, args, lambda name: graph.values[name].shape, _LocalSizes(graph, part))
    return args, {name: value for name, value in node.kwargs.items() if name != "output_size"}  # only a hint


def _size_at(position: int) -> Fix:
    """The size argument is the shape of the result."""

    def fix(node: fx.Node, args: list[Any], whole: Sizes, local: Sizes) -> list[Any]:
        return [*args[:position], list(local(node.name)), *args[position + 1 :]]

    return fix


def _unflatten(node: fx.Node, args: list[Any], whole: Sizes, local: Sizes) -> list[Any]:
    dim = args[1] % len(whole(args[0].name))
    return [*args[:2], list(local(node.name)[dim : dim + len(args[2])])]


def _groups_at(position: int) -> Fix:
    """As many groups as the local channels make up: groups count whole."""

    def fix(node: fx.Node, args: list[Any], whole: Sizes, local: Sizes) -> list[Any]:
        if len(args) <= position or args[position] == 1:
            return args
        channels = args[0].name
        groups = args[position] * local(channels)[1] // whole(channels)[1]
        return [*args[:position], groups, *args[position + 1 :]]

    return fix


def _counts(node: fx.Node) -> bool:
    """Whether a node is `arange(n)`."""
    start, end, step = range_of(node) or (1, 1, 1)
    return (start, step) == (0, 1) and isinstance(end, int)


def _range(node: fx.Node, args: list[Any], whole: Sizes, local: Sizes) -> list[Any]:
    """A range over all samples goes on doing so."""
    place = 0 if node.target is aten.arange.default else 1
    return [*args[:place], *local(node.name), *args[place + 1 :]] if _counts(node) else args


def _slice(node: fx.Node, args: list[Any], whole: Sizes, local: _LocalSizes) -> list[Any]:
    """A slice that takes all of a dimension, or a section that is cut by itself, goes on doing so."""
    dim, source = args[1] if len(args) > 1 else 0, args[0].name
    size, length = whole(source)[dim], local(node.name)[dim]
    if size == whole(node.name)[dim]:
        return [*args[:2], 0, length, *args[4:]] if len(args) > 3 else args
    if size == local(source)[dim] or len(args) < 3 or local.is_kept(node, dim % len(whole(source))):
        return args
    start, step = min(args[2] or 0, size), args[4] if len(args) > 4 else 1
    if 0 <= start < step:  # every so many: where it begins does not grow with the dimension
        return [*args[:2], start, start + length * step, *args[4:]]
    start = local.index(source, dim % len(whole(source)), start + size if start < 0 else start)
    return [*args[:2], start, start + length * step, *args[4:]]


def _narrow(node: fx.Node, args: list[Any], whole: Sizes, local: _LocalSizes) -> list[Any]:
    source, dim = args[0].name, args[1] % len(whole(args[0].name))
    if local.is_kept(node, dim):
        return args
    start = args[2] + whole(source)[dim] if args[2] < 0 else args[2]
    return [*args[:2], local.index(source, dim, start), local(node.name)[dim]]


def _split(node: fx.Node, args: list[Any], whole: Sizes, local: _LocalSizes) -> list[Any]:
    """Parts of a dimension each of which is cut by itself."""
    source = args[0].name
    dim = args[2] % len(whole(source)) if len(args) > 2 else 0
    if local(source)[dim] == whole(source)[dim]:
        return args
    if not isinstance(args[1], (list, tuple)):
        return [args[0], local.index(source, dim, args[1]), *args[2:]]
    ends = [local.index(source, dim, end) for end in accumulate(args[1], initial=0)]
    return [args[0], [after - before for before, after in pairwise(ends)], *args[2:]]


def _repeat(node: fx.Node, args: list[Any], whole: Sizes, local: Sizes) -> list[Any]:
    """As often as there are shares of what neighbouring shards repeat."""
    if len(args) < 3 or args[2] is None:
        return args
    own, made = local(args[0].name)[args[2]], local(node.name)[args[2]]
    return [args[0], made // own, *args[2:]] if own else args


def _repeats(node: fx.Node, args: list[Any], whole: Sizes, local: Sizes) -> list[Any]:
    """As many copies as the local result is times as large as the local operand."""
    shape, source = local(node.name), local(args[0].name)
    sizes = zip(args[1], shape, (1,) * (len(shape) - len(source)) + source, strict=True)
    return [args[0], [size // own if own else times for times, size, own in sizes], *args[2:]]


def _overloads(fix: Fix, names: str) -> dict[Any, Fix]:
    return {op: fix for name in names.split() if (op := overload(name)) is not None}


# fmt: off
_SIZED: dict[Any, Fix] = {
    **_overloads(_size_at(0), "empty.memory_format full ones rand randn zeros"),
    **_overloads(_size_at(1), "expand new_empty new_full new_ones new_zeros reshape _reshape_copy _unsafe_view view"),
    **_overloads(_size_at(1), "randint"),
    **_overloads(_size_at(2), "randint.low"),
    **_overloads(_unflatten, "unflatten.int"),
}
_RANGES: dict[Any, Fix] = _overloads(_range, "arange arange.start arange.start_step")
_RESIZED: dict[Any, Fix] = {**_SIZED, **_RANGES}
_FIXES: dict[Any, Fix] = {
    **_RESIZED,
    **_overloads(_groups_at(1), "group_norm"),
    **_overloads(_groups_at(6), "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"),
    **_overloads(_slice, "slice.Tensor"),
    **_overloads(_narrow, "narrow"),
    **_overloads(_repeat, "repeat_interleave.self_int"),
    **_overloads(_split, "split.Tensor split_with_sizes"),
    **_overloads(_repeats, "repeat"),
}
# fmt: on


def is_resized(node: fx.Node, only_shape: bool) -> bool:
    """Whether the code of a layer that sees all samples has a node's sizes put right for another number of them.

    Args:
        only_shape: nothing in its arguments changes with the batch but the shape of its result (a fill value may).
    """
    if node.target in _RANGES:
        return _counts(node)
    return node.target in _RESIZED and (only_shape or node.target is aten.unflatten.int)
