"""Measures a compiled model: whole training steps, recorded, that leave everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parplan.compat import pytree
from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.calls import Call
from parplan.runtime.execution.timeline import Activity, Kind, StepTimes, Timeline
from parplan.runtime.measurement.measured_step import Figure, MeasuredStep
from parplan.runtime.measurement.peak_memory import StepPeak, step_peak
from parplan.runtime.measurement.predicted import Expected
from parplan.runtime.measurement.summary import Summary
from parplan.runtime.preserve_state import preserved
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.distributed import DistributedTransport

if TYPE_CHECKING:
    from parplan.runtime.execution.executor import Executor

__all__ = ["Effort", "Recorder", "Subject", "measure"]

_LOSS, _UPDATE = Activity(Kind.LOSS), Activity(Kind.UPDATE)


class Recorder:
    """A timeline, and the executors that write on it."""

    def __init__(self, transport: Transport) -> None:
        self.timeline = Timeline(transport)
        self._of: dict[Executor, Executor] = {}
        self.last: Executor | None = None

    def executor(self, plain: Executor) -> Executor:
        """What runs the same program and records it."""
        if plain not in self._of:
            self._of[plain] = plain.recorded(self.timeline)
        self.last = self._of[plain]
        return self.last


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Args:
        module: whose parameters and buffers are put back.
        transport: which devices there are.
        graph: the captured graph.
        call: the arguments of a step.
        forward: calls the model with them, recorded if a recorder is given.
        expected: what was predicted.
    """

    module: nn.Module
    transport: Transport
    graph: LayerGraph
    call: Call
    forward: Callable[[Call, Recorder | None], Any]
    expected: Expected | None


@dataclass(frozen=True)
class Effort:
    """What a step consists of, and how many are run; `between` is called after each, and is not timed."""

    steps: int
    warmup: int
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[[Any], Tensor] | None
    memory: bool = False
    between: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise RuntimeFailure(
                f"steps={self.steps}, warmup={self.warmup}: measure at least 1 step, after 0 or more to warm up"
            )


def measure(subject: Subject, effort: Effort) -> MeasuredStep:
    """Run and record training steps; every rank has to call this.

    Raises:
        RuntimeFailure: no result needs a gradient, or another process failed.
    """
    with preserved(subject.module, effort.optimizer), torch.inference_mode(False), torch.enable_grad():
        recorder = Recorder(subject.transport)
        for _ in range(effort.warmup + effort.steps):
            _run(subject, effort, recorder)
            if effort.between is not None:
                effort.between()
        steps = recorder.timeline.steps()[effort.warmup :]
        peak = _peak(subject, effort) if effort.memory else None
        return _measured(subject, effort, recorder, steps, peak)


def _run(subject: Subject, effort: Effort, recorder: Recorder | None) -> None:
    """One training step."""
    timeline = recorder.timeline if recorder is not None else None
    with _recorded(timeline):
        result = subject.forward(subject.call, recorder)
        _enter(timeline, _LOSS)
        _backward(result, effort.loss_fn)
        _enter(timeline, _UPDATE)
        if effort.optimizer is not None:
            effort.optimizer.step()
        for parameter in subject.module.parameters():
            parameter.grad = None
        for tensor in subject.call.tensors:
            tensor.grad = None


@contextmanager
def _recorded(timeline: Timeline | None) -> Iterator[None]:
    if timeline is not None:
        timeline.begin()
    yield
    if timeline is not None:
        timeline.end()


def _enter(timeline: Timeline | None, activity: Activity) -> None:
    if timeline is not None:
        timeline.enter(activity)


def _backward(result: Any, loss_fn: Callable[[Any], Tensor] | None) -> None:
    """The gradients of a loss, or of the mean over every result."""
    ends = [loss_fn(result)] if loss_fn is not None else pytree.tree_leaves(result)
    tensors = [end for end in ends if isinstance(end, Tensor) and end.requires_grad]
    if not tensors:
        raise RuntimeFailure("no result of the model needs a gradient, so there is no training step to measure")
    torch.autograd.backward(tensors, [torch.full_like(end, 1 / max(1, end.numel())) for end in tensors])


def _peak(subject: Subject, effort: Effort) -> StepPeak:
    """Of one more step."""
    place = subject.transport.physical(subject.transport.owned[0])
    held = [*subject.module.parameters(), *subject.module.buffers(), *subject.call.tensors]
    states = effort.optimizer.state.values() if effort.optimizer is not None else ()
    held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return step_peak(lambda: _run(subject, effort, None), map(local_tensor, held), place)


def _measured(
    subject: Subject, effort: Effort, recorder: Recorder, steps: list[StepTimes], peak: StepPeak | None
) -> MeasuredStep:
    assert recorder.last is not None
    transport, found = subject.transport, Summary(subject.graph, recorder.last.program, steps)
    step, batch = found.step(), subject.call.batch or 1
    slowest_ns, whole_batch = round(step.seconds * 1e9), batch
    if isinstance(transport, DistributedTransport):
        told = transport.gather(slowest_ns, batch)
        slowest_ns, whole_batch = max(ns for ns, _ in told), sum(size for _, size in told)
    places = [transport.physical(device) for device in transport.owned]
    turns = len(set(places)) < len(places)
    on_one_clock = turns and places[0].type == "cpu" and len(set(places)) == 1
    return MeasuredStep(
        model=subject.graph.model,
        batch=whole_batch,
        devices=max(transport.processes, len(places)),
        processes=transport.processes,
        turns=turns,
        steps=effort.steps,
        layers=found.layers(),
        transfers=found.transfers(),
        sends=found.sends(),
        reductions=found.of(Kind.REDUCTION),
        loss=found.of(Kind.LOSS),
        update=found.of(Kind.UPDATE),
        updated=effort.optimizer is not None,
        others=found.others() if on_one_clock else Figure(0.0),
        step=step,
        slowest_step_s=slowest_ns / 1e9,
        peak=peak,
        expected=subject.expected,
    )
