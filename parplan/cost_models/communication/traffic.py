"""How many elements go from which device to which when a layout changes, added up by device and by domain of links.

The same as counting the pieces of `parplan.layout.pieces`, with whole numbers, on a tensor whose cut dimensions are
just long enough for both layouts to divide. The pieces of regular layouts are counted by formula (regular_flows.py), in
a time that grows with the devices; those of others are listed, and there may be as many as devices squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

import numpy as np

from parplan.cost_models.communication.regular_flows import Flow, RegularFlows
from parplan.layout import IntArray, Layout, PieceTable, piece_table

__all__ = ["Traffic", "traffic"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What goes from where to where, in elements of a tensor that has `total` of them.

    Args:
        source, target: the layouts; figures are of the devices of their grids, in order.
        shape: of the tensor.
        held: what each sender holds.
        wanted: what each receiver wants.
        total: elements of the tensor.
        copies: whether several receivers want the same.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    held: int
    wanted: int
    total: int
    copies: bool

    @property
    def senders(self) -> tuple[int, ...]:
        """Devices of the source layout."""
        return self.source.grid.devices

    @property
    def receivers(self) -> tuple[int, ...]:
        """Devices of the target layout."""
        return self.target.grid.devices

    @cached_property
    def everything(self) -> Flow:
        """All pieces, also those with which devices serve themselves."""
        return self.within(None)

    @cached_property
    def own(self) -> Flow:
        """The pieces with which devices serve themselves."""
        return self.within(1)

    @cached_property
    def foreign(self) -> Flow:
        """The pieces that really move."""
        return self.everything - self.own

    @cached_property
    def whole(self) -> bool:
        """Whether whoever sends to others sends each of them all it holds."""
        if self._regular is not None:
            return self.held == 1
        table, (receivers, senders) = self._table, self.numbers
        moves = receivers[table.takers] != senders[table.givers]
        return bool((table.elements[moves] == self.held).all())

    def within(self, size: int | None) -> Flow:
        """The pieces between devices of one domain, which begins at every multiple of `size`; None: all pieces."""
        if self._regular is not None and self._regular.fits(size):
            return self._regular.within(size)
        table, (receivers, senders) = self._table, self.numbers
        takers, givers, elements = table.takers, table.givers, table.elements
        if size is not None:
            kept = receivers[takers] // size == senders[givers] // size
            takers, givers, elements = takers[kept], givers[kept], elements[kept]
        return Flow(*_added_up(takers, elements, len(receivers)), *_added_up(givers, elements, len(senders)))

    @cached_property
    def _regular(self) -> RegularFlows | None:
        return RegularFlows.of(self.source, self.target)

    @cached_property
    def _table(self) -> PieceTable:
        return piece_table(self.shape, self.source, self.target)

    @cached_property
    def numbers(self) -> tuple[IntArray, IntArray]:
        """Devices of the target layout, and of the source layout."""
        receivers, senders = (
            np.array(grid.devices) if grid.first is None else np.arange(grid.first, grid.first + len(grid.devices))
            for grid in (self.target.grid, self.source.grid)
        )
        return receivers, senders


def _added_up(places: IntArray, elements: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Elements, and pieces, by place."""
    added = np.zeros(count, dtype=np.int64)
    np.add.at(added, places, elements)
    return added, np.bincount(places, minlength=count)


def traffic(source: Layout, target: Layout) -> Traffic:
    """What must move for a tensor to go from layout `source` to `target`, which must not be partial."""
    if target.partial:
        raise ValueError("nothing is ever sent to become a partial sum")
    first, second = source.cuts, target.cuts
    shape = [1] * (1 + max((*first, *second), default=-1))
    for dim in {**first, **second}:
        shape[dim] = lcm(first.get(dim, 1), second.get(dim, 1))
    total, parts = prod(shape), prod(second.values())
    copies = parts < len(target.grid.devices)
    return Traffic(source, target, tuple(shape), total // prod(first.values()), total // parts, total, copies)
