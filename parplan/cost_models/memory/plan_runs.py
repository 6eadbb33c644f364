"""What the runtime makes of a plan, as far as memory goes: runs of layers, moves between them, gradient messages.

The same rules as lowering/segments.py and placement.py, which cost models must not import: layers run
together while they are on one grid with nothing to move, batch norm over replicas runs alone, a value is moved once per
layout, and a run ends where a message of gradients can leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Grid, Layout, Region, region
from parplan.lowering.holdings import Holdings, bucket_heads, buckets, holdings
from parplan.plan import Strategy

__all__ = ["Move", "PlanRuns", "block_on", "outside", "plan_runs"]


@dataclass
class Move:
    """A value in a new layout, and the layers (by index; their number stands for the caller) that read it there."""

    value: str
    source: Layout
    target: Layout
    readers: list[int]


@dataclass(frozen=True)
class PlanRuns:
    """What runs together.

    Args:
        first: of every layer, the index of its run's first one.
        leaving: values that are read outside the run that makes them.
        moves: of values, in the order they are asked for.
        messages: parameters whose gradients travel in one message.
        holdings: block of every parameter that each device holds.
    """

    first: tuple[int, ...]
    leaving: frozenset[str]
    moves: tuple[Move, ...]
    messages: tuple[tuple[str, ...], ...]
    holdings: Holdings


def block_on(shape: tuple[int, ...], layout: Layout, device: int) -> Region:
    """The block of a tensor that `device` holds."""
    return region(shape, layout, *layout.grid.position(device))


def outside(graph: LayerGraph, devices: int, value: str) -> Layout:
    """Where user inputs and results lie: every device has the samples it brings and gets."""
    return Layout(Grid(tuple(range(devices)), devices, 1), graph.batch_dims.get(value) if devices > 1 else None)


@dataclass
class _Run:
    grid: Grid | None = None
    first: int = 0
    closed: bool = True
    read: dict[str, Layout] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)


class _Runs:
    """Follows the layers in order."""

    def __init__(self, graph: LayerGraph, strategies: Mapping[str, Strategy], devices: int) -> None:
        self.graph, self.strategies, self.devices = graph, strategies, devices
        self.first: list[int] = []
        self.leaving: set[str] = set()
        self.moves: dict[tuple[str, Layout], Move] = {}
        self.holdings = holdings(graph, strategies)
        messages = buckets(graph, self.holdings, range(devices), {})
        self.messages = tuple(message.parameters for message in messages)
        self.heads = bucket_heads(graph, messages)
        self.run = _Run()

    def add(self, index: int, layer: Layer) -> None:
        strategy = self.strategies[layer.name]
        alone = layer.mixes_batch and strategy.replicas > 1
        if alone or not self._joins(layer, strategy):
            self.run = _Run(strategy.grid, index, alone)
        self.first.append(self.run.first)
        for value in layer.inputs:
            wanted = layer.layout(value, strategy)
            if value not in self.run.made:
                self.run.read.setdefault(value, wanted)
                self.read(value, wanted, index)
        self.run.made.update(layer.outputs)

    def read(self, value: str, wanted: Layout, index: int) -> None:
        """Somebody outside the run that makes it reads a value."""
        self.leaving.add(value)
        home = self.home(value)
        if not self._same_place(value, home, wanted):
            self.moves.setdefault((value, wanted), Move(value, home, wanted, [])).readers.append(index)

    def home(self, value: str) -> Layout:
        if value not in self.graph.producer:
            return outside(self.graph, self.devices, value)
        layer = self.graph.producer[value]
        return self.graph.layers[layer].layout(value, self.strategies[layer])

    def _joins(self, layer: Layer, strategy: Strategy) -> bool:
        run = self.run
        if run.closed or layer.name in self.heads or run.grid != strategy.grid:
            return False
        for value in layer.inputs:
            known = self.home(value) if value in run.made else run.read.get(value)
            if known is not None and not self._same_place(value, known, layer.layout(value, strategy)):
                return False
        return True

    def _same_place(self, value: str, home: Layout, wanted: Layout) -> bool:
        if home == wanted:
            return True
        if wanted.partial or (home.partial and home.grid.shards > 1):
            return False
        if not set(wanted.grid.devices) <= set(home.grid.devices):
            return False
        shape = self.graph.values[value].shape
        return all(block_on(shape, wanted, d) == block_on(shape, home, d) for d in wanted.grid.devices)


def plan_runs(graph: LayerGraph, strategies: Mapping[str, Strategy], devices: int) -> PlanRuns:
    """What runs together when `graph` runs by `strategies`."""
    runs = _Runs(graph, strategies, devices)
    for index, layer in enumerate(graph.layers.values()):
        runs.add(index, layer)
    for value in dict.fromkeys(graph.user_outputs):
        if isinstance(value, str) and value in graph.producer:
            runs.read(value, outside(graph, devices, value), len(graph.layers))
    return PlanRuns(
        tuple(runs.first), frozenset(runs.leaving), tuple(runs.moves.values()), runs.messages, runs.holdings
    )
