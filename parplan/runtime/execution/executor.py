"""The services that run one program on the devices of this process: parameters, generated code, transport, threads, and
the parts of values that are here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, fx

from parplan.errors import RuntimeFailure
from parplan.graph.kinds import gives_new_gradients
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.sites import site_of
from parplan.graph.user_line import failing_layer
from parplan.layout import Grid
from parplan.lowering.holdings import Bucket
from parplan.lowering.ordering import runs_on_replicas
from parplan.lowering.pipeline.stages import Pipeline, pipeline
from parplan.lowering.program import Compute, Program, Reduce, Transfer, last_reads
from parplan.runtime.dispatch import Dispatch, Inline
from parplan.runtime.execution.buffer_sync import BufferBroadcast
from parplan.runtime.execution.module_hooks import HookCalls
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.random_state import OwnDraws, SeededOps, draws_any
from parplan.runtime.execution.segment_cache import EAGER, Function, SegmentCache, written_buffers
from parplan.runtime.execution.slot_parts import memory
from parplan.runtime.execution.timeline import Recorder
from parplan.runtime.sharded_state.outside_gradients import ParameterAliases
from parplan.runtime.transport.base import Transport

__all__ = ["Executor", "GradientSum", "LocalForward", "LocalStep"]


@dataclass(frozen=True)
class GradientSum:
    """A bucket's all-reduce over all processes.

    Args:
        number: in the order of the program's sums, in which all processes begin them.
        label: for messages.
        shapes, sizes: of the parameters; elements.
        in_place: a gradient that is summed alone, in memory that its ops make for it.
    """

    number: int
    label: str
    bucket: Bucket
    shapes: Sequence[Sequence[int]]
    sizes: list[int]
    in_place: bool


@dataclass(frozen=True)
class LocalStep:
    """A compute step of a device that takes all steps for samples of its own.

    Args:
        states: its parameters and buffers; None where some are made anew in every call.
        sums: of gradients of parameters that no step before has used.
    """

    step: Compute
    code: Function
    states: Sequence[Tensor] | None
    sums: Sequence[GradientSum]


@dataclass(frozen=True)
class LocalForward:
    """A forward that a device of this process computes alone, prepared: it runs in the caller's autograd. The device
    has the whole program, or each process has all of it for its own samples.

    Args:
        place: where the device lives.
        tensors: all of the module's own that steps use, which have to lie on the device.
        sums: of gradients over processes, in the program's order.
    """

    device: int
    place: torch.device
    steps: Sequence[LocalStep | Transfer]
    tensors: Sequence[Tensor]
    sums: Sequence[GradientSum]


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
        caller_autograd: whether a forward that a device computes alone runs in the caller's autograd.

    Attributes:
        differentiable_results: names of the results that take a gradient.
        several_results: there are more than one, so that a loss may leave some out, and the parameters of those have no
            gradients.
        may_leave_out: there are, and every process takes all steps: in the end they tell each other which parameters
            have a gradient in one of them. In other programs they do so before the backward, whose transfers all have
            to take.
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
        results = dict.fromkeys(program.outputs)
        self.differentiable_results = tuple(name for name in results if program.slots[name].requires_grad)
        self.several_results = len(self.differentiable_results) > 1
        self.may_leave_out = self.several_results and transport.processes > 1 and runs_on_replicas(program)
        self._state_results: frozenset[int] | None = None
        self._parameters_of: dict[frozenset[str], frozenset[str]] = {}
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
    def local_forward(self) -> LocalForward | None:
        """The program's forward where a device of this process takes all of its steps, and nothing is computed again;
        None of other programs."""
        program, steps, several = self.program, self.program.computes, self.transport.processes > 1
        devices = {device for step in steps for device in step.grid.devices}
        watched = type(self.recorder) is not Recorder or not isinstance(self.dispatch, Inline)
        if not runs_on_replicas(program) or watched or not self._caller_autograd:
            return None
        if len(devices) != self.transport.processes or (several and not self._reaches_every_sum):
            return None
        (device,) = devices.intersection(self.transport.owned)
        special, known = self._changing | self._statistics, list[LocalStep | Transfer]()
        buckets = [step.bucket for step in program.backward if isinstance(step, Reduce)]
        sums, entered = [self._sum(bucket, number, device) for number, bucket in enumerate(buckets)], set[int]()
        for step in program.forward:
            if not isinstance(step, Compute):
                assert isinstance(step, Transfer)
                known.append(step)
                continue
            names = {state.name for state in step.states}
            states = [self.store.original(state.name) for state in step.states] if special.isdisjoint(names) else None
            first = [n for n, b in enumerate(buckets) if n not in entered and not names.isdisjoint(b.parameters)]
            entered.update(first)
            known.append(LocalStep(step, self.code.get(step, device), states, [sums[number] for number in first]))
        tensors = [self.store.original(state.name) for step in steps for state in step.states]
        return LocalForward(device, self.transport.physical(device), known, tensors, sums)

    def _sum(self, bucket: Bucket, number: int, device: int) -> GradientSum:
        shapes = [self.store.shapes[name][device] for name in bucket.parameters]
        (first, *others), graph = bucket.parameters, self.graph
        nodes = (node for layer in graph.users[first] for node in graph.layers[layer].nodes)
        users = [node for node in nodes if any(used.name == first for used in node.all_input_nodes)]
        # A compiler may give one memory for two gradients that are the same.
        in_place = not others and self.backend == EAGER and bool(users) and all(map(gives_new_gradients, users))
        return GradientSum(number, self.store.sum_label(bucket), bucket, shapes, [*map(prod, shapes)], in_place)

    @property
    def _reaches_every_sum(self) -> bool:
        """Whether a backward reaches every gradient sum in every process, so that all come to it."""
        empty = any(step.batch(device) == 0 for step in self.program.computes for device in step.grid.devices)
        # The user's own code may give no gradient in one process and one in another.
        own_code = any(site_of(node) is not None for layer in self.graph.layers.values() for node in layer.nodes)
        return not empty and not own_code and not self.graph.sites

    def parameters_behind(self, results: frozenset[str]) -> frozenset[str] | None:
        """Placeholders of the parameters that results, by slot, are computed from, where processes exchange values:
        there others' results have parts in the gradients of a process. Else None."""
        if not self.program.transfers:
            return None
        if results not in self._parameters_of:
            graph, found = self.graph, set[fx.Node]()
            values = {self.program.slots[name].value for name in results}
            makers = {graph.producer[value] for value in values & graph.producer.keys()}
            waiting = [node for maker in makers for node in graph.layers[maker].nodes if node.name in values]
            while waiting:
                node = waiting.pop()
                if node not in found:
                    found.add(node)
                    waiting += node.all_input_nodes
            self._parameters_of[results] = frozenset(node.name for node in found if node.name in graph.parameters)
        return self._parameters_of[results]

    @cached_property
    def pipeline(self) -> Pipeline:
        """The program's steps by pipeline stage."""
        return pipeline(self.graph, self.program)

    def aliases(self) -> ParameterAliases:
        """The trainable parameters as the program takes them, under torchrun."""
        return ParameterAliases.shared(list(self.store.trainable.values()))

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
