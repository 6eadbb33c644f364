"""Follow a program on the devices this process owns, forward and backward.

Autograd is not asked to order anything across devices. One outer `autograd.Function` stands for the whole call, and its
backward takes the program's backward steps one by one. So every process meets every other one in the same order,
whatever the model, and nothing can wait in a circle.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Grid
from parplan.lowering.program import Compute, Forward, Program, State
from parplan.plan import Strategy
from parplan.runtime.compat import call_hooks_with_gradients_only, recomputed_once
from parplan.runtime.execution.buffer_sync import Handover
from parplan.runtime.execution.code_cache import Codes, written_buffers
from parplan.runtime.execution.dispatch import Dispatch, Inline
from parplan.runtime.execution.module_hooks import HookCalls
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.random_state import Draws, draws_any
from parplan.runtime.execution.recording import RecordedRun, RecordedTransport
from parplan.runtime.execution.run import Run, memory
from parplan.runtime.execution.timeline import Timeline
from parplan.runtime.sharded_state.outside_gradients import aliases
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["Executor"]


class Executor:
    """Runs one program.

    Args:
        graph, strategies: what the program was lowered from.
        program: the steps.
        store: parameters and buffers as the devices hold them.
        transport: moves tensors; says which devices are here.
        output: the device whose part of a result is handed back, where one process holds all.
        dropout: whether dropout drops anything.
        draws: sets apart ops that draw on several devices at once; default: those of the graph and strategies.
        timeline: records what a step spends its time on; default: nothing does, and nothing is spent on it.
        dispatch: who runs the devices' work; default: the caller's thread.
        hooks: whether the user's module hooks are called.
    """

    def __init__(
        self,
        graph: LayerGraph,
        strategies: Mapping[str, Strategy],
        program: Program,
        store: Store,
        transport: Transport,
        output: int = 0,
        dropout: bool = True,
        draws: Draws | None = None,
        timeline: Timeline | None = None,
        dispatch: Dispatch | None = None,
        hooks: bool = True,
    ) -> None:
        self.graph = graph
        self.program = program
        self.store = store
        self.timeline = timeline
        self.transport = transport if timeline is None else RecordedTransport(transport, timeline, program)
        self.deliver_from = output if transport.processes == 1 else transport.owned[0]
        self.draws = draws if draws is not None else Draws(graph, strategies)
        self._dropout = dropout
        self._strategies = strategies
        self._run = Run if timeline is None else RecordedRun
        self.hooks = HookCalls(graph, strategies, program, transport.processes, silent=not hooks)
        places = {device: transport.physical(device) for device in transport.owned}
        self.codes = Codes(graph, strategies, program, self.draws, dropout, places, self.hooks, timeline)
        self.dispatch: Dispatch = dispatch if dispatch is not None else Inline()
        # Autograd computes on a GPU in the one thread it has for that, which waits for the whole backward of a call:
        # a backward that another thread starts within would wait for that thread forever.
        gpus = any(place.type == "cuda" for place in places.values())
        self.backward_dispatch: Dispatch = Inline() if gpus else self.dispatch
        self._drawing = {id(step) for step in program.forward if isinstance(step, Compute) and draws_any(graph, step)}
        self._indices = {id(step): index for index, step in enumerate(program.forward)}
        self._written = [written_buffers(graph, step) for step in program.forward]
        self._statistics = frozenset[str]().union(*self._written)
        self._changing = frozenset(program.updates) | graph.numbers.keys()
        self._last_reads = _last_reads(program)
        results = {name for name in program.outputs if program.slots[name].requires_grad}
        self._several_results = len(results) > 1  # a loss may leave some out, and their parameters have no gradients
        self._state_results: frozenset[int] | None = None
        self._latest: weakref.ref[Run] | None = None  # of those whose backward may still come
        self._handed_on = _handed_on(program, self._written)
        self._handover: Handover | None = None
        if isinstance(transport, DistributedTransport):
            self._handover = Handover(graph, program, store, transport)
        for bucket in program.buckets:
            for group in bucket.groups:
                transport.group(group)

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Results for the user's input values (by name); differentiable in inputs and parameters."""
        trainable = self.store.trainable
        tensors: list[Tensor] = [*inputs.values(), *trainable.values()]
        run = self._run(self, tuple(inputs), tuple(trainable))
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            results = run.forward(list(inputs.values()), record=False)
        else:
            if self._several_results:
                call_hooks_with_gradients_only(tensors)
            if self.transport.processes > 1:
                # Calls of one backward share aliases, so that the sum of their gradients is known as theirs.
                latest = self._latest() if self._latest is not None else None
                run.aliases = latest.aliases if latest is not None else aliases(list(trainable.values()))
                self._latest = weakref.ref(run)
                tensors[len(inputs) :] = run.aliases
            results = _Call.apply(run, *tensors)  # type: ignore[no-untyped-call]
        run.end()
        return list(results)

    def recorded(self, timeline: Timeline) -> Executor:
        """An executor of the same program with the same parameters that records what it does."""
        return Executor(
            self.graph,
            self._strategies,
            self.program,
            self.store,
            self.transport,
            output=self.deliver_from,
            dropout=self._dropout,
            draws=self.draws,
            timeline=timeline,
        )

    def each(self, step: Compute, work: Callable[[int], object], backward: bool = False) -> None:
        """Do `work` for those devices of a step that are in this process; in turn where it draws random numbers."""
        dispatch = self.backward_dispatch if backward else self.dispatch
        dispatch.each(self.owned(step.grid.devices), work, in_turn=not backward and id(step) in self._drawing)

    def done(self, step: Compute) -> None:
        """A step has run in all processes."""
        if self._handover is not None:
            self._handover.after(step)
        elif id(step) in self._handed_on:
            self.transport.show()
            self.store.refresh()
            self.transport.begin()

    def share_buffers(self) -> None:
        """All steps have run: every rank gets the buffers that only some ranks wrote."""
        if self._handover is not None:
            self._handover.finish()

    def owned(self, devices: Iterable[int]) -> list[int]:
        """Those of `devices` that are in this process."""
        return [device for device in devices if device in self.transport.owned]

    def state_results(self, results: Sequence[Tensor]) -> frozenset[int]:
        """Places of the results that are parameters or buffers, or views of them: the same in every call."""
        if self._state_results is None:
            place = self.deliver_from
            steps = [step for step in self.program.forward if isinstance(step, Compute) and place in step.grid.devices]
            states = {memory(self.store.get(state, place)) for step in steps for state in step.states}
            self._state_results = frozenset(i for i, result in enumerate(results) if memory(result) in states)
        return self._state_results

    def states(self, step: Compute, device: int) -> list[Tensor]:
        """Parameters and buffers for a compute step; only the first replica writes the module's buffers.

        Buffers that the step's end assigns, and numbers, are copied: the backward needs what the forward has read.
        """
        spare = self.transport.processes == 1 and step.grid.position(device)[0] > 0
        found = [(state.name, self._state(state, device)) for state in step.states]
        if spare:
            written = self._written[self._indices[id(step)]]
            # Not a copy, which would have to wait for the replica that writes: nothing reads these statistics.
            return [torch.zeros_like(tensor) if name in written else tensor for name, tensor in found]
        # Norms write statistics without a trace in autograd: a later call of the module does not spoil an earlier one's
        # backward, which has saved them and does not read them.
        return [tensor.data if name in self._statistics else tensor for name, tensor in found]

    def _state(self, state: State, device: int) -> Tensor:
        tensor = self.store.get(state, device)
        return tensor.clone() if state.name in self._changing else tensor

    def write_back(self, step: Compute, device: int) -> None:
        """Bring home the buffers that a step wrote on its first replica."""
        if self.transport.processes == 1 and step.grid.position(device)[0] == 0:
            for state in step.states:
                if state.name in self._written[self._indices[id(step)]]:
                    self.store.write_back(state, device)

    def last_reads(self, step: Forward) -> Sequence[str]:
        """Slots that nothing reads after this forward step."""
        return self._last_reads[self._indices[id(step)]]


def _handed_on(program: Program, written: Sequence[Set[str]]) -> Set[int]:
    """Steps that write buffers which steps on other devices go on from: a batch norm that is called more than once."""
    grids: dict[str, set[Grid]] = defaultdict(set)
    for step in program.forward:
        if isinstance(step, Compute):
            for state in step.states:
                grids[state.name].add(step.grid)
    return {
        id(step)
        for step, names in zip(program.forward, written, strict=True)
        if any(len(grids[name]) > 1 for name in names)
    }


def _last_reads(program: Program) -> list[list[str]]:
    """Per forward step, the slots that no later step and no caller reads."""
    kept = {*program.outputs, *program.updates.values()}
    last: dict[str, int] = {}
    for index, step in enumerate(program.forward):
        for slot in step.reads:
            last[slot] = index
    found: list[list[str]] = [[] for _ in program.forward]
    for slot, index in last.items():
        if slot not in kept:
            found[index].append(slot)
    return found


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Call(torch.autograd.Function):
    """A whole call of the compiled model as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))
        results = run.forward(list(tensors[: len(run._inputs)]), record=True)
        ctx.mark_non_differentiable(
            *(t for t, wants in zip(results, run.wanting, strict=True) if not (wants and _is_differentiable(t)))
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled()  # create_graph=True
        ctx.run.enter_backward()
        with torch.no_grad(), recomputed_once():
            # Under a checkpoint this computes the forward again: here, where all processes are, and not at the first
            # step that needs it, where others wait for what this one has yet to send.
            _ = ctx.saved_tensors
            found = ctx.run.backward(gradients)
        if differentiable:
            # What comes in may be a constant (1, for a sum); the results depend on inputs and parameters all the same.
            found = [None if one is None else _once_differentiable(one) for one in found]
        return (None, *found)


def _once_differentiable(gradient: Tensor) -> Tensor:
    once: Tensor = _FirstOnly.apply(gradient, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return once


class _FirstOnly(torch.autograd.Function):
    """A gradient that raises when it is differentiated again, rather than counting as a constant."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, needs_gradient: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise RuntimeFailure(
            "second derivatives through a compiled model are refused (gradient penalties, Hessians: a gradient made "
            "with create_graph=True was differentiated); compute that term with the plain model, `module` of the "
            "compiled one"
        )
