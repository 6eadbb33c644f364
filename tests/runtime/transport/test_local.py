"""Movements in one process: every pair of layouts, there and transposed, and when memory is shared."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from parplan.layout import Grid, Layout, Piece, Range, Sections, pieces, regions, shape_of
from parplan.lowering.program import Exchange
from parplan.runtime.transport.base import block_values
from parplan.runtime.transport.local import LocalTransport
from tests.every_case import every_case

WHOLE = torch.arange(6 * 12, dtype=torch.float64).reshape(6, 12)
LAYOUTS = {
    "one": Layout(Grid((2,), 1, 1), None),
    "rows": Layout(Grid((0, 1, 2, 3), 4, 1), 0),
    "columns": Layout(Grid((3, 1, 0, 2), 1, 4), None, 1),
    "both": Layout(Grid((0, 1, 2, 3), 2, 2), 0, 1),
    "three": Layout(Grid((1, 3, 0), 3, 1), 0),
    "copies": Layout(Grid((0, 1, 2, 3), 4, 1), None),
    "sections": Layout(Grid((1, 0), 1, 2), None, 1, sections=Sections.of((8, 2, 2))),
    "shared": Layout(Grid((0, 1, 2, 3), 1, 4), None, 1, sections=Sections.of((8, 4), (0, 2))),
}


def part(layout: Layout, device: int) -> Tensor:
    return block_values(WHOLE, regions(WHOLE.shape, layout)[device])


def transport() -> LocalTransport:
    return LocalTransport([torch.device("cpu")] * 4)


@every_case(("source", "target"), list(product(LAYOUTS, LAYOUTS)))
def test_every_device_gets_its_part(source: str, target: str) -> None:
    here, there = LAYOUTS[source], LAYOUTS[target]
    moving = tuple(pieces(WHOLE.shape, here, there))
    shapes = {d: tuple(part(there, d).shape) for d in there.grid.devices}
    exchange = Exchange("x", moving, shapes, WHOLE.dtype)
    found = transport().start(exchange, {d: part(here, d) for d in here.grid.devices}).wait()
    assert set(found) == set(there.grid.devices)
    for device, tensor in found.items():
        assert torch.equal(tensor, part(there, device))


@every_case(("source", "target"), list(product(LAYOUTS, LAYOUTS)))
def test_the_reversed_pieces_are_the_transposed_movement(source: str, target: str) -> None:
    """<move(x), y> = <x, move^T(y)> for random x and y on every device."""
    here, there = LAYOUTS[source], LAYOUTS[target]
    moving = tuple(pieces(WHOLE.shape, here, there))
    shapes = {device: shape_of(block) for device, block in regions(WHOLE.shape, here).items()}
    wide = {d: tuple(part(there, d).shape) for d in there.grid.devices}
    x = {d: torch.randn(shape, dtype=WHOLE.dtype) for d, shape in shapes.items()}
    y = {d: torch.randn(shape, dtype=WHOLE.dtype) for d, shape in wide.items()}
    moved = transport().start(Exchange("x", moving, wide, WHOLE.dtype), x).wait()
    back = tuple(piece.reversed() for piece in moving)
    returned = transport().start(Exchange("y", back, shapes, WHOLE.dtype), y).wait()
    left = sum((moved[d] * y[d]).sum() for d in y)
    right = sum((x[d] * returned[d]).sum() for d in x)
    torch.testing.assert_close(left, right)


def test_terms_are_added() -> None:
    terms = Layout(Grid((0, 1, 2), 1, 3), None, None, partial=True)
    moving = tuple(pieces(WHOLE.shape, terms, LAYOUTS["rows"]))
    exchange = Exchange("x", moving, {d: tuple(part(LAYOUTS["rows"], d).shape) for d in range(4)}, WHOLE.dtype)
    found = transport().start(exchange, dict.fromkeys(range(3), WHOLE)).wait()
    for device, tensor in found.items():
        assert torch.equal(tensor, 3 * part(LAYOUTS["rows"], device))


def test_a_whole_piece_is_not_copied() -> None:
    moving = tuple(pieces(WHOLE.shape, LAYOUTS["one"], LAYOUTS["copies"]))
    exchange = Exchange("x", moving, dict.fromkeys(range(4), (6, 12)), WHOLE.dtype)
    found = transport().start(exchange, {2: WHOLE}).wait()
    assert {tensor.data_ptr() for tensor in found.values()} == {WHOLE.data_ptr()}


@pytest.mark.parametrize("group", [(1, 2), (1, 2, 3), (1, 0, 2, 3)])
def test_a_sum_leaves_its_terms_alone(group: tuple[int, ...]) -> None:
    flats = {device: torch.full((3,), 10.0**device) for device in group}
    assert transport().reduce("x", group, flats).wait()[1].tolist() == [sum(10.0**device for device in group)] * 3
    assert {device: flat.tolist() for device, flat in flats.items()} == {n: [10.0**n] * 3 for n in group}


def test_blocks_that_overlap_are_added_and_gaps_are_zero() -> None:
    """Two readers of the same half: as many elements come back as the whole has, and yet half of it gets nothing."""
    half = (Range(0, 2),)
    back = (Piece(0, 2, half, half), Piece(1, 2, half, half))
    found = (
        transport().start(Exchange("x", back, {2: (4,)}, torch.float32), dict.fromkeys((0, 1), torch.ones(2))).wait()
    )
    assert found[2].tolist() == [2.0, 2.0, 0.0, 0.0]
