"""How samples get from many replicas to layers with fewer, and how much of that time can be hidden.

Krizhevsky ("One weird trick", arXiv 1404.5997, section 4) names three schemes for K workers whose samples meet in
layers that every worker has a part of:

    gather      all send at once; the layers then run once, on the whole batch
    broadcast   one worker at a time sends its samples; the layers run K times
    interleave  all send 1/K of theirs at a time; the layers run K times

With K rounds, the next round's samples come, and the last round's gradients leave, while this one is computed: lanes
carry both ways at once and those who send are not those who receive, so a round lasts as long as the longest of the
three. What cannot be hidden is the first round on its way in and the last on its way out. Only compute hides it: the
shards' own messages need the same lanes. A lone sender has its own lane only, and K - 1 copies to put on it: a
broadcast is slow where a gather, which uses all lanes, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from parplan.cost_models.collectives import FloatArray, Linear, Topology
from parplan.cost_models.moves import moves
from parplan.layout import Layout

__all__ = ["Exposed", "Scheme", "exposed", "rounds"]


class Scheme(Enum):
    """In which order the samples of several replicas are sent."""

    GATHER = "gather"
    BROADCAST = "broadcast"
    INTERLEAVE = "interleave"


@dataclass(frozen=True)
class Exposed:
    """Seconds of a boundary that hold up the step, on the way in and on the way back."""

    forward_s: float
    backward_s: float


def rounds(topology: Topology, scheme: Scheme, source: Layout, target: Layout) -> tuple[Linear, ...]:
    """What each round takes by the whole tensor's bytes, when samples go from `source` to `target` or back.

    There are as many rounds as the layout with more replicas has of them; one when everything is gathered at once.
    """
    moved = moves(source, target)
    share = moved.foreign / moved.total
    count = max(source.grid.replicas, target.grid.replicas)
    if scheme is Scheme.GATHER:
        parts = [share]
    elif scheme is Scheme.INTERLEAVE:
        parts = [share / count] * count
    else:
        parts = _by_replica(share, source, target)
    return tuple(topology.traffic(part, moved.senders, moved.receivers) for part in parts)


def exposed(round_s: Sequence[float], beside_s: float | None) -> Exposed:
    """What holds up the step when `beside_s` seconds of compute run beside each round but the first.

    Args:
        round_s: seconds of each round, the same in both directions; at least one.
        beside_s: None when nothing is sent while anything is computed.
    """
    if beside_s is None:
        return Exposed(sum(round_s), sum(round_s))
    waits_s = sum(max(0.0, seconds - beside_s) for seconds in round_s[1:])
    return Exposed(round_s[0] + waits_s, round_s[-1])


def _by_replica(share: FloatArray, source: Layout, target: Layout) -> list[FloatArray]:
    """What one replica after another sends (or receives, where the target has more of them)."""
    many = source.grid if source.grid.replicas >= target.grid.replicas else target.grid
    rows = np.arange(len(many.devices)) // many.shards
    across = rows[None, :] if many is source.grid else rows[:, None]
    return [np.where(across == row, share, 0.0) for row in range(many.replicas)]
