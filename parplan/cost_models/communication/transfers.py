"""What it costs to change a tensor's layout: how much moves, over which links, and the field's word for it.

The share of a tensor that moves (traffic.py) depends on the two layouts only: a pair is worked out once, and every
tensor's time is latency + bytes x a factor. (Where a size does not divide, chunks differ by one index and the figure by
as little.)

The backward of a transfer is the transposed one: what a device received it now sends. Both directions of a link are
alike, so it takes as long, or no time when the value has no gradient. A partial sum that every device of its row needs
whole is run, and priced, as a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.communication.collectives import Linear, Topology
from parplan.cost_models.communication.flows import Flows
from parplan.cost_models.communication.measured_links import Curve, MeasuredLinks
from parplan.cost_models.communication.traffic import Traffic, together, traffic
from parplan.cost_models.costs import TransferCost, TransferMatrix
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import Grid, Layout

__all__ = ["Transfers"]

Pairs = Sequence[tuple[Layout, Layout]]

# The kind of communication that is measured and most similar, by the kind of transfer; of others all-to-all.
_ALIKE = {
    **dict.fromkeys(("copy", "scatter", "gather", "broadcast"), "copy"),
    **dict.fromkeys(("reduce-scatter", "reduce"), "reduce-scatter"),
    "all-gather": "all-gather",
}


@dataclass(frozen=True)
class _Measured:
    """The busiest device receives (or sends) `share` of the tensor in each of these communications."""

    curves: tuple[Curve, ...]
    share: float

    def seconds(self, nbytes: float) -> float:
        return sum(float(curve.seconds(self.share * nbytes)) for curve in self.curves)


@dataclass(frozen=True)
class _Price:
    time: Linear | _Measured
    received: float
    kind: str


class _Table:
    """The prices of pairs of layouts, of each pair once: an index into the distinct ones, filled as pairs are met."""

    def __init__(self) -> None:
        self.distinct: list[_Price] = []
        self._numbers: dict[_Price, int] = {}
        self._places: dict[Layout, int] = {}
        self._index = np.full((64, 64), -1, dtype=np.int32)

    def index(
        self, sources: Sequence[Layout], targets: Sequence[Layout], prices: Callable[[Pairs], Iterable[_Price]]
    ) -> NDArray[np.int32]:
        """Where the prices of all pairs are in `distinct`, shape (sources, targets)."""
        rows, columns = ([self._places.setdefault(one, len(self._places)) for one in own] for own in (sources, targets))
        if (size := len(self._index)) < len(self._places):
            more = max(len(self._places), 2 * size) - size
            self._index = np.pad(self._index, (0, more), constant_values=-1)
        pairs = np.ix_(rows, columns)
        lacking = {
            (rows[a], columns[b]): (sources[a], targets[b]) for a, b in np.argwhere(self._index[pairs] < 0).tolist()
        }
        for place, found in zip(lacking, prices([*lacking.values()]), strict=True):
            number = self._numbers.setdefault(found, len(self.distinct))
            self.distinct += [found] if number == len(self.distinct) else []
            self._index[place] = number
        return self._index[pairs]


class Transfers:
    """Prices of layout changes on one cluster.

    Args:
        cluster: the devices and links.
        links: measured communication, in place of the cluster's rates where it has the pattern.
    """

    def __init__(self, cluster: Cluster, links: MeasuredLinks | None = None) -> None:
        self.topology = Topology(cluster)
        self.links = links
        self._rings: dict[Hashable, Linear] = {}
        self._known: dict[Hashable, _Price] = {}
        self._table = _Table()

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` from layout `source` to layout `target` (not a partial sum)."""
        (price,) = self._prices([(source, target)])
        forward_s = price.time.seconds(value.nbytes)
        backward_s = forward_s if value.requires_grad else 0.0
        return TransferCost(forward_s, backward_s, round(price.received * value.nbytes), price.kind)

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """The times of `transfer` for all pairs, shape (sources, targets)."""
        numbers = self._table.index(sources, targets, self._prices)
        seconds = np.zeros(len(self._table.distinct))
        for number in np.flatnonzero(np.bincount(numbers.ravel())).tolist():
            seconds[number] = self._table.distinct[number].time.seconds(value.nbytes)
        forward_s = seconds[numbers]
        return TransferMatrix(forward_s, forward_s if value.requires_grad else np.zeros_like(forward_s))

    def all_reduce(self, grid: Grid, nbytes: int) -> float:
        """Seconds for the devices of every column of `grid` to sum a tensor of `nbytes` each, all columns at once."""
        size = grid.replicas
        curve = self.links.curve("all-reduce", size) if self.links is not None and size > 1 else None
        if curve is not None:
            return float(curve.seconds(nbytes))
        if grid.key not in self._rings:
            self._rings[grid.key] = self.topology.all_reduce([grid.column(column) for column in range(grid.shards)])
        return self._rings[grid.key].seconds(nbytes)

    def _prices(self, pairs: Pairs) -> list[_Price]:
        """Of changes of layout from the first to the second of each pair."""
        cut = [(source.against(target), target.against(source)) for source, target in pairs]
        classes = [_class(*pair, self.topology) for pair in cut]
        lacking = {key: pair for key, pair in zip(classes, cut, strict=True) if key not in self._known}
        moved = [traffic(*pair) for pair in lacking.values()]
        found: dict[int, _Price] = {}
        for numbers, flows in together(moved, [level.link.size for level in self.topology.levels]):
            found.update(zip(numbers, self._priced([moved[number] for number in numbers], flows), strict=True))
        self._known.update((key, found[number]) for number, key in enumerate(lacking))
        return [self._known[key] for key in classes]

    def _priced(self, moved: Sequence[Traffic], flows: Flows) -> Iterator[_Price]:
        """Of several changes of layout, with the flows of all of them."""
        times = self.topology.traffic(flows, [one.total for one in moved])
        every, (received, sent), partners = flows.pieces, flows.elements(1, None), flows.messages(1, None)
        figures = (own.tolist() for own in (every, received, sent, partners))
        for one, time, own_every, own_received, own_sent, own_partners in zip(moved, times, *figures, strict=True):
            kind = _kind(one, own_every, own_partners)
            source, target = one.source, one.target
            if kind == "all-reduce" and source.grid == target.grid and source.batch_dim == target.batch_dim:
                yield self._all_reduce(source.grid, one.held / one.total)
            else:
                measured = self._measured(kind, own_partners, max(own_received, own_sent) / one.total)
                yield _Price(measured or time, own_received / one.total, kind)

    def _measured(self, kind: str, partners: int, busiest: float) -> _Measured | None:
        """What was measured of the kind most like this one, among as many devices as one talks to."""
        if self.links is None or partners == 0:
            return None
        like = _ALIKE.get(kind, "all-to-all")
        # One who sends to or gets from several does so one after another: copies, of which only pairs are measured.
        curve = self.links.curve(like, 2 if like == "copy" else partners + 1)
        return _Measured((curve,), busiest) if curve is not None else None

    def _all_reduce(self, grid: Grid, held: float) -> _Price:
        received = 2 * (grid.shards - 1) / grid.shards * held
        if self.links is not None:
            # Run as a reduce-scatter, then an all-gather; two devices send each other all they have.
            kinds = ("reduce-scatter",) if grid.shards == 2 else ("reduce-scatter", "all-gather")
            curves = tuple(curve for kind in kinds if (curve := self.links.curve(kind, grid.shards)) is not None)
            if len(curves) == len(kinds):
                return _Price(_Measured(curves, received / len(kinds)), received, "all-reduce")
        ring = self.topology.all_reduce([grid.row(row) for row in range(grid.replicas)])
        return _Price(Linear(ring.latency_s, ring.s_per_byte * held), received, "all-reduce")


def _class(source: Layout, target: Layout, topology: Topology) -> Hashable:
    """A key of pairs that cost the same: cut alike, along whichever dimensions, on neighbours that lie alike."""
    cuts = (source.batch_dim, source.shard_dim, target.batch_dim, target.shard_dim)
    alike = tuple(None if dim is None else cuts.index(dim) for dim in cuts)
    sections = source.sections, target.sections
    first, other = source.grid.first, target.grid.first
    if first is None or other is None:
        return source.grid, target.grid, alike, source.partial, sections
    shapes = (source.grid.replicas, source.grid.shards, target.grid.replicas, target.grid.shards)
    begin = min(first, other)
    if begin > 0:  # moved down by whole domains of the level that joins them all
        last = max(first + len(source.grid.devices), other + len(target.grid.devices)) - 1
        domains = (level.domain for level in topology.levels if begin // level.link.size == last // level.link.size)
        begin -= begin % next(domains, 1)
    return alike, source.partial, sections, first - begin, other - begin, *shapes


def _kind(moved: Traffic, pieces: int, partners: int) -> str:
    """The field's word for a transfer, where devices get so many pieces and talk to so many others at most."""
    source = moved.source
    if partners == 0:
        return "none" if moved.held == moved.wanted else "slice"
    if source.partial and source.grid.shards > 1:
        if moved.wanted < moved.held:
            return "reduce-scatter"
        return "all-reduce" if moved.copies else "reduce"
    if pieces > 1:
        return ("all-gather" if moved.copies else "gather") if moved.whole else "all-to-all"
    if not moved.whole:
        return "scatter"
    return "broadcast" if len(moved.receivers) > len(moved.senders) else "copy"
