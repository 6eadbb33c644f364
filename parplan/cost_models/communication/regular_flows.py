"""Pieces of regular layouts counted by formula: for every device those it gets and gives, in all or inside its domain.

Regular are layouts on devices numbered on from a first one, where of two counts of parts along one dimension one is a
multiple of the other. All pieces then have one size, and those whom a device serves, or is served by, lie in a
rectangle of the other grid, as its domain of links does: what the two share is counted. Of copies the readers take
turns, but a device that has one reads its own, and these are put right one by one.

Many pairs of layouts are counted at once, the devices of one behind those of another: a planner asks for thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parplan.cost_models.communication.flows import Ends, Flow, ListedFlows
from parplan.layout import IntArray, Layout

__all__ = ["RegularFlows", "copies", "fits", "regular"]


class RegularFlows(ListedFlows):
    """The pieces between pairs of regular layouts, each of which is one element of the tensor of its `Traffic`."""

    def __init__(self, pairs: Sequence[tuple[Layout, Layout]]) -> None:
        givers, takers = [], []
        for source, target in pairs:
            rows, columns = copied = copies(source)
            grid, readers = source.grid, target.grid
            givers.append((*_figures(source, target, readers.replicas, readers.shards), *copied))
            takers.append((*_figures(target, source, grid.replicas // rows, grid.shards // columns), *copied))
        self._given, self._taken = _Side.of(givers), _Side.of(takers)

    @cached_property
    def takers(self) -> Ends:
        return Ends(self._taken.place + self._taken.first, self._taken.begins)

    @cached_property
    def givers(self) -> Ends:
        return Ends(self._given.place + self._given.first, self._given.begins)

    def within(self, size: int | None) -> Flow:
        """The pieces between devices of one domain of `size`; None: all."""
        takers, own, instead = self._own
        if size == 1:
            incoming, outgoing = (np.zeros(len(side.place), dtype=np.int64) for side in (self._taken, self._given))
            incoming[takers] = outgoing[own] = 1
            return Flow(incoming, incoming, outgoing, outgoing)
        asked, readers, same = self._asked, self._given.met, np.ones_like(takers)
        if size is not None:
            asked = asked.common(self._taken.domain(size))
            readers = readers.common(self._given.domain(size))
            same -= self.takers.numbers[takers] // size != self.givers.numbers[instead] // size
        incoming, outgoing = asked.area, self._turns_taken(readers)
        incoming[takers] += 1 - same
        outgoing[own] += 1
        np.subtract.at(outgoing, instead, same)
        return Flow(incoming, incoming, outgoing, outgoing)

    @cached_property
    def _turn(self) -> tuple[IntArray, IntArray]:
        """Row and column, among the copies of the source's, of the one whose turn it is to serve each reader."""
        side = self._taken
        return np.divmod(side.place % (side.row_copies * side.column_copies), side.column_copies)

    @cached_property
    def _asked(self) -> _Rectangles:
        """Where those lie in the source's grid whose turn it is to serve each reader."""
        (row, column), met = self._turn, self._taken.met
        return _Rectangles(met.top + row, met.bottom + row, met.left + column, met.right + column)

    @cached_property
    def _own(self) -> tuple[IntArray, IntArray, IntArray]:
        """Readers that have what they read, and which giver each is, and whose turn it was."""
        side, met, turn = self._taken, self._taken.met, self._turn
        place = self.takers.numbers - side.other_first
        row, column = np.divmod(place, side.other_shards)
        serves = (place >= 0) & (place < side.other_replicas * side.other_shards)
        serves &= (met.top <= row) & (row < met.bottom + side.row_copies - 1)
        serves &= (met.left <= column) & (column < met.right + side.column_copies - 1)
        instead = np.where(side.row_copies == 1, row, turn[0]) * side.other_shards
        instead += np.where(side.column_copies == 1, column, turn[1])
        (takers,) = serves.nonzero()
        begins = self.givers.begins[side.pair[takers]]
        return takers, begins + place[takers], begins + instead[takers]

    def _turns_taken(self, readers: _Rectangles) -> IntArray:
        """For every device of the source, how many of these `readers` of its block have their turn there."""
        side = self._given
        turn = side.row % side.row_copies * side.column_copies + side.column % side.column_copies
        across = np.minimum(side.row_copies * side.column_copies, side.other_shards)
        down = side.row_copies * side.column_copies // across
        row, column = np.divmod(turn, side.other_shards)
        return _every(readers.left, readers.right, across, column) * _every(readers.top, readers.bottom, down, row)


def regular(source: Layout, target: Layout) -> bool:
    """Whether pieces between two layouts are counted by formula."""
    first, second = source.cuts, target.cuts
    numbered = source.grid.first is not None and target.grid.first is not None
    if not numbered or source.sections is not None or target.sections is not None:
        return False
    rows, columns = copies(source)
    nested = all(_nest(first[dim], second[dim]) for dim in first.keys() & second.keys())
    return nested and _nest(rows * columns, target.grid.shards)


def fits(layout: Layout, size: int) -> bool:
    """Whether domains of `size` devices are rectangles of the grid of a regular layout."""
    first, shards = layout.grid.first or 0, layout.grid.shards
    covered = first // size == (first + len(layout.grid.devices) - 1) // size
    return covered or (_nest(size, shards) and first % min(size, shards) == 0)


def copies(source: Layout) -> tuple[int, int]:
    """How many rows, and how many columns, hold the same."""
    grid = source.grid
    return 1 if source.rows_differ else grid.replicas, 1 if source.columns_differ else grid.shards


def _figures(own: Layout, other: Layout, rows: int, columns: int) -> tuple[int, ...]:
    """The arguments of `_Side`, without copies, where the blocks of `other` have so many rows and columns to meet."""
    grids = (one for grid in (own.grid, other.grid) for one in (grid.first or 0, grid.replicas, grid.shards))
    met = []
    for dim, parts in ((other.batch_dim, rows), (other.shard_dim, columns)):
        cut = own.cuts.get(dim, 1) if dim is not None else 1
        met += [cut, own.grid.shards if dim == own.batch_dim else 1, max(1, parts // cut)]
    return (*grids, *met)


@dataclass(frozen=True, eq=False)
class _Side:
    """The devices of one layout of every pair, with figures of both grids; shape (devices of all pairs,) each.

    Args:
        pair: which one, and `place` in its grid.
        first, replicas, shards: of its own grid.
        other_first, other_replicas, other_shards: of the other one.
        row_parts, row_run, rows: into how many parts it cuts what the other grid has by rows, how many neighbours have
            the same part, and how many rows meet one.
        column_parts, column_run, columns: the same of what the other grid has by columns.
        row_copies, column_copies: rows, and columns, of the source's grid that hold the same.
    """

    begins: IntArray
    pair: IntArray
    place: IntArray
    first: IntArray
    replicas: IntArray
    shards: IntArray
    other_first: IntArray
    other_replicas: IntArray
    other_shards: IntArray
    row_parts: IntArray
    row_run: IntArray
    rows: IntArray
    column_parts: IntArray
    column_run: IntArray
    columns: IntArray
    row_copies: IntArray
    column_copies: IntArray

    @staticmethod
    def of(figures: Sequence[Sequence[int]]) -> _Side:
        each = np.array(figures).T
        counts = each[1] * each[2]
        begins, pair = np.cumsum(counts) - counts, np.repeat(np.arange(len(figures)), counts)
        return _Side(begins, pair, np.arange(len(pair)) - begins[pair], *each[:, pair])

    @cached_property
    def row(self) -> IntArray:
        row: IntArray = self.place // self.shards
        return row

    @cached_property
    def column(self) -> IntArray:
        column: IntArray = self.place % self.shards
        return column

    @cached_property
    def met(self) -> _Rectangles:
        """What the block of each device meets in the other grid."""
        top = self.place // self.row_run % self.row_parts * self.other_replicas // self.row_parts
        left = self.place // self.column_run % self.column_parts * self.other_shards // self.column_parts
        return _Rectangles(top, top + self.rows, left, left + self.columns)

    def domain(self, size: int) -> _Rectangles:
        """Where the domain of each device lies in the other grid."""
        begin = (self.place + self.first) // size * size - self.other_first
        count = self.other_replicas * self.other_shards
        begin, end = (np.minimum(np.maximum(edge, 0), count) for edge in (begin, begin + size))
        top, left = np.divmod(begin, self.other_shards)
        return _Rectangles(top, -(-end // self.other_shards), left, left + np.minimum(end - begin, self.other_shards))


@dataclass(frozen=True, eq=False)
class _Rectangles:
    """Rows `top` to `bottom` and columns `left` to `right` (ends excluded) of a grid, for every device of another."""

    top: IntArray
    bottom: IntArray
    left: IntArray
    right: IntArray

    def common(self, other: _Rectangles) -> _Rectangles:
        return _Rectangles(
            np.maximum(self.top, other.top),
            np.minimum(self.bottom, other.bottom),
            np.maximum(self.left, other.left),
            np.minimum(self.right, other.right),
        )

    @property
    def area(self) -> IntArray:
        found: IntArray = np.maximum(self.bottom - self.top, 0) * np.maximum(self.right - self.left, 0)
        return found


def _every(begin: IntArray, end: IntArray, step: IntArray, offset: IntArray) -> IntArray:
    """Numbers from `begin` to `end` (excluded) that are `offset` and a multiple of `step`."""
    return np.maximum((end - 1 - offset) // step - (begin - 1 - offset) // step, 0)


def _nest(one: int, other: int) -> bool:
    return max(one, other) % min(one, other) == 0
