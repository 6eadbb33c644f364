"""What it costs to change a tensor's layout: how much moves, over which links, and the field's word for it.

The share of a tensor that moves (moves.py) depends on the two layouts only: a pair is worked out once, and every
tensor's time is latency + bytes x a factor. (Where a size does not divide, chunks differ by one index and the figure by
as little.)

The backward of a transfer is the transposed one: what a device received it now sends. Both directions of a link are
alike, so it takes as long, or no time when the value has no gradient. A partial sum that every device of its row needs
whole is run, and priced, as a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.collectives import Linear, Topology
from parplan.cost_models.costs import TransferCost, TransferMatrix
from parplan.cost_models.moves import Moves, moves
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import Grid, Layout

__all__ = ["Transfers"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class _Price:
    time: Linear
    received: float
    kind: str


class Transfers:
    """Prices of layout changes on one cluster.

    Args:
        cluster: the devices and links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.topology = Topology(cluster)
        self._prices: dict[tuple[Layout, Layout], _Price] = {}
        self._tables: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], tuple[FloatArray, FloatArray]] = {}

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` from layout `source` to layout `target` (not a partial sum)."""
        price = self._price(source, target)
        forward_s = price.time.seconds(value.nbytes)
        backward_s = forward_s if value.requires_grad else 0.0
        return TransferCost(forward_s, backward_s, round(price.received * value.nbytes), price.kind)

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """The times of `transfer` for all pairs, shape (sources, targets)."""
        latency_s, s_per_byte = self._table(tuple(sources), tuple(targets))
        forward_s = latency_s + value.nbytes * s_per_byte if value.nbytes else np.zeros_like(latency_s)
        return TransferMatrix(forward_s, forward_s if value.requires_grad else np.zeros_like(forward_s))

    def _table(self, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> tuple[FloatArray, FloatArray]:
        key = (sources, targets)
        if key not in self._tables:
            times = [self._price(source, target).time for source, target in product(sources, targets)]
            shape = (len(sources), len(targets))
            latency_s = np.array([time.latency_s for time in times]).reshape(shape)
            self._tables[key] = (latency_s, np.array([time.s_per_byte for time in times]).reshape(shape))
        return self._tables[key]

    def _price(self, source: Layout, target: Layout) -> _Price:
        key = (source, target)
        if key not in self._prices:
            self._prices[key] = self._work_out(source, target)
        return self._prices[key]

    def _work_out(self, source: Layout, target: Layout) -> _Price:
        moved = moves(source, target)
        kind = _kind(source, moved)
        if kind == "all-reduce" and source.grid == target.grid and source.batch_dim == target.batch_dim:
            return self._all_reduce(source.grid, moved.held / moved.total)
        share = moved.foreign / moved.total
        time = self.topology.traffic(share, moved.senders, moved.receivers)
        return _Price(time, float(share.sum(axis=1).max()), kind)

    def _all_reduce(self, grid: Grid, held: float) -> _Price:
        ring = self.topology.all_reduce([grid.row(row) for row in range(grid.replicas)])
        received = 2 * (grid.shards - 1) / grid.shards * held
        return _Price(Linear(ring.latency_s, ring.s_per_byte * held), received, "all-reduce")


def _kind(source: Layout, moved: Moves) -> str:
    """The field's word for a transfer."""
    foreign = moved.foreign
    if not foreign.any():
        return "none" if moved.held == moved.wanted else "slice"
    if source.partial and source.grid.shards > 1:
        if moved.wanted < moved.held:
            return "reduce-scatter"
        return "all-reduce" if moved.copies else "reduce"
    whole = bool((foreign[foreign > 0] == moved.held).all())
    if (moved.elements > 0).sum(axis=1).max() > 1:
        return ("all-gather" if moved.copies else "gather") if whole else "all-to-all"
    if not whole:
        return "scatter"
    return "broadcast" if len(moved.receivers) > len(moved.senders) else "copy"
