"""How many elements go from which device to which when a layout changes, without listing the pieces.

The same as counting the pieces of `parplan.layout.pieces`, but fast enough for the hundred thousand pairs of layouts a
plan may have to price: on a tensor whose cut dimensions are just long enough for both layouts to divide, with whole
numbers, all devices at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from parplan.layout import Grid, Layout

__all__ = ["Traffic", "traffic"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What goes from where to where, in elements of a tensor that has `total` of them.

    Args:
        elements: `elements[i, j]` go from `senders[j]` to `receivers[i]`, also what devices serve themselves.
        senders: devices of the source layout.
        receivers: devices of the target layout.
        held: what each sender holds.
        wanted: what each receiver wants.
        total: elements of the tensor.
        copies: whether several receivers want the same.
    """

    elements: IntArray
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    held: int
    wanted: int
    total: int
    copies: bool

    @cached_property
    def foreign(self) -> IntArray:
        """What really moves: `elements` without what devices serve themselves."""
        own = np.array(self.receivers)[:, None] == np.array(self.senders)
        return np.where(own, 0, self.elements)


def traffic(source: Layout, target: Layout) -> Traffic:
    """What must move for a tensor to go from layout `source` to `target`, which must not be partial."""
    if target.partial:
        raise ValueError("nothing is ever sent to become a partial sum")
    first, second = _parts(source), _parts(target)
    sizes = tuple((dim, lcm(first.get(dim, 1), second.get(dim, 1))) for dim in {**first, **second})
    holders = _holders(source.grid, *_differ(source))
    held, wanted = _blocks(source, sizes)[:, holders[:, 0]], _blocks(target, sizes)[:, :, None]
    overlaps = (np.minimum(wanted[1], held[1]) - np.maximum(wanted[0], held[0])).clip(0).prod(axis=-1)
    elements = np.zeros((len(target.grid.devices), len(source.grid.devices)), dtype=np.int64)
    places = _givers(source.grid, *_differ(source), target.grid.devices)
    np.add.at(elements, (np.arange(len(elements))[:, None], places), overlaps)
    total = prod(size for _, size in sizes)
    return Traffic(
        elements,
        source.grid.devices,
        target.grid.devices,
        total // prod(first.values()),
        total // prod(second.values()),
        total,
        prod(second.values()) < len(target.grid.devices),
    )


def _parts(layout: Layout) -> dict[int, int]:
    """Into how many parts each cut dimension is cut."""
    cuts = ((layout.batch_dim, layout.grid.replicas), (layout.shard_dim, layout.grid.shards))
    return {dim: parts for dim, parts in cuts if dim is not None}


@lru_cache(maxsize=10_000)
def _blocks(layout: Layout, sizes: tuple[tuple[int, int], ...]) -> IntArray:
    """First index and end of every device's block: shape (2, devices, dimensions)."""
    rows, columns = np.divmod(np.arange(len(layout.grid.devices)), layout.grid.shards)
    parts = _parts(layout)
    block = np.empty((2, len(rows), len(sizes)), dtype=np.int64)
    for axis, (dim, size) in enumerate(sizes):
        index = rows if dim == layout.batch_dim else columns
        step = size // parts.get(dim, 1)
        block[0, :, axis] = index * step if dim in parts else 0
        block[1, :, axis] = block[0, :, axis] + step
    return block


def _differ(layout: Layout) -> tuple[bool, bool]:
    """Whether rows hold different blocks, and whether columns do (or different terms of a sum)."""
    return layout.batch_dim is not None, layout.shard_dim is not None or layout.partial


@lru_cache(maxsize=10_000)
def _holders(grid: Grid, rows_differ: bool, columns_differ: bool) -> IntArray:
    """Places in the grid that hold one block or term, all blocks: shape (blocks, copies)."""
    rows = grid.replicas if rows_differ else 1
    columns = grid.shards if columns_differ else 1
    places = np.arange(len(grid.devices)).reshape(rows, grid.replicas // rows, columns, grid.shards // columns)
    held_alike: IntArray = places.transpose(0, 2, 1, 3).reshape(rows * columns, -1)
    return held_alike


@lru_cache(maxsize=10_000)
def _givers(grid: Grid, rows_differ: bool, columns_differ: bool, devices: tuple[int, ...]) -> IntArray:
    """The place in the grid that each of `devices` reads each block from: shape (devices, blocks).

    Its own, where it holds the block; else that of the holders in turn, as `pieces` does.
    """
    holders = _holders(grid, rows_differ, columns_differ)
    places = np.empty((len(devices), len(holders)), dtype=np.int64)
    for turn, device in enumerate(devices):
        places[turn] = holders[:, turn % holders.shape[1]]
        if device in grid.devices:
            own = grid.devices.index(device)
            places[turn][(holders == own).any(axis=1)] = own
    return places
