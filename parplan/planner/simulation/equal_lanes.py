"""Symmetry of a priced program: lanes of devices that are always busy together are one in its simulation.

Prices are of a layer or a transfer, not of a device. So all devices that compute the same layers and hold the same
values do the same at the same time: the data-parallel copies and tensor shards of a pipeline stage, say. Exchanging
them changes nothing, and the compute of one stands for all. What links carry is another question: samples that lie on
one of the copies already are not sent to it, so lanes are equal where their shares in all transfers are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parplan.lowering.program import Compute
from parplan.planner.simulation.priced_program import Busy, PricedProgram

__all__ = ["EqualLanes"]


@dataclass(frozen=True)
class EqualLanes:
    """For every device the first one whose lanes are equal to its own; itself where none is.

    Args:
        computing: of compute, and gradient sums.
        carrying: of sending, and receiving.
    """

    computing: tuple[int, ...]
    carrying: tuple[int, ...]

    @staticmethod
    def apart(devices: int) -> EqualLanes:
        """None are equal."""
        return EqualLanes(tuple(range(devices)), tuple(range(devices)))

    @staticmethod
    def of(priced: PricedProgram) -> EqualLanes:
        """The equal lanes of a program's devices."""
        moves = [move for move in priced.moves.values() if move.forward_s or move.backward_s]
        steps = (*priced.program.forward, *priced.program.backward)
        blocks = [step.grid.devices for step in steps if isinstance(step, Compute)]
        blocks += [layer.devices for layer in priced.layers.values()]
        for move in moves:
            blocks += [move.devices, move.given.devices, move.wanted.devices]
            sides = [tuple(device for device, _ in side) for side in (move.sent, move.received)]
            blocks += sides if move.apart else []  # from stage to stage, each holds its own
        shares = [side for move in moves for side in (move.sent, move.received)]
        count = priced.program.devices
        together = (tuple((device, 1.0) for device in block) for block in dict.fromkeys(blocks))
        return EqualLanes(_first(count, together), _first(count, shares))


def _first(count: int, parts: Iterable[Busy]) -> tuple[int, ...]:
    """For every device the first one with the same part in everything."""
    own: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for number, busy in enumerate(dict.fromkeys(parts)):
        for device, part in busy:
            own[device].append((number, part))
    first = dict[tuple[tuple[int, float], ...], int]()
    return tuple(first.setdefault(tuple(one), device) for device, one in enumerate(own))
