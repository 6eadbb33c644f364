"""Programs of one model: its captured graphs as they are lowered, and the blocks of parameters this process holds.

A graph is lowered once per number of samples. Under torchrun the first graph decides which blocks of the parameters
every rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.attributes.input_checks import InputCheck
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Block, Grid, shape_of
from parplan.lowering.lower import lower
from parplan.lowering.micro_batches import How, check_micro_batches, combinations
from parplan.lowering.passes import early_periods
from parplan.lowering.program import Program
from parplan.lowering.stages import stages
from parplan.lowering.step_setting import StepSetting
from parplan.lowering.strategies import on_every_process, strategies_for
from parplan.plan import SCHEDULES, Plan, Scheme, Strategy
from parplan.runtime.calls import ModelCall
from parplan.runtime.dispatch import ThreadsOption, dispatch_for
from parplan.runtime.execution.buffer_sync import BufferSync
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.module_hooks import with_whole_hooks
from parplan.runtime.execution.parameter_store import Copies, Store
from parplan.runtime.execution.random_state import SeededOps
from parplan.runtime.execution.segment_cache import EAGER, INDUCTOR, written_buffers
from parplan.runtime.programs.planned_memory import GraphBytes
from parplan.runtime.programs.sample_axes import check_own_samples
from parplan.runtime.programs.start_values import StartValues
from parplan.runtime.sharded_state.block_placement import Placement
from parplan.runtime.sharded_state.cutting import Sharding
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.devices import memories

__all__ = ["Captured", "Options", "Programs"]

# Samples per rank that a program is lowered for to see whether it needs the ranks' real numbers.
SUPPOSED_SAMPLES = 2
# Programs kept per graph; ranks with ever new numbers of samples would fill the memory with them.
KEPT_PROGRAMS = 32


@dataclass(frozen=True)
class Options:
    """Options of a compiled model; see `Compiled`. Without `dim` inputs hold no samples."""

    dim: int | None = 0
    output: int = 0
    global_statistics: bool = True
    per_replica: bool = False
    dropout: bool = True
    groups: bool = False
    same_draws: bool = False
    threads: ThreadsOption = False
    start: StartValues | None = None
    backend: str = EAGER
    caller_autograd: bool = True

    @classmethod
    def of(cls, batch_norm: str, scalars: str, inputs: str, dim: int, backend: str, **others: Any) -> Options:
        """The options that a user's words ask for.

        Raises:
            PlanError: an unknown word, or two that exclude each other.
        """
        _one_of("batch_norm", batch_norm, "global", "local")
        _one_of("scalars", scalars, "whole", "per_replica")
        _one_of("inputs", inputs, "own", "group", "same")
        _one_of("backend", backend, EAGER, INDUCTOR)
        if inputs != "own" and scalars == "per_replica":
            raise PlanError(
                f'inputs="{inputs}" has no number per process to give for scalars="per_replica"; use one of them'
            )
        if inputs == "same" and dim:
            raise PlanError(f'inputs="same" says that inputs hold no samples, and dim={dim} where they lie; use one')
        return cls(
            dim=None if inputs == "same" else dim,
            global_statistics=batch_norm == "global",
            per_replica=scalars == "per_replica",
            groups=inputs == "group",
            backend=backend,
            **others,
        )


def _one_of(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise PlanError(f"{name} is {value!r}; it is {' or '.join(chr(34) + word + chr(34) for word in known)}")


@dataclass
class Captured:
    """A captured graph, how its layers run, and what it was lowered to, by samples per process.

    Attributes:
        seeded: ops whose random numbers devices draw together.
        supposed: the program of a few samples per process, which says what each holds of the parameters.
        exchanges: whether ranks have to tell each other their numbers of samples, or a seed, before a step.
        compares: why inputs without samples have to be the same in all processes; empty where they need not.
        groups: ranks in rows that bring the same samples; None when every rank brings its own.
        checked: for which grad modes it has been compared with the plain module (runtime/self_check/check.py).
        batches: numbers of samples at which another capture was the same graph, where none other says so.
        micro_batches: in how many parts of the batch a training step goes forward and backward.
        schedule: in which order micro-batches go through the stages of a plan.
        mean_loss: whether a loss outside of them was seen to be a mean over samples.
        warned: whether it was said that a plain call keeps the whole batch's activations.
    """

    graph: LayerGraph
    strategies: Mapping[str, Strategy]
    scheme: Scheme
    seeded: SeededOps
    supposed: Program | None = None
    exchanges: bool = True
    groups: Grid | None = None
    compares: str = ""
    executors: dict[tuple[int, ...], Executor] = field(default_factory=dict)
    checked: set[bool] = field(default_factory=set)
    batches: set[int] = field(default_factory=set)
    micro_batches: int = 1
    schedule: str = SCHEDULES[0]
    mean_loss: bool = False
    warned: bool = False

    def refused(self, call: ModelCall) -> InputCheck | None:
        """The assertion on inputs that a call breaks.

        Raises:
            RuntimeFailure: it is about the whole batch, of which this process has a part.
        """
        checks = self.graph.checks
        if call.batch != self.graph.batch and any(check.fixed for check in checks):
            raise RuntimeFailure(
                f"an assertion on inputs has sizes of the whole batch, {self.graph.batch} samples, of which this "
                f"process has {call.batch}; check inputs in front of the model\n  at {checks[0].line}"
            )
        return next((check for check in checks if not check.holds(call.leaves)), None)

    @cached_property
    def loss(self) -> str | None:
        """The result that is the loss of a step in micro-batches; None where it is outside of the model.

        Raises:
            PlanError: there are several, or another result is a mean over other targets.
        """
        found = self.graph.losses
        if len(found) > 1:
            losses = " and ".join(map(self.graph.label, found))
            raise PlanError(
                f"the model returns several losses ({losses}), and micro-batches go back by one before all have gone "
                "forward; add them up in the model, or plan with 1 micro-batch"
            )
        if not found:
            return None
        own = combinations(self.graph)
        for value in self.graph.results:
            if own[value].counts not in (None, own[found[0]].counts):
                raise PlanError(
                    f"{self.graph.label(value)}: counts other targets than the loss, and micro-batches are weighed by "
                    "what the loss counts; compute it outside of the model, or plan with 1 micro-batch"
                )
        return found[0]

    def check_weighed_by_samples(self) -> None:
        """Refuse a number of the model's in a step whose micro-batches are weighed by samples.

        Raises:
            PlanError: it is a sum, or a mean over targets.
        """
        for value, own in combinations(self.graph).items():
            if own.how is How.SUM or own.counts is not None:
                raise PlanError(
                    f"{self.graph.label(value)}: is {'a sum' if own.how is How.SUM else 'a mean over targets'}, and "
                    "train_step weighs micro-batches by samples; call the model in the usual loop (loss.backward()), "
                    "which weighs its loss by what counts, or plan with 1 micro-batch"
                )

    @cached_property
    def of_micro_batch(self) -> Captured:
        """The graph that micro-batches run: with what samples count in the loss as a last result, if they do."""
        counts = None if self.loss is None else combinations(self.graph)[self.loss].counts
        if counts is None:
            return self
        graph = replace(self.graph, user_outputs=(*self.graph.user_outputs, counts))
        return replace(self, graph=graph, executors={})

    def serves(self, batch: int | None) -> bool:
        """Whether the forward with `batch` samples is this graph."""
        return batch is None or batch in self.batches or self.graph.serves(batch)

    @cached_property
    def shared_inputs(self) -> frozenset[str]:
        """User inputs without samples that layers read."""
        graph = self.graph
        names = (name for name in graph.user_inputs if name is not None and name not in graph.batch_dims)
        return frozenset(name for name in names if graph.consumers(name))

    def splits_gradient(self, name: str, processes: int) -> bool:
        """Whether processes have parts of the gradient of an input without samples, and not each that of its loss."""
        return any(self.strategies[layer].replicas != processes for layer in self.graph.consumers(name))

    @cached_property
    def nbytes(self) -> GraphBytes:
        """Bytes of all tensors of the graph."""
        return GraphBytes.of(self.graph)

    @cached_property
    def early_periods(self) -> Mapping[str, int]:
        """After how many passes each parameter is updated that does not wait for the last one; the same in every step.

        Raises:
            PlanError: a period does not divide the passes.
        """
        known = stages(self.graph, self.strategies, self.scheme)
        return early_periods(self.graph, self.strategies, known)


class Programs:
    """Lowers captured graphs.

    Args:
        module: the user's module.
        transport: which devices there are.
        options: how programs are lowered.

    Attributes:
        device_count: of logical devices, over all processes.
        home: the device where inputs arrive, where one process has several memories to bring them to.
        sharding: under torchrun, which blocks of the parameters this rank holds.
        sync: under torchrun with local batch norm, what keeps the ranks' statistics equal.
        copies: of parameters and buffers in the memories of this process's other devices, once for all programs.
        waiting: what will give the module's meta tensors their values; None once it has.
    """

    def __init__(self, module: nn.Module, transport: Transport, options: Options) -> None:
        self._module = module
        self._transport = transport
        self._memories = memories(transport)
        self.device_count = len(self._memories)
        several = transport.processes == 1 and len(set(self._memories)) > 1
        self.home = 0 if several else None
        self._options = options
        self._dispatch = dispatch_for(options.threads, transport)
        self._held: dict[str, Mapping[int, Block]] = {}
        self._readers: dict[str, Strategy] = {}  # of the first layer that read each parameter
        self.sharding: Sharding | None = None
        self.sync: BufferSync | None = None
        self.copies: Copies = {}
        values = (*module.parameters(), *module.buffers())
        self.waiting = options.start if any(tensor.is_meta for tensor in values) else None

    @property
    def cuts_start(self) -> bool:
        """Whether the module came without values and is cut over processes, so that it may be larger than one."""
        return self._options.start is not None and self.sharding is not None and self.sharding.cuts

    def fresh_buffers(self, graph: LayerGraph, program: Program) -> dict[str, dict[int, Block]]:
        """Blocks of the buffers that norms write in a program, by dotted name and the devices that are up to date.

        All replicas have the same global statistics; of local ones the first replica's are the model's.
        """
        found: dict[str, dict[int, Block]] = {}
        for step in program.computes:
            if written := written_buffers(graph, step):
                devices = step.grid.devices if self._options.global_statistics else step.grid.row(0)
                own = [state for state in step.states if state.name in written]
                found |= {graph.buffers[s.name]: {device: s.blocks[device] for device in devices} for s in own}
        return found

    def know(self, graph: LayerGraph, plan: Plan) -> Captured:
        """A captured graph, ready to be lowered by `plan`."""
        paths = graph.parameters
        held = {name: self._readers[path] for name, path in paths.items() if path in self._readers}
        planned = strategies_for(graph, plan, held)
        groups = self.groups(plan)
        several = plan.micro_batches if graph.training else 1
        if several > 1:
            check_micro_batches(replace(plan, batch=max(plan.batch, several)), graph)
            self._check_parts(graph, plan.schedule)
        planned = planned if several > 1 else on_every_process(graph, planned, self._transport.processes)
        strategies = with_whole_hooks(graph, planned, plan.scheme, self._transport.processes, groups)
        for layer in graph.layers.values():
            for name in layer.parameters:
                self._readers.setdefault(paths[name], strategies[layer.name])
        apart = self._transport.processes > 1 and not self._options.same_draws
        seeded = SeededOps(graph, strategies, self._transport.rank if apart else None)
        known = Captured(graph, strategies, plan.scheme, seeded, groups=groups, micro_batches=several)
        known.schedule = plan.schedule
        if known.groups is not None and known.groups.replicas > 1:
            check_own_samples(graph)
        loss = known.loss if several > 1 and self._options.per_replica else None
        # Gradients are summed over processes by one factor, and each of them would have its own.
        if loss is not None and combinations(graph)[loss].counts is not None:
            raise PlanError(
                f"{graph.label(loss)}: is a mean over targets, of which processes may count different numbers; in "
                'micro-batches compile with scalars="whole", or plan with 1 micro-batch'
            )
        known.supposed = self._lower(known, (SUPPOSED_SAMPLES,) * self._transport.processes, self._options)
        if self._options.dim is None:
            known.compares = 'inputs="same" says that all bring the same'
        elif known.supposed.transfers:
            known.compares = "this plan moves values between them, so that each would meet another one's"
        known.exchanges = bool(known.compares) or seeded.any or known.groups is not None
        return known

    def _check_parts(self, graph: LayerGraph, schedule: str) -> None:
        """Refuse what micro-batches cannot keep.

        Raises:
            PlanError: options or hooks of modules that a step in parts would answer otherwise.
        """
        why = ""
        if self._options.groups:
            why = 'inputs="group" has each sample in several processes'
        elif self._options.per_replica and (self._transport.processes == 1 or schedule != SCHEDULES[0]):
            why = 'scalars="per_replica" gives a number for each replica'
        elif graph.sites:
            why = f"{next(iter(graph.sites))} has hooks, which would be called for every micro-batch"
        if why:
            raise PlanError(f"the plan has micro-batches, and {why}; plan with 1 micro-batch, or without")

    def hold(self, captured: Captured) -> None:
        """Under torchrun, cut the module's parameters to this rank's blocks before the first step that reads them.

        Those on the meta device get their values first, cut as they are made.

        Raises:
            RuntimeFailure: an earlier graph needs other blocks, or a copy in a state dict was written.
        """
        if self.sharding is not None:
            self.sharding.check_state_copies()
        program, graph = captured.supposed, captured.graph
        if self._transport.processes == 1 or program is None:
            self._give_values({})
            return
        held = {graph.parameters[name]: dict(blocks) for name, blocks in program.holdings.items()}
        if self.sharding is None:
            self.sharding = Sharding(self._module, self._transport)
        unread = {n: blocks for n, blocks in held.items() if n not in self._held and self.sharding.knows(n)}
        self.sharding.plan(unread)
        self._held |= unread
        self._give_values(self.sharding.placements)
        self.sharding.hold()
        self.sharding.fresh |= self.fresh_buffers(graph, program)
        for name, blocks in held.items():
            known = self._held.get(name, {})
            # Without gradients a block may rest on a device that does not use it.
            if blocks != known and (torch.is_grad_enabled() or not blocks.items() <= known.items()):
                if not known:
                    reason = "was no parameter of its own at the first call (a tie that is broken since?)"
                else:
                    reason = f"is held {_places(known)} since the first call, and this call needs it {_places(blocks)}"
                raise RuntimeFailure(
                    f"{name} {reason}; call the model in training mode first, with the inputs it is trained with, pin "
                    "what reads it to the same devices, or build the model anew, compile it, and load state_dict()"
                )
        if held.items() <= self._held.items():  # for calls with gradients, too
            captured.supposed = None

    def _give_values(self, placements: Mapping[str, Placement]) -> None:
        if self.waiting is not None:
            self.waiting.give(self._module, self._transport, placements)
            self.waiting = None

    def groups(self, plan: Plan) -> Grid | None:
        """The ranks in rows that bring the same samples: the shards of one replica of the first layer.

        Raises:
            PlanError: the first layer is not on all ranks.
        """
        if not self._options.groups or self._transport.processes == 1:
            return None
        name, first = next(iter(plan.layers.items()))
        if len(first.devices) != self._transport.processes:
            raise PlanError(
                f"{name}, the first layer, is on {len(first.devices)} of {self._transport.processes} ranks, so the "
                'others have no replica whose samples they could bring; compile with inputs="own"'
            )
        return first.grid

    def _lower(self, known: Captured, samples: tuple[int, ...], options: Options) -> Program:
        setting = StepSetting(
            devices=self.device_count,
            samples=samples,
            memories=self._memories,
            output=options.output,
            global_statistics=options.global_statistics,
            per_replica=options.per_replica,
            scheme=known.scheme,
            groups=known.groups,
        )
        return lower(known.graph, known.strategies, setting)

    def executor(self, captured: Captured, samples: tuple[int, ...]) -> Executor:
        """The executor of a graph for these samples per process."""
        if samples not in captured.executors:
            if len(captured.executors) >= KEPT_PROGRAMS:
                captured.executors.pop(next(iter(captured.executors)))
            captured.executors[samples] = self._bind(captured, samples, self._options)
        return captured.executors[samples]

    def checking_executor(self, captured: Captured, samples: tuple[int, ...], keep: bool) -> Executor:
        """An executor of a graph by its plan that computes the plain module's numbers: with the whole batch's
        statistics and losses and with dropout as the module has it. The user's hooks are not called.

        Args:
            keep: the step itself has these samples, so that it may use the same executor.
        """
        plain = replace(
            self._options, global_statistics=True, per_replica=False, dropout=True, threads=False, backend=EAGER
        )
        held = self._transport.processes == 1 or self.sharding is not None
        if keep and held and plain == self._options and not captured.graph.sites:
            return self.executor(captured, samples)
        return self._bind(captured, samples, plain, hooks=False)

    def _bind(self, captured: Captured, samples: tuple[int, ...], options: Options, hooks: bool = True) -> Executor:
        """A graph's program for these samples per process, with the parameters and buffers that are held now."""
        graph = captured.graph
        program = self._lower(captured, samples, options)
        cut = self.sharding is not None
        store = Store(self._module, graph, program, self._transport, sharded=cut, copies=self.copies)
        if self._transport.processes > 1 and graph.training and not options.global_statistics:
            self.sync = self.sync or BufferSync(self._module, self._transport)
            self.sync.know(graph, program)
        return Executor(
            graph, program, store, self._transport, output=options.output, dropout=options.dropout,
            seeded=captured.seeded, dispatch=self._dispatch if hooks else None, hooks=hooks, backend=options.backend,
            caller_autograd=options.caller_autograd,
        )  # fmt: skip


def _places(blocks: Mapping[int, Block]) -> str:
    """The devices that hold blocks of a parameter, by the shape of the block, as an error names them."""
    devices: dict[tuple[int, ...], list[int]] = {}
    for device, block in blocks.items():
        devices.setdefault(shape_of(block), []).append(device)
    told = (f"as {list(shape)} on devices {', '.join(map(str, found))}" for shape, found in devices.items())
    return " and ".join(told) or "nowhere"
