"""Movements of a tensor between devices: the pieces that each sends, and puts its part together from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from parplan.layout.grids import Layout
from parplan.layout.pieces import Piece
from parplan.layout.ranges import disjoint

if TYPE_CHECKING:
    import torch

__all__ = ["Assembly", "EqualSlices", "Exchange", "Messages", "equal_slices"]

Messages = Mapping[int, tuple[Piece, ...]]
"""The pieces of one flat message to (or from) every other device, in the order in which they lie in it."""


@dataclass(frozen=True)
class Assembly:
    """How one device's part of a tensor is put together.

    Args:
        pieces: the pieces it takes, in order.
        whole: the only piece is the whole part, which can be taken as it is.
        tiled: the pieces cover the part without overlap, so they are copied, not added.
    """

    pieces: tuple[Piece, ...]
    whole: bool
    tiled: bool


@dataclass(frozen=True)
class EqualSlices:
    """The regular pattern of an exchange between equal slices of tensors and their copies, for which libraries have a
    collective.

    Args:
        groups: devices that hold the slices of one tensor, in their order along `dim`; each of them has it whole on the
            other side.
        gathered: slices are gathered; else terms of whole tensors are summed to slices.
    """

    groups: tuple[tuple[int, ...], ...]
    dim: int
    gathered: bool


def equal_slices(layout: Layout, rows: Sequence[int] | None) -> EqualSlices | None:
    """The pattern of a gather from the rows of a layout, where they are equal and lie in the order of a process group:
    that of the devices' numbers."""
    grid, dim = layout.grid, layout.batch_dim
    groups = tuple(tuple(grid.column(column)) for column in range(grid.shards))
    ordered = all(list(group) == sorted(group) for group in groups)
    return (
        EqualSlices(groups, dim, gathered=True) if dim is not None and len(set(rows or ())) == 1 and ordered else None
    )


@dataclass(frozen=True)
class Exchange:
    """One movement of a tensor from layout to layout, the same on every process.

    Send lists and assemblies are made at the first use and kept, as a program runs many times.

    Args:
        name: what moves, for errors: "conv1 -> 2x1 on 0,1".
        pieces: what every device adds from which other one.
        shapes: shape of the target's part, for every device that gets one.
        dtype: of the tensor.
        slices: the regular pattern that it follows, if a transport may take a collective for it.
    """

    name: str
    pieces: tuple[Piece, ...]
    shapes: Mapping[int, tuple[int, ...]]
    dtype: torch.dtype
    slices: EqualSlices | None = None

    @cached_property
    def assemblies(self) -> Mapping[int, Assembly]:
        """How every device that gets a part puts it together."""
        found = {}
        for device, shape in self.shapes.items():
            own = tuple(piece for piece in self.pieces if piece.target == device)
            tiled = disjoint(piece.target_region for piece in own) and sum(p.elements for p in own) == prod(shape)
            found[device] = Assembly(own, tiled and len(own) == 1, tiled)
        return found

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parts that it fills."""
        return sum(map(prod, self.shapes.values())) * self.dtype.itemsize

    @cached_property
    def sent(self) -> Mapping[int, Messages]:
        """Per device, the messages that it sends to others."""
        return self._messages(lambda piece: (piece.source, piece.target))

    @cached_property
    def received(self) -> Mapping[int, Messages]:
        """Per device, the messages that it gets from others."""
        return self._messages(lambda piece: (piece.target, piece.source))

    def _messages(self, ends: Callable[[Piece], tuple[int, int]]) -> Mapping[int, Messages]:
        found: dict[int, dict[int, tuple[Piece, ...]]] = {}
        for piece in self.pieces:
            own, other = ends(piece)
            if own != other:
                messages = found.setdefault(own, {})
                messages[other] = (*messages.get(other, ()), piece)
        return found
