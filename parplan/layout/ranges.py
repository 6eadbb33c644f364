"""Blocks of tensors: per dimension one interval of indices, or several where sections of it are cut by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

__all__ = [
    "Block", "Extent", "Range", "Ranges", "Region", "disjoint", "extent_of", "intervals", "located", "region_of",
    "regions_of", "shape_of", "whole_block", "within",
]  # fmt: skip


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


@dataclass(frozen=True)
class Ranges:
    """Several intervals along one dimension, apart and in order; a block holds their indices one after another."""

    parts: tuple[Range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def shifted(self, by: int) -> Ranges:
        """The same indices counted from another origin."""
        return Ranges(tuple(part.shifted(by) for part in self.parts))


Region = tuple[Range, ...]
"""A block that is one interval along every dimension: a view of the tensor."""

Extent = Range | Ranges
Block = tuple[Extent, ...]
"""What a device holds of a tensor; along a dimension of sections, one interval of each."""


def extent_of(ranges: Sequence[Range]) -> Extent:
    """Intervals in order, those that follow each other joined.

    >>> extent_of([Range(0, 2), Range(2, 4)])
    Range(start=0, stop=4)
    """
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(ranges), 1) if a.stop != b.start), len(ranges)]
    joined = [Range(ranges[i].start, ranges[j - 1].stop) for i, j in pairwise(starts)]
    return joined[0] if len(joined) == 1 else Ranges(tuple(joined))


def intervals(extent: Extent) -> tuple[Range, ...]:
    """The intervals of an extent."""
    return extent.parts if isinstance(extent, Ranges) else (extent,)


def shape_of(block: Block) -> tuple[int, ...]:
    """Shape of a block."""
    return tuple(len(extent) for extent in block)


def whole_block(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return tuple(Range(0, size) for size in shape)


def regions_of(block: Block) -> Iterator[tuple[Region, Region]]:
    """The regions that make up a block: each in the whole tensor, and in the block itself."""
    pairs = []
    for extent in block:
        found, before = [], 0
        for part in intervals(extent):
            found.append((part, Range(before, before + len(part))))
            before += len(part)
        pairs.append(found)
    for chosen in product(*pairs):
        yield tuple(outer for outer, _ in chosen), tuple(inner for _, inner in chosen)


def region_of(block: Block) -> Region:
    """A block as one region, where a view of the tensor is needed.

    Raises:
        ValueError: it has sections.
    """
    found = tuple(extent for extent in block if isinstance(extent, Range))
    if len(found) < len(block):
        raise ValueError(f"{block} is cut in sections, of which there is no view; pin its layer to one shard")
    return found


def within(block: Block, held: Block) -> Block:
    """`block` counted in `held`, which is the same block or one without sections.

    Raises:
        ValueError: `held` has sections and is another block.
    """
    if block == held:
        return whole_block(shape_of(block))
    return tuple(extent.shifted(-_start(outer)) for extent, outer in zip(block, held, strict=True))


def located(inner: Block, held: Block) -> Block:
    """A block given in `held`, in the whole tensor: the reverse of `within`.

    Raises:
        ValueError: `held` has sections and `inner` is not all of it.
    """
    if inner == whole_block(shape_of(held)):
        return held
    return tuple(extent.shifted(_start(outer)) for extent, outer in zip(inner, held, strict=True))


def _start(extent: Extent) -> int:
    if isinstance(extent, Ranges):
        raise ValueError(f"a part of {extent}, which is cut in sections, has no place of its own")
    return extent.start


def disjoint(blocks: Iterable[Block]) -> bool:
    """Whether no two of `blocks` overlap."""
    return all(any(_apart(x, y) for x, y in zip(a, b, strict=True)) for a, b in combinations(blocks, 2))


def _apart(one: Extent, other: Extent) -> bool:
    pairs = product(intervals(one), intervals(other))
    return all(min(a.stop, b.stop) <= max(a.start, b.start) for a, b in pairs)
