"""Rows of a picture of a net: layers with what follows them, or modules, so many that a person reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from parplan.fields import counted
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from parplan.planner.decision import Decision, LayerReport

__all__ = ["MOST_ROWS", "Connections", "Row", "connections", "net_rows"]

MOST_ROWS = 60


@dataclass(frozen=True)
class Row:
    """Layers that follow each other with one strategy: a layer with those that only go on from it, or modules.

    `label` is the first one's name, or the modules'; `repeats` how many equal modules it stands for.
    """

    label: str
    layers: tuple[LayerReport, ...]
    repeats: int = 1

    @property
    def strategy(self) -> Strategy:
        """The strategy of all its layers, but for the name of the axis."""
        return self.layers[0].strategy

    @property
    def count(self) -> str:
        """Words on how many layers: empty for one."""
        count = len(self.layers)
        if self.repeats > 1:
            return f"{self.repeats} x {counted(count // self.repeats, 'layer')}"
        return f"{count} layers" if count > 1 else ""

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Compute, transfers, and gradient sums of its layers."""
        return (
            sum(layer.forward_s + layer.backward_s for layer in self.layers),
            sum(layer.transfer_s for layer in self.layers),
            sum(layer.reduce_s for layer in self.layers),
        )


def net_rows(decision: Decision, limit: int = MOST_ROWS) -> tuple[Row, ...]:
    """The net's rows in forward order, as detailed as `limit` allows."""
    graph = decision.priced.graph if decision.priced is not None else None
    layers = _folded(decision.layers, graph)
    if len(layers) <= limit:
        return tuple(layers)
    deepest = max(row.label.count(".") + 1 for row in layers)
    levels = [list(_modules(layers, depth)) for depth in range(deepest, -1, -1)]
    rows = levels[-1]
    for own, coarser in pairwise(levels):
        if len(own) <= limit:
            return tuple(own)
        if len(coarser) > limit or len(coarser) < limit / 4:  # repeated modules tell more than what is around them
            rows = list(_equal(own))
            if len(rows) <= limit:
                return tuple(rows)
    if len(levels[-1]) <= limit:
        return tuple(levels[-1])
    size = math.ceil(len(rows) / limit)
    runs = [list(run) for _, run in groupby(rows, key=lambda row: _place(row.strategy))]
    return tuple(_joined(run[start : start + size]) for run in runs for start in range(0, len(run), size))


def _folded(layers: Iterable[LayerReport], graph: LayerGraph | None) -> list[Row]:
    """Layers without weights, and norms, join the row that feeds them, if they are where it is."""
    rows: list[list[LayerReport]] = []
    for layer in layers:
        fed = bool(rows) and (graph is None or any(graph.digraph.has_edge(one.name, layer.name) for one in rows[-1]))
        light = "norm" in layer.kind or (graph is not None and not graph.layers[layer.name].parameters)
        if fed and light and _place(rows[-1][0].strategy) == _place(layer.strategy):
            rows[-1].append(layer)
        else:
            rows.append([layer])
    return [Row(own[0].name, tuple(own)) for own in rows]


def _place(strategy: Strategy) -> tuple[object, ...]:
    return strategy.replicas, strategy.shards, strategy.devices


def _modules(rows: Sequence[Row], depth: int) -> Iterator[Row]:
    """Adjacent rows of one strategy and one module of so many name parts."""

    def module(row: Row) -> tuple[object, ...]:
        return (*row.label.split(".")[:depth], _place(row.strategy))

    for _, own in groupby(rows, key=module):
        listed = list(own)
        prefix = ".".join(listed[0].label.split(".")[:depth])
        yield listed[0] if len(listed) == 1 else Row(prefix or listed[0].label, _layers(listed))


def _equal(rows: Sequence[Row]) -> Iterator[Row]:
    """Equal modules of a sequence as one: numbered, of the same kinds of layers, in the same places."""

    def signature(row: Row) -> tuple[object, ...]:
        head, _, number = row.label.rpartition(".")
        alike = head if number.isdigit() else row.label
        return (_place(row.strategy), alike, tuple(layer.kind for layer in row.layers))

    for _, own in groupby(rows, key=signature):
        listed = list(own)
        label = f"{listed[0].label} … {listed[-1].label}"
        yield listed[0] if len(listed) == 1 else Row(label, _layers(listed), len(listed))


def _joined(rows: Sequence[Row]) -> Row:
    return rows[0] if len(rows) == 1 else Row(f"{rows[0].label} … {rows[-1].label}", _layers(rows))


def _layers(rows: Iterable[Row]) -> tuple[LayerReport, ...]:
    return tuple(layer for row in rows for layer in row.layers)


@dataclass(frozen=True)
class Connections:
    """Connections between rows.

    Args:
        direct: rows that read from the row in front of them.
        skips: the others, as (from, to), short ones first.
        inside: rows with a connection that skips layers of their own.
    """

    direct: frozenset[int]
    skips: tuple[tuple[int, int], ...]
    inside: frozenset[int]


def connections(rows: Sequence[Row], graph: LayerGraph) -> Connections:
    """The graph's connections, row by row."""
    where: Mapping[str, tuple[int, int]] = {
        layer.name: (index, place) for index, row in enumerate(rows) for place, layer in enumerate(row.layers)
    }
    edges = [(where[source], where[target]) for source, target in graph.digraph.edges]
    pairs = {(source, target) for (source, _), (target, _) in edges}
    others = sorted((pair for pair in pairs if pair[1] - pair[0] > 1), key=lambda pair: (pair[1] - pair[0], pair))
    inside = (row for (row, start), (other, end) in edges if row == other and end - start > 1)
    return Connections(frozenset(t for s, t in pairs if t - s == 1), tuple(others), frozenset(inside))
