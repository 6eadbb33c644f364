"""Pieces move a tensor from any layout to any other, and read backwards they are the transposed transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parplan.layout import (
    Block,
    Grid,
    Layout,
    Piece,
    Range,
    Ranges,
    Region,
    Sections,
    block_shapes,
    in_place,
    intervals,
    pieces,
    region_of,
    regions,
    regions_of,
    shape_of,
    split_evenly,
)  # fmt: skip
from tests.slow_layout import in_sections, random_layout, random_rows, slow_elements, slow_pieces, slow_region

Blocks = Mapping[int, NDArray[np.int64]]
GRID = Grid((4, 2, 7, 1, 0, 5), replicas=3, shards=2)


def test_a_grid_is_read_row_by_row() -> None:
    assert [GRID.row(row) for row in range(3)] == [(4, 2), (7, 1), (0, 5)]
    assert [GRID.column(column) for column in range(2)] == [(4, 7, 0), (2, 1, 5)]
    assert [GRID.position(device) for device in GRID.devices] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(GRID.device(*GRID.position(device)) == device for device in GRID.devices)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid((0, 1, 2), 2, 2), "2 x 2 does not arrange 3 devices"),
        (lambda: Layout(GRID, 0, 1, partial=True), "a partial sum is not cut"),
        (lambda: Layout(GRID, 0, 0), "one dimension cannot be cut by replicas and by shards"),
        (lambda: pieces((4,), Layout(GRID, 0), Layout(GRID, 0, partial=True)), "nothing is ever sent to become"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_splits_have_the_sizes_of_numpy(size: int, parts: int) -> None:
    found = split_evenly(size, parts)
    assert sorted(found) == sorted(len(part) for part in np.array_split(np.arange(size), parts))
    assert found[0] == max(found)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_parts_of_an_even_split_put_together_are_an_even_split(size: int, groups: int, each: int) -> None:
    parts = split_evenly(size, groups * each)
    together = tuple(sum(parts[begin : begin + each]) for begin in range(0, len(parts), each))
    assert together == split_evenly(size, groups)


@pytest.mark.parametrize(
    ("layout", "row", "column", "expected"),
    [
        (Layout(GRID, None), 1, 1, (Range(0, 7), Range(0, 4))),
        (Layout(GRID, 0), 0, 1, (Range(0, 3), Range(0, 4))),
        (Layout(GRID, 0, 1), 2, 1, (Range(5, 7), Range(2, 4))),
        (Layout(GRID, 1, 0), 2, 0, (Range(0, 4), Range(3, 4))),
        (Layout(GRID, 0, partial=True), 1, 1, (Range(3, 5), Range(0, 4))),
    ],
)
def test_regions(layout: Layout, row: int, column: int, expected: Region) -> None:
    assert regions((7, 4), layout)[layout.grid.device(row, column)] == expected


def test_rows_may_be_uneven_and_empty() -> None:
    blocks = regions((7, 4), Layout(GRID, 0), [5, 0, 2])
    assert [blocks[GRID.device(row, 0)][0] for row in range(3)] == [Range(0, 5), Range(5, 5), Range(5, 7)]


# --- any layout to any other -----------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A tensor's shape, and how it lies before and after."""

    shape: tuple[int, ...]
    source: Layout
    target: Layout
    source_rows: tuple[int, ...] | None
    target_rows: tuple[int, ...] | None


@st.composite
def layouts(draw: st.DrawFn, rank: int, partial: bool) -> Layout:
    replicas, shards = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (2, 3), (3, 2), (4, 1)]))
    devices = draw(st.permutations(range(8)))[: replicas * shards]
    dims: list[int | None] = [None, *range(rank)]
    batch = draw(st.sampled_from(dims))
    if partial and draw(st.booleans()):
        return Layout(Grid(tuple(devices), replicas, shards), batch, None, partial=True)
    shard = draw(st.sampled_from([dim for dim in dims if dim is None or dim != batch]))
    return Layout(Grid(tuple(devices), replicas, shards), batch, shard)


@st.composite
def row_sizes(draw: st.DrawFn, layout: Layout, shape: Sequence[int]) -> tuple[int, ...] | None:
    if layout.batch_dim is None or draw(st.booleans()):
        return None
    size = shape[layout.batch_dim]
    stops = sorted(draw(st.lists(st.integers(0, size), min_size=layout.grid.replicas - 1, max_size=8)))
    edges = [0, *stops[: layout.grid.replicas - 1], size]
    return tuple(stop - start for start, stop in pairwise(edges))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    source, target = draw(layouts(len(shape), partial=True)), draw(layouts(len(shape), partial=False))
    return Case(shape, source, target, draw(row_sizes(source, shape)), draw(row_sizes(target, shape)))


def places(layout: Layout, shape: Sequence[int], rows: Sequence[int] | None) -> dict[int, Region]:
    return {device: region_of(block) for device, block in regions(shape, layout, rows).items()}


def slices(block: Region) -> tuple[slice, ...]:
    return tuple(slice(extent.start, extent.stop) for extent in block)


def moved(found: Sequence[Piece], sources: Blocks, targets: Mapping[int, Region]) -> Blocks:
    """`target[slices] += source[slices]`, from zeros."""
    made = {device: np.zeros([len(extent) for extent in block], np.int64) for device, block in targets.items()}
    for piece in found:
        made[piece.target][slices(piece.target_region)] += sources[piece.source][slices(piece.source_region)]
    return made


def whole_tensor(shape: Sequence[int]) -> NDArray[np.int64]:
    return np.random.randint(-9, 10, shape)


def random_blocks(regions: Mapping[int, Region]) -> Blocks:
    return {device: whole_tensor([len(extent) for extent in block]) for device, block in regions.items()}


def held(case: Case, whole: NDArray[np.int64]) -> Blocks:
    """Blocks of `whole` on the source's devices; terms of it, alike in every row, for a partial sum."""
    found = places(case.source, case.shape, case.source_rows)
    blocks = {device: whole[slices(block)] for device, block in found.items()}
    if not case.source.partial:
        return blocks
    grid = case.source.grid
    terms = [whole_tensor(case.shape) for _ in range(grid.shards - 1)]
    terms.append(whole - sum(terms, np.zeros_like(whole)))
    return {device: terms[grid.position(device)[1]][slices(block)] for device, block in found.items()}


@given(cases())
def test_pieces_reproduce_the_tensor(case: Case) -> None:
    whole = whole_tensor(case.shape)
    found = pieces(case.shape, case.source, case.target, case.source_rows, case.target_rows)
    targets = places(case.target, case.shape, case.target_rows)
    made = moved(found, held(case, whole), targets)
    assert {device: block.tolist() for device, block in made.items()} == {
        device: whole[slices(block)].tolist() for device, block in targets.items()
    }


@given(cases())
def test_reversed_pieces_are_the_adjoint(case: Case) -> None:
    found = pieces(case.shape, case.source, case.target, case.source_rows, case.target_rows)
    sources = places(case.source, case.shape, case.source_rows)
    targets = places(case.target, case.shape, case.target_rows)
    x, y = random_blocks(sources), random_blocks(targets)
    there = moved(found, x, targets)
    back = moved([piece.reversed() for piece in found], y, sources)
    forward = sum(int((there[device] * y[device]).sum()) for device in targets)
    assert forward == sum(int((back[device] * x[device]).sum()) for device in sources)


@pytest.mark.full
@given(cases())
def test_a_device_that_has_what_it_needs_serves_itself(case: Case) -> None:
    found = pieces(case.shape, case.source, case.target, case.source_rows, case.target_rows)
    sources = places(case.source, case.shape, case.source_rows)
    for device, wanted in places(case.target, case.shape, case.target_rows).items():
        has = device in sources and all(o.intersection(w) == w for o, w in zip(sources[device], wanted, strict=True))
        if has and not case.source.partial:
            assert {piece.source for piece in found if piece.target == device} <= {device}


@given(cases())
def test_pieces_are_not_empty_and_always_the_same(case: Case) -> None:
    found = pieces(case.shape, case.source, case.target, case.source_rows, case.target_rows)
    assert all(piece.elements > 0 for piece in found)
    assert all([len(a) for a in piece.source_region] == [len(b) for b in piece.target_region] for piece in found)
    assert found == pieces(case.shape, case.source, case.target, case.source_rows, case.target_rows)


def test_copies_are_read_from_different_devices_in_turn() -> None:
    source = Layout(Grid((0, 1), 2, 1), None)
    target = Layout(Grid((2, 3, 4, 5), 4, 1), None)
    assert [piece.source for piece in pieces((3,), source, target)] == [0, 1, 0, 1]


@pytest.mark.parametrize("regular", [True, False])
def test_pieces_and_regions_are_those_of_the_slow_way(regular: bool) -> None:
    for seed in range(150):
        random = Random(seed)
        shape = [random.choice([0, 1, 2, 3, 5, 6, 8, 16, 17, 40]) for _ in range(random.randint(1, 3))]
        source, target = (random_layout(random, 16, len(shape), partial, regular) for partial in (True, False))
        rows = [random_rows(random, layout, shape) for layout in (source, target)]
        assert pieces(shape, source, target, *rows) == slow_pieces(shape, source, target, *rows)
        for layout, own in zip((source, target), rows, strict=True):
            expected = {d: slow_region(shape, layout, place, own) for place, d in enumerate(layout.grid.devices)}
            assert regions(shape, layout, own) == expected


# --- sections ---------------------------------------------------------------------------------

PACKED = Sections.of((8, 2, 2))
assert PACKED is not None
FOUR = Grid((0, 1, 2, 3), 1, 4)


def test_a_shard_holds_its_part_of_every_section() -> None:
    two = Grid((0, 1), 1, 2)
    blocks = regions((12,), Layout(two, None, 0, sections=PACKED))
    assert blocks[0] == (Ranges((Range(0, 4), Range(8, 9), Range(10, 11))),)
    assert blocks[1] == (Ranges((Range(4, 8), Range(9, 10), Range(11, 12))),)
    assert block_shapes((12,), Layout(two, None, 0, sections=PACKED)).tolist() == [[6, 6]]


def test_neighbours_share_what_there_are_not_enough_of() -> None:
    shared = Sections.of((8, 2, 2), (0, 2, 2))
    blocks = regions((12,), Layout(FOUR, None, 0, sections=shared))
    assert blocks[0] == (Ranges((Range(0, 2), Range(8, 9), Range(10, 11))),)
    assert blocks[1] == (Ranges((Range(2, 4), Range(8, 9), Range(10, 11))),)
    heads = regions((2, 5), Layout(FOUR, None, 0, sections=Sections.of((1,), (2,))))
    assert [heads[device][0] for device in range(4)] == [Range(0, 1), Range(0, 1), Range(1, 2), Range(1, 2)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: regions((10,), Layout(FOUR, None, 0, sections=PACKED)), "no sections in proportion"),
        (lambda: regions((12,), Layout(FOUR, None, 0, sections=PACKED)), "cannot be cut in 4"),
        (lambda: Layout(FOUR, None, 0, sections=Sections.of((1,), (3,))), "do not divide over 4"),
        (lambda: Layout(FOUR, None, None, sections=PACKED), "of dimension None"),
    ],
)
def test_sections_that_do_not_divide_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def pick(whole: NDArray[np.int64], block: Block) -> NDArray[np.int64]:
    for dim, extent in enumerate(block):
        whole = np.concatenate([whole.take(range(i.start, i.stop), dim) for i in intervals(extent)], dim)
    return whole


def random_sections(seed: int) -> tuple[tuple[int, ...], Layout, Layout]:
    random = Random(seed)
    rank = random.randint(1, 2)
    source, target = (random_layout(random, 6, rank, partial, random.random() < 0.5) for partial in (True, False))
    source, target = in_sections(random, source), in_sections(random, target)
    shape = [1] * rank
    for layout in (source, target):
        for dim, parts in layout.cuts.items():
            total = layout.sections.total if layout.sections is not None and dim == layout.shard_dim else 1
            shape[dim] = lcm(shape[dim], parts * total)
    return tuple(shape), source, target


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_pieces_between_sections_reproduce_the_tensor(start: int) -> None:
    for seed in range(start, start + 50):
        shape, source, target = random_sections(seed)
        np.random.seed(seed)
        whole, found = whole_tensor(shape), pieces(shape, source, target)
        terms = [whole_tensor(shape) for _ in range(source.grid.shards - 1)]
        terms.append(whole - sum(terms, np.zeros_like(whole)))
        blocks = {
            device: pick(terms[source.grid.position(device)[1]] if source.partial else whole, block)
            for device, block in regions(shape, source).items()
        }
        made = {device: np.zeros(shape_of(block), np.int64) for device, block in regions(shape, target).items()}
        moves = Counter[tuple[int, int]]()
        for piece in found:
            made[piece.target][slices(piece.target_region)] += blocks[piece.source][slices(piece.source_region)]
            moves[piece.source, piece.target] += piece.elements
        for device, block in regions(shape, target).items():
            assert made[device].tolist() == pick(whole, block).tolist(), seed
            assert block == slow_region(shape, target, target.grid.places[device], None)
            parts = np.zeros(shape_of(block), np.int64)
            for outer, inner in regions_of(block):
                parts[slices(inner)] = whole[slices(outer)]
            assert parts.tolist() == made[device].tolist()
        assert moves == slow_elements(shape, source, target), seed
        assert block_shapes(shape, target).T.tolist() == [list(block.shape) for block in made.values()]
        if not source.partial and in_place(shape, source, target):
            assert all(blocks[device].tolist() == block.tolist() for device, block in made.items())
