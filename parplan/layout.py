"""How one tensor lies over devices, and what must move to change that.

A layer's devices form a grid of `replicas` rows and `shards` columns. Rows work on different
samples, columns on different slices of one axis. Every transfer between two layers is then a
list of pieces, `target[slices] += source[slices]`; its backward is the same list read from
right to left. Planner and runtime both start from the pieces, so what is priced is what runs:
the planner from their table (arrays, for thousands of devices), the runtime from their list.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from math import prod

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Grid", "IntArray", "Layout", "Piece", "PieceTable", "Range", "Region", "block_shapes", "in_place", "own_places",
    "piece_table", "pieces", "region", "regions", "split_evenly",
]  # fmt: skip

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class _Numbering:
    """Device numbers with the first one, where they are numbered on from there (else None), and their hash."""

    devices: tuple[int, ...]
    first: int | None
    hash: int


_NUMBERINGS: dict[int, _Numbering] = {}
"""By identity: thousands of grids are of one tuple of devices, which is kept, so that no other one has its `id`."""


def _numbering(devices: tuple[int, ...]) -> _Numbering:
    known = _NUMBERINGS.get(id(devices))
    if known is None:
        if len(_NUMBERINGS) >= 1024:
            _NUMBERINGS.clear()
        first = devices[0] if devices and devices == tuple(range(devices[0], devices[0] + len(devices))) else None
        known = _NUMBERINGS[id(devices)] = _Numbering(devices, first, hash(devices))
    return known


@dataclass(frozen=True)
class Grid:
    """Logical devices arranged as replicas x shards, row by row.

    Args:
        devices: logical device numbers, `replicas * shards` of them, all different.
        replicas: rows; each works on its own samples.
        shards: columns; each holds its own slice of the cut axis.
    """

    devices: tuple[int, ...]
    replicas: int
    shards: int

    def __post_init__(self) -> None:
        if self.replicas * self.shards != len(self.devices):
            raise ValueError(f"{self.replicas} x {self.shards} does not arrange {len(self.devices)} devices")

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Place of every device, row by row."""
        return {device: place for place, device in enumerate(self.devices)}

    @cached_property
    def first(self) -> int | None:
        """The first device, where they are numbered on from there; None in any other order."""
        return _numbering(self.devices).first

    def position(self, device: int) -> tuple[int, int]:
        """Row and column of `device`."""
        return divmod(self.places[device], self.shards)

    def device(self, row: int, column: int) -> int:
        """The device at one place of the grid."""
        return self.devices[row * self.shards + column]

    @property
    def key(self) -> Hashable:
        """A short key of its devices and their arrangement, as there may be thousands."""
        numbering = _numbering(self.devices)
        return (self.devices if numbering.first is None else numbering.first, self.replicas, self.shards)

    def __hash__(self) -> int:
        """That of its fields, without going through the devices each time."""
        return hash((_numbering(self.devices).hash, self.replicas, self.shards))

    def row(self, row: int) -> tuple[int, ...]:
        """The devices that hold the shards of one replica."""
        return self.devices[row * self.shards : (row + 1) * self.shards]

    def column(self, column: int) -> tuple[int, ...]:
        """The devices that hold the replicas of one shard."""
        return self.devices[column :: self.shards]


@dataclass(frozen=True)
class Layout:
    """Where the parts of one tensor are.

    Args:
        grid: the devices that hold it.
        batch_dim: dimension cut over the rows; None when every row holds the same.
        shard_dim: dimension cut over the columns; None when every column holds the same.
        partial: every column holds a term, and the tensor is the sum over the columns.
    """

    grid: Grid
    batch_dim: int | None
    shard_dim: int | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.partial and self.shard_dim is not None:
            raise ValueError("a partial sum is not cut as well")
        if self.batch_dim is not None and self.batch_dim == self.shard_dim:
            raise ValueError("one dimension cannot be cut by replicas and by shards")

    @cached_property
    def cuts(self) -> Mapping[int, int]:
        """Into how many parts each cut dimension is cut."""
        cuts = ((self.batch_dim, self.grid.replicas), (self.shard_dim, self.grid.shards))
        return {dim: parts for dim, parts in cuts if dim is not None}

    @property
    def rows_differ(self) -> bool:
        """Whether rows hold different blocks."""
        return self.batch_dim is not None

    @property
    def columns_differ(self) -> bool:
        """Whether columns hold different blocks, or different terms of a sum."""
        return self.shard_dim is not None or self.partial


@dataclass(frozen=True)
class Range:
    """Half-open interval of indices along one dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def intersection(self, other: Range) -> Range:
        """The indices in both; empty ranges have length 0."""
        return Range(max(self.start, other.start), min(self.stop, other.stop))

    def shifted(self, by: int) -> Range:
        """The same range counted from another origin."""
        return Range(self.start + by, self.stop + by)


Region = tuple[Range, ...]


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


def split_evenly(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` nearly equal chunks, the larger ones first (as torch.tensor_split).

    >>> split_evenly(10, 4)
    (3, 3, 2, 2)
    """
    base, extra = divmod(size, parts)
    return tuple(base + (index < extra) for index in range(parts))


def _starts(size: int, parts: int, sizes: Sequence[int] | None = None) -> IntArray:
    """First index of every part of a dimension, then its end; shape (parts + 1,)."""
    if sizes is not None:
        return np.cumsum([0, *sizes])
    index = np.arange(parts + 1)
    return index * (size // parts) + np.minimum(index, size % parts)


def _cut_starts(shape: Sequence[int], layout: Layout, row_sizes: Sequence[int] | None) -> tuple[IntArray, IntArray]:
    """`_starts` of the rows' and of the columns' parts, where they are cut."""
    nothing, grid = np.zeros(0, dtype=np.int64), layout.grid
    by_row = _starts(shape[layout.batch_dim], grid.replicas, row_sizes) if layout.batch_dim is not None else nothing
    by_column = _starts(shape[layout.shard_dim], grid.shards) if layout.shard_dim is not None else nothing
    return by_row, by_column


def region(
    shape: Sequence[int], layout: Layout, row: int, column: int, row_sizes: Sequence[int] | None = None
) -> Region:
    """The block of a tensor of `shape` that the device at (row, column) holds.

    `row_sizes` gives each row's extent of the batch dimension when rows are not even.
    """
    extents = [Range(0, size) for size in shape]
    by_row, by_column = _cut_starts(shape, layout, row_sizes)
    for dim, index, starts in ((layout.batch_dim, row, by_row), (layout.shard_dim, column, by_column)):
        if dim is not None:
            extents[dim] = Range(int(starts[index]), int(starts[index + 1]))
    return tuple(extents)


def regions(shape: Sequence[int], layout: Layout, row_sizes: Sequence[int] | None = None) -> dict[int, Region]:
    """`region` of every device of the layout; equal ones are one object."""
    grid, (by_row, by_column) = layout.grid, _cut_starts(shape, layout, row_sizes)
    rows: list[Range | None] = [Range(*ends) for ends in pairwise(by_row.tolist())]
    columns: list[Range | None] = [Range(*ends) for ends in pairwise(by_column.tolist())]
    rows, columns = rows or [None], columns or [None]
    made: dict[tuple[int, int], Region] = {}
    found = {}
    for place, device in enumerate(grid.devices):
        row, column = divmod(place, grid.shards)
        key = (row % len(rows), column % len(columns))
        if key not in made:
            extents = [Range(0, size) for size in shape]
            for dim, extent in ((layout.batch_dim, rows[key[0]]), (layout.shard_dim, columns[key[1]])):
                if dim is not None and extent is not None:
                    extents[dim] = extent
            made[key] = tuple(extents)
        found[device] = made[key]
    return found


def block_shapes(shape: Sequence[int], layout: Layout, row_sizes: Sequence[int] | None = None) -> IntArray:
    """Shapes of the blocks of all devices of the layout, by place, as an array (dimensions, devices)."""
    first, end = _blocks(shape, layout, range(len(shape)), row_sizes)
    lengths: IntArray = end - first
    return lengths


def in_place(
    shape: Sequence[int],
    held: Layout,
    wanted: Layout,
    held_rows: Sequence[int] | None = None,
    wanted_rows: Sequence[int] | None = None,
) -> bool:
    """Whether every device of `wanted` already holds its block in `held`."""
    places, dims = own_places(held.grid, wanted.grid), sorted({*held.cuts, *wanted.cuts})
    if (places < 0).any():
        return False
    blocks = _blocks(shape, held, dims, held_rows)[:, :, places]
    return bool((blocks == _blocks(shape, wanted, dims, wanted_rows)).all())


@dataclass(frozen=True, eq=False)
class PieceTable:
    """All pieces of a change of layout as arrays, in the order of `pieces`; `dims` are the dimensions that are cut.

    Args:
        takers, givers: places in the target's and the source's grid, shape (pieces,).
        start, stop: the block in the whole tensor, shape (dims, pieces).
        held, wanted: first index and end of every source and target device's block, shape (2, dims, devices).
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
    held, wanted = _blocks(shape, source, dims, source_rows), _blocks(shape, target, dims, target_rows)
    begins, ends = zip(
        _met(source.batch_dim, False, source.grid.replicas, _cut_starts(shape, source, source_rows)[0], dims, wanted),
        _met(source.shard_dim, source.partial, source.grid.shards, _cut_starts(shape, source, None)[1], dims, wanted),
        strict=True,
    )
    across, down = ends[1] - begins[1], ends[0] - begins[0]
    counts = across * down
    takers = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(takers)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows, columns = begins[0][takers] + within // across[takers], begins[1][takers] + within % across[takers]
    givers = _givers(source, target, takers, rows, columns)
    start = np.maximum(held[0][:, givers], wanted[0][:, takers])
    stop = np.minimum(held[1][:, givers], wanted[1][:, takers])
    uncut = prod(size for dim, size in enumerate(shape) if dim not in dims)
    real = (stop > start).all(axis=0) & (uncut > 0)
    if not real.all():
        takers, givers, start, stop = takers[real], givers[real], start[:, real], stop[:, real]
    return PieceTable(dims, takers, givers, start, stop, held, wanted, uncut)


def _blocks(shape: Sequence[int], layout: Layout, dims: Sequence[int], rows: Sequence[int] | None) -> IntArray:
    by_row, by_column = _cut_starts(shape, layout, rows)
    row, column = np.divmod(np.arange(len(layout.grid.devices)), layout.grid.shards)
    found = np.zeros((2, len(dims), len(row)), dtype=np.int64)
    for index, dim in enumerate(dims):
        if dim == layout.batch_dim:
            found[:, index] = by_row[row], by_row[row + 1]
        elif dim == layout.shard_dim:
            found[:, index] = by_column[column], by_column[column + 1]
        else:
            found[1, index] = shape[dim]
    return found


def _met(
    dim: int | None, differ: bool, parts: int, starts: IntArray, dims: Sequence[int], wanted: IntArray
) -> tuple[IntArray, IntArray]:
    """For every target device, the first of the source's rows (or columns) that it meets, and the end of them.

    One stands for all that hold the same; all are met of those that hold terms (`differ`).
    """
    if dim is None:
        none = np.zeros(wanted.shape[2], dtype=np.int64)
        return none, none + (parts if differ else 1)
    first, end = wanted[:, dims.index(dim)]
    begin = np.searchsorted(starts[1:], first, side="right")
    return begin, np.maximum(begin, np.searchsorted(starts[:-1], end, side="left"))


def _givers(source: Layout, target: Layout, takers: IntArray, rows: IntArray, columns: IntArray) -> IntArray:
    """Place in the source's grid that serves each piece: the taker's own, else that of the copies in turn.

    Args:
        rows, columns: of the source's blocks; 0 where all hold the same.
    """
    grid = source.grid
    alike = 1 if source.columns_differ else grid.shards
    turns = takers % (alike * (1 if source.rows_differ else grid.replicas))
    row = rows if source.rows_differ else turns // alike
    column = columns if source.columns_differ else turns % alike
    own = own_places(grid, target.grid)[takers]
    serves_itself = own >= 0
    if source.rows_differ:
        serves_itself &= own // grid.shards == rows
    if source.columns_differ:
        serves_itself &= own % grid.shards == columns
    return np.where(serves_itself, own, row * grid.shards + column)


def own_places(source: Grid, target: Grid) -> IntArray:
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
    for own, places, blocks in ends:
        devices.append([own[place] for place in places.tolist()])
        origin = blocks[0][:, places]
        bounds = np.stack([table.start - origin, table.stop - origin], axis=-1)
        local.append(_regions(shape, table.dims, bounds))
    return [Piece(*one) for one in zip(*devices, *local, strict=True)]


def _regions(shape: Sequence[int], dims: Sequence[int], bounds: IntArray) -> list[Region]:
    """Regions with these `bounds` (dims, pieces, 2), and all indices of the other dimensions."""
    columns: list[Iterable[Range]] = [repeat(Range(0, size), bounds.shape[1]) for size in shape]
    for dim, extents in zip(dims, bounds.tolist(), strict=True):
        columns[dim] = [Range(*extent) for extent in extents]
    return list(zip(*columns, strict=True)) if shape else [()] * bounds.shape[1]
