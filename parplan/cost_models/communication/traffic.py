"""How many elements go from which device to which when a layout changes, added up by device and by domain of links.

The same as counting the pieces of `parplan.layout.pieces`, with whole numbers, on a tensor whose cut dimensions are
just long enough for both layouts to divide. The pieces of regular layouts are counted by formula (regular_flows.py), in
a time that grows with the devices; those of others are listed, and there may be as many as devices squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

import numpy as np

from parplan.cost_models.communication.regular_flows import Flow, RegularFlows
from parplan.layout import IntArray, Layout, piece_table

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
        takers, givers, elements = self._listed
        moves = self.numbers[0][takers] != self.numbers[1][givers]
        return bool((elements[moves] == self.held).all())

    def within(self, size: int | None) -> Flow:
        """The pieces between devices of one domain, which begins at every multiple of `size`; None: all pieces."""
        if self._regular is not None and self._regular.fits(size):
            return self._regular.within(size)
        (takers, givers, elements), (receivers, senders) = self._listed, self.numbers
        if size is not None:
            kept = receivers[takers] // size == senders[givers] // size
            takers, givers, elements = takers[kept], givers[kept], elements[kept]
        return Flow(*_added_up(takers, elements, len(receivers)), *_added_up(givers, elements, len(senders)))

    @cached_property
    def _regular(self) -> RegularFlows | None:
        return RegularFlows.of(self.source, self.target)

    @cached_property
    def _listed(self) -> tuple[IntArray, IntArray, IntArray]:
        """Receiver, sender and elements of every message: the pieces between the same two (of sections) are one."""
        table = piece_table(self.shape, self.source, self.target)
        if self.source.sections is None and self.target.sections is None:
            return table.takers, table.givers, table.elements
        pairs, message = np.unique(np.stack([table.takers, table.givers]), axis=1, return_inverse=True)
        elements = np.zeros(pairs.shape[1], dtype=np.int64)
        np.add.at(elements, message.reshape(-1), table.elements)
        return pairs[0], pairs[1], elements

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
    source, target = source.against(target), target.against(source)
    first, second = source.cuts, target.cuts
    shape = [1] * (1 + max((*first, *second), default=-1))
    for dim in {**first, **second}:
        sections = [end.sections.total for end in (source, target) if end.sections is not None and dim == end.shard_dim]
        shape[dim] = lcm(first.get(dim, 1), second.get(dim, 1)) * lcm(*sections)
    held, wanted, total = _block(source, shape), _block(target, shape), prod(shape)
    return Traffic(source, target, tuple(shape), held, wanted, total, wanted * len(target.grid.devices) > total)


def _block(layout: Layout, shape: Sequence[int]) -> int:
    """Elements of each device's block of a tensor that `layout` divides evenly."""
    elements, dim, shards = prod(shape), layout.shard_dim, layout.grid.shards
    if layout.sections is None or dim is None:
        return elements // prod(layout.cuts.values())
    rows = layout.cuts[layout.batch_dim] if layout.batch_dim is not None else 1
    return elements // rows // shape[dim] * layout.sections.local_bounds(shape[dim], shards)[-1]
