"""A model that runs by a plan, and behaves like the model in every other way.

In one process the compiled model takes whole batches and gives whole results, like `nn.DataParallel`; under torchrun
every process brings its own samples and gets its own results, like `DistributedDataParallel`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan.accelerators import as_current
from parplan.compat import FakeTensor, pytree
from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.program import Program
from parplan.plan import Plan
from parplan.runtime.calls import ModelCall
from parplan.runtime.dispatch import ThreadsOption
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.program_function import run_program
from parplan.runtime.execution.staged_run import run_with_loss
from parplan.runtime.measurement.measure import MeasuredModel, StepRecorder, StepsToRun, measure
from parplan.runtime.measurement.measured_step import MeasuredStep
from parplan.runtime.measurement.predicted import Expected
from parplan.runtime.module.micro_batches import Parts, parts_of
from parplan.runtime.module.own_samples import watched
from parplan.runtime.module.plain_evaluation import PlainEvaluation
from parplan.runtime.module.repeated_call import RepeatedCall
from parplan.runtime.module.train_step import (
    StagedStep,
    arguments,
    check_staged,
    check_training,
    checked_loss,
    moments,
    sample_axes,
)
from parplan.runtime.module.wrapper import Wrapped
from parplan.runtime.out_of_memory import StepMemory, is_out_of_memory
from parplan.runtime.preserve_state import preserved_generators, preserved_modes
from parplan.runtime.programs.captures import Captures, Planner
from parplan.runtime.programs.planned_memory import warn_of_whole_batch
from parplan.runtime.programs.program_cache import Captured, Options
from parplan.runtime.programs.rank_agreement import Agreement, come_together, exchange_facts
from parplan.runtime.programs.start_values import NO_VALUES, StartValues
from parplan.runtime.self_check.check import CheckRecord, SelfCheck
from parplan.runtime.self_check.checked_step import begin_forward, end_forward
from parplan.runtime.sharded_state.cutting import Sharding, same_start
from parplan.runtime.transport.devices import Device, existing, logical, transport_for
from parplan.runtime.transport.rendezvous import RankAlone

__all__ = ["Compiled"]

ALIKE = ("batch_norm", "scalars", "inputs", "dim", "same_draws", "dropout")  # options that all processes give alike


class Compiled(Wrapped):
    """`module`, run by the plan that `planner` makes for it.

    Args:
        module: the model; its parameters and buffers stay its own.
        planner: makes a plan from a captured graph; asked once, with the training graph.
        devices: where each logical device lives; default: one per process of a group, all accelerators, or the CPU.
        output_device, dim: where results go in one process (default: device 0's place); the dimension of samples.
        batch_norm: "global" statistics over the whole batch, or "local" ones per replica.
        scalars: a result that is one number (a loss) is "whole", the plain model's; or "per_replica", an entry of each
            replica's own samples, as `nn.DataParallel` gives it (under torchrun each process its own number). Inputs
            have the gradients of their process's own samples' loss either way.
        inputs: under torchrun, every process brings its "own" samples; the shards of one replica of the plan's first
            layer the same ones, as a "group", ungathered, and get the same results; or all the "same", of no samples.
        same_draws: under torchrun, processes that were seeded alike draw alike (dropout), as DistributedDataParallel's.
        backend: "inductor" compiles the layers that a device runs at a stretch; "eager" runs op by op.
        dropout: False switches dropout off, for comparisons.
        threads: True gives every logical device of this process a thread of its own that runs its work; a function of
            the device's number is called first in each of them. False: the caller's thread runs all devices in turn.
        group: the process group, under torchrun; default: all processes.
        check: "first" compares every new capture with the plain module before its first step, "always" every call.
        start: gives tensors on the meta device their values; default: their modules' `reset_parameters()` do.
        alike: texts, by name, that have to be the same in all processes.
        caller_autograd: False: one device alone runs as several do, in a graph of its own, so that this is measured.

    Attributes:
        program: that of the last call, for reading.
        predict_times: predicts a step for a graph and the plan, for `measure` to print; set by the planner's maker.
        report: the analysis that the plan came from; set by the planner's maker, else None.
    """

    def __init__(
        self,
        module: nn.Module,
        planner: Planner,
        *,
        devices: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        batch_norm: str = "global",
        scalars: str = "whole",
        inputs: str = "own",
        same_draws: bool = False,
        dropout: bool = True,
        threads: ThreadsOption = False,
        group: dist.ProcessGroup | None = None,
        check: str = "first",
        backend: str = "eager",
        start: StartValues | None = None,
        alike: Mapping[str, object] | None = None,
        caller_autograd: bool = True,
    ) -> None:
        super().__init__(module)
        options = Options.of(
            batch_norm, scalars, inputs, dim, backend, same_draws=same_draws, dropout=dropout, threads=threads
        )
        start = StartValues.of(module) if start is None else start
        self.program: Program | None = None
        self.predict_times: Callable[[LayerGraph, Plan], Expected] | None = None
        self.report: Any = None
        self._example: ModelCall | None = None
        self._batch: int | None = None
        self._latest: Captured | None = None
        self._given: dict[str, Any] = {
            "devices": devices, "output_device": output_device, "dim": dim, "batch_norm": batch_norm,
            "scalars": scalars, "inputs": inputs, "same_draws": same_draws, "dropout": dropout, "threads": threads,
            "check": check, "backend": backend, "start": start, "alike": alike,
            "caller_autograd": caller_autograd,
        }  # fmt: skip
        self._planner = planner
        self._transport = transport_for(devices, group)
        self._dim = options.dim
        self._output_device = existing(output_device) if output_device is not None else None
        output = logical(self._output_device, self._transport)
        options = replace(options, output=output, start=start, caller_autograd=caller_autograd)
        self._captures = Captures(module, planner, self._transport, options)
        self._programs = self._captures.programs
        self._self_check = SelfCheck(module, self._captures, self._transport, options, check)
        self._plain = PlainEvaluation(module, self._captures, self._transport, options, check == "always")
        if self._transport.processes > 1:
            same_start(module, self._transport, {**(alike or {}), **{name: self._given[name] for name in ALIKE}})
        self._built = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile leaves this part as it is
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result for these arguments.

        Raises:
            RuntimeFailure: no samples, another process failed, or torch.func is at work.
        """
        leaves = pytree.tree_leaves((args, kwargs)) if torch.compiler.is_exporting() else ()  # in some thread
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return self.module(*args, **kwargs)  # a larger model is being captured, and its plan covers this part
        repeated: RepeatedCall | None = self._captures.repeated
        inputs = repeated.inputs(args, kwargs, self._captures) if repeated is not None else None
        call = ModelCall.of(args, kwargs, self._dim) if repeated is None or inputs is None else repeated.call
        try:
            if repeated is not None and inputs is not None:
                return self._run(call, repeated.captured, repeated.executor, inputs)
            takes = self._plain.takes(call)
            return self._plain.run(call, args, kwargs) if takes else self._follow(call, None, tuple(kwargs))
        except RankAlone as alone:
            return self._plain.run_alone(call, args, kwargs, alone)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise self._explained(error) from error
            raise

    def plain(self) -> nn.Module:
        """A plain copy of the module with whole weights: for export, evaluation by one rank, generation.

        Under torchrun every rank has to call this where parameters are cut; it gathers them.
        """
        return self._plain.copy()

    def train_step(
        self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor:
        """One training step, in the micro-batches and with the updates (`update_period`) that the plan says.

        Where it has neither this is the usual loop: `zero_grad()`, forward, loss, `backward()`, `step()`. Else every
        micro-batch, or pass, goes forward and backward by itself (runtime/module/train_step.py), `loss_fn` is called
        with its results and targets and has to be a mean over samples, and gradient hooks of parameters do not run.

        Args:
            inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            targets: what `loss_fn` compares with; tensors that have samples where a result or the inputs have them are
                cut as those are.
            loss_fn: gives one number from results and targets.
            optimizer: of this model's parameters.

        Returns:
            The loss, a tensor of shape () without a graph: the mean over this process's samples.

        Raises:
            RuntimeFailure: the model is in evaluation mode, the optimizer is none, needs a closure or is for another
                model, the loss is no number, or an input needs a gradient.
            PlanError: the plan's periods do not divide its passes, or a pass has no results of its own.
        """
        if not self.training:
            raise RuntimeFailure("train_step trains, and the model is in evaluation mode; call train() first")
        check_training(self.module, loss_fn, optimizer)
        args, kwargs = arguments(inputs)
        call = ModelCall.of(args, kwargs, self._dim)
        try:
            loss = self._train_in_parts(call, targets, loss_fn, optimizer)
            if loss is not None:
                return loss
            optimizer.zero_grad()
            loss = checked_loss(loss_fn(self(*args, **kwargs), targets))
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise self._explained(error) from error
            raise
        return loss.detach()

    def _train_in_parts(
        self, call: ModelCall, targets: Any, loss_fn: Callable[[Any, Any], Tensor], optimizer: torch.optim.Optimizer
    ) -> Tensor | None:
        """The loss of a step in micro-batches, or in passes that are updated at different moments; None: of neither."""
        captured = self._find(call)
        early, several = captured.early_periods, captured.micro_batches > 1
        if not early and not several:
            return None
        check_staged(self, self.module, call, captured.schedule)
        if several:
            captured.check_weighed_by_samples()
        parts = self._parts(call, captured) if several else None
        executor, graph = self._ready(call, captured) if parts is None else parts.executor, captured.graph
        program = self.program = executor.program
        found = moments(captured, program.staged, early) if parts is None else ()
        nested, axes = partial(self._nested, graph, program, call=call), sample_axes(graph, call.dim)
        step = StagedStep(executor, nested, targets, call.batch or 1, axes, loss_fn, optimizer)
        self._begins(graph)
        with as_current(executor.transport.physical(executor.deliver_from)):
            if parts is not None:
                loss = step.run_in_micro_batches(parts.micro_batches, parts.ranges, check=not captured.mean_loss)
                captured.mean_loss = True
            else:
                assert program.staged is not None  # else there are no moments
                loss = step.run(program.staged, call.named(graph.user_inputs), found)
        end_forward(self.module, graph)
        return loss

    def _parts(self, call: ModelCall, captured: Captured) -> Parts:
        """The micro-batches of a call that all processes are ready for."""
        parts = parts_of(self._programs, captured, call, self._agreed(call, captured).samples, self._transport)
        self.program = parts.executor.program
        return parts

    def _follow(self, call: ModelCall, recorder: StepRecorder | None = None, names: tuple[str, ...] = ()) -> Any:
        captured = self._find(call)
        graph, inputs = captured.graph, call.named(captured.graph.user_inputs)
        several = captured.micro_batches > 1 and torch.is_grad_enabled()
        if several and recorder is not None:
            raise RuntimeFailure("measure() cannot time a plan in micro-batches yet; measure it with micro_batches=1")
        if several and captured.loss is not None:
            parts = self._parts(call, captured)
            self._begins(graph)
            results = run_with_loss(parts.with_loss(captured, self._given["scalars"] == "whole"), inputs)
            end_forward(self.module, graph)
            return self._nested(graph, parts.executor.program, results, call)
        if several and not captured.warned:
            warn_of_whole_batch(captured.micro_batches)
            captured.warned = True
        executor = self._ready(call, captured)
        executor = executor if recorder is None else recorder.executor(executor)
        found = self._run(call, captured, executor, inputs)
        once = several or recorder is not None or self._self_check.wants(captured)
        self._captures.repeated = None if once else RepeatedCall.of(call, names, captured, executor, self._captures)
        return found

    def _run(self, call: ModelCall, captured: Captured, executor: Executor, inputs: Mapping[str, Tensor]) -> Any:
        """The results of a call that everything is ready for."""
        self.__dict__["program"] = executor.program  # setting an attribute of a module takes microseconds
        self._begins(captured.graph)
        results = run_program(executor, inputs, self._explained)
        end_forward(self.module, captured.graph)
        return self._nested(captured.graph, executor.program, results, call)

    def _ready(self, call: ModelCall, captured: Captured) -> Executor:
        """The executor of a graph for these samples, compared with the plain module; ranks' buffers are equal."""
        return self._programs.executor(captured, self._agreed(call, captured).samples)

    def _agreed(self, call: ModelCall, captured: Captured) -> Agreement:
        """Agreement of all processes on a call, which is compared with the plain module first if need be."""
        sync = self._programs.sync
        if captured.exchanges or (sync is not None and sync.stale):
            come_together(self._transport, self.training)
        wanted = self._self_check.wants(captured)
        refused = captured.refused(call)
        if refused is not None:
            if captured.exchanges and self._transport.processes > 1:
                exchange_facts(self._transport, call, captured, wanted, refused=True)
            self._self_check.raise_own_error(call, captured, refused, self.training)
        agreement = exchange_facts(
            self._transport, call, captured, wanted, serves=lambda batch: self._captures.serve(call, captured, batch)
        )
        if sync is not None:
            sync.run()
        if self._programs.sharding is not None or self._programs.waiting is not None:
            self._programs.hold(captured)
        if wanted:
            self._self_check.before(call, captured, self.training, agreement)
        self._programs.hold(captured)  # at the first step only now: the plain module runs with whole parameters
        return agreement

    def while_planning(self, progress: AbstractContextManager[Any]) -> None:
        """Have the first capture and planning run inside of `progress`, whose `phase` is told what is done."""
        self._captures.progress = progress

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Capture and plan for inputs like these without a step; returns the plan. Meta tensors get their values."""
        captured = self._find(ModelCall.of(args, kwargs, self._dim))
        if self._programs.waiting is not None:
            self._programs.hold(captured)
        assert self.plan is not None
        return self.plan

    def _find(self, call: ModelCall) -> Captured:
        self._transport.begin_call()
        captured = self._captures.find(call, self.training)
        self._batch, self._captures.repeated = call.batch, None
        if captured is not self._latest:
            self._latest, self._example = captured, call.without_numbers()
        return captured

    def measure(
        self,
        *args: Any,
        steps: int = 20,
        warmup: int = 3,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: Callable[[Any], Tensor] | None = None,
        memory: bool = False,
        between: Callable[[], object] | None = None,
        **kwargs: Any,
    ) -> MeasuredStep:
        """Run training steps and say what each layer and each transfer took, beside what was predicted.

        Parameters, gradients, buffers, the optimizer, the mode and torch's random numbers are as before afterwards.
        Under torchrun every rank has to call this, and each gets its own times.

        Args:
            args, kwargs: of the model; without any, random ones like those of the last call.
            steps, warmup: how many steps are recorded, and how many run before.
            optimizer: updates in every step; without one there is no update.
            loss_fn: a loss of the model's result; without one the mean of every result.
            memory: run one more step to find the most memory that it takes.
            between: called after each step, outside of what is timed.

        Raises:
            RuntimeFailure: there was no call to take inputs from, or no result needs a gradient.
        """
        wanted = StepsToRun(steps, warmup, optimizer, loss_fn, memory, between)
        if args or kwargs:
            call = ModelCall.of(args, kwargs, self._dim)
        elif self._example is not None:
            call = self._example.drawn(self._batch)
        else:
            raise RuntimeFailure("nothing is known of the inputs yet; call or prepare() the model, or give inputs")
        mode, program = self.training, self.program
        try:
            with preserved_modes(self.module):
                if not mode:
                    self.train()
                captured = self._find(call)
                with preserved_generators(), torch.inference_mode(False), torch.enable_grad():
                    self._ready(call, captured)  # compared with the plain module, if it was not yet
                graph = captured.graph
                expected = self.predict_times(graph, self.plan) if self.predict_times and self.plan else None
                return measure(MeasuredModel(self.module, self._transport, graph, call, self._follow, expected), wanted)
        finally:
            self.program, self.training = program, mode

    @property
    def graph(self) -> LayerGraph | None:
        """The captured graph of the last call, once there was one."""
        return self._latest.graph if self._latest is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan, once it is made."""
        return self._captures.plan

    @property
    def checked(self) -> tuple[CheckRecord, ...]:
        """The findings of the comparisons with the plain module; under `check="always"` the last call's."""
        return tuple(self._self_check.records)

    @property
    def device_count(self) -> int:
        """Number of logical devices, over all processes."""
        return self._programs.device_count

    @property
    def home(self) -> int | None:
        """The logical device where inputs arrive, where one process runs several physical ones; None elsewhere."""
        return self._programs.home

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """An error of an allocation in a step, with the figures of the plan."""
        return StepMemory(self.graph, self.plan, self._batch, self._transport, self.predict_times).explained(error)

    def _begins(self, graph: LayerGraph) -> None:
        """Count a forward before it runs, as layers do, for a checkpoint may end one early."""
        begin_forward(self.module, graph)
        if self._programs.sync is not None and graph.training:
            self._programs.sync.written()

    def _nested(self, graph: LayerGraph, program: Program, results: Sequence[Tensor], call: ModelCall) -> Any:
        tensors = []
        for slot, result in zip(program.outputs, results, strict=False):  # what samples count may come behind them
            own = program.slots[slot].per_replica and self._transport.processes > 1
            result = result.squeeze(0) if own else result
            tensors.append(result if self._output_device is None else result.to(self._output_device))
        return graph.returned(tensors, call.containers)

    @property
    def _slices(self) -> Sharding | None:
        if self._programs.waiting is not None:
            raise RuntimeFailure(NO_VALUES)
        return self._programs.sharding

    def __getattr__(self, name: str) -> Any:
        """The module's attribute; under torchrun its methods see this process's samples alone."""
        found = super().__getattr__(name)
        unplanned = self._plain.unplanned if self.plan is None else None
        return watched(self.module, found, self._transport.processes > 1, unplanned)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Compiled:
        """Move or convert the module; what was captured no longer fits."""
        super()._apply(fn, recurse)
        self._captures.clear()
        self._latest = self._example = None
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """A compiled copy of the module, with the same plan; sharded parameters stay cut as they are."""
        twin = Compiled(copy.deepcopy(self.module, memo), self._planner, group=self.process_group, **self._given)
        twin._captures.plan, twin._captures.planned = self.plan, self._captures.planned
        twin.predict_times, twin.report = self.predict_times, self.report
        return twin
