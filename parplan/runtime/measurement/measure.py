"""Measures a compiled model: whole training steps, recorded, that leave everything as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from parplan.compat import pytree
from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.program import Join, Program
from parplan.runtime.calls import ModelCall
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.segment_cache import EAGER
from parplan.runtime.execution.timeline import REST, ActivityKind, StepActivity, StepTimeline, StepTimes
from parplan.runtime.measurement.measured_spans import gathered_spans
from parplan.runtime.measurement.measured_step import Figure, MeasuredPart, MeasuredStep, StepPart
from parplan.runtime.measurement.peak_memory import step_peak
from parplan.runtime.measurement.predicted import INPUTS, RESULTS, SLICES, Expected
from parplan.runtime.preserve_state import preserved
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from parplan.runtime.transport.base import Transport

__all__ = ["MeasuredModel", "StepRecorder", "StepsToRun", "measure"]

_LOSS, _UPDATE = StepActivity(ActivityKind.LOSS), StepActivity(ActivityKind.UPDATE)


class StepRecorder:
    """A timeline, and the executors that write on it."""

    def __init__(self, transport: Transport) -> None:
        self.timeline = StepTimeline(transport)
        self._of: dict[Executor, Executor] = {}
        self.last: Executor | None = None

    def executor(self, plain: Executor) -> Executor:
        """The executor that runs the same program and records it.

        Raises:
            RuntimeFailure: a backend compiles layers together, of which none can be timed.
        """
        if plain.backend != EAGER:
            raise RuntimeFailure(
                f"measure() times every layer, and {plain.backend} compiles them together; measure the plan with "
                f'backend="{EAGER}"'
            )
        if plain not in self._of:
            self._of[plain] = plain.recorded(self.timeline)
        self.last = self._of[plain]
        return self.last


@dataclass(frozen=True)
class MeasuredModel:
    """The model that is measured, and one call of it.

    Args:
        module: whose parameters and buffers are put back.
        transport: which devices there are.
        graph: the captured graph.
        call: the arguments of a step.
        forward: calls the model with them, recorded if a recorder is given.
        expected: the prediction.
    """

    module: nn.Module
    transport: Transport
    graph: LayerGraph
    call: ModelCall
    forward: Callable[[ModelCall, StepRecorder | None], Any]
    expected: Expected | None


@dataclass(frozen=True)
class StepsToRun:
    """The steps to run, and their optimizer and loss; `between` is called after each, and is not timed."""

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


def measure(subject: MeasuredModel, wanted: StepsToRun) -> MeasuredStep:
    """Run and record training steps; every rank has to call this.

    Raises:
        RuntimeFailure: no result needs a gradient, or another process failed.
    """
    transport, optimizer = subject.transport, wanted.optimizer
    places = [transport.physical(device) for device in transport.owned]
    with preserved(subject.module, optimizer), torch.inference_mode(False), torch.enable_grad():
        recorder = StepRecorder(transport)
        for _ in range(wanted.warmup + wanted.steps):
            recorder.timeline.begin()
            _run(subject, wanted, recorder)
            recorder.timeline.end()
            if wanted.between is not None:
                wanted.between()
        steps = recorder.timeline.steps()[wanted.warmup :]
        peak = None
        if wanted.memory:
            held = [*subject.module.parameters(), *subject.module.buffers(), *subject.call.tensors]
            states = optimizer.state.values() if optimizer is not None else ()
            held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
            peak = step_peak(lambda: _run(subject, wanted, None), map(local_tensor, held), places[0])
    turns = len(set(places)) < len(places)
    parts = _parts(subject.graph, recorder, steps, turns)
    told = transport.gather(round(parts[-1].forward.seconds * 1e9), subject.call.batch or 1)
    recorded = _median_step(transport, steps)
    assert recorder.last is not None
    spans = gathered_spans(transport, recorder.last.program, recorded, recorder.timeline.one_clock)
    return MeasuredStep(
        model=subject.graph.model,
        batch=sum(size for _, size in told),
        devices=max(transport.processes, len(places)),
        processes=transport.processes,
        turns=turns,
        steps=wanted.steps,
        updated=optimizer is not None,
        slowest_step_s=max(ns for ns, _ in told) / 1e9,
        parts=parts,
        peak=peak,
        expected=subject.expected,
        spans=spans,
    )


def _median_step(transport: Transport, steps: Sequence[StepTimes]) -> StepTimes:
    """The step that took the median time, of its slowest process: the same one in all processes."""
    slowest = [max(own) for own in zip(*transport.gather(*(step.step_ns for step in steps)), strict=True)]
    return steps[sorted(range(len(steps)), key=slowest.__getitem__)[(len(steps) - 1) // 2]]


def _run(subject: MeasuredModel, wanted: StepsToRun, recorder: StepRecorder | None) -> None:
    """One training step, of a loss or of the mean over every result."""
    result = subject.forward(subject.call, recorder)
    if recorder is not None:
        recorder.timeline.enter(_LOSS)
    ends = [wanted.loss_fn(result)] if wanted.loss_fn is not None else pytree.tree_leaves(result)
    tensors = [end for end in ends if isinstance(end, Tensor) and end.requires_grad]
    if not tensors:
        raise RuntimeFailure("no result of the model needs a gradient, so there is no training step to measure")
    torch.autograd.backward(tensors, [torch.full_like(end, 1 / max(1, end.numel())) for end in tensors])
    if recorder is not None:
        recorder.timeline.enter(_UPDATE)
    if wanted.optimizer is not None:
        wanted.optimizer.step()
    for tensor in (*subject.module.parameters(), *subject.call.tensors):
        tensor.grad = None


def _parts(
    graph: LayerGraph, recorder: StepRecorder, steps: Sequence[StepTimes], turns: bool
) -> tuple[MeasuredPart, ...]:
    """The rows of the measured table, the step last."""
    assert recorder.last is not None  # a step has run
    program = recorder.last.program
    # Nanoseconds by device of every layer, forward or backward, per step.
    by_device: list[dict[tuple[str, bool], dict[int, int]]] = []
    for step in steps:
        own: dict[tuple[str, bool], dict[int, int]] = defaultdict(dict)
        for activity, ns in step.spent_ns.items():
            if activity.kind is ActivityKind.LAYER and activity.device is not None:
                own[activity.name, activity.backward][activity.device] = ns
        by_device.append(own)

    def slowest(name: str, backward: bool) -> Figure:
        return _figure([max(own.get((name, backward), {0: 0}).values()) for own in by_device])

    def total(kind: ActivityKind, chosen: Callable[[StepActivity], bool] = lambda activity: True) -> Figure:
        return _figure([sum(ns for a, ns in s.spent_ns.items() if a.kind is kind and chosen(a)) for s in steps])

    def moving(value: str, backward: bool) -> Figure:
        return total(ActivityKind.TRANSFER, lambda a: a.name in slots[value] and a.backward is backward)

    present = {layer for own in by_device for layer, _ in own}
    parts = [
        MeasuredPart(StepPart.LAYER, slowest(name, False), slowest(name, True), name)
        for name in graph.layers
        if name in present
    ]
    slots: dict[str, set[str]] = defaultdict(set)
    for transfer in program.transfers:
        slots[program.slots[transfer.target].value].add(transfer.target)
    for value, label in _labels(graph, program, slots).items():
        parts.append(MeasuredPart(StepPart.TRANSFER, moving(value, False), moving(value, True), value, label))
    parts += [
        MeasuredPart(StepPart.SENDS, total(ActivityKind.TRANSFER, lambda activity: not activity.name)),
        MeasuredPart(StepPart.REDUCTIONS, total(ActivityKind.REDUCTION)),
        MeasuredPart(StepPart.LOSS, total(ActivityKind.LOSS)),
        MeasuredPart(StepPart.UPDATE, total(ActivityKind.UPDATE)),
    ]
    if recorder.timeline.one_clock:
        if turns:
            others = [sum(sum(d.values()) - max(d.values()) for d in own.values()) for own in by_device]
            parts.append(MeasuredPart(StepPart.TURNS, _figure(others)))
        parts.append(MeasuredPart(StepPart.RUNTIME, _figure([step.spent_ns.get(REST, 0) for step in steps])))
    return (*parts, MeasuredPart(StepPart.STEP, _figure([step.step_ns for step in steps])))


def _figure(nanoseconds: Sequence[int]) -> Figure:
    """Median and relative spread."""
    middle = median(nanoseconds)
    spread = 1.4826 * median(abs(value - middle) for value in nanoseconds) / middle if middle > 0 else 0.0
    return Figure(middle / 1e9, spread)


def _labels(graph: LayerGraph, program: Program, slots: dict[str, set[str]]) -> dict[str, str]:
    """Of every value that moves the layer it comes from and those that read it elsewhere, such as `pool5 -> fc6`.

    Args:
        slots: that transfers fill, by value.
    """
    moved = set[str]().union(*slots.values())
    joins = [step for step in program.forward if isinstance(step, Join)]
    moved |= {join.target for join in joins if not moved.isdisjoint(join.sources)}
    readers: dict[str, dict[str, None]] = defaultdict(dict)
    for step in program.computes:
        for slot in moved.intersection(step.reads):
            value = program.slots[slot].value
            taken = {n: (*graph.layers[n].inputs, *graph.layers[n].parameters) for n in step.layers}
            reading = [n for n, own in taken.items() if value in own or value not in graph.values]
            readers[value] |= dict.fromkeys(reading)
    for slot in (*program.outputs, *program.updates.values()):
        if slot in moved:
            readers[program.slots[slot].value][RESULTS] = None
    # Statistics of batch norm are no value of the graph: they are named after their layer.
    statistics = {f"{name}.statistics": name for name in graph.layers}
    others = {**statistics, **dict.fromkeys(program.slices, SLICES)}
    sources = {value: graph.producer.get(value, others.get(value, INPUTS)) for value in slots}
    return {value: f"{source} -> {', '.join(readers[value])}" for value, source in sources.items()}
