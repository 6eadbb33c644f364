"""The lowered program: the steps of all devices for one training step, forward and backward, as plain data.

Lowering makes it, the executor follows it, `text()` prints it. Tensors are known by slots: one slot is one value in one
layout. Both directions are listed, as the best moment to start a transfer differs between them: forward, as soon as the
value is there; backward, as soon as the last reader has given its gradient. All processes follow one order, so none can
wait for a message that another one will only send after it has received one itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import torch

from parplan.fields import ranges
from parplan.graph.layer_graph import TensorSpec
from parplan.layout import (
    Assembly,
    Block,
    EqualSlices,
    Exchange,
    Grid,
    Layout,
    Messages,
    Range,
    equal_slices,
    pieces,
    regions,
    shape_of,
)
from parplan.lowering.holdings import Bucket
from parplan.plan import LISTED_DEVICES, Scheme, Strategy

__all__ = [
    "Assembly", "Bucket", "Code", "Compute", "Exchange", "Forward", "Join", "Messages", "OnePass", "Operand", "Program",
    "Reduce", "Regather", "Slot", "Split", "Staged", "State", "Step", "Transfer", "gathers_beside", "last_reads",
    "shape_of",
]  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """One value in one layout.

    Args:
        name: unique: the value's name, or with `@` and a number for further layouts.
        value: the value's name in the captured graph.
        layout: where its parts are.
        shape: of the whole tensor in this step.
        rows: extent of the batch dimension in every row of the grid; None when rows hold the same.
        dtype: of the tensor.
        requires_grad: whether a gradient flows back through it.
        per_replica: a number of which every row has its own: one entry each, where the layers' code has none.
        pass_number: which pass's samples it has; None when those of the whole batch.
    """

    name: str
    value: str
    layout: Layout
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    per_replica: bool = False
    pass_number: int | None = None

    @property
    def spec(self) -> TensorSpec:
        """The whole tensor."""
        return TensorSpec(self.shape, self.dtype, self.requires_grad)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that hold a part."""
        return self.layout.grid.devices

    @cached_property
    def blocks(self) -> Mapping[int, Block]:
        """The block that every device holds."""
        return regions(self.shape, self.layout, self.rows)

    @cached_property
    def local_shapes(self) -> Mapping[int, tuple[int, ...]]:
        """Shape of every device's part."""
        return {device: shape_of(block) for device, block in self.blocks.items()}


class Code(Enum):
    """Code of a compute step."""

    LAYERS = "the layers' own ops"
    STATISTICS = "count, mean and squared deviations of batch norm, per replica"
    NORMALISE = "batch norm with the statistics of all replicas"


@dataclass(frozen=True)
class Operand:
    """A value that a compute step reads or writes: its name in the code, and the slot it lies in."""

    name: str
    slot: str


@dataclass(frozen=True)
class State:
    """A parameter or buffer that a compute step uses: the block of what each device holds of it."""

    name: str
    blocks: Mapping[int, Block] = field(hash=False)


@dataclass(frozen=True)
class Compute:
    """Consecutive layers on one grid with nothing to move between them.

    Args:
        code: which code runs.
        layers: names, in forward order.
        grid: the devices that take part.
        batches: samples per row of the grid.
        operands: values read, in the order of the code's arguments.
        states: parameters and buffers, which follow as further arguments.
        results: values the code returns.
        pass_number: which pass it belongs to; None when it runs once.
        unit: of recomputation, where the layers run forward again when they go back; None: what that needs is kept.
    """

    code: Code
    layers: tuple[str, ...]
    grid: Grid
    batches: tuple[int, ...]
    operands: tuple[Operand, ...]
    states: tuple[State, ...]
    results: tuple[Operand, ...]
    pass_number: int | None = None
    unit: int | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Slots it reads."""
        return tuple(operand.slot for operand in self.operands)

    def batch(self, device: int) -> int:
        """Samples that `device` works on."""
        return self.batches[self.grid.position(device)[0]]

    def text(self) -> str:
        """One line of the printed program."""
        layers = " + ".join(self.layers)
        what = layers if self.code is Code.LAYERS else f"{self.code.name.lower()} of {layers}"
        what = what if self.pass_number is None else f"pass {self.pass_number}: {what}"
        names = (", ".join(o.slot for o in group) for group in (self.operands, self.results))
        return f"{what} on {_grid_text(self.grid)}: " + " -> ".join(names)


@dataclass(frozen=True)
class Transfer:
    """Redistribution of a value from one slot to another; its pieces are worked out at the first use.

    Args:
        given, wanted: the slots it reads and fills; a value is sent in the type that it arrives in.
        weights: it gathers a parameter that lies in slices; its gradient is summed to slices.
    """

    given: Slot
    wanted: Slot
    weights: bool = False

    @property
    def source(self) -> str:
        """Name of the slot it reads."""
        return self.given.name

    @property
    def target(self) -> str:
        """Name of the slot it fills."""
        return self.wanted.name

    @property
    def reads(self) -> tuple[str, ...]:
        """Slots it reads."""
        return (self.source,)

    @property
    def name(self) -> str:
        """Slots and layouts, for errors."""
        return " -> ".join(f"{slot.name} {_layout_text(slot.layout)}" for slot in (self.given, self.wanted))

    @cached_property
    def sent(self) -> Slot:
        """The slot that it reads, in the type in which the value is sent."""
        return self.given if self.given.dtype == self.wanted.dtype else replace(self.given, dtype=self.wanted.dtype)

    @cached_property
    def sent_back(self) -> Slot:
        """The slot that it fills, in the type in which the gradient is sent."""
        return self.wanted if self.given.dtype == self.wanted.dtype else replace(self.wanted, dtype=self.given.dtype)

    @cached_property
    def exchange(self) -> Exchange:
        """Moves the value."""
        given, wanted = self.given, self.wanted
        moving = tuple(pieces(given.shape, given.layout, wanted.layout, given.rows, wanted.rows))
        return Exchange(self.name, moving, wanted.local_shapes, wanted.dtype, self.slices)

    @cached_property
    def transposed(self) -> Exchange:
        """Moves its gradient back."""
        back, given = tuple(piece.reversed() for piece in self.exchange.pieces), self.given
        slices = replace(self.slices, gathered=False) if self.slices is not None else None
        return Exchange(f"gradient of {self.name}", back, given.local_shapes, given.dtype, slices)

    @cached_property
    def slices(self) -> EqualSlices | None:
        """The regular pattern of a gather of weights, where it has one."""
        return equal_slices(self.given.layout, self.given.rows) if self.weights else None

    def text(self) -> str:
        """One line of the printed program."""
        return f"move {self.name}"


@dataclass(frozen=True)
class Split:
    """The parts that the passes have of a value of the whole batch, where it lies: nothing moves.

    Args:
        source: slot of the whole batch.
        targets: slot per pass.
        dim: the dimension of the samples.
        ranges: per device and pass, the indices along `dim` that are the pass's.
    """

    source: str
    targets: tuple[str, ...]
    dim: int
    ranges: Mapping[int, tuple[tuple[Range, ...], ...]] = field(hash=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """Slots it reads."""
        return (self.source,)

    def text(self) -> str:
        """One line of the printed program."""
        return f"split {self.source} -> {', '.join(self.targets)}"


@dataclass(frozen=True)
class Join:
    """A value of the whole batch from the parts that the passes made, where they lie: the reverse of `Split`."""

    sources: tuple[str, ...]
    target: str
    dim: int
    ranges: Mapping[int, tuple[tuple[Range, ...], ...]] = field(hash=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """Slots it reads."""
        return self.sources

    def text(self) -> str:
        """One line of the printed program."""
        return f"join {', '.join(self.sources)} -> {self.target}"


@dataclass(frozen=True)
class Reduce:
    """Start the gradient sums of one bucket; they are waited for at the end of the backward."""

    bucket: Bucket

    def text(self) -> str:
        """One line of the printed program."""
        return f"sum gradients of {', '.join(self.bucket.parameters)}"


@dataclass(frozen=True)
class Regather:
    """Gather of weights that were freed behind their forward, again for the backward that follows."""

    transfer: Transfer

    def text(self) -> str:
        """One line of the printed program."""
        return f"move {self.transfer.name} again"


Forward = Compute | Transfer | Split | Join
Step = Forward | Reduce | Regather


@dataclass(frozen=True)
class OnePass:
    """One pass of a staged program.

    Args:
        forward, backward: its steps; its results are delivered at the end of `forward`.
        outputs: slot per result leaf that is a tensor, of this pass's samples.
        samples: per process, the indices of its samples that are the pass's.
    """

    forward: tuple[Forward, ...]
    backward: tuple[Step, ...]
    outputs: tuple[str, ...]
    samples: tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class Staged:
    """The steps of a program whose passes each go forward and backward before the next one does.

    Args:
        before: forward, up to the passes.
        passes: one after another.
        sums: of gradients that come from the passes.
        after: backward, from the passes on.
    """

    before: tuple[Forward, ...]
    passes: tuple[OnePass, ...]
    sums: tuple[Reduce, ...]
    after: tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """One training or evaluation step.

    Args:
        slots: every slot by name.
        forward, backward: steps in the order in which every process takes them.
        inputs: slot per user input value.
        outputs: slot per result leaf that is a tensor.
        updates: slot whose value is assigned to a buffer after the step, by placeholder.
        buckets: of gradients that several devices have a share in.
        holdings: block of every parameter that each device holds, by placeholder.
        slices: parameters that lie in slices, each in the slot of its name: transfers gather them for the layers that
            read them, and sum their gradients to slices.
        strategies: of every layer, as lowered.
        devices: how many logical devices there are.
        scheme: how samples get from many replicas to layers with fewer.
        staged: the same steps pass by pass, where results come from passes alone.
    """

    slots: Mapping[str, Slot]
    forward: tuple[Forward, ...]
    backward: tuple[Step, ...]
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    updates: Mapping[str, str]
    buckets: tuple[Bucket, ...]
    holdings: Mapping[str, Mapping[int, Block]]
    slices: tuple[str, ...]
    strategies: Mapping[str, Strategy]
    devices: int
    scheme: Scheme = Scheme.GATHER
    staged: Staged | None = None

    @property
    def computes(self) -> tuple[Compute, ...]:
        """All compute steps, in forward order."""
        return tuple(step for step in self.forward if isinstance(step, Compute))

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, in forward order."""
        return tuple(step for step in self.forward if isinstance(step, Transfer))

    @cached_property
    def freed(self) -> Mapping[str, str]:
        """Slots of gathered weights that are freed behind their forward and filled again, with their parameters."""
        again = (step.transfer for step in self.backward if isinstance(step, Regather))
        return {transfer.target: transfer.given.value for transfer in again}

    def reached(self, results: Set[str]) -> Set[str]:
        """Slots that have a gradient where these have one."""
        found = set(results)
        for step in self.backward:
            if isinstance(step, Reduce | Regather):
                continue
            if isinstance(step, Compute):
                targets = [result.slot for result in step.results]
            else:
                targets = list(step.targets) if isinstance(step, Split) else [step.target]
            if not found.isdisjoint(targets):
                found.update(step.reads)
        return found

    def text(self) -> str:
        """The program as a table, one step per line."""
        forward = [f"  {step.text()}" for step in self.forward]
        backward = [f"  {_back_text(step)}" for step in self.backward]
        return "\n".join(["forward:", *forward, "backward:", *backward, ""])


def gathers_beside(program: Program) -> Mapping[tuple[str, bool], Compute]:
    """The compute step that follows each gather of weights, by the slot that is filled and whether it is backward."""
    found = dict[tuple[str, bool], Compute]()
    for backward, steps in enumerate((program.forward, program.backward)):
        waiting = list[str]()
        for step in steps:
            own = step.transfer if isinstance(step, Regather) else step
            if isinstance(step, Compute):
                found |= {(slot, bool(backward)): step for slot in waiting}
                waiting = []
            elif isinstance(own, Transfer) and own.weights and (isinstance(step, Regather) or not backward):
                waiting.append(own.target)
    return found


def last_reads(steps: Sequence[Forward], kept: Collection[str] = ()) -> Mapping[int, Sequence[str]]:
    """Per step (by its id), the slots that no later one reads; without those that are kept."""
    found: dict[int, list[str]] = {id(step): [] for step in steps}
    for slot, last in {slot: id(step) for step in steps for slot in step.reads}.items():
        if slot not in kept:
            found[last].append(slot)
    return found


def _back_text(step: Step) -> str:
    if isinstance(step, Transfer):
        return f"move {step.target} back to {step.source}"
    if isinstance(step, Split):
        return f"join {', '.join(step.targets)} back to {step.source}"
    if isinstance(step, Join):
        return f"split {step.target} back to {', '.join(step.sources)}"
    if isinstance(step, Reduce | Regather):
        return step.text()
    prefix = "" if step.pass_number is None else f"pass {step.pass_number}: "
    return f"{prefix}back through {' + '.join(step.layers)}"


def _grid_text(grid: Grid) -> str:
    devices = ranges(grid.devices) if len(grid.devices) > LISTED_DEVICES else ",".join(map(str, grid.devices))
    return f"{grid.replicas}x{grid.shards} ({devices})"


def _layout_text(layout: Layout) -> str:
    """Such as `2x2 (0,1,2,3) rows:0 columns:1`."""
    words = [_grid_text(layout.grid)]
    words += [f"rows:{layout.batch_dim}"] if layout.batch_dim is not None else []
    words += [f"columns:{layout.shard_dim}"] if layout.shard_dim is not None else []
    words += [layout.sections.text()] if layout.sections is not None else []
    words += ["terms"] if layout.partial else []
    return " ".join(words)
