"""Pieces of regular layouts counted by formula: for every device those it gets and gives, in all or inside its domain.

Regular are layouts on devices numbered on from a first one, where of two counts of parts along one dimension one is a
multiple of the other. All pieces then have one size, and those whom a device serves, or is served by, lie in a
rectangle of the other grid, as its domain of links does: what the two share is counted. Of copies the readers take
turns, but a device that has one reads its own, and these are put right one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from parplan.layout import Grid, IntArray, Layout, own_places

__all__ = ["Flow", "RegularFlows"]


@dataclass(frozen=True, eq=False)
class Flow:
    """Elements and messages that some pieces add up to, by receiver and by sender, shape (devices,) each."""

    received: IntArray
    messages_in: IntArray
    sent: IntArray
    messages_out: IntArray

    @property
    def back(self) -> Flow:
        """The same pieces on their way back."""
        return Flow(self.sent, self.messages_out, self.received, self.messages_in)

    def __sub__(self, other: Flow) -> Flow:
        return Flow(
            self.received - other.received,
            self.messages_in - other.messages_in,
            self.sent - other.sent,
            self.messages_out - other.messages_out,
        )


@dataclass(frozen=True, eq=False)
class RegularFlows:
    """The pieces between two regular layouts, each of which is one element of the tensor that `Traffic` describes."""

    source: Layout
    target: Layout

    @staticmethod
    def of(source: Layout, target: Layout) -> RegularFlows | None:
        """None where the layouts are not regular."""
        first, second, flows = source.cuts, target.cuts, RegularFlows(source, target)
        nested = all(_nest(first[dim], second[dim]) for dim in first.keys() & second.keys())
        numbered = source.grid.first is not None and target.grid.first is not None
        if source.sections is not None or target.sections is not None:
            return None
        return flows if nested and numbered and _nest(flows._copies, target.grid.shards) else None

    def fits(self, size: int | None) -> bool:
        """Whether domains of `size` devices are rectangles of both grids."""
        if size is None:
            return True
        for grid in (self.source.grid, self.target.grid):
            first, shards = grid.first or 0, grid.shards
            covered = first // size == (first + len(grid.devices) - 1) // size
            if not covered and (not _nest(size, shards) or first % min(size, shards)):
                return False
        return True

    def within(self, size: int | None) -> Flow:
        """The pieces between devices of one domain of `size`; None: all."""
        source, target = self.source.grid, self.target.grid
        takers, own, instead = self._own
        if size == 1:
            incoming = np.zeros(len(target.devices), dtype=np.int64)
            outgoing = np.zeros(len(source.devices), dtype=np.int64)
            incoming[takers] = outgoing[own] = 1
            return Flow(incoming, incoming, outgoing, outgoing)
        incoming = self._met.common(_domain(target, source, size)).area
        outgoing = self._turns_taken(_domain(source, target, size))
        same = np.ones_like(takers)
        if size is not None:
            first = source.first or 0, target.first or 0
            same = ((takers + first[1]) // size == (instead + first[0]) // size).astype(np.int64)
        incoming[takers] += 1 - same
        np.add.at(outgoing, own, 1)
        np.subtract.at(outgoing, instead, same)
        return Flow(incoming, incoming, outgoing, outgoing)

    @property
    def _copies(self) -> int:
        """How many devices hold the same."""
        grid = self.source.grid
        rows = 1 if self.source.rows_differ else grid.replicas
        return rows * (1 if self.source.columns_differ else grid.shards)

    @cached_property
    def _met(self) -> _Rectangles:
        """Where those lie in the source's grid whose turn it is to serve each reader."""
        source, reader, grid = self.source, self.target, self.source.grid
        turn = np.arange(len(reader.grid.devices)) % self._copies
        row, column = np.divmod(turn, 1 if source.columns_differ else grid.shards)
        return _Rectangles(
            *(_meets(reader, source.batch_dim, grid.replicas) if source.rows_differ else (row, row + 1)),
            *(_meets(reader, source.shard_dim, grid.shards) if source.columns_differ else (column, column + 1)),
        )

    @cached_property
    def _own(self) -> tuple[IntArray, IntArray, IntArray]:
        """Readers that have what they read, and where in the source's grid they are, and those whose turn it was."""
        source, met = self.source, self._met
        places = own_places(source.grid, self.target.grid)
        row, column = np.divmod(places, source.grid.shards)
        serves = places >= 0
        if source.rows_differ:
            serves &= (met.top <= row) & (row < met.bottom)
        if source.columns_differ:
            serves &= (met.left <= column) & (column < met.right)
        instead = (row if source.rows_differ else met.top) * source.grid.shards
        instead = instead + (column if source.columns_differ else met.left)
        (takers,) = serves.nonzero()
        return takers, places[takers], instead[takers]

    def _turns_taken(self, domain: _Rectangles) -> IntArray:
        """For every device of the source, how many in `domain` of those that read its block have their turn there."""
        source, reader, target = self.source, self.target, self.target.grid
        row, column = np.divmod(np.arange(len(source.grid.devices)), source.grid.shards)
        turn = np.zeros_like(row) if source.rows_differ else row
        turn = turn if source.columns_differ else turn * source.grid.shards + column
        readers = _Rectangles(
            *_meets(source, reader.batch_dim, target.replicas), *_meets(source, reader.shard_dim, target.shards)
        ).common(domain)
        if self._copies == 1:
            return readers.area
        if target.shards % self._copies == 0:
            return readers.height * _every(readers.left, readers.right, self._copies, turn)
        here = (readers.left <= turn % target.shards) & (turn % target.shards < readers.right)
        return here * _every(readers.top, readers.bottom, self._copies // target.shards, turn // target.shards)


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
    def height(self) -> IntArray:
        found: IntArray = np.maximum(self.bottom - self.top, 0)
        return found

    @property
    def area(self) -> IntArray:
        found: IntArray = self.height * np.maximum(self.right - self.left, 0)
        return found


def _meets(layout: Layout, dim: int | None, parts: int) -> tuple[IntArray, IntArray]:
    """First and end of the `parts` of `dim` that each device's block meets: all where it has all of `dim`."""
    grid, own = layout.grid, layout.cuts.get(dim, 0) if dim is not None else 0
    return _meets_parts(len(grid.devices), grid.shards, dim == layout.batch_dim, own, parts)


@lru_cache(maxsize=10_000)
def _meets_parts(count: int, shards: int, by_row: bool, own: int, parts: int) -> tuple[IntArray, IntArray]:
    if own == 0:
        return np.zeros(count, dtype=np.int64), np.full(count, parts)
    row, column = np.divmod(np.arange(count), shards)
    begin = (row if by_row else column) * parts // own
    return begin, begin + max(1, parts // own)


def _domain(grid: Grid, other: Grid, size: int | None) -> _Rectangles:
    """Where the domain of each device of `grid` lies in `other`."""
    return _domain_in(grid.first or 0, len(grid.devices), other.first or 0, other.replicas, other.shards, size)


@lru_cache(maxsize=10_000)
def _domain_in(first: int, count: int, other: int, replicas: int, shards: int, size: int | None) -> _Rectangles:
    if size is None:
        zero = np.zeros(1, dtype=np.int64)
        return _Rectangles(zero, zero + replicas, zero, zero + shards)
    begin = (np.arange(count) + first) // size * size - other
    begin, end = (np.minimum(np.maximum(edge, 0), replicas * shards) for edge in (begin, begin + size))
    if size >= shards:
        return _Rectangles(begin // shards, -(-end // shards), np.zeros_like(begin), np.full_like(begin, shards))
    top, left = np.divmod(begin, shards)
    return _Rectangles(top, -(-end // shards), left, left + end - begin)


def _every(begin: IntArray, end: IntArray, step: int, offset: IntArray) -> IntArray:
    """Numbers from `begin` to `end` (excluded) that are `offset` and a multiple of `step`."""
    return np.maximum((end - 1 - offset) // step - (begin - 1 - offset) // step, 0)


def _nest(one: int, other: int) -> bool:
    return max(one, other) % min(one, other) == 0
