"""Rows of a picture of a net, as few as tell the plan: layers with what follows them, modules, equal neighbours as one.

A plan of one placement is one row; a net of many layers is grouped by module. `inside` gives the rows of a row, so that
a reader who looks into one after another finds every layer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from parplan.fields import counted
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from parplan.planner.decision import Decision, LayerReport
from parplan.report.sections.blocks import LEAST, NUMBER, name_span, repeats
from parplan.report.sections.layer_groups import StrategyGroup, TableLine

__all__ = ["MOST_ROWS", "Connections", "Row", "connections", "inside", "net_rows"]

MOST_ROWS = 24


@dataclass(frozen=True)
class Row:
    """Layers of one placement: a layer with those that only go on from it, or modules.

    Args:
        label: the first one's name, or the modules'.
        repeats: how many equal modules it stands for.
        run: a number that the rows of one repeated sequence share, where it has several.
    """

    label: str
    layers: tuple[LayerReport, ...]
    repeats: int = 1
    run: int | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy of all its layers, but for the name of the axis."""
        return self.layers[0].strategy

    @property
    def words(self) -> str:
        """The strategy with the axes of all layers that have weights."""
        group = StrategyGroup(self.strategy, (TableLine(self.label, self.layers),))
        return group.words if self.strategy.shards > 1 else self.strategy.describe()

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
    """The net's rows in forward order: one by placement where all layers with weights share it, else by module."""
    layers, graph = decision.layers, decision.priced.graph if decision.priced is not None else None
    weighted = [layer for layer in layers if layer.parameters] or layers
    if len({layer.strategy.placement for layer in weighted}) == 1:
        runs = (tuple(run) for _, run in groupby(layers, key=lambda layer: layer.strategy.placement))
        found = tuple(_row(run) for run in runs)
        if len(found) <= limit:
            return found
    return _grouped(layers, graph, limit)


def inside(row: Row, graph: LayerGraph | None, limit: int = MOST_ROWS) -> tuple[Row, ...]:
    """The rows of what a row stands for, of the first of equal modules; none where it has no more to tell."""
    layers = row.layers[: len(row.layers) // row.repeats]
    found = _grouped(layers, graph, limit)
    same = len(found) == 1 and len(found[0].layers) == len(row.layers) and found[0].repeats == row.repeats
    return () if same or (len(found) == 1 and found[0].repeats == 1) else found


def _row(layers: Sequence[LayerReport]) -> Row:
    ends = dict.fromkeys((layers[0].name, layers[-1].name))
    return Row(" … ".join(ends), tuple(layers))


def _grouped(layers: Sequence[LayerReport], graph: LayerGraph | None, limit: int) -> tuple[Row, ...]:
    """Every layer where these are few; else modules, as deep as equal ones in a row begin, or as `limit` allows."""
    deepest = max(layer.name.count(".") + 1 for layer in layers)
    single = [Row(layer.name, (layer,)) for layer in layers]
    if len(_folded(single, graph)) <= limit:
        return _folded(_repeated(single), graph)
    levels = [_folded(_repeated(_modules(layers, depth)), graph) for depth in range(1, deepest + 1)]
    few = [level for level in levels if 1 < len(level) <= limit]
    repeated = (level for level in levels if len(level) <= limit and any(row.repeats > 1 for row in level))
    found = next(repeated, few[-1] if few else None)
    if found is not None:
        return found
    rows = max(levels, key=len)
    size = math.ceil(len(rows) / limit)
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row.strategy.placement)]
    return tuple(_joined(run[start : start + size]) for run in runs for start in range(0, len(run), size))


def _modules(layers: Iterable[LayerReport], depth: int) -> list[Row]:
    """Adjacent layers of one placement and one module of so many name parts."""

    def module(layer: LayerReport) -> tuple[Hashable, ...]:
        return ".".join(layer.name.split(".")[:depth]), layer.strategy.placement

    runs = [(str(name), tuple(own)) for (name, _), own in groupby(layers, key=module)]
    names = [name for name, _ in runs]
    # A module whose layers are in several places has several rows, each named by its own layers.
    return [Row(name, own) if names.count(name) == 1 < len(own) else _row(own) for name, own in runs]


def _repeated(rows: Sequence[Row]) -> list[Row]:
    """Three and more equal rows, or sequences of rows, behind each other as one: names up to numbers, kinds, sizes."""

    def key(row: Row) -> Hashable:
        parts = ((NUMBER.sub("#", layer.name), layer.kind, layer.parameters) for layer in row.layers)
        return row.strategy.placement, NUMBER.sub("#", row.label), tuple(parts)

    found, at = list[Row](), 0
    for number, run in enumerate(repeats([key(row) for row in rows])):
        if run.count < LEAST:
            continue
        found += rows[at : run.start]
        at = run.start + run.period * run.count
        for offset in range(run.period):
            copies = rows[run.start + offset : at : run.period]
            layers = tuple(layer for copy in copies for layer in copy.layers)
            label = name_span([copy.label for copy in copies])
            found.append(Row(label, layers, run.count, number if run.period > 1 else None))
    return [*found, *rows[at:]]


def _folded(rows: Iterable[Row], graph: LayerGraph | None) -> tuple[Row, ...]:
    """Single layers without weights, and norms, join the row that feeds them, if they are where it is."""
    found: list[Row] = []
    for row in rows:
        last, each = found[-1] if found else None, len(row.layers) // row.repeats
        layer, alike = row.layers[0], last is not None and (last.repeats, last.run) == (row.repeats, row.run)
        light = "norm" in layer.kind or (graph is not None and not graph.layers[layer.name].parameters)
        if (
            last is not None and alike and light and each == 1
            and (row.repeats == 1 or row.run is not None)
            and last.strategy.placement == row.strategy.placement
            and (graph is None or any(graph.digraph.has_edge(one.name, layer.name) for one in last.layers))
        ):  # fmt: skip
            found[-1] = replace(last, layers=_interleaved(last, row))
        else:
            found.append(row)
    return tuple(found)


def _interleaved(row: Row, more: Row) -> tuple[LayerReport, ...]:
    """The layers of both, those of every repeat together."""
    size, added = len(row.layers) // row.repeats, len(more.layers) // more.repeats
    parts = (
        (*row.layers[number * size : (number + 1) * size], *more.layers[number * added : (number + 1) * added])
        for number in range(row.repeats)
    )
    return tuple(layer for part in parts for layer in part)


def _joined(rows: Sequence[Row]) -> Row:
    return rows[0] if len(rows) == 1 else _row([layer for row in rows for layer in row.layers])


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
    """The graph's connections between the layers of these rows, row by row."""
    where: Mapping[str, tuple[int, int]] = {
        layer.name: (index, place) for index, row in enumerate(rows) for place, layer in enumerate(row.layers)
    }
    edges = [(where[one], where[other]) for one, other in graph.digraph.edges if one in where and other in where]
    pairs = {(source, target) for (source, _), (target, _) in edges}
    others = sorted((pair for pair in pairs if pair[1] - pair[0] > 1), key=lambda pair: (pair[1] - pair[0], pair))
    skipping = (row for (row, start), (other, end) in edges if row == other and end - start > 1)
    return Connections(frozenset(t for s, t in pairs if t - s == 1), tuple(others), frozenset(skipping))
