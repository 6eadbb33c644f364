"""Where values lie in a program: a slot for every layout that somebody reads a value in, and the moves between them.

A value that is read in another layout than it was made in is moved once per layout, however many layers read it. A sum
that several devices hold terms of and many want to read meets in slices first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Grid, Layout, pieces
from parplan.runtime.program import Slot, Transfer
from parplan.runtime.setting import Setting
from parplan.runtime.transport import Exchange

__all__ = ["Placed", "Placing"]


@dataclass(frozen=True)
class Placed:
    """A transfer, the segment after which it starts, and the one after whose backward it goes back."""

    transfer: Transfer
    forward_at: int
    backward_at: int


class Placing:
    """The slots of a program that is being lowered.

    Args:
        graph: the captured graph.
        setting: how many samples, and where results go.
        numbers: values with one entry per replica -> how many replicas.

    Attributes:
        slots: by name.
        moves: what fills them, in the order it was asked for.
    """

    def __init__(self, graph: LayerGraph, setting: Setting, numbers: Mapping[str, int]) -> None:
        self._graph = graph
        self._setting = setting
        self._numbers = numbers
        self.slots: dict[str, Slot] = {}
        self.moves: list[Placed] = []
        self._made_in: dict[str, int] = {}  # slot -> segment after which it can be read
        self._moved: dict[str, dict[Layout, str]] = {}

    def add(self, slot: Slot, segment: int) -> None:
        """A value that `segment` makes (-1: the user brings it)."""
        self.slots[slot.name] = slot
        self._made_in[slot.name] = segment

    def slot(self, value: str, layout: Layout) -> Slot:
        """The slot of a value of the graph in `layout`, with the shape it has in this step."""
        spec = self._graph.values[value]
        if value in self._numbers:
            replicas = self._numbers[value]
            rows = (1,) * replicas if layout.batch_dim is not None else None
            return Slot(value, value, layout, (replicas,), rows, spec.dtype, spec.requires_grad, per_replica=True)
        dim = self._graph.batch_dims.get(value)
        shape = list(spec.shape)
        if dim is not None and self._graph.batch:
            shape[dim] = spec.shape[dim] // self._graph.batch * self._setting.batch
        return Slot(value, value, layout, tuple(shape), self._rows(value, layout), spec.dtype, spec.requires_grad)

    def _rows(self, value: str, layout: Layout) -> tuple[int, ...] | None:
        if layout.batch_dim is None or not self._graph.batch:
            return None
        per_sample = self._graph.values[value].shape[layout.batch_dim] // self._graph.batch
        return tuple(per_sample * count for count in self._setting.rows(layout.grid.replicas))

    def place(self, value: str, layout: Layout, reader: int) -> str:
        """The slot of `value` in `layout`, moved there if need be, for segment `reader`."""
        home = self.slots.get(value)
        if home is None:
            raise PlanError(f"{value}: the model returns a parameter or buffer as it is; return a copy (x.clone())")
        if self.same_place(home, layout):
            return home.name
        known = self._moved.setdefault(value, {})
        if layout not in known:
            between = _cut_sum(home, layout) if home.layout.partial and home.layout.grid.shards > 1 else None
            source = self._move(home, between, reader) if between is not None else home
            known[layout] = self._move(source, layout, reader).name
        return known[layout]

    def deliver(self, value: str, end: int) -> str:
        """The slot of `value` where results are handed back, after the last segment."""
        dim = 0 if value in self._numbers else self._graph.batch_dims.get(value)
        return self.place(value, self._setting.delivery(dim), end)

    def same_place(self, home: Slot, layout: Layout) -> bool:
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
        inside = home.value in self._graph.values and not home.per_replica
        return replace(home, name=name, layout=layout, rows=self._rows(home.value, layout) if inside else None)

    def _move(self, source: Slot, layout: Layout, reader: int) -> Slot:
        moved = self._moved.setdefault(source.value, {})
        if layout in moved:
            return self.slots[moved[layout]]
        target = self._relaid(source, layout, f"{source.value}@{len(moved) + 1}")
        moved[layout] = target.name
        # What was itself moved has to arrive first: it goes on when it is needed, not as soon as it could.
        start = self._made_in[source.name] if source.name == source.value else reader - 1
        self.add(target, start)
        self.moves.append(Placed(_transfer(source, target), start, reader))
        return target


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
