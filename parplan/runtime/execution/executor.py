"""The services that run one program on the devices of this process: parameters, generated code, transport, threads, and
the parts of values that are here."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.user_line import failing_layer
from parplan.layout import Grid
from parplan.lowering.pipeline.stages import Pipeline, pipeline
from parplan.lowering.program import Compute, Program, Transfer, last_reads
from parplan.runtime.compat import writes
from parplan.runtime.execution.buffer_sync import BufferBroadcast
from parplan.runtime.execution.dispatch import Dispatch, Inline
from parplan.runtime.execution.module_hooks import HookCalls
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.random_state import OwnDraws, SeededOps, draws_any
from parplan.runtime.execution.segment_cache import EAGER, Function, SegmentCache, written_buffers
from parplan.runtime.execution.timeline import Recorder, Span
from parplan.runtime.sharded_state.outside_gradients import ParameterAliases
from parplan.runtime.transport.base import Held, Pending, Transport

__all__ = ["Executor", "FreedWeights", "SingleDevice", "SlotParts", "memory", "start_together"]

TOGETHER = 1 << 20
"""Bytes up to which messages of one step go as one: smaller ones cost their handling, and larger ones would be copied,
and hold up the first micro-batch until those of all have arrived."""


_Call = tuple[Compute, Function, Sequence[Tensor] | None]


@dataclass(frozen=True)
class SingleDevice:
    """A program that one device runs alone, prepared: the order of its steps is that of the caller's autograd.

    Args:
        place: where the device lives.
        calls: each step, its code, and its parameters and buffers; None where some are made anew in every call.
        tensors: all of the module's own that steps use, which have to lie on the device.
    """

    device: int
    place: torch.device
    calls: Sequence[_Call]
    tensors: Sequence[Tensor]


class Executor:
    """One program bound to the devices of this process; `run_program` calls it.

    Args:
        graph: that the program was lowered from.
        program: the steps.
        store: parameters and buffers as the devices hold them.
        transport: moves tensors; says which devices are here.
        output: the device whose part of a result is handed back, where one process holds all.
        dropout: whether dropout drops anything.
        seeded: ops that draw random numbers on several devices at once; default: those of the program.
        recorder: told of the activities of a step; default: nothing is recorded, and nothing is spent on it.
        dispatch: which thread runs the devices' work; default: the caller's.
        hooks: whether the user's module hooks are called.
        backend: that compiles the code of compute steps.
        caller_autograd: whether a program that one device runs alone runs in the caller's autograd.

    Attributes:
        several_results: more than one result takes a gradient, so that a loss may leave some out, and the parameters
            of those have no gradients.
        last_reads: per forward step (by its id), the slots that no later step and no caller reads.
    """

    def __init__(
        self,
        graph: LayerGraph,
        program: Program,
        store: Store,
        transport: Transport,
        output: int = 0,
        dropout: bool = True,
        seeded: SeededOps | None = None,
        recorder: Recorder | None = None,
        dispatch: Dispatch | None = None,
        hooks: bool = True,
        backend: str = EAGER,
        caller_autograd: bool = True,
    ) -> None:
        self.graph = graph
        self.backend, self._caller_autograd = backend, caller_autograd
        self.program = program
        self.store = store
        self.transport = transport
        self.recorder = recorder if recorder is not None else Recorder()
        self.deliver_from = output if transport.processes == 1 else transport.owned[0]
        self.seeded = seeded if seeded is not None else SeededOps(graph, program.strategies)
        self._dropout = dropout
        self.hooks = HookCalls(graph, program, transport.processes, silent=not hooks)
        places = {device: transport.physical(device) for device in transport.owned}
        marks = self.recorder.marks
        self.code = SegmentCache(graph, program, self.seeded, dropout, places, self.hooks, marks, backend)
        self.dispatch: Dispatch = dispatch if dispatch is not None else Inline()
        # Autograd computes on an accelerator in the one thread it has for that, which waits for the whole backward of
        # a call: a backward that another thread starts within would wait for that thread forever.
        on_cpus = all(place.type == "cpu" for place in places.values())
        self.backward_dispatch: Dispatch = self.dispatch if on_cpus else Inline()
        self._drawing = {id(step) for step in program.computes if draws_any(graph, step.layers)}
        self._written = {id(step): written_buffers(graph, step) for step in program.computes}
        self._statistics = frozenset[str]().union(*self._written.values())
        self._changing = frozenset(program.updates) | graph.numbers.keys()
        self.last_reads = last_reads(program.forward, {*program.outputs, *program.updates.values()})
        self.several_results = len({name for name in program.outputs if program.slots[name].requires_grad}) > 1
        self._state_results: frozenset[int] | None = None
        self._aliases: weakref.ref[ParameterAliases] | None = None
        grids: dict[str, set[Grid]] = defaultdict(set)
        for step in program.computes:
            for state in step.states:
                grids[state.name].add(step.grid)
        # Buffers that steps on other devices go on from: those of a batch norm that is called more than once.
        rewritten = {name for name in self._statistics if len(grids[name]) > 1}
        self._rewriting = {step for step, names in self._written.items() if not rewritten.isdisjoint(names)}
        self._broadcast: BufferBroadcast | None = None
        if transport.processes > 1:
            self._broadcast = BufferBroadcast(graph, program, rewritten, store, transport)
        for bucket in program.buckets:
            for group in bucket.groups:
                transport.group(group)
        for transfer in program.transfers if transport.collectives else ():
            for group in transfer.slices.groups if transfer.slices is not None else ():
                transport.group(group)

    @cached_property
    def single_device(self) -> SingleDevice | None:
        """The program as one device of a process of its own runs it, where nothing has to be moved or computed again;
        None of other programs."""
        program, steps = self.program, self.program.computes
        devices = {device for step in steps for device in step.grid.devices}
        moves = len(steps) < len(program.forward) or bool(program.slices) or len(devices) != 1
        again = any(step.unit is not None or step.pass_number is not None for step in steps) or bool(program.updates)
        watched = type(self.recorder) is not Recorder or not isinstance(self.dispatch, Inline)
        watched = watched or not self._caller_autograd
        if self.transport.processes > 1 or moves or again or watched:
            return None
        (device,) = devices
        special, calls = self._changing | self._statistics, list[_Call]()
        for step in steps:
            states = None
            if special.isdisjoint(state.name for state in step.states):
                states = [self.store.original(state.name) for state in step.states]
            calls.append((step, self.code.get(step, device), states))
        tensors = [self.store.original(state.name) for step in steps for state in step.states]
        return SingleDevice(device, self.transport.physical(device), calls, tensors)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The program's steps by pipeline stage."""
        return pipeline(self.graph, self.program)

    def aliases(self) -> ParameterAliases:
        """The trainable parameters as the program takes them, under torchrun.

        Calls of one backward share aliases, so that the sum of their gradients is known as theirs.
        """
        known = self._aliases() if self._aliases is not None else None
        if known is None:
            known = ParameterAliases(list(self.store.trainable.values()))
            self._aliases = weakref.ref(known)
        return known

    def own_draws(self) -> OwnDraws:
        """The random numbers of one forward of this process."""
        places = {self.transport.physical(device) for device in self.transport.owned} if self.seeded.apart else ()
        return self.seeded.own_draws(places)

    def recorded(self, recorder: Recorder) -> Executor:
        """An executor of the same program with the same parameters that tells of its activities."""
        return Executor(
            self.graph,
            self.program,
            self.store,
            self.transport,
            output=self.deliver_from,
            dropout=self._dropout,
            seeded=self.seeded,
            recorder=recorder,
        )

    def each(self, step: Compute, work: Callable[[int], object], backward: bool = False) -> None:
        """Do `work` for those devices of a step that are in this process; in turn where it draws random numbers."""
        dispatch = self.backward_dispatch if backward else self.dispatch
        ordered = self.is_random(step) and (not backward or step.unit is not None)
        dispatch.each(self.owned(step.grid.devices), work, ordered=ordered)

    def is_random(self, step: Compute) -> bool:
        """Whether a step draws random numbers."""
        return id(step) in self._drawing

    def done(self, step: Compute) -> None:
        """A step has run in all processes: give others the buffers that it wrote, where they go on from them."""
        if self._broadcast is not None:
            self._broadcast.after(step)
        elif id(step) in self._rewriting:
            self.transport.show()
            self.store.refresh()
            self.transport.begin()

    def share_buffers(self) -> None:
        """All steps have run: every rank gets the buffers that only some ranks wrote."""
        if self._broadcast is not None:
            self._broadcast.finish()

    def owned(self, devices: Iterable[int]) -> list[int]:
        """Those of `devices` that are in this process."""
        return [device for device in devices if device in self.transport.owned]

    def state_results(self, results: Sequence[Tensor]) -> frozenset[int]:
        """Places of the results that are parameters or buffers, or views of them: the same in every call."""
        if self._state_results is None:
            place = self.deliver_from
            steps = [step for step in self.program.computes if place in step.grid.devices]
            states = {memory(self.store.get(state, place)) for step in steps for state in step.states}
            self._state_results = frozenset(i for i, result in enumerate(results) if memory(result) in states)
        return self._state_results

    def run_code(self, step: Compute, device: int, code: Function, inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Results of a compute step's code on one device, for its operands and states.

        Raises:
            RuntimeFailure: a result has another shape than the plan was made for.
        """
        try:
            results = self.dispatch.apart(code, *inputs)
        except (IndexError, RuntimeError, ValueError) as error:
            if type(error) not in (IndexError, RuntimeError, ValueError):  # of a class of its own: kept as it is
                raise
            layer, line = failing_layer(error, {name: self.graph.layers[name].nodes for name in step.layers})
            raise type(error)(f"{layer}: {error}" + (f"\n  at {line}" if line else "")) from error
        self.write_back(step, device)
        for result, tensor in zip(step.results, results, strict=True):
            slot = self.program.slots[result.slot]
            if tensor.shape != slot.local_shapes[device]:
                raise RuntimeFailure(
                    f"{' + '.join(step.layers)}: {self.graph.label(slot.value)} has shape {tuple(tensor.shape)} on "
                    f"device {device} where {slot.local_shapes[device]} was planned; give these layers one replica and "
                    "one shard"
                )
        return results

    def states(self, step: Compute, device: int, attached: bool = False) -> list[Tensor]:
        """Parameters and buffers for a compute step; only the first replica writes the module's buffers.

        Buffers that the step's end assigns, and numbers, are copied: the backward needs what the forward has read.

        Args:
            attached: the module's own tensors, through which the caller's autograd goes.
        """
        spare = self.transport.processes == 1 and step.grid.position(device)[0] > 0
        written = self._written[id(step)]
        found = []
        for state in step.states:
            tensor = self.store.original(state.name) if attached else self.store.get(state, device)
            if state.name in self._changing:
                tensor = tensor.clone()
            if spare:
                # Not a copy, which would have to wait for the replica that writes: nothing reads these statistics.
                tensor = torch.zeros_like(tensor) if state.name in written else tensor
            elif state.name in self._statistics:
                # Norms write statistics without a trace in autograd: a later call of the module does not spoil an
                # earlier one's backward, which has saved them and does not read them.
                tensor = tensor.data
            found.append(tensor)
        return found

    def write_back(self, step: Compute, device: int) -> None:
        """Copy the buffers that a step wrote on its first replica to the module."""
        written = self._written[id(step)]
        if written and self.transport.processes == 1 and step.grid.position(device)[0] == 0:
            for state in step.states:
                if state.name in written:
                    self.store.write_back(state, device)


class SlotParts:
    """The parts of every slot that are in this process, and those that are on their way to it."""

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport = transport
        self._recorder = recorder
        self._parts: dict[str, Held] = defaultdict(dict)
        self._coming: dict[str, list[tuple[Pending, Span]]] = defaultdict(list)  # waiting is recorded under the span

    def add(self, slot: str, device: int, tensor: Tensor) -> None:
        """Put a part, or add to it; never in place, as it may be shared."""
        with self._transport.on(device):
            self.put(slot, device, tensor)

    def put(self, slot: str, device: int, tensor: Tensor) -> None:
        """The same on the current stream."""
        known = self._parts[slot].get(device)
        self._parts[slot][device] = tensor if known is None else known + tensor

    def start(self, transfer: Transfer, tensors: Held, backward: bool = False) -> None:
        """Start a transfer, or that of its gradient, whose results are added to the slot it fills when that is read."""
        slot, exchange = (transfer.source, transfer.transposed) if backward else (transfer.target, transfer.exchange)
        span = self._recorder.moving(transfer, backward)
        with span:
            sent = {device: self._cast(tensor, exchange.dtype, device) for device, tensor in tensors.items()}
            self._coming[slot].append((self._transport.start(exchange, sent), span))

    def _cast(self, tensor: Tensor, dtype: torch.dtype, device: int) -> Tensor:
        """A tensor in the type in which it is sent: weights that autocast reads in another one, and their gradients."""
        if tensor.dtype == dtype:
            return tensor
        with self._transport.on(device):
            return tensor.to(dtype)

    def expect(self, transfer: Transfer, pending: Pending) -> None:
        """Add what was started for a transfer to the slot it fills, when that is read."""
        self._coming[transfer.target].append((pending, self._recorder.moving(transfer, False)))

    def get(self, slot: str) -> Held:
        """The parts of a slot, after those on their way have arrived."""
        for pending, span in self._coming.pop(slot, ()):
            with span:
                arrived = pending.wait()
            for device, tensor in arrived.items():
                self.add(slot, device, tensor)
        return self._parts[slot]

    def drop(self, slot: str) -> None:
        """Forget a slot."""
        self._parts.pop(slot, None)

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for slot in list(self._coming):
            self.get(slot)


def start_together(moves: Sequence[tuple[SlotParts, Transfer]], transport: Transport) -> None:
    """Start transfers of several runs of a program, such as a step's micro-batches; between processes small ones of a
    value together.

    All processes give them in one order, so that they agree on what goes together.
    """
    groups: dict[str, list[list[tuple[SlotParts, Transfer]]]] = defaultdict(list)
    room: dict[str, int] = defaultdict(int)  # in the last group of a value
    for parts, transfer in moves:
        nbytes = transfer.exchange.nbytes
        if nbytes > room[transfer.target] or transfer.target not in groups or transport.processes == 1:
            groups[transfer.target].append([])
            room[transfer.target] = TOGETHER
        groups[transfer.target][-1].append((parts, transfer))
        room[transfer.target] -= nbytes
    for group in (group for own in groups.values() for group in own):
        if len(group) == 1:
            parts, transfer = group[0]
            parts.start(transfer, parts.get(transfer.source))
            continue
        started = transport.start_together([(t.exchange, parts.get(t.source)) for parts, t in group])
        for (parts, transfer), pending in zip(group, started, strict=True):
            parts.expect(transfer, pending)


class FreedWeights:
    """Gathered weights of one call that are freed behind their forward, in the tensors that autograd's graphs hold, and
    gathered again into those for the backward.

    Args:
        store: whose slices they are gathered from.
        transport: moves them.
        recorder: told of it.
    """

    def __init__(self, store: Store, transport: Transport, recorder: Recorder) -> None:
        self._store, self._transport = store, transport
        self._parts = SlotParts(transport, recorder)
        self._writes: dict[str, int] = {}  # of the parameters, when the forward began

    def begin(self, parameters: Iterable[str]) -> None:
        """A forward begins; of the parameters whose weights will be gathered again."""
        self._writes = {name: writes(self._store.original(name)) for name in parameters}

    def free(self, device: int, weights: Iterable[Tensor]) -> None:
        """Free the memory of weights."""
        with self._transport.on(device):
            for tensor in weights:
                tensor.untyped_storage().resize_(0)

    def gather(self, transfer: Transfer) -> None:
        """Start to gather weights for their backward.

        Raises:
            RuntimeFailure: they were written since the forward.
        """
        name, given = transfer.given.value, transfer.given
        if writes(self._store.original(name)) != self._writes[name]:
            raise RuntimeFailure(
                f"{self._store.label(name)} was written between a forward and its backward, for which its weights are "
                'gathered again; call backward before the optimizer steps, or plan its layer with state "sharded"'
            )
        owned = [device for device in given.devices if device in self._transport.owned]
        self._parts.drop(transfer.target)  # of a backward before, where a step did not go back on some device
        slices = dict[int, Tensor]()
        for device in owned:
            with self._transport.on(device):  # which is past waiting for the caller's stream, unlike in a forward
                slices[device] = self._store.slice(name, device)
        self._parts.start(transfer, slices)

    def refill(self, device: int, weights: Mapping[str, Tensor]) -> None:
        """Put gathered weights into a graph's tensors, by slot."""
        for slot, tensor in weights.items():
            if tensor.untyped_storage().size() == 0 and (found := self._parts.get(slot).pop(device, None)) is not None:
                with self._transport.on(device):
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                    tensor.data.copy_(found)  # a write that autograd need not know of: the same values


def memory(tensor: Tensor) -> int:
    """The address of a tensor's storage: the same for views of one another."""
    return tensor.untyped_storage().data_ptr()
