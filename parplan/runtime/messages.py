"""What ranks send each other: the blocks that one needs from another, in one flat message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from parplan.layout import Piece

__all__ = ["Flat", "Message", "messages"]


@dataclass
class Message:
    """Blocks that one rank sends another in one flat tensor."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)


@dataclass(frozen=True)
class Flat:
    """A flat message to or from another rank."""

    other: int
    sent: bool
    tensor: Tensor


def messages(pieces: Sequence[Piece], rank: int, sending: bool) -> dict[int, Message]:
    """What `rank` sends to (or gets from) every other rank, in the order of the pieces."""
    found: dict[int, Message] = {}
    for piece in pieces:
        own, other = (piece.source, piece.target) if sending else (piece.target, piece.source)
        if own == rank and other != rank:
            found.setdefault(other, Message()).pieces.append(piece)
    return found
