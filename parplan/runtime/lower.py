"""Lower a graph and a plan to a program: which steps, in which order, moving which pieces.

A pure function of the captured graph, the plan's strategies and the sizes of one step, so that its result can be read
and tested as text. Layers are joined to segments while nothing has to move between them; every value that is read in
another layout than it was made in is moved once per layout, however many layers read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Grid, Layout, Region, pieces, split_evenly
from parplan.plan import Strategy
from parplan.runtime.holdings import buckets, holdings, used_block, within
from parplan.runtime.program import Bucket, Code, Compute, Operand, Program, Reduce, Slot, State, Step, Transfer
from parplan.runtime.transport import Exchange

__all__ = ["Setting", "lower"]


@dataclass(frozen=True)
class Setting:
    """Where one step runs and with how many samples.

    Args:
        devices: how many logical devices there are.
        samples: per process: all of them in one process, each rank's under torchrun.
        memories: for every logical device, which memory it works in (physical device, or process).
        home: in one process, the device where inputs arrive.
        output: in one process, the device that results go to.
        global_statistics: batch norm in training uses the statistics of all replicas.
    """

    devices: int
    samples: tuple[int, ...]
    memories: tuple[int, ...]
    home: int = 0
    output: int = 0
    global_statistics: bool = True

    @property
    def batch(self) -> int:
        """Samples in the step, over all devices."""
        return sum(self.samples)

    def rows(self, replicas: int) -> tuple[int, ...]:
        """Samples per replica; where ranks divide into replicas, each takes its ranks' samples as they are."""
        ranks = len(self.samples)
        if ranks % replicas:
            return split_evenly(self.batch, replicas)
        each = ranks // replicas
        return tuple(sum(self.samples[row * each : (row + 1) * each]) for row in range(replicas))

    def arrival(self, batch_dim: int | None) -> Layout:
        """The layout in which user inputs arrive."""
        return self._edge(self.home, batch_dim)

    def delivery(self, batch_dim: int | None) -> Layout:
        """The layout in which results are handed back."""
        return self._edge(self.output, batch_dim)

    def _edge(self, device: int, batch_dim: int | None) -> Layout:
        ranks = len(self.samples)
        if ranks == 1:
            return Layout(Grid((device,), 1, 1), None)
        return Layout(Grid(tuple(range(ranks)), ranks, 1), batch_dim)


def lower(graph: LayerGraph, strategies: Mapping[str, Strategy], setting: Setting) -> Program:
    """The program of one step of `graph` under `strategies`.

    Raises:
        PlanError: the plan leaves a layer out, or uses a device that is not there.
    """
    for name in graph.layers:
        if name not in strategies:
            raise PlanError(f"{name}: the plan does not say where it runs; add a strategy for it")
        if max(strategies[name].devices) >= setting.devices:
            raise PlanError(
                f"{name}: runs on devices {strategies[name].devices}, but there are only {setting.devices} (0 to "
                f"{setting.devices - 1}); give more devices or another plan"
            )
    return _Lowering(graph, strategies, setting).program()


@dataclass
class _Segment:
    """A compute step that is being filled."""

    code: Code
    grid: Grid
    layers: list[str]
    operands: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Placed:
    """A transfer, the segment after which it starts, and the one after whose backward it goes back."""

    transfer: Transfer
    forward_at: int
    backward_at: int


class _Lowering:
    """The state of one lowering: segments in forward order, and what moves between them."""

    def __init__(self, graph: LayerGraph, strategies: Mapping[str, Strategy], setting: Setting) -> None:
        self._graph = graph
        self._strategies = strategies
        self._setting = setting
        self._held = holdings(graph, strategies)
        self._buckets = buckets(graph, self._held, setting.memories)
        self._heads = _bucket_heads(graph, self._buckets)
        self._slots: dict[str, Slot] = {}
        self._made_in: dict[str, int] = {}  # home slot or moved slot -> segment after which it can be read
        self._moved: dict[str, dict[Layout, str]] = {}
        self._segments: list[_Segment] = []
        self._placed: list[_Placed] = []

    def program(self) -> Program:
        graph = self._graph
        inputs = [name for name in graph.user_inputs if name is not None]
        for value in inputs:
            self._add_slot(self._slot(value, self._setting.arrival(graph.batch_dims.get(value))), -1)
        for layer in graph.layers.values():
            self._add_layer(layer)
        outputs = tuple(self._deliver(value) for value in graph.user_outputs if isinstance(value, str))
        updates = {buffer: self._deliver(value) for buffer, value in graph.buffer_updates.items()}
        read = {*outputs, *updates.values(), *(placed.transfer.source for placed in self._placed)}
        read.update(slot for segment in self._segments for slot in segment.operands.values())
        steps = [self._compute(segment, read) for segment in self._segments]
        return Program(
            slots=self._slots,
            forward=tuple(self._forward(steps)),
            backward=tuple(self._backward(steps)),
            inputs={value: value for value in inputs},
            outputs=outputs,
            updates=updates,
            buckets=self._buckets,
            holdings=self._held,
        )

    # -- layers to segments --

    def _add_layer(self, layer: Layer) -> None:
        strategy = self._strategies[layer.name]
        if layer.mixes_batch and strategy.replicas > 1 and self._setting.global_statistics:
            self._add_batch_norm(layer, strategy)
            return
        if not self._joins(layer, strategy):
            self._segments.append(_Segment(Code.LAYERS, strategy.grid, []))
        segment = self._segments[-1]
        segment.layers.append(layer.name)
        self._read(layer, strategy, segment)
        self._make(layer, strategy, segment)

    def _joins(self, layer: Layer, strategy: Strategy) -> bool:
        """Whether the layer can run in the last segment."""
        if not self._segments or layer.name in self._heads:
            return False
        last = self._segments[-1]
        if last.code is not Code.LAYERS or last.grid != strategy.grid:
            return False
        known = {**last.operands, **{value: value for value in last.results}}
        in_place = all(
            self._same_place(self._slots[known[value]], layer.layout(value, strategy))
            for value in layer.inputs
            if value in known
        )
        return in_place and all(self._uses_alike(layer, other) for other in last.layers)

    def _uses_alike(self, layer: Layer, other_name: str) -> bool:
        """Whether two layers use the same blocks of the parameters and buffers they share."""
        other = self._graph.layers[other_name]
        shared = {*layer.parameters, *layer.buffers} & {*other.parameters, *other.buffers}
        return all(
            self._used(layer.name, state, device) == self._used(other_name, state, device)
            for state in shared
            for device in self._strategies[layer.name].devices
        )

    def _used(self, layer: str, state: str, device: int) -> Region:
        return used_block(self._graph, self._strategies, layer, state, device)

    def _read(self, layer: Layer, strategy: Strategy, segment: _Segment) -> None:
        for value in layer.inputs:
            if value not in segment.results:
                slot = self._place(value, layer.layout(value, strategy), len(self._segments) - 1)
                segment.operands.setdefault(value, slot)

    def _make(self, layer: Layer, strategy: Strategy, segment: _Segment) -> None:
        for value in layer.outputs:
            self._add_slot(self._slot(value, layer.layout(value, strategy)), len(self._segments) - 1)
            segment.results[value] = value

    def _add_batch_norm(self, layer: Layer, strategy: Strategy) -> None:
        """Statistics per replica, an exchange between the replicas of each shard, then the normalisation."""
        if len(layer.inputs) != 1:
            raise PlanError(
                f"{layer.name}: batch norm with a computed weight or bias cannot share statistics between "
                f'{strategy.replicas} replicas; give it one replica, or compile with batch_norm="local"'
            )
        (value,) = layer.inputs
        name = f"{layer.name}.statistics"
        self._segments.append(_Segment(Code.STATISTICS, strategy.grid, [layer.name]))
        self._read(layer, strategy, self._segments[-1])
        here = layer.layout(value, strategy)
        channels = self._graph.values[value].shape[1]
        spread = Layout(strategy.grid, 0, None if here.shard_dim is None else 2)
        spec = self._graph.values[value]
        ones = (1,) * strategy.replicas
        dtype = torch.promote_types(spec.dtype, torch.float32)
        own = Slot(name, name, spread, (strategy.replicas, 3, channels), ones, dtype, spec.requires_grad)
        self._add_slot(own, len(self._segments) - 1)
        self._segments[-1].results[name] = name
        self._segments.append(_Segment(Code.NORMALISE, strategy.grid, [layer.name]))
        self._read(layer, strategy, self._segments[-1])
        shared = replace(spread, batch_dim=None)
        self._segments[-1].operands[name] = self._place(name, shared, len(self._segments) - 1)
        self._make(layer, strategy, self._segments[-1])

    # -- values to slots --

    def _slot(self, value: str, layout: Layout) -> Slot:
        spec = self._graph.values[value]
        dim = self._graph.batch_dims.get(value)
        shape = list(spec.shape)
        rows = None
        if dim is not None and self._graph.batch:
            shape[dim] = spec.shape[dim] // self._graph.batch * self._setting.batch
        if layout.batch_dim is not None and self._graph.batch:
            per_sample = spec.shape[layout.batch_dim] // self._graph.batch
            rows = tuple(per_sample * count for count in self._setting.rows(layout.grid.replicas))
        return Slot(value, value, layout, tuple(shape), rows, spec.dtype, spec.requires_grad)

    def _add_slot(self, slot: Slot, segment: int) -> None:
        self._slots[slot.name] = slot
        self._made_in[slot.name] = segment

    def _same_place(self, home: Slot, layout: Layout) -> bool:
        """Whether every device of `layout` already holds what it wants."""
        if home.layout == layout:
            return True
        wanted = self._relaid(home, layout, home.name)
        summed = home.layout.partial and home.layout.grid.shards > 1
        return (
            not summed
            and not layout.partial
            and set(wanted.devices) <= set(home.devices)
            and all(wanted.region(device) == home.region(device) for device in wanted.devices)
        )

    def _relaid(self, home: Slot, layout: Layout, name: str) -> Slot:
        slot = replace(home, name=name, layout=layout, rows=None)
        if layout.batch_dim is None or home.value not in self._graph.values:
            return slot
        return replace(slot, rows=self._slot(home.value, layout).rows)

    def _place(self, value: str, layout: Layout, reader: int) -> str:
        """The slot of `value` in `layout`, moved there if need be, for segment `reader`."""
        home = self._slots.get(value)
        if home is None:
            raise PlanError(f"{value}: the model returns a parameter or buffer as it is; return a copy (x.clone())")
        if self._same_place(home, layout):
            return home.name
        known = self._moved.setdefault(value, {})
        if layout not in known:
            between = _cut_sum(home, layout) if home.layout.partial and home.layout.grid.shards > 1 else None
            source = self._move(home, between, reader) if between is not None else home
            known[layout] = self._move(source, layout, reader).name
        return known[layout]

    def _move(self, source: Slot, layout: Layout, reader: int) -> Slot:
        moved = self._moved.setdefault(source.value, {})
        if layout in moved:
            return self._slots[moved[layout]]
        target = self._relaid(source, layout, f"{source.value}@{len(moved) + 1}")
        moved[layout] = target.name
        # What was itself moved has to arrive first: it goes on when it is needed, not as soon as it could.
        start = self._made_in[source.name] if source.name == source.value else reader - 1
        self._add_slot(target, start)
        self._placed.append(_Placed(_transfer(source, target), start, reader))
        return target

    def _deliver(self, value: str) -> str:
        layout = self._setting.delivery(self._graph.batch_dims.get(value))
        return self._place(value, layout, len(self._segments))

    # -- steps --

    def _compute(self, segment: _Segment, read: set[str]) -> Compute:
        """The finished step; of its results only those that anyone else reads are kept."""
        names = dict.fromkeys(s for n in segment.layers for s in self._states_of(self._graph.layers[n], segment.code))
        return Compute(
            code=segment.code,
            layers=tuple(segment.layers),
            grid=segment.grid,
            batches=self._setting.rows(segment.grid.replicas),
            operands=tuple(Operand(*item) for item in segment.operands.items()),
            states=tuple(self._state(name, segment) for name in names),
            results=tuple(Operand(*item) for item in segment.results.items() if item[1] in read),
        )

    def _states_of(self, layer: Layer, code: Code) -> tuple[str, ...]:
        return () if code is Code.STATISTICS else (*layer.parameters, *layer.buffers)

    def _state(self, name: str, segment: _Segment) -> State:
        blocks = {}
        users = [
            n for n in segment.layers if name in (*self._graph.layers[n].parameters, *self._graph.layers[n].buffers)
        ]
        for device in segment.grid.devices:
            used = self._used(users[0], name, device)
            held = self._held.get(name, {}).get(device)
            blocks[device] = within(used, held) if held is not None else used
        return State(name, blocks)

    def _forward(self, steps: Sequence[Compute]) -> list[Compute | Transfer]:
        order: list[Compute | Transfer] = []
        for index in range(-1, len(steps)):
            if index >= 0:
                order.append(steps[index])
            order += [placed.transfer for placed in self._placed if placed.forward_at == index]
        return order

    def _backward(self, steps: Sequence[Compute]) -> list[Step]:
        heads = self._reduce_after(steps)
        order: list[Step] = []
        for index in range(len(steps), -1, -1):
            if index < len(steps):
                order.append(steps[index])
            order += [Reduce(b, self._buckets[b].parameters) for b in heads.get(index, [])]
            order += [placed.transfer for placed in reversed(self._placed) if placed.backward_at == index]
        return order

    def _reduce_after(self, steps: Sequence[Compute]) -> dict[int, list[int]]:
        """Buckets by the segment whose backward completes them."""
        found: dict[int, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            first = min(i for i, step in enumerate(steps) if any(s.name in bucket.parameters for s in step.states))
            found.setdefault(first, []).append(number)
        return found


def _bucket_heads(graph: LayerGraph, filled: Sequence[Bucket]) -> set[str]:
    """The first layer of each bucket, at which a segment is split so that the bucket can leave early."""
    order = list(graph.layers)
    heads = set()
    for bucket in filled:
        using = (i for i, name in enumerate(order) if set(graph.layers[name].parameters) & set(bucket.parameters))
        heads.add(order[min(using)])
    return heads


def _cut_sum(home: Slot, target: Layout) -> Layout | None:
    """Where the terms of a sum meet before the sum is copied: cut over the columns, or on one device a row.

    None when sending every term to every reader moves no more: a reader per row, or two terms for two readers.
    """
    grid = home.layout.grid
    copies = _copies(target)
    if copies == 1 or (copies == 2 and grid.shards == 2):
        return None
    sizes = {dim: size for dim, size in enumerate(home.shape) if dim != home.layout.batch_dim}
    able = [dim for dim, size in sizes.items() if size >= grid.shards]
    if able and 0 not in home.shape:
        return Layout(grid, home.layout.batch_dim, max(able, key=lambda dim: sizes[dim]))
    return Layout(Grid(grid.column(0), grid.replicas, 1), home.layout.batch_dim)


def _copies(layout: Layout) -> int:
    """How many devices hold the same block."""
    rows = layout.grid.replicas if layout.batch_dim is None else 1
    return rows * (layout.grid.shards if layout.shard_dim is None else 1)


def _transfer(source: Slot, target: Slot) -> Transfer:
    moving = tuple(pieces(source.shape, source.layout, target.layout, source.rows, target.rows))
    back = tuple(piece.reversed() for piece in moving)
    dtype: torch.dtype = source.dtype
    there = Exchange(_describe(source, target), moving, {d: target.local_shape(d) for d in target.devices}, dtype)
    shapes = {d: source.local_shape(d) for d in source.devices}
    return Transfer(source.name, target.name, there, Exchange(f"gradient of {there.name}", back, shapes, dtype))


def _describe(source: Slot, target: Slot) -> str:
    return f"{source.name} {_layout_text(source.layout)} -> {target.name} {_layout_text(target.layout)}"


def _layout_text(layout: Layout) -> str:
    """Such as `2x2 (0,1,2,3) rows:0 columns:1`."""
    grid = layout.grid
    words = [f"{grid.replicas}x{grid.shards} ({','.join(map(str, grid.devices))})"]
    words += [f"rows:{layout.batch_dim}"] if layout.batch_dim is not None else []
    words += [f"columns:{layout.shard_dim}"] if layout.shard_dim is not None else []
    words += ["terms"] if layout.partial else []
    return " ".join(words)
