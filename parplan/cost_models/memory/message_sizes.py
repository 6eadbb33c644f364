"""What the messages of one transfer add up to on each device: elements received, and elements copied to be sent.

Between regular layouts whose parts are all equal, one piece stands for all, and their number is known by formula
(communication/regular_flows.py); other pieces are looked at one by one, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from parplan.cost_models.communication.flows import Flow
from parplan.cost_models.communication.regular_flows import RegularFlows, regular
from parplan.layout import IntArray, Layout, block_shapes, piece_table
from parplan.lowering.program import Slot

__all__ = ["Messages", "messages"]

Rows = tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Messages:
    """One direction of a transfer; arrays by the place of the device in its layout's grid.

    Args:
        received: elements that each receiver gets from others.
        pieces: how many pieces each receiver puts together, its own among them.
        copied: elements that each sender copies to send them: a block with gaps.
        shared: whether each sender also sends from a tensor as it lies.
        own: whether each receiver also takes a piece of what it has itself.
    """

    received: IntArray
    pieces: IntArray
    copied: IntArray
    shared: NDArray[np.bool_]
    own: NDArray[np.bool_]


def messages(given: Slot, wanted: Slot) -> tuple[Messages, Messages]:
    """Those from `given` to `wanted`, and those of the gradient back."""
    return _messages(given.shape, given.layout, wanted.layout, given.rows, wanted.rows)


@lru_cache(maxsize=1000)
def _messages(
    shape: tuple[int, ...], source: Layout, target: Layout, source_rows: Rows, target_rows: Rows
) -> tuple[Messages, Messages]:
    held, wanted = block_shapes(shape, source, source_rows), block_shapes(shape, target, target_rows)
    if regular(source, target) and 0 not in shape and all((own == own[:, :1]).all() for own in (held, wanted)):
        piece = np.minimum(held[:, :1], wanted[:, :1])
        flows = RegularFlows([(source, target)])
        every, own = flows.inside(None), flows.inside(1)
        return _alike(every, own, piece, held[:, :1]), _alike(every.back, own.back, piece, wanted[:, :1])
    table = piece_table(shape, source, target, source_rows, target_rows)
    lengths = np.repeat(np.array(shape, dtype=np.int64)[:, None], len(table.takers), axis=1)
    lengths[list(table.dims)] = table.stop - table.start
    foreign = np.array(source.grid.devices)[table.givers] != np.array(target.grid.devices)[table.takers]
    # Several pieces for one device are put together to one message.
    _, pair, count = np.unique(table.givers * wanted.shape[1] + table.takers, return_inverse=True, return_counts=True)
    joined: NDArray[np.bool_] = count[pair] > 1
    return (
        _listed(lengths, foreign, joined, table.givers, held, table.takers, wanted),
        _listed(lengths, foreign, joined, table.takers, wanted, table.givers, held),
    )


def _alike(every: Flow, own: Flow, piece: IntArray, block: IntArray) -> Messages:
    """Messages whose pieces are all of one shape, from blocks of one shape."""
    elements, gaps, foreign = int(piece.prod()), bool(_has_gaps(piece, block).any()), every - own
    copied = foreign.messages_out * (elements if gaps else 0)
    shared = (foreign.messages_out > 0) & (not gaps)
    return Messages(foreign.messages_in * elements, every.messages_in, copied, shared, own.messages_in > 0)


def _listed(
    lengths: IntArray,
    foreign: NDArray[np.bool_],
    joined: NDArray[np.bool_],
    senders: IntArray,
    held: IntArray,
    receivers: IntArray,
    wanted: IntArray,
) -> Messages:
    """Messages of these pieces, which `senders` take from blocks of the shapes in `held`."""
    gaps, elements = foreign & (joined | _has_gaps(lengths, held[:, senders])), lengths.prod(axis=0)
    received, copied = np.zeros(wanted.shape[1], dtype=np.int64), np.zeros(held.shape[1], dtype=np.int64)
    np.add.at(received, receivers, elements * foreign)
    np.add.at(copied, senders, elements * gaps)
    pieces, own = (np.bincount(some, minlength=len(received)) for some in (receivers, receivers[~foreign]))
    return Messages(received, pieces, copied, np.bincount(senders[foreign & ~gaps], minlength=len(copied)) > 0, own > 0)


def _has_gaps(pieces: IntArray, blocks: IntArray) -> NDArray[np.bool_]:
    """Whether pieces do not lie in one stretch of memory: before the first cut dimension only single indices do."""
    cut = pieces != blocks
    before = np.cumprod(np.vstack([np.ones_like(pieces[:1]), pieces]), axis=0)[:-1]
    several: NDArray[np.bool_] = (cut & ((before > 1) | (np.cumsum(cut, axis=0) > 1))).any(axis=0)
    return several
