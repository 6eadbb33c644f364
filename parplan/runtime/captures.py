"""Captured graphs of one model, the plan they run by, and the programs they are lowered to.

A graph is captured at the first call of each kind, the plan is asked for once, and a graph is lowered once per number
of samples. Under torchrun every rank captures at the same time and rank 0 alone plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Region
from parplan.plan import Plan, Strategy
from parplan.runtime.buffers import BufferSync, fresh_buffers
from parplan.runtime.calls import Call
from parplan.runtime.devices import memories
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.draws import Draws
from parplan.runtime.executor import Executor
from parplan.runtime.lower import lower
from parplan.runtime.parameters import Store
from parplan.runtime.program import Program
from parplan.runtime.setting import Setting
from parplan.runtime.sharding import Sharding
from parplan.runtime.strategies import strategies_for
from parplan.runtime.tensors import OwnTensors
from parplan.runtime.transport import Transport

__all__ = ["Captured", "Captures", "Options", "Planner"]

Planner = Callable[[LayerGraph], Plan]

# Samples per rank that a program is lowered for to see whether it needs the ranks' real numbers.
SUPPOSED_SAMPLES = 2
# Programs kept per graph; ranks with ever new numbers of samples would fill the memory with them.
KEPT_PROGRAMS = 32


@dataclass(frozen=True)
class Options:
    """How a compiled model runs; see `Compiled`."""

    dim: int = 0
    output: int = 0
    global_statistics: bool = True
    per_replica: bool = False
    dropout: bool = True


@dataclass
class Captured:
    """A captured graph, how its layers run, and what it was lowered to, by samples per process.

    Attributes:
        draws: random numbers that devices draw together.
        shares: whether ranks have to tell each other their numbers of samples, or a seed, before a step.
    """

    graph: LayerGraph
    strategies: Mapping[str, Strategy]
    draws: Draws
    shares: bool
    executors: dict[tuple[int, ...], Executor] = field(default_factory=dict)


class Captures:
    """What is known of one model.

    Args:
        module: the user's module.
        planner: makes a plan from a captured graph.
        transport: which devices there are.
        options: how programs are lowered.

    Attributes:
        plan: once it is made.
        sharding: under torchrun, which blocks of the parameters this rank holds.
        sync: under torchrun with local batch norm, what keeps the ranks' statistics equal.
    """

    def __init__(self, module: nn.Module, planner: Planner, transport: Transport, options: Options) -> None:
        self._module = module
        self._own = OwnTensors(module)
        self._planner = planner
        self._transport = transport
        self._memories = memories(transport)
        self._options = options
        self._captured: dict[Hashable, Captured] = {}
        self._traced: dict[Hashable, LayerGraph] = {}  # captured to be planned for, not yet run
        self._held: Mapping[str, Mapping[int, Region]] = {}
        self.plan: Plan | None = None
        self.sharding: Sharding | None = None
        self.sync: BufferSync | None = None

    @property
    def device_count(self) -> int:
        """How many logical devices there are, over all processes."""
        return len(self._memories)

    def clear(self) -> None:
        """Forget what was captured, but not the plan."""
        self._captured.clear()
        self._traced.clear()
        self._own.look_up()
        self.sync = None

    def find(self, call: Call, training: bool) -> Captured:
        """The graph for a call, captured and planned for if it is the first of its kind."""
        if self._own.replaced:
            self.clear()
        kind = self._kind(call, training)
        if kind in self._captured:
            return self._captured[kind]
        batch = self._whole_batch(call)
        if (kind, batch) not in self._captured:
            if self.plan is None:
                self._make_plan(call, batch)
            graph = self._trace(call, training, batch)
            known = self._known(graph)
            if not _bound_to_batch(graph):
                self._captured[kind] = known
                return known
            self._captured[kind, batch] = known
        return self._captured[kind, batch]

    def _kind(self, call: Call, training: bool) -> Hashable:
        """What has to agree for two calls to share a graph."""
        casts = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return (training, casts, self._own.trained, call.signature)

    def _whole_batch(self, call: Call) -> int | None:
        """Samples over all processes, which all have to ask."""
        if call.batch is None:
            return None
        whole = call.batch
        if isinstance(self._transport, DistributedTransport):
            whole = sum(self._transport.gather_sizes(call.batch))
        call.check(whole)
        return whole

    def _trace(self, call: Call, training: bool, batch: int | None) -> LayerGraph:
        """Capture for `batch` samples, or for 2 where it is 1, as an axis of 1 looks like none at all."""
        key = (self._kind(call, training), batch)
        if key in self._traced:
            return self._traced.pop(key)
        graph = self._traced_at(call, training, 2 if batch == 1 else batch)
        if batch == 1 and _bound_to_batch(graph):
            return self._traced_at(call, training, batch)
        return graph

    def _traced_at(self, call: Call, training: bool, batch: int | None) -> LayerGraph:
        args, kwargs = call.resized(batch) if batch is not None else pytree.tree_unflatten(call.leaves, call.spec)
        whole: AbstractContextManager[None] = self.sharding.whole_shapes() if self.sharding else nullcontext()
        with whole:
            return capture(self._module, args, kwargs, training=training, dim=self._options.dim)

    def _make_plan(self, call: Call, batch: int | None) -> None:
        # Every rank captures, at the same time; only one plans.
        graph = self._trace(call, True, batch)
        self._traced[self._kind(call, True), batch] = graph
        distributed = isinstance(self._transport, DistributedTransport)

        def planned() -> str:
            return self._planner(graph).to_json()

        text = self._transport.from_first(planned) if isinstance(self._transport, DistributedTransport) else planned()
        plan = Plan.from_json(text)
        count = self.device_count
        if plan.devices > count or (distributed and plan.devices != count):
            raise PlanError(
                f"the plan is for {plan.devices} devices, here are {count} {'ranks' if distributed else 'devices'}; "
                f"start as many, or make a plan for {count}"
            )
        self.plan = plan

    # -- programs --

    def _known(self, graph: LayerGraph) -> Captured:
        assert self.plan is not None
        strategies = strategies_for(graph, self.plan)
        supposed = self._lower(graph, strategies, (SUPPOSED_SAMPLES,) * self._transport.processes)
        draws = Draws(graph, strategies)
        if isinstance(self._transport, DistributedTransport):
            self._hold(graph, supposed)
        return Captured(graph, strategies, draws, bool(supposed.transfers) or draws.any)

    def _lower(self, graph: LayerGraph, strategies: Mapping[str, Strategy], samples: tuple[int, ...]) -> Program:
        setting = Setting(
            devices=self.device_count,
            samples=samples,
            memories=self._memories,
            output=self._options.output,
            global_statistics=self._options.global_statistics,
            per_replica=self._options.per_replica,
        )
        return lower(graph, strategies, setting)

    def _hold(self, graph: LayerGraph, program: Program) -> None:
        """Cut the module's parameters to this rank's blocks, once; later graphs have to agree."""
        assert isinstance(self._transport, DistributedTransport)
        held = {graph.parameters[name]: dict(blocks) for name, blocks in program.holdings.items()}
        if self.sharding is None:
            self._held = held
            self.sharding = Sharding(self._module, held, self._transport)
        self.sharding.fresh |= fresh_buffers(graph, program)
        for name, blocks in held.items():
            if self._held.get(name) != blocks:
                raise RuntimeFailure(
                    f"{name} is held as {self._held.get(name)} since the first call, and this call needs {blocks}; "
                    "call the model in training mode first, with the inputs it is trained with"
                )

    def executor(self, captured: Captured, samples: tuple[int, ...]) -> Executor:
        """What runs a graph for these samples per process."""
        if samples not in captured.executors:
            if len(captured.executors) >= KEPT_PROGRAMS:
                captured.executors.pop(next(iter(captured.executors)))
            captured.executors[samples] = self._executor(captured, samples)
        return captured.executors[samples]

    def _executor(self, captured: Captured, samples: tuple[int, ...]) -> Executor:
        graph, options = captured.graph, self._options
        program = self._lower(graph, captured.strategies, samples)
        distributed = isinstance(self._transport, DistributedTransport)
        store = Store(self._module, graph, program, self._transport, sharded=distributed)
        if isinstance(self._transport, DistributedTransport) and graph.training and not options.global_statistics:
            self.sync = self.sync or BufferSync(graph, program, store, self._transport)
        return Executor(
            graph,
            captured.strategies,
            program,
            store,
            self._transport,
            output=options.output,
            dropout=options.dropout,
            draws=captured.draws,
        )


def _bound_to_batch(graph: LayerGraph) -> bool:
    """Whether a graph holds for one number of samples only."""
    loose = [
        value
        for layer in graph.layers.values()
        if layer.batch is None and not layer.constant
        for value in layer.outputs
        if value not in graph.batch_dims and graph.values[value].shape
    ]
    return graph.fixed_batch or bool(loose)
