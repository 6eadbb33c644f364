"""Which block of every parameter each device holds, in slices or whole, and which gradients are summed together.

Layers that share a parameter may cut it differently. Blocks that are equal or apart can be held as they are; where two
layers' blocks overlap, the parameter stays whole on every device that uses it. The runtime holds and sums by this, and
memory is predicted by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod

import torch

from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Block, Grid, Layout, disjoint, regions, split_evenly, whole_block
from parplan.plan import Strategy

__all__ = [
    "ALONE_BYTES", "BUCKET_BYTES", "FIRST_BUCKET_BYTES", "Bucket", "Holdings", "Slices", "buckets", "holdings",
    "makes_large_result", "segment_heads", "slices", "used_blocks",
]  # fmt: skip

# As DistributedDataParallel: a small first bucket starts reducing early.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
# A gradient of this size travels alone: it is summed where it lies, while a bucket is a copy of what it holds.
ALONE_BYTES = 8 << 20

Strategies = Mapping[str, Strategy]
Holdings = dict[str, Mapping[int, Block]]


def used_blocks(graph: LayerGraph, strategies: Strategies, layer: str, state: str) -> Mapping[int, Block]:
    """The block of a parameter or buffer that `layer` uses on each of its devices."""
    return _blocks(graph.values[state].shape, graph.layers[layer].layout(state, strategies[layer]))


@lru_cache(maxsize=1000)
def _blocks(shape: tuple[int, ...], layout: Layout) -> Mapping[int, Block]:
    return dict(sorted(regions(shape, layout).items()))


@dataclass(frozen=True)
class Slices:
    """A parameter that lies in slices between steps (sharded state): a slice per row, of so many indices."""

    layout: Layout
    rows: tuple[int, ...]


def slices(graph: LayerGraph, layer: Layer, strategy: Strategy) -> dict[str, Slices]:
    """The parameters of a layer of sharded state that lie in slices over all devices which hold them alike, by
    placeholder.

    The others stay as they are: vectors (a message of its own takes longer than what it saves), those with fewer
    indices along every dimension that is not cut anyway than there are slices, those of a batch norm, and those that
    several layers share.
    """
    found: dict[str, Slices] = {}
    if strategy.state == "replicated" or layer.mixes_batch:
        return found
    axis = layer.axis(strategy.axis) if strategy.shards > 1 else None
    for parameter in layer.parameters:
        shape, whole = graph.values[parameter].shape, layer.layout(parameter, strategy)
        grid = whole.grid
        if whole.shard_dim is None:
            grid = Grid(grid.devices, len(grid.devices), 1)
        elif axis is not None and axis.sharers(parameter, strategy.shards) > 1:
            continue
        dims = [dim for dim, size in enumerate(shape) if dim != whole.shard_dim and size >= grid.replicas]
        if grid.replicas > 1 and len(shape) > 1 and dims and len(graph.users[parameter]) == 1:
            layout = Layout(grid, dims[0], whole.shard_dim, sections=whole.sections)
            found[parameter] = Slices(layout, split_evenly(shape[dims[0]], grid.replicas))
    return found


def holdings(graph: LayerGraph, strategies: Strategies) -> Holdings:
    """Block that each device holds of each parameter, by placeholder; devices without one are absent."""
    held: Holdings = {}
    for parameter, layers in graph.users.items():
        own = slices(graph, graph.layers[layers[0]], strategies[layers[0]]).get(parameter)
        if own is not None:
            held[parameter] = dict(sorted(regions(graph.values[parameter].shape, own.layout, own.rows).items()))
            continue
        used = [used_blocks(graph, strategies, name, parameter) for name in layers]
        held[parameter] = used[0]
        if any(own is not used[0] for own in used):
            by_device: dict[int, set[Block]] = defaultdict(set)
            for device, block in chain.from_iterable(own.items() for own in used):
                by_device[device].add(block)
            agree = all(len(blocks) == 1 for blocks in by_device.values())
            apart = agree and disjoint(set().union(*by_device.values()))
            whole = whole_block(graph.values[parameter].shape)
            held[parameter] = {d: next(iter(own)) if apart else whole for d, own in sorted(by_device.items())}
    return held


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together, as one flat tensor per device.

    Args:
        parameters: placeholders, in the order their gradients become ready.
        groups: devices that hold the same blocks of all of them.
    """

    parameters: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Kind:
    """Gradients that can share a flat tensor: those that one step of the optimizer, maybe one of several, needs."""

    groups: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    period: int


@dataclass
class _Open:
    """A bucket that is being filled; the next one of its kind takes its place when it is full."""

    parameters: list[str]
    bytes_left: int


def buckets(
    graph: LayerGraph, held: Holdings, memories: Sequence[int], periods: Mapping[str, int]
) -> tuple[Bucket, ...]:
    """Parameters whose gradient has terms in several memories, grouped in the order they become ready.

    Args:
        memories: for every logical device, which memory it works in; terms in one memory are summed in place.
        periods: after how many passes each parameter is updated, of those in layers that run in passes.
    """
    filled: list[Bucket] = []
    being: dict[_Kind, _Open] = {}
    for parameter in reversed(tuple(graph.users)):  # the backward is done first with the last to be used first
        spec, groups = graph.values[parameter], _groups(held[parameter])
        if not spec.requires_grad or all(len({memories[device] for device in group}) == 1 for group in groups):
            continue
        kind = _Kind(groups, spec.dtype, periods.get(parameter, 0))
        blocks = {id(block): block for block in held[parameter].values()}  # most devices' blocks are few objects
        size = max(prod(map(len, block)) for block in blocks.values()) * spec.dtype.itemsize
        if size >= ALONE_BYTES:
            filled.append(Bucket((parameter,), groups))
            continue
        bucket = being.setdefault(kind, _Open([], FIRST_BUCKET_BYTES))
        bucket.parameters.append(parameter)
        bucket.bytes_left -= size
        if bucket.bytes_left <= 0:
            filled.append(Bucket(tuple(bucket.parameters), groups))
            being[kind] = _Open([], BUCKET_BYTES)
    rest = [Bucket(tuple(b.parameters), kind.groups) for kind, b in being.items() if b.parameters]
    return (*filled, *rest)


def _groups(held: Mapping[int, Block]) -> tuple[tuple[int, ...], ...]:
    same: dict[Block, list[int]] = {}
    known: dict[int, list[int]] = {}  # by the block's identity: hashing each of thousands takes long
    for device, block in held.items():
        if id(block) not in known:
            known[id(block)] = same.setdefault(block, [])
        known[id(block)].append(device)
    return tuple(tuple(devices) for devices in same.values())


def makes_large_result(graph: LayerGraph, layer: Layer) -> bool:
    """Whether a layer makes a large result of the model from less: it begins a segment.

    A segment holds the gradients of what it hands on until all of it has gone back.
    """
    least = max(ALONE_BYTES, 1 + sum(graph.values[value].nbytes for value in layer.inputs))
    return any(value in graph.user_outputs and graph.values[value].nbytes >= least for value in layer.outputs)


def segment_heads(graph: LayerGraph, buckets: Sequence[Bucket]) -> set[str]:
    """The layers at which a segment is split: the first of each bucket, so that it can leave early, and those that make
    large results."""
    place = {name: number for number, name in enumerate(graph.layers)}
    heads = {name for name, layer in graph.layers.items() if makes_large_result(graph, layer)}
    for bucket in buckets:
        heads.add(min((graph.users[parameter][0] for parameter in bucket.parameters), key=place.__getitem__))
    return heads
