"""Pieces between layouts on powers of two, counted by the binary digits of device numbers.

With grids, blocks and domains of powers of two, the digits of a device's number are the digits of its row and column
and of its domains. Which device reads from which is then a set of equations between single digits: a digit of the
giver's row or column is one of the taker's (the part of a dimension that both cut, or whose turn it is to serve a
copy), and devices of one domain have equal upper digits. Solutions are counted by joining digits that are equal: a
power of two, or none. So a transfer among 16,384 devices costs as much as one among 16, and many are counted at once.

Of the pairs of a giver and a taker, E are those whose turn it is; a taker that has what it reads is served by itself
instead, in place of one pair (I). Inside domains, both lose the pairs across; the pairs put in place of I are those of
devices with themselves. All units of one size (devices, or domains) that have pairs of a set have equally many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parplan.cost_models.communication.flows import Flows
from parplan.cost_models.communication.regular_flows import copies
from parplan.layout import IntArray, Layout

__all__ = ["BinaryFlows", "binary"]

Labels = NDArray[np.int8]
"""Of the constants 0 and 1, the giver's and the taker's digits from the lowest, shape (2 + 2 x digits, pairs): equal
where the digits are, and the lowest row of those that are."""


def binary(source: Layout, target: Layout, sizes: Sequence[int]) -> bool:
    """Whether what moves between two regular layouts over domains of these sizes can be counted by digits."""
    ends = [0, 0]
    for place, grid in enumerate((source.grid, target.grid)):
        first, count = grid.first or 0, len(grid.devices)
        if not (_is_power(grid.replicas) and _is_power(grid.shards)) or first % count:
            return False
        ends[place] = first + count
    return all(_is_power(size) or size >= max(ends) for size in sizes)


class BinaryFlows(Flows):
    """The pieces between pairs of layouts that are `binary`, each one element of the tensor of its `Traffic`."""

    def __init__(self, pairs: Sequence[tuple[Layout, Layout]]) -> None:
        grids = [grid for pair in pairs for grid in (pair[0].grid, pair[1].grid)]
        self._last = max((grid.first or 0) + len(grid.devices) for grid in grids) - 1
        self.digits = self._last.bit_length()
        base = np.empty((2 + 2 * self.digits, len(pairs)), dtype=np.int8)
        base[:] = np.arange(len(base))[:, None]
        reads = base[2 : 2 + self.digits].copy()
        turns = np.zeros(reads.shape, dtype=bool)
        for number, (source, target) in enumerate(pairs):
            for begin, grid in ((2, source.grid), (2 + self.digits, target.grid)):
                for digit in range(_log(len(grid.devices)), self.digits):
                    base[begin + digit, number] = (grid.first or 0) >> digit & 1
            for digit, other in _equal_digits(source, target):
                reads[digit, number] = 2 + self.digits + other
            for digit, other in _turn_digits(source):
                known = other < _log(len(target.grid.devices))
                reads[digit, number] = 2 + self.digits + other if known else 0
                turns[digit, number] = True
        self._turn = base
        for digit in range(self.digits):
            self._turn = _joined(self._turn, 2 + digit, reads[digit])
        self._instead = self._turn
        for digit in range(self.digits):
            own = np.where(turns[digit], 2 + digit, 2 + self.digits + digit)
            self._instead = _joined(self._instead, 2 + digit, own)
        self._known: dict[tuple[bool, int | None], Labels] = {}
        self._found: dict[tuple[int, int | None, int], tuple[IntArray, IntArray]] = {}

    @property
    def last(self) -> int:
        return self._last

    @property
    def pieces(self) -> IntArray:
        return _power(_free(self._turn[2:]) - _free(self._turn[2 + self.digits :]))

    def elements(self, inner: int, outer: int | None, unit: int = 1) -> tuple[IntArray, IntArray]:
        if (inner, outer, unit) not in self._found:
            systems = [self._inside(instead, size) for instead in (False, True) for size in (outer, inner)]
            begin = min(_log(unit), self.digits)
            received, sent = (
                _most(systems, slice(side + begin, side + self.digits), unit == 1) for side in (2 + self.digits, 2)
            )
            self._found[inner, outer, unit] = received, sent
        return self._found[inner, outer, unit]

    def messages(self, inner: int, outer: int | None) -> IntArray:
        return np.maximum(*self.elements(inner, outer))

    def message(self, inner: int, outer: int | None) -> NDArray[np.float64]:
        return np.minimum(self.messages(inner, outer), 1).astype(np.float64)

    def _inside(self, instead: bool, size: int | None) -> Labels:
        """E, or I, of devices in one domain of `size`."""
        if (instead, size) not in self._known:
            labels = self._instead if instead else self._turn
            for digit in range(_log(size) if size is not None else self.digits, self.digits):
                labels = _joined(labels, 2 + digit, np.full(labels.shape[1], 2 + self.digits + digit))
            self._known[instead, size] = labels
        return self._known[instead, size]


def _most(systems: Sequence[Labels], kept: slice, devices: bool) -> IntArray:
    """By transfer, the most pairs of E and of those in place of I that one unit has inside the outer domain alone.

    Args:
        systems: E in the outer domain, E in the inner one, I in both.
        kept: rows of the digits that tell units apart.
        devices: units are devices; these have pairs of I in the inner domain where they have some of E there and of I.
    """
    units, each = zip(*(_units(labels, kept) for labels in systems), strict=True)
    near, far_own = systems[1], systems[2]
    every, inside, replaced, replaced_inside = units
    both = replaced_inside if devices else _units(_both(far_own, near, kept), kept)[0]
    total, less, own, own_inside = each
    found = np.zeros(near.shape[1], dtype=np.int64)
    for some, amount in (
        (every - inside - replaced + both, total),
        (replaced - both, total - own),
        (inside - both, total - less),
        (both - replaced_inside, total - own - less),
        (replaced_inside, total - own - less + own_inside),
    ):
        found = np.where(some > 0, np.maximum(found, amount), found)
    return found


def _equal_digits(source: Layout, target: Layout) -> list[tuple[int, int]]:
    """Digits of the giver's place that have to be digits of the taker's: of the parts of dimensions that both cut."""
    found = []
    for dim in source.cuts.keys() & target.cuts.keys():
        ends = [
            (_log(layout.grid.shards), _log(layout.cuts[dim]), dim == layout.batch_dim) for layout in (source, target)
        ]
        common = min(parts for _, parts, _ in ends)
        tops = [columns + parts if by_rows else parts for columns, parts, by_rows in ends]
        found += [(tops[0] - 1 - place, tops[1] - 1 - place) for place in range(common)]
    return found


def _turn_digits(source: Layout) -> list[tuple[int, int]]:
    """Digits of the giver's place among copies, and the taker's digits whose turn it is there."""
    rows, columns = (_log(count) for count in copies(source))
    shards = _log(source.grid.shards)
    return [(digit, digit) for digit in range(columns)] + [(shards + digit, columns + digit) for digit in range(rows)]


# ---- equations between digits ----


def _joined(labels: Labels, row: int, others: NDArray[np.integer]) -> Labels:
    """With one more equation: the digit of `row` is, in each pair, that of the row in `others`."""
    one, other = labels[row], labels[others, np.arange(labels.shape[1])]
    low, high = np.minimum(one, other), np.maximum(one, other)
    found: Labels = np.where(labels == high, low, labels)
    return found


def _both(labels: Labels, other: Labels, kept: slice) -> Labels:
    """The equations of one, and those that the other implies between the rows kept."""
    more = np.arange(len(labels), 2 * len(labels), dtype=np.int8)
    more[:2] = 0, 1
    found = np.concatenate([labels, np.repeat(more[:, None], labels.shape[1], axis=1)])
    # Without solutions, the other says that 0 is 1.
    found = _joined(found, 1, other[1].astype(np.int64))
    for row in range(kept.start, kept.stop):
        found = _joined(found, row, len(labels) + other[row].astype(np.int64))
    return found[: len(labels)]


def _units(labels: Labels, kept: slice) -> tuple[IntArray, IntArray]:
    """How many values the digits of the rows kept take, and how many solutions have each of them."""
    possible = labels[1] == 1
    some = _free(labels[kept])
    return np.where(possible, _power(some), 0), np.where(possible, _power(_free(labels[2:]) - some), 0)


def _free(labels: Labels) -> IntArray:
    """How many digits can be chosen."""
    if not len(labels):
        return np.zeros(labels.shape[1], dtype=np.int64)
    ordered = np.sort(labels, axis=0)
    first = np.concatenate([ordered[:1] > 1, (ordered[1:] != ordered[:-1]) & (ordered[1:] > 1)])
    counts: IntArray = first.sum(axis=0)
    return counts


def _power(digits: IntArray) -> IntArray:
    found: IntArray = np.left_shift(1, digits)
    return found


def _log(count: int) -> int:
    return count.bit_length() - 1


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0
