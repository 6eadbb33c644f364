"""Movements of a tensor between devices: the pieces that each sends, and puts its part together from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from parplan.layout.pieces import Piece
from parplan.layout.ranges import disjoint

if TYPE_CHECKING:
    import torch

__all__ = ["Assembly", "Exchange", "Messages"]

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
class Exchange:
    """One movement of a tensor from layout to layout, the same on every process.

    Send lists and assemblies are made at the first use and kept, as a program runs many times.

    Args:
        name: what moves, for errors: "conv1 -> 2x1 on 0,1".
        pieces: what every device adds from which other one.
        shapes: shape of the target's part, for every device that gets one.
        dtype: of the tensor.
    """

    name: str
    pieces: tuple[Piece, ...]
    shapes: Mapping[int, tuple[int, ...]]
    dtype: torch.dtype

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
