"""The pieces of a change of layout, device by device and block by block: slow, and written down only once more.

`parplan.layout` works them out with arrays, and the planner adds them up by formula; both are compared with this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise, product
from random import Random

from parplan.layout import (
    Block,
    Extent,
    Grid,
    Layout,
    Piece,
    Range,
    Ranges,
    Sections,
    intervals,
    region_of,
    split_evenly,
)

__all__ = ["in_sections", "random_layout", "random_rows", "slow_elements", "slow_pieces", "slow_region"]


def _section_extent(size: int, layout: Layout, column: int) -> Extent:
    """A shard's part of every section, index by index."""
    assert layout.sections is not None
    unit, start, found = size // layout.sections.total, 0, list[int]()
    for relative, most in zip(layout.sections.sizes, layout.sections.limits, strict=True):
        length, parts = relative * unit, min(most, layout.grid.shards) if most else layout.grid.shards
        part = column // (layout.grid.shards // parts)
        found += range(start + part * (length // parts), start + (part + 1) * (length // parts))
        start += length
    cuts = [0, *(i for i in range(1, len(found)) if found[i] != found[i - 1] + 1), len(found)]
    ranges = [Range(found[i], found[j - 1] + 1) for i, j in pairwise(cuts)]
    return ranges[0] if len(ranges) == 1 else Ranges(tuple(ranges))


def slow_region(shape: Sequence[int], layout: Layout, place: int, rows: Sequence[int] | None) -> Block:
    row, column = divmod(place, layout.grid.shards)
    extents: list[Extent] = [Range(0, size) for size in shape]
    for dim, index, parts, sizes in (
        (layout.batch_dim, row, layout.grid.replicas, rows),
        (layout.shard_dim, column, layout.grid.shards, None),
    ):
        if dim is not None:
            stops = list(accumulate(sizes if sizes is not None else split_evenly(shape[dim], parts), initial=0))
            extents[dim] = Range(stops[index], stops[index + 1])
    if layout.sections is not None and layout.shard_dim is not None:
        extents[layout.shard_dim] = _section_extent(shape[layout.shard_dim], layout, column)
    return tuple(extents)


def _holders(layout: Layout) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A place that stands for each block (or term), and the devices that hold it."""
    grid = layout.grid
    rows_differ, columns_differ = layout.batch_dim is not None, layout.shard_dim is not None or layout.partial
    for row in range(grid.replicas if rows_differ else 1):
        for column in range(grid.shards if columns_differ else 1):
            rows = (row,) if rows_differ else range(grid.replicas)
            columns = (column,) if columns_differ else range(grid.shards)
            holders = tuple(grid.devices[r * grid.shards + c] for r, c in product(rows, columns))
            yield row * grid.shards + column, holders


def slow_pieces(
    shape: Sequence[int],
    source: Layout,
    target: Layout,
    source_rows: Sequence[int] | None = None,
    target_rows: Sequence[int] | None = None,
) -> list[Piece]:
    """As `parplan.layout.pieces`."""
    found = []
    for turn, device in enumerate(target.grid.devices):
        wanted = region_of(slow_region(shape, target, turn, target_rows))
        for place, holders in _holders(source):
            block = region_of(slow_region(shape, source, place, source_rows))
            common = [a.intersection(b) for a, b in zip(block, wanted, strict=True)]
            if all(len(extent) > 0 for extent in common):
                giver = device if device in holders else holders[turn % len(holders)]
                local = [
                    tuple(extent.shifted(-outer.start) for extent, outer in zip(common, within, strict=True))
                    for within in (block, wanted)
                ]
                found.append(Piece(giver, device, local[0], local[1]))
    return found


def slow_elements(shape: Sequence[int], source: Layout, target: Layout) -> Counter[tuple[int, int]]:
    """How many elements go from which device to which, index by index; sections or not."""
    held = {d: _indices(slow_region(shape, source, place, None)) for place, d in enumerate(source.grid.devices)}
    found = Counter[tuple[int, int]]()
    for turn, device in enumerate(target.grid.devices):
        for index in _indices(slow_region(shape, target, turn, None)):
            for term in range(source.grid.shards if source.partial else 1):
                holders = [d for p, d in enumerate(source.grid.devices) if index in held[d] and _has(source, p, term)]
                found[device if device in holders else holders[turn % len(holders)], device] += 1
    return found


def _has(layout: Layout, place: int, term: int) -> bool:
    return not layout.partial or place % layout.grid.shards == term


def _indices(block: Block) -> set[tuple[int, ...]]:
    return set(product(*(chain.from_iterable(range(i.start, i.stop) for i in intervals(e)) for e in block)))


def random_layout(random: Random, devices: int, rank: int, partial: bool, regular: bool) -> Layout:
    """A layout of a tensor of so many dimensions on some of `devices`.

    Args:
        partial: whether it may be a sum of terms.
        regular: on neighbours, with counts of parts that are powers of two; else on any, in any order.
    """
    if regular:
        counts = [1 << bit for bit in range(devices.bit_length())]
        replicas = random.choice(counts)
        shards = random.choice([count for count in counts if replicas * count <= devices])
        first = random.choice([0, random.randrange(devices - replicas * shards + 1)])
        places = list(range(first, first + replicas * shards))
    else:
        replicas = random.randint(1, devices)
        shards = random.randint(1, devices // replicas)
        places = random.sample(range(devices), replicas * shards)
        if random.random() < 0.6:
            places = sorted(places)
    batch = random.choice([None, *range(rank)])
    is_sum = partial and random.random() < 0.3
    shard = None if is_sum else random.choice([None, *(dim for dim in range(rank) if dim != batch)])
    return Layout(Grid(tuple(places), replicas, shards), batch, shard, is_sum)


def in_sections(random: Random, layout: Layout) -> Layout:
    """The layout with its shards' dimension cut in sections, some of which neighbours share; often as it is."""
    if layout.shard_dim is None or random.random() < 0.2:
        return layout
    shards, count = layout.grid.shards, random.randint(1, 3)
    shared = [most for most in range(1, shards) if shards % most == 0]
    most = [random.choice([0, 0, *shared]) for _ in range(count)]
    return replace(layout, sections=Sections.of([random.choice([1, 1, 2, 4]) for _ in range(count)], most))


def random_rows(random: Random, layout: Layout, shape: Sequence[int]) -> list[int] | None:
    """Uneven rows, some of them empty; None for even ones."""
    if layout.batch_dim is None or random.random() < 0.5:
        return None
    size = shape[layout.batch_dim]
    stops = sorted(random.randint(0, size) for _ in range(layout.grid.replicas - 1))
    return [after - before for before, after in zip([0, *stops], [*stops, size], strict=True)]
