"""Blocks of a layout, and the pieces that must move to change it: `target[slices] += source[slices]`.

The backward of a transfer is the same list of pieces read from right to left. Planner and runtime both start from the
pieces, so what is priced is what runs: the planner from their table (arrays, for thousands of devices), the runtime
from their list. A block with sections is as many intervals, and a piece joins one interval of each side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from math import prod

import numpy as np
from numpy.typing import NDArray

from parplan.layout.grids import Grid, Layout
from parplan.layout.ranges import Block, Extent, Range, Region, extent_of

__all__ = [
    "IntArray", "Piece", "PieceTable", "block_shapes", "in_place", "piece_table", "pieces", "regions",
    "split_evenly",
]  # fmt: skip

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """One block that `target` adds from `source`; slices are local to each side."""

    source: int
    target: int
    source_region: Region
    target_region: Region

    @property
    def elements(self) -> int:
        """Number of elements in the block."""
        return prod(len(extent) for extent in self.source_region)

    def reversed(self) -> Piece:
        """The piece of the transposed transfer."""
        return Piece(self.target, self.source, self.target_region, self.source_region)


@lru_cache(maxsize=1000)
def split_evenly(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` nearly equal chunks; every run of `k` neighbours of `k * n` is a chunk of `n`.

    So replicas have the same samples whether one process splits the batch or each of more processes brings its share.

    >>> split_evenly(10, 4), split_evenly(10, 2)
    ((3, 2, 3, 2), (5, 5))
    """
    return tuple(np.diff(_starts(size, parts)).tolist())


def _starts(size: int, parts: int, sizes: Sequence[int] | None = None) -> IntArray:
    """First index of every part of a dimension, then its end; shape (parts + 1,)."""
    if sizes is not None:
        return np.cumsum([0, *sizes])
    return (np.arange(parts + 1) * size + parts - 1) // parts


@dataclass(frozen=True, eq=False)
class _Cut:
    """The intervals that a tensor is cut into, and who holds them: per dimension of samples, and of shards.

    Args:
        layout: of the tensor.
        shape: of the tensor.
        rows: first index of every row's part of the samples, then the end; of one part where rows are alike.
        starts: the same of the intervals along the sharded dimension, in its order.
        offsets: per interval, where it begins in the block of a column that holds it.
        first, copies: per interval, the first column that holds it and how many neighbours do.
        held: (columns, sections): the intervals that each column holds.
    """

    layout: Layout
    shape: tuple[int, ...]
    rows: IntArray
    starts: IntArray
    offsets: IntArray
    first: IntArray
    copies: IntArray
    held: IntArray

    @staticmethod
    def of(shape: Sequence[int], layout: Layout, row_sizes: Sequence[int] | None) -> _Cut:
        shards, dim = layout.grid.shards, layout.shard_dim
        rows = np.zeros(2, dtype=np.int64)
        if layout.batch_dim is not None:
            rows = _starts(shape[layout.batch_dim], layout.grid.replicas, row_sizes)
        column = np.arange(shards)
        if layout.sections is not None and dim is not None:
            parts = layout.sections.parts(shards)
            bounds, local = layout.sections.bounds(shape[dim]), layout.sections.local_bounds(shape[dim], shards)
            index = [np.arange(count) for count in parts]
            sizes = [after - before for before, after in pairwise(local)]
            begins = [begin + i * size for begin, i, size in zip(bounds, index, sizes, strict=False)]
            before = np.cumsum([0, *parts])
            return _Cut(
                layout,
                tuple(shape),
                rows,
                np.concatenate([*begins, [shape[dim]]]),
                np.repeat(local[:-1], parts),
                np.concatenate([i * (shards // count) for i, count in zip(index, parts, strict=True)]),
                np.repeat([shards // count for count in parts], parts),
                np.stack([b + column * n // shards for b, n in zip(before, parts, strict=False)], axis=1),
            )
        differ = shards if layout.columns_differ else 1
        starts = _starts(shape[dim], shards) if dim is not None else np.zeros(2, dtype=np.int64)
        held = column if layout.columns_differ else np.zeros_like(column)
        nothing = np.zeros(differ, dtype=np.int64)
        copies = nothing + shards // differ
        return _Cut(layout, tuple(shape), rows, starts, nothing, np.arange(differ), copies, held[:, None])

    def bounds(self, dims: Sequence[int], rows: IntArray, intervals: IntArray) -> IntArray:
        """First index and end of blocks along `dims`, by their row and interval; shape (2, dims, blocks)."""
        found = np.zeros((2, len(dims), len(rows)), dtype=np.int64)
        for index, dim in enumerate(dims):
            if dim == self.layout.batch_dim:
                found[:, index] = self.rows[rows], self.rows[rows + 1]
            elif dim == self.layout.shard_dim:
                found[:, index] = self.starts[intervals], self.starts[intervals + 1]
            else:
                found[1, index] = self.shape[dim]
        return found

    def origins(self, dims: Sequence[int], bounds: IntArray, intervals: IntArray) -> IntArray:
        """Index in the whole tensor that is 0 in the block of such bounds, as far as it goes; (dims, blocks)."""
        origins: IntArray = bounds[0].copy()
        if self.layout.shard_dim in dims:
            origins[dims.index(self.layout.shard_dim)] -= self.offsets[intervals]
        return origins

    def all_blocks(self) -> tuple[IntArray, IntArray, IntArray]:
        """Place, row and interval of all intervals that all devices hold."""
        sections = self.held.shape[1]
        places = np.repeat(np.arange(len(self.layout.grid.devices)), sections)
        rows, columns = np.divmod(places, self.layout.grid.shards)
        intervals = self.held[columns, np.tile(np.arange(sections), len(self.layout.grid.devices))]
        return places, rows if self.layout.rows_differ else np.zeros_like(rows), intervals

    def extent(self, column: int) -> Extent:
        """What a column holds along the sharded dimension."""
        return extent_of([Range(int(self.starts[i]), int(self.starts[i + 1])) for i in self.held[column].tolist()])


def regions(shape: Sequence[int], layout: Layout, row_sizes: Sequence[int] | None = None) -> dict[int, Block]:
    """The block of a tensor of `shape` that every device of the layout holds; equal ones are one object.

    `row_sizes` gives each row's extent of the batch dimension when rows are not even.
    """
    grid, cut = layout.grid, _Cut.of(shape, layout, row_sizes)
    rows: list[Range | None] = [None]
    columns: list[Extent | None] = [None]
    if layout.batch_dim is not None:
        rows = [Range(*ends) for ends in pairwise(cut.rows.tolist())]
    if layout.shard_dim is not None:
        columns = [cut.extent(column) for column in range(grid.shards)]
    made: dict[tuple[Range | None, Extent | None], Block] = {}
    found = {}
    for place, device in enumerate(grid.devices):
        row, column = divmod(place, grid.shards)
        key = (rows[row % len(rows)], columns[column % len(columns)])
        if key not in made:
            extents: list[Extent] = [Range(0, size) for size in shape]
            for dim, extent in ((layout.batch_dim, key[0]), (layout.shard_dim, key[1])):
                if dim is not None and extent is not None:
                    extents[dim] = extent
            made[key] = tuple(extents)
        found[device] = made[key]
    return found


@lru_cache(maxsize=1000)
def block_shapes(shape: tuple[int, ...], layout: Layout, row_sizes: tuple[int, ...] | None = None) -> IntArray:
    """Shapes of the blocks of all devices of the layout, by place, as an array (dimensions, devices)."""
    cut = _Cut.of(shape, layout, row_sizes)
    _, rows, intervals = cut.all_blocks()
    first, end = cut.bounds(range(len(shape)), rows, intervals)
    lengths: IntArray = end - first
    sections = cut.held.shape[1]
    if sections == 1:
        return lengths
    lengths = lengths.reshape(len(shape), -1, sections)
    total: IntArray = lengths[:, :, 0].copy()
    if layout.shard_dim is not None:
        total[layout.shard_dim] = lengths[layout.shard_dim].sum(axis=1)
    return total


@lru_cache(maxsize=1000)
def in_place(
    shape: tuple[int, ...],
    held: Layout,
    wanted: Layout,
    held_rows: tuple[int, ...] | None = None,
    wanted_rows: tuple[int, ...] | None = None,
) -> bool:
    """Whether every device of `wanted` already holds its block in `held`."""
    places, dims = _own_places(held.grid, wanted.grid), sorted({*held.cuts, *wanted.cuts})
    if (places < 0).any():
        return False
    if dims and dims[-1] >= len(shape):  # layer profiles name dimensions without their sizes
        return held == wanted
    cuts = _Cut.of(shape, held, held_rows), _Cut.of(shape, wanted, wanted_rows)
    if any(cut.held.shape[1] > 1 for cut in cuts):
        before, after = regions(shape, held, held_rows), regions(shape, wanted, wanted_rows)
        return all(before[device] == block for device, block in after.items())
    blocks = [cut.bounds(dims, *cut.all_blocks()[1:]) for cut in cuts]
    return bool((blocks[0][:, :, places] == blocks[1]).all())


@dataclass(frozen=True, eq=False)
class PieceTable:
    """All pieces of a change of layout as arrays, in the order of `pieces`; `dims` are the dimensions that are cut.

    Args:
        takers, givers: places in the target's and the source's grid, shape (pieces,).
        start, stop: the block in the whole tensor, shape (dims, pieces).
        held, wanted: index in the whole tensor that is 0 in the giver's and in the taker's block, shape (dims, pieces).
        uncut: elements of a block for each one of those in `dims`.
    """

    dims: tuple[int, ...]
    takers: IntArray
    givers: IntArray
    start: IntArray
    stop: IntArray
    held: IntArray
    wanted: IntArray
    uncut: int

    @cached_property
    def elements(self) -> IntArray:
        """Elements of every piece."""
        lengths: IntArray = (self.stop - self.start).prod(axis=0) * self.uncut
        return lengths

    def only(self, kept: NDArray[np.bool_]) -> PieceTable:
        """The table of some of the pieces."""
        start, stop, held, wanted = (one[:, kept] for one in (self.start, self.stop, self.held, self.wanted))
        return PieceTable(self.dims, self.takers[kept], self.givers[kept], start, stop, held, wanted, self.uncut)


def piece_table(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    source_rows: Sequence[int] | None = None,
    target_rows: Sequence[int] | None = None,
) -> PieceTable:
    """The table of `pieces`; its size is their number, however many devices there are."""
    if target.partial:
        raise ValueError("nothing is ever sent to become a partial sum")
    dims = tuple(sorted({*source.cuts, *target.cuts}))
    before, after = _Cut.of(shape, source, source_rows), _Cut.of(shape, target, target_rows)
    places, *blocks = after.all_blocks()
    wanted = after.bounds(dims, *blocks)
    begins, ends = zip(
        _met(source.batch_dim, False, source.grid.replicas, before.rows, dims, wanted),
        _met(source.shard_dim, source.partial, source.grid.shards, before.starts, dims, wanted),
        strict=True,
    )
    across, down = ends[1] - begins[1], ends[0] - begins[0]
    counts = across * down
    blocks_taken = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(blocks_taken)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = begins[0][blocks_taken] + nth // across[blocks_taken]
    intervals = begins[1][blocks_taken] + nth % across[blocks_taken]
    held, wanted = before.bounds(dims, rows, intervals), wanted[:, :, blocks_taken]
    takers = places[blocks_taken]
    uncut = prod(size for dim, size in enumerate(shape) if dim not in dims)
    table = PieceTable(
        dims,
        takers,
        _givers(before, target, takers, rows, intervals),
        np.maximum(held[0], wanted[0]),
        np.minimum(held[1], wanted[1]),
        before.origins(dims, held, intervals),
        after.origins(dims, wanted, blocks[1][blocks_taken]),
        uncut,
    )
    real: NDArray[np.bool_] = np.all(table.stop > table.start, axis=0) & (uncut > 0)
    return table if real.all() else table.only(real)


def _met(
    dim: int | None, differ: bool, parts: int, starts: IntArray, dims: Sequence[int], wanted: IntArray
) -> tuple[IntArray, IntArray]:
    """For every wanted block, the first of the source's rows (or intervals) that it meets, and the end of them.

    One stands for all that hold the same; all are met of those that hold terms (`differ`).
    """
    if dim is None:
        none = np.zeros(wanted.shape[2], dtype=np.int64)
        return none, none + (parts if differ else 1)
    first, end = wanted[:, dims.index(dim)]
    begin = np.searchsorted(starts[1:], first, side="right")
    return begin, np.maximum(begin, np.searchsorted(starts[:-1], end, side="left"))


def _givers(source: _Cut, target: Layout, takers: IntArray, rows: IntArray, intervals: IntArray) -> IntArray:
    """Place in the source's grid that serves each piece: the taker's own, else that of the copies in turn.

    Args:
        rows, intervals: of the source's blocks; 0 where all hold the same.
    """
    layout, grid = source.layout, source.layout.grid
    first, alike = source.first[intervals], source.copies[intervals]
    turns = takers % (alike * (1 if layout.rows_differ else grid.replicas))
    row = rows if layout.rows_differ else turns // alike
    column = first + turns % alike
    own = _own_places(grid, target.grid)[takers]
    serves_itself = (own >= 0) & (first <= own % grid.shards) & (own % grid.shards < first + alike)
    if layout.rows_differ:
        serves_itself &= own // grid.shards == rows
    return np.where(serves_itself, own, row * grid.shards + column)


def _own_places(source: Grid, target: Grid) -> IntArray:
    """For every place of the target's grid, its device's place in the source's; -1 where it has none."""
    if source.first is not None and target.first is not None:
        places = np.arange(len(target.devices)) + (target.first - source.first)
        return np.where((places >= 0) & (places < len(source.devices)), places, -1)
    return np.array([source.places.get(device, -1) for device in target.devices])


def pieces(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    source_rows: Sequence[int] | None = None,
    target_rows: Sequence[int] | None = None,
) -> list[Piece]:
    """What must move for a tensor of `shape` to go from one layout to another.

    A device that already holds what it needs serves itself; copies that several devices hold are
    read from different ones in turn. `target` must not be partial. Order is deterministic.
    """
    table = piece_table(shape, source, target, source_rows, target_rows)
    ends = [(source.grid.devices, table.givers, table.held), (target.grid.devices, table.takers, table.wanted)]
    devices, local = [], []
    for own, places, origins in ends:
        devices.append([own[place] for place in places.tolist()])
        bounds = np.stack([table.start - origins, table.stop - origins], axis=-1)
        local.append(_regions(shape, table.dims, bounds))
    return [Piece(*one) for one in zip(*devices, *local, strict=True)]


def _regions(shape: Sequence[int], dims: Sequence[int], bounds: IntArray) -> list[Region]:
    """Regions with these `bounds` (dims, pieces, 2), and all indices of the other dimensions."""
    columns: list[Iterable[Range]] = [repeat(Range(0, size), bounds.shape[1]) for size in shape]
    for dim, extents in zip(dims, bounds.tolist(), strict=True):
        columns[dim] = [Range(*extent) for extent in extents]
    return list(zip(*columns, strict=True)) if shape else [()] * bounds.shape[1]
