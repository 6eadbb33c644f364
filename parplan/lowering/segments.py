"""Layers joined to segments: consecutive layers on one grid with nothing to move between them are one compute step.

A segment waits for all that it reads, and what it makes leaves at its end. So a layer that reads a value from elsewhere
begins one, and a layer whose value others read elsewhere ends one: branches on other devices need not wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from parplan.errors import PlanError
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Block, Grid, Layout, within
from parplan.lowering.holdings import Holdings, used_blocks
from parplan.lowering.per_replica_scalars import Spread
from parplan.lowering.placement import SlotAssigner
from parplan.lowering.program import Code, Compute, Operand, Slot, State
from parplan.plan import Strategy

__all__ = ["Segments", "statistics"]


@dataclass
class _Segment:
    """A compute step that is being filled."""

    code: Code
    grid: Grid
    layers: list[str]
    operands: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    pass_number: int | None = None
    unit: int | None = None


class Segments:
    """The compute steps of a program that is being lowered.

    Args:
        graph: the captured graph.
        spread: how its layers are spread.
        slots: where values lie.
        heads: layers that start a segment.
        replayed: the number of its unit, by layer that is replayed.
    """

    def __init__(
        self,
        graph: LayerGraph,
        spread: Spread,
        slots: SlotAssigner,
        heads: Iterable[str],
        replayed: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._graph = graph
        self._spread = spread
        self._slots = slots
        self._heads = frozenset(heads)
        self._replayed = replayed
        self._segments: list[_Segment] = []
        self._readers: dict[str, list[str]] = defaultdict(list)
        for name, layer in graph.layers.items():
            for value in layer.inputs:
                self._readers[value].append(name)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def read(self) -> set[str]:
        """Slots that segments read."""
        return {slot for segment in self._segments for slot in segment.operands.values()}

    def add(self, layer: Layer, pass_number: int | None = None) -> None:
        """Append a layer (in one of the passes), to the last segment if it can run there."""
        strategy = self._spread.strategies[layer.name]
        if not self._joins(layer, strategy, pass_number):
            unit = self._replayed.get(layer.name)
            self._segments.append(_Segment(Code.LAYERS, strategy.grid, [], pass_number=pass_number, unit=unit))
        segment = self._segments[-1]
        segment.layers.append(layer.name)
        self._read(layer, strategy, segment)
        self._make(layer, strategy, segment)

    def _operands(self, layer: Layer) -> list[str]:
        """Values that come to the layer: its inputs, and parameters that lie in slices."""
        return [*layer.inputs, *(name for name in layer.parameters if name in self._slots.slots)]

    def _joins(self, layer: Layer, strategy: Strategy, pass_number: int | None) -> bool:
        """Whether the layer can run in the last segment."""
        if not self._segments or layer.name in self._heads:
            return False
        last = self._segments[-1]
        own = Code.LAYERS, strategy.grid, pass_number, self._replayed.get(layer.name)
        if (last.code, last.grid, last.pass_number, last.unit) != own or self._leaves(last):
            return False
        known = {**last.operands, **last.results}
        apart = {*known, *self._graph.user_inputs}  # the user's come first
        if last.unit is not None:  # a unit's weights come before all of it: what its segments hand on would be kept
            apart.update(layer.parameters)
        others = (value for value in self._operands(layer) if value not in apart)
        if any(self._slots.arrives(value, layer.layout(value, strategy), pass_number) for value in others):
            return False
        in_place = all(
            self._slots.same_place(self._slots.slots[known[value]], layer.layout(value, strategy))
            for value in self._operands(layer)
            if value in known
        )
        return in_place and all(self._uses_alike(layer, other) for other in last.layers)

    def _leaves(self, segment: _Segment) -> bool:
        """Whether another layer reads in another layout what the segment's last layer makes."""
        for value in self._graph.layers[segment.layers[-1]].outputs:
            home = self._slots.slots[segment.results[value]]
            for reader in self._readers[value]:
                layout = self._spread.layers[reader].layout(value, self._spread.strategies[reader])
                if not self._slots.same_place(home, layout):
                    return True
        return False

    def _uses_alike(self, layer: Layer, other_name: str) -> bool:
        """Whether two layers use the same blocks of the parameters and buffers they share."""
        other = self._graph.layers[other_name]
        shared = {*layer.parameters, *layer.buffers} & {*other.parameters, *other.buffers}
        return all(self._used(layer.name, state) == self._used(other_name, state) for state in shared)

    def _used(self, layer: str, state: str) -> Mapping[int, Block]:
        return used_blocks(self._graph, self._spread.strategies, layer, state)

    def _read(self, layer: Layer, strategy: Strategy, segment: _Segment) -> None:
        reader, number = len(self._segments) - 1, segment.pass_number
        for value in self._operands(layer):
            if value not in segment.results:
                slot = self._slots.place(value, layer.layout(value, strategy), reader, number)
                segment.operands.setdefault(value, slot)

    def _make(self, layer: Layer, strategy: Strategy, segment: _Segment) -> None:
        for value in layer.outputs:
            slot = self._slots.slot(value, layer.layout(value, strategy), segment.pass_number)
            self._slots.add(slot, len(self._segments) - 1)
            segment.results[value] = slot.name

    # -- batch norm over replicas --

    def add_batch_norm(self, layer: Layer) -> None:
        """Append statistics per replica, an exchange between the replicas of each shard, and the normalisation."""
        strategy = self._spread.strategies[layer.name]
        if len(layer.inputs) != 1:
            raise PlanError(
                f"{layer.name}: batch norm with a computed weight or bias cannot share statistics between "
                f'{strategy.replicas} replicas; give it one replica, or compile with batch_norm="local"'
            )
        own = statistics(self._graph, layer, strategy)
        self._segments.append(_Segment(Code.STATISTICS, strategy.grid, [layer.name], results={own.name: own.name}))
        self._read(layer, strategy, self._segments[-1])
        self._slots.add(own, len(self._segments) - 1)
        normalise = _Segment(Code.NORMALISE, strategy.grid, [layer.name])
        self._segments.append(normalise)
        self._read(layer, strategy, normalise)
        shared = replace(own.layout, batch_dim=None)
        normalise.operands[own.name] = self._slots.place(own.name, shared, len(self._segments) - 1)
        self._make(layer, strategy, normalise)

    # -- finished steps --

    def steps(self, read: set[str], held: Holdings) -> list[Compute]:
        """The finished steps; of their results only those that anyone else reads are kept.

        Args:
            read: slots that segments, transfers or the caller read.
            held: block of every parameter that each device holds.
        """
        found = []
        for segment in self._segments:
            users: dict[str, str] = {}  # the first layer that uses each parameter and buffer
            for layer in map(self._graph.layers.__getitem__, segment.layers):
                for state in (*layer.parameters, *layer.buffers) if segment.code is not Code.STATISTICS else ():
                    if state not in segment.operands:
                        users.setdefault(state, layer.name)
            found.append(
                Compute(
                    code=segment.code,
                    layers=tuple(segment.layers),
                    grid=segment.grid,
                    batches=self._slots.samples(segment.grid.replicas, segment.pass_number),
                    operands=tuple(Operand(*item) for item in segment.operands.items()),
                    states=tuple(self._state(*item, held) for item in users.items()),
                    results=tuple(Operand(*item) for item in segment.results.items() if item[1] in read),
                    pass_number=segment.pass_number,
                    unit=segment.unit,
                )
            )
        return found

    def _state(self, name: str, user: str, held: Holdings) -> State:
        used, outer = self._used(user, name), held.get(name, {})
        made: dict[tuple[int, int], Block] = {}  # most devices' blocks are few objects
        blocks = {}
        for device, block in used.items():
            whole = outer.get(device)
            key = (id(block), id(whole))
            if key not in made:
                made[key] = block if whole is None else within(block, whole)
            blocks[device] = made[key]
        return State(name, blocks)


def statistics(graph: LayerGraph, layer: Layer, strategy: Strategy) -> Slot:
    """Batch statistics, [replicas, 3, channels]: a row per replica, cut over the columns as the channels are."""
    value = next(node.all_input_nodes[0].name for node in layer.nodes if op_name(node) == "batch_norm")
    spec, name = graph.values[value], f"{layer.name}.statistics"
    layout = Layout(strategy.grid, 0, None if layer.layout(value, strategy).shard_dim is None else 2)
    dtype, shape = torch.promote_types(spec.dtype, torch.float32), (strategy.replicas, 3, spec.shape[1])
    return Slot(name, name, layout, shape, (1,) * strategy.replicas, dtype, spec.requires_grad)
