"""How many elements go from which device to which when a layout changes, added up by device and by domain of links.

The same as counting the pieces of `parplan.layout.pieces`, with whole numbers, on a tensor whose cut dimensions are
just long enough for both layouts to divide. The pieces of regular layouts are counted by formula (regular_flows.py), in
a time that grows with the devices, or with the digits of their numbers where all counts are powers of two
(binary_flows.py); those of others are listed, and there may be as many as devices squared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

import numpy as np

from parplan.cost_models.communication.binary_flows import BinaryFlows, binary
from parplan.cost_models.communication.flows import Ends, Flow, Flows, ListedFlows
from parplan.cost_models.communication.regular_flows import RegularFlows, fits, regular
from parplan.layout import Grid, IntArray, Layout, piece_table

__all__ = ["Traffic", "together", "traffic"]

TOGETHER = 1 << 15
"""Devices of transfers that are counted together: few enough for their figures to stay in a processor's cache. More of
them are counted by digits where they can be."""


@dataclass(frozen=True, eq=False)
class Traffic(ListedFlows):
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
    def takers(self) -> Ends:
        """The receivers."""
        return _ends(self.target.grid)

    @cached_property
    def givers(self) -> Ends:
        """The senders."""
        return _ends(self.source.grid)

    @cached_property
    def whole(self) -> bool:
        """Whether whoever sends to others sends each of them all it holds."""
        if self.regular:
            return self.held == 1
        takers, givers, elements = self._listed
        moves = self.takers.numbers[takers] != self.givers.numbers[givers]
        return bool((elements[moves] == self.held).all())

    def within(self, size: int | None) -> Flow:
        """The pieces between devices of one domain, which begins at every multiple of `size`; None: all pieces."""
        if self.fits(size):
            return self._formula.within(size)
        (takers, givers, elements), receivers, senders = self._listed, self.takers.numbers, self.givers.numbers
        if size is not None:
            kept = receivers[takers] // size == senders[givers] // size
            takers, givers, elements = takers[kept], givers[kept], elements[kept]
        return Flow(*_added_up(takers, elements, len(receivers)), *_added_up(givers, elements, len(senders)))

    def fits(self, *sizes: int | None) -> bool:
        """Whether pieces inside domains of these sizes are counted by formula."""
        ends = self.source, self.target
        return self.regular and all(fits(end, size) for size in sizes if size is not None for end in ends)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Senders with the receivers of what they send, devices that serve themselves aside."""
        takers, givers, _ = self._listed
        both = zip(self.givers.numbers[givers].tolist(), self.takers.numbers[takers].tolist(), strict=True)
        return sorted({(giver, taker) for giver, taker in both if giver != taker})

    @cached_property
    def regular(self) -> bool:
        """Whether all its pieces are counted by formula."""
        return regular(self.source, self.target)

    @cached_property
    def _formula(self) -> RegularFlows:
        return RegularFlows([(self.source, self.target)])

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


def _ends(grid: Grid) -> Ends:
    first, count = grid.first, len(grid.devices)
    numbers = np.array(grid.devices) if first is None else np.arange(first, first + count)
    return Ends(numbers, np.zeros(1, dtype=np.int64))


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


def together(moved: Sequence[Traffic], sizes: Sequence[int]) -> Iterator[tuple[Sequence[int], Flows]]:
    """Which of these are counted together, and their flows; `sizes` of domains are what they will be asked for."""
    ends = [(one.source, one.target) for one in moved]
    counts = [len(source.grid.devices) + len(target.grid.devices) for source, target in ends]
    many = sum(counts) > TOGETHER
    by_digits = [n for n, one in enumerate(moved) if many and one.regular and binary(*ends[n], sizes)]
    if by_digits:
        yield by_digits, BinaryFlows([ends[n] for n in by_digits])
    some, count = list[int](), 0
    for n in sorted({*range(len(moved))} - {*by_digits}):
        if not moved[n].fits(*sizes):
            yield (n,), moved[n]
            continue
        some.append(n)
        count += counts[n]
        if count >= TOGETHER:
            yield some, RegularFlows([ends[n] for n in some])
            some, count = [], 0
    if some:
        yield some, RegularFlows([ends[n] for n in some])
