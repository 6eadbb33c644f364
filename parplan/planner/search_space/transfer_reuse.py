"""Reuse of transfers: a value is moved once per layout, however many layers read it (lowering/placement.py).

The first reader of a value pays for its transfer. For every later one that may want it in the same layout as an earlier
one, the problem has one more node: an option of it is what the reader wants, with the first reader before that wants
the same, whose transfer is reused, or none. The readers' options fix it:

    maker - node             seconds of the transfer, counted at the reader; 0 where another one is reused
    reader - node            the option is what the reader wants
    earlier reader - node    it wants the same where its transfer is reused, something else where a later one's or none

Of a value with more than `EVERY_READER` readers only some earlier ones are looked at, where they have a choice: T may
then count a transfer twice. Of a given plan, each layer of which wants one layout, all are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parplan.layout import Layout
from parplan.planner.search_space.step_time import EdgeParts, NodeParts
from parplan.planner.solver.problem import FloatArray

__all__ = ["Read", "TransferReuse", "reuses"]

EVERY_READER = 3
"""Readers of a value up to which each may reuse the transfer of any earlier one."""

Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Read:
    """A value that a node reads.

    Args:
        value: its name.
        reader: the node.
        wants: per option, the layout and whether one pass's samples: both have to be equal for a transfer to be reused.
        groups: per option, what else its role in the plan depends on.
        first: the node of the reader's copy in the first of equal blocks, if it has one.
    """

    value: str
    reader: int
    wants: Sequence[tuple[Layout, bool]]
    groups: Sequence[Hashable]
    first: int | None = None


@dataclass(frozen=True, eq=False)
class TransferReuse:
    """The node that says, for a later reader of a value, whose transfer is reused.

    Args:
        node: its place.
        earlier: readers whose transfers may be reused, in order.
        wanted: per option of each of them and of the reader, a number for what is wanted.
        group: per option of the reader, a number for what it wants and needs besides.
        standing: per option of the node, the reader's option that stands for it.
        source: per option of the node, the place in `earlier` of the reader whose transfer is reused; behind the last
            where the value is moved.
    """

    node: int
    value: str
    reader: int
    earlier: tuple[int, ...]
    wanted: tuple[Ints, ...]
    group: Ints
    standing: Ints
    source: Ints

    @property
    def moved(self) -> FloatArray:
        """1 for every option in which the value is moved, else 0."""
        return np.where(self.source == len(self.earlier), 1.0, 0.0)

    def option(self, choice: Sequence[int | Ints]) -> int | Ints:
        """The option that follows from the readers' options; of several choices at once where some are arrays."""
        own, source = self.wanted[-1][choice[self.reader]], np.array(len(self.earlier))
        for place in range(len(self.earlier) - 1, -1, -1):
            source = np.where(self.wanted[place][choice[self.earlier[place]]] == own, place, source)
        table = np.full((self.group.max() + 1, len(self.earlier) + 1), -1)
        table[self.group[self.standing], self.source] = np.arange(len(self.source))
        found: Ints = table[self.group[choice[self.reader]], source]
        return found if found.ndim else int(found)

    def edges(self) -> Iterator[EdgeParts]:
        """Edges that fix it by the options of the reader and of the earlier ones."""
        own = self.wanted[-1][self.standing]
        allowed = {self.reader: np.equal.outer(self.group, self.group[self.standing])}
        for place, (other, wanted) in enumerate(zip(self.earlier, self.wanted, strict=False)):
            same = np.equal.outer(wanted, own)
            allowed[other] = np.where(self.source == place, same, (self.source < place) | ~same)
        for other, pairs in allowed.items():
            zero = np.zeros(pairs.shape)
            yield EdgeParts(other, self.node, np.where(pairs, 0.0, np.inf), (zero, zero))

    def parts(self, reader: NodeParts, arrival_s: FloatArray, in_passes: NDArray[np.bool_]) -> NodeParts:
        """Its seconds: of a value that the user brings its arrival, per option of the reader."""
        own, inside = NodeParts.alone(np.zeros(len(self.standing)), len(reader.lanes)), in_passes[self.standing]
        seconds = self.moved * arrival_s[self.standing]
        return replace(
            own,
            arrival_s=np.where(inside, 0.0, seconds),
            samples_in_s=np.where(inside, seconds, 0.0),
            lanes=reader.lanes[:, self.standing],
            beside=None if reader.beside is None else reader.beside[:, self.standing],
            order=None if reader.order is None else reader.order[:, self.standing],
        )


def reuses(reads: Sequence[Read], begin: int) -> dict[tuple[int, str], TransferReuse]:
    """The nodes for all reads that may reuse a transfer, by reader and value, numbered from `begin`.

    Args:
        reads: in forward order.
    """
    by_value: dict[str, list[Read]] = {}
    for read in reads:
        by_value.setdefault(read.value, []).append(read)
    found: dict[tuple[int, str], TransferReuse] = {}
    for value, readers in by_value.items():
        for place, read in enumerate(readers):
            some = _looked_at(readers, place)
            if any(set(read.wants) & set(other.wants) for other in some):
                found[read.reader, value] = _reuse(read, some, begin + len(found))
    return found


def _looked_at(readers: Sequence[Read], place: int) -> list[Read]:
    """The readers before one whose transfers it may reuse."""
    before, own = readers[:place], readers[place]
    if len(readers) <= EVERY_READER:
        return list(before)
    return [
        other for other in before
        if other is before[0] or other.reader == own.first or len({layout for layout, _ in other.wants}) == 1
    ]  # fmt: skip


def _reuse(read: Read, earlier: Sequence[Read], node: int) -> TransferReuse:
    numbers: dict[Hashable, int] = {}
    wanted = [np.array([numbers.setdefault(one, len(numbers)) for one in own.wants]) for own in (*earlier, read)]
    groups: dict[Hashable, int] = {}
    group = np.array([groups.setdefault(one, len(groups)) for one in zip(read.wants, read.groups, strict=True)])
    options: list[tuple[int, int]] = []
    for first in (int(np.flatnonzero(group == number)[0]) for number in range(len(groups))):
        own = wanted[-1][first]
        for place, one in enumerate(wanted[:-1]):
            if (one == own).any():
                options.append((first, place))
            if (one == own).all():
                break
        else:
            options.append((first, len(earlier)))
    standing, source = np.array(options).T
    used = sorted(set(source.tolist()) - {len(earlier)})
    others, kept = tuple(earlier[place].reader for place in used), tuple(wanted[place] for place in (*used, -1))
    return TransferReuse(
        node, read.value, read.reader, others, kept, group, standing, np.searchsorted([*used, len(earlier)], source)
    )
