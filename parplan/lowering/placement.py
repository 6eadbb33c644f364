"""Assigns a slot to every (value, layout) that a layer reads, and inserts the redistributions between them.

A value that is read in another layout than it was made in is moved once per layout, however many layers read it. A sum
that several devices hold terms of and many want to read meets in slices first. A value whose readers run in passes is
split where it lies, and each pass's part moves by itself: pass p + 1's while pass p computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Grid, Layout, Range, in_place, split_evenly
from parplan.lowering.passes import Pass, local_ranges
from parplan.lowering.program import Join, Slot, Split, Transfer
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Scheme

__all__ = ["ScheduledMove", "SlotAssigner"]

Rows = tuple[int, ...] | None


@dataclass(frozen=True)
class ScheduledMove:
    """Step that fills a slot, the segment after which it starts, and the one after whose backward it goes back."""

    step: Transfer | Split | Join
    forward_at: int
    backward_at: int


class SlotAssigner:
    """Slots and scheduled moves of a program that is being lowered.

    Args:
        graph: the captured graph.
        step_setting: how many samples, and where results go.
        numbers: values with one entry per replica -> how many replicas.
        passes: those of the step, if any.

    Attributes:
        slots: by name.
        moves: what fills them, in the order it was asked for.
        begins: the first segment of every pass, then the first one behind them, as far as they are known.
    """

    def __init__(
        self, graph: LayerGraph, step_setting: StepSetting, numbers: Mapping[str, int], passes: Sequence[Pass] = ()
    ) -> None:
        self._graph = graph
        self._step_setting = step_setting
        self._numbers = numbers
        self._passes = passes
        self.slots: dict[str, Slot] = {}
        self.moves: list[ScheduledMove] = []
        self.begins: list[int] = []
        self._made_in: dict[str, int] = {}  # slot -> segment after which it can be read
        self._moved: dict[str, dict[tuple[Layout, Rows], str]] = {}

    def add(self, slot: Slot, segment: int) -> None:
        """A value that `segment` makes (-1: the user brings it)."""
        self.slots[slot.name] = slot
        self._made_in[slot.name] = segment

    def slot(self, value: str, layout: Layout, pass_number: int | None = None) -> Slot:
        """The slot of a value of the graph in `layout`, with the shape it has in this step, or in one pass of it."""
        spec = self._graph.values[value]
        if value in self._numbers:
            replicas = self._numbers[value]
            rows = (1,) * replicas if layout.batch_dim is not None else None
            return Slot(value, value, layout, (replicas,), rows, spec.dtype, spec.requires_grad, per_replica=True)
        dim = self._graph.batch_dims.get(value)
        shape = list(spec.shape)
        # All samples by all samples, say, grow along another dimension than that of the rows too.
        for grown in {*(() if dim is None else (dim,)), *(self._graph.grown or {}).get(value, ())}:
            captured = self._graph.batch or 1
            here = self._step_setting.batch if pass_number is None else self._passes[pass_number].batch
            shape[grown] = shape[grown] * here // captured if self._graph.batch else shape[grown]
        name, rows = _home(value, pass_number), self._rows(value, layout, pass_number)
        return Slot(name, value, layout, tuple(shape), rows, spec.dtype, spec.requires_grad, pass_number=pass_number)

    def _per_sample(self, value: str) -> int:
        """Indices along the dimension of the samples, per sample."""
        return self._graph.values[value].shape[self._graph.batch_dims[value]] // (self._graph.batch or 1)

    def _rows(self, value: str, layout: Layout, pass_number: int | None) -> Rows:
        if layout.batch_dim is None or not self._graph.batch:
            return None
        per_sample = self._graph.values[value].shape[layout.batch_dim] // self._graph.batch
        return tuple(per_sample * count for count in self.samples(layout.grid.replicas, pass_number))

    def samples(self, replicas: int, pass_number: int | None) -> tuple[int, ...]:
        """Samples per replica in this step, or in one pass of it."""
        whole = self._step_setting if pass_number is None else self._passes[pass_number]
        return whole.rows(replicas)

    def place(self, value: str, layout: Layout, reader: int, pass_number: int | None = None) -> str:
        """The slot of `value` in `layout`, moved there if need be, for segment `reader`, which may be of a pass."""
        home = self._find(value, pass_number, reader) or self._joined(value, layout, reader)
        return self._at(home, layout, self._rows_like(home, layout), reader)

    def deliver(self, value: str, end: int) -> str:
        """The slot of `value` where results are handed back, after the last segment."""
        dim = 0 if value in self._numbers else self._graph.batch_dims.get(value)
        return self.place(value, self._step_setting.delivery(dim), end)

    def arrives(self, value: str, layout: Layout, pass_number: int | None) -> bool:
        """Whether `value` still has to be moved for a segment that reads it in `layout`."""
        home = self.slots.get(_home(value, pass_number)) or self.slots.get(value)
        if home is None:
            return True
        rows = self._rows_like(home, layout)
        return not self._same_place(home, layout, rows) and (layout, rows) not in self._moved.get(home.name, {})

    def same_place(self, home: Slot, layout: Layout) -> bool:
        """Whether every device of `layout` already holds what it wants."""
        return self._same_place(home, layout, self._rows_like(home, layout))

    def _same_place(self, home: Slot, layout: Layout, rows: Rows) -> bool:
        if home.layout == layout and home.rows == rows:
            return True
        summed = home.layout.partial and home.layout.grid.shards > 1
        return not summed and not layout.partial and in_place(home.shape, home.layout, layout, home.rows, rows)

    def _rows_like(self, home: Slot, layout: Layout) -> Rows:
        """The rows of `home` in `layout`; a pass's part of a whole batch need not lie as the pass's layers want it."""
        if layout == home.layout and home.pass_number is None:
            return home.rows
        inside = home.value in self._graph.values and not home.per_replica
        return self._rows(home.value, layout, home.pass_number) if inside else None

    # -- from layout to layout --

    def _at(self, home: Slot, layout: Layout, rows: Rows, reader: int) -> str:
        if self._same_place(home, layout, rows):
            return home.name
        known = self._moved.setdefault(home.name, {})
        if (layout, rows) not in known:
            stop = self._between(home, layout, rows)
            source = home if stop is None else self._move(home, stop.layout, stop.rows, reader, first=True)
            known[layout, rows] = self._move(source, layout, rows, reader).name
        return known[layout, rows]

    def _between(self, home: Slot, layout: Layout, rows: Rows) -> Slot | None:
        """A stop on the way, where going straight would move more."""
        if home.layout.partial and home.layout.grid.shards > 1:
            stop = _cut_sum(home, layout)
            return None if stop is None else replace(home, layout=stop, rows=self._rows_like(home, stop))
        if self._step_setting.scheme is Scheme.BROADCAST and self._crosses(home) and home.layout.batch_dim is not None:
            return self._dealt(home, layout, rows)
        return None

    def _dealt(self, home: Slot, layout: Layout, rows: Rows) -> Slot | None:
        """Where a lone sender deals its samples out, before those who want them all give them to each other."""
        copies = layout.grid.shards
        if layout.shard_dim is not None or copies < 3 or (layout.batch_dim is None and layout.grid.replicas > 1):
            return None
        per_sample = self._per_sample(home.value)
        whole = rows if rows is not None else (home.shape[self._graph.batch_dims[home.value]],)
        dealt = tuple(per_sample * part for row in whole for part in split_evenly(row // per_sample, copies))
        grid = Grid(layout.grid.devices, len(layout.grid.devices), 1)
        return replace(home, layout=Layout(grid, home.layout.batch_dim), rows=dealt)

    def _move(self, source: Slot, layout: Layout, rows: Rows, reader: int, first: bool = False) -> Slot:
        """Move `source`; `first`: to a stop on the way."""
        base = _home(source.value, source.pass_number)
        moved = self._moved.setdefault(base, {})
        if (layout, rows) in moved:
            return self.slots[moved[layout, rows]]
        dtype = self._graph.read_as.get(source.value, source.dtype)  # weights as autocast reads them
        target = replace(source, name=f"{base}@{len(moved) + 1}", layout=layout, rows=rows, dtype=dtype)
        moved[layout, rows] = target.name
        start, end = self._start(source, base, reader), reader
        if first and self._crosses(source) and source.pass_number:
            end = self.begins[source.pass_number] - 1  # the second half of the way back is behind the pass before
        if source.pass_number is not None and source.pass_number + 2 < len(self._passes) < len(self.begins):
            end = self.begins[source.pass_number + 2]  # results: their gradients when the pass behind begins to go back
        self.add(target, start)
        weights = source.value in self._graph.parameters
        self.moves.append(ScheduledMove(Transfer(source, target, weights), start, end))
        return target

    def _start(self, source: Slot, base: str, reader: int) -> int:
        """The segment after which a move starts."""
        made = self._made_in[source.name]
        if source.value in self._graph.parameters:
            return reader - 1  # ordering.py says how much earlier: whole weights take memory
        early = source.pass_number is not None and source.pass_number > 0 and made < self.begins[source.pass_number]
        if source.name != base:
            # What was itself moved has to arrive first: it goes on when it is needed, not as soon as it could, or
            # beside the pass before.
            return min(reader - 1, max(made, self.begins[(source.pass_number or 1) - 1])) if early else reader - 1
        return max(made, self.begins[(source.pass_number or 1) - 1] - 1) if early else made

    def _crosses(self, slot: Slot) -> bool:
        """Whether it is a part of what was made before the passes."""
        return slot.pass_number is not None and self._made_in[slot.name] < self.begins[0]

    # -- passes --

    def _find(self, value: str, pass_number: int | None, reader: int) -> Slot | None:
        """The home of a value, or of a pass's part of it, where there is one; the whole is split where it lies."""
        whole = self.slots.get(value)
        if pass_number is None or (whole is not None and value not in self._graph.batch_dims):
            return whole
        if whole is not None and _home(value, pass_number) not in self.slots:
            shared, made = self._shared(whole), self._made_in[whole.name]
            parts = [replace(self.slot(value, whole.layout, p), rows=rows) for p, rows in enumerate(shared.rows)]
            for part in parts:
                self.add(part, made)
            step = Split(whole.name, tuple(p.name for p in parts), self._graph.batch_dims[value], shared.ranges)
            self.moves.append(ScheduledMove(step, made, reader))
        return self.slots.get(_home(value, pass_number))

    def _joined(self, value: str, layout: Layout, reader: int) -> Slot:
        """The home, in `layout`, of a value that the passes made parts of.

        Raises:
            PlanError: no layer made it.
        """
        parts = [self.slots.get(_home(value, number)) for number in range(len(self._passes))]
        homes = [part for part in parts if part is not None]
        if not homes:
            raise PlanError(
                f"{self._graph.label(value)}: the model returns a parameter or buffer as it is; return a copy "
                "(x.clone())"
            )
        if value not in self._graph.batch_dims:
            return homes[0]  # the same in every pass
        target = self.slot(value, layout)
        shared = self._shared(target)
        ways = zip(homes, shared.rows, strict=True)
        sources = tuple(self._at(home, layout, rows, reader) for home, rows in ways)
        made = max(self._made_in[source] for source in sources)
        self.add(target, made)
        step = Join(sources, target.name, self._graph.batch_dims[value], shared.ranges)
        self.moves.append(ScheduledMove(step, made, reader))
        return target

    def _shared(self, whole: Slot) -> _Shared:
        """How the passes share a slot of the whole batch."""
        dim, per_sample = self._graph.batch_dims[whole.value], self._per_sample(whole.value)
        sizes = whole.rows if whole.rows is not None else (whole.shape[dim],) * whole.layout.grid.replicas
        starts = [sum(sizes[:row]) if whole.rows is not None else 0 for row in range(len(sizes))]
        by_row = [
            tuple(local_ranges(one.ranges, Range(start, start + size), per_sample) for one in self._passes)
            for start, size in zip(starts, sizes, strict=True)
        ]
        rows: list[Rows] = [
            tuple(sum(map(len, own[number])) for own in by_row) if whole.rows is not None else None
            for number in range(len(self._passes))
        ]
        grid = whole.layout.grid
        return _Shared(tuple(rows), {device: by_row[grid.position(device)[0]] for device in grid.devices})


@dataclass(frozen=True)
class _Shared:
    """Per pass the extent of every row, and per device and pass the indices that are the pass's."""

    rows: tuple[Rows, ...]
    ranges: Mapping[int, tuple[tuple[Range, ...], ...]]


def _home(value: str, pass_number: int | None) -> str:
    """The name of the slot that a value is made in."""
    return value if pass_number is None else f"{value}#{pass_number}"


def _cut_sum(home: Slot, target: Layout) -> Layout | None:
    """Where the terms of a sum meet before the sum is copied: cut over the columns, or on one device a row.

    None when sending every term to every reader moves no more: a reader per row, or two terms for two readers.
    """
    grid = home.layout.grid
    copies = target.grid.replicas if target.batch_dim is None else 1
    copies *= target.grid.shards if target.shard_dim is None else 1
    if copies == 1 or (copies == 2 and grid.shards == 2):
        return None
    sizes = {dim: size for dim, size in enumerate(home.shape) if dim != home.layout.batch_dim}
    able = [dim for dim, size in sizes.items() if size >= grid.shards]
    if able and 0 not in home.shape:
        return Layout(grid, home.layout.batch_dim, max(able, key=lambda dim: sizes[dim]))
    return Layout(Grid(grid.column(0), grid.replicas, 1), home.layout.batch_dim)
