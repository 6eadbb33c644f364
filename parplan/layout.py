"""How one tensor lies over devices, and what must move to change that.

A layer's devices form a grid of `replicas` rows and `shards` columns. Rows work on different
samples, columns on different slices of one axis. Every transfer between two layers is then a
list of pieces, `target[slices] += source[slices]`; its backward is the same list read from
right to left. Planner and runtime both start from the pieces, so what is priced is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

__all__ = ["Grid", "Layout", "Piece", "Range", "Region", "pieces", "region", "split_evenly"]


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

    def position(self, device: int) -> tuple[int, int]:
        """Row and column of `device`."""
        return divmod(self.devices.index(device), self.shards)

    def device(self, row: int, column: int) -> int:
        """The device at one place of the grid."""
        return self.devices[row * self.shards + column]

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


def _chunk(sizes: Sequence[int], index: int) -> Range:
    stops = list(accumulate(sizes))
    return Range(stops[index] - sizes[index], stops[index])


def region(
    shape: Sequence[int], layout: Layout, row: int, column: int, row_sizes: Sequence[int] | None = None
) -> Region:
    """The block of a tensor of `shape` that the device at (row, column) holds.

    `row_sizes` gives each row's extent of the batch dimension when rows are not even.
    """
    extents = [Range(0, size) for size in shape]
    if layout.batch_dim is not None:
        sizes = row_sizes if row_sizes is not None else split_evenly(shape[layout.batch_dim], layout.grid.replicas)
        extents[layout.batch_dim] = _chunk(sizes, row)
    if layout.shard_dim is not None:
        sizes = split_evenly(shape[layout.shard_dim], layout.grid.shards)
        extents[layout.shard_dim] = _chunk(sizes, column)
    return tuple(extents)


def _holdings(
    shape: Sequence[int], layout: Layout, row_sizes: Sequence[int] | None
) -> Iterator[tuple[Region, tuple[int, ...]]]:
    """Regions and the devices of which any one (a copy) or each one (terms of a sum) serves it."""
    grid = layout.grid
    rows_differ = layout.batch_dim is not None
    columns_differ = layout.shard_dim is not None or layout.partial
    for row in range(grid.replicas if rows_differ else 1):
        for column in range(grid.shards if columns_differ else 1):
            rows = (row,) if rows_differ else range(grid.replicas)
            columns = (column,) if columns_differ else range(grid.shards)
            holders = tuple(grid.device(r, c) for r, c in product(rows, columns))
            yield region(shape, layout, row, column, row_sizes), holders


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
    if target.partial:
        raise ValueError("nothing is ever sent to become a partial sum")
    holdings = list(_holdings(shape, source, source_rows))
    found: list[Piece] = []
    for turn, device in enumerate(target.grid.devices):
        row, column = target.grid.position(device)
        wanted = region(shape, target, row, column, target_rows)
        for block, holders in holdings:
            common = tuple(a.intersection(b) for a, b in zip(block, wanted, strict=True))
            if any(len(extent) == 0 for extent in common):
                continue
            giver = device if device in holders else holders[turn % len(holders)]
            found.append(Piece(giver, device, _local(common, block), _local(common, wanted)))
    return found


def _local(common: Region, within: Region) -> Region:
    return tuple(extent.shifted(-outer.start) for extent, outer in zip(common, within, strict=True))
