"""Timeline of recorded training steps: which activity every device is in, from moment to moment.

At every moment a step does one thing: it is in a layer, moves a tensor, sums gradients, updates, or is in the runtime
itself. So a recording is a list of moments at which the activity changed, and the times of all activities add up to the
step. On the CPU a moment is a reading of the host's clock. On CUDA it is an event on the device's own stream, so that
nothing waits for anything that it would not wait for otherwise; events are read when all steps are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from parplan.accelerators import is_accelerator
from parplan.graph.local import Marks
from parplan.lowering.program import Transfer
from parplan.runtime.transport.base import Transport

__all__ = [
    "REST", "ActivityKind", "RecordedSpan", "Recorder", "Span", "StepActivity", "StepTimeline", "StepTimes",
]  # fmt: skip


class ActivityKind(Enum):
    """The kinds of activity of a step."""

    LAYER = "layer"
    TRANSFER = "transfer"
    REDUCTION = "gradient sums"
    LOSS = "loss"
    UPDATE = "update"
    RUNTIME = "runtime"


@dataclass(frozen=True)
class StepActivity:
    """One activity of a step.

    Args:
        name: the layer, or the slot that a transfer fills; of transfers empty for sends that had not left at the end.
        device: the logical device whose part of a layer it is.
        backward: whether it belongs to the backward pass.
    """

    kind: ActivityKind
    name: str = ""
    device: int | None = None
    backward: bool = False


REST = StepActivity(ActivityKind.RUNTIME)


@dataclass(frozen=True)
class RecordedSpan:
    """An activity of these devices (none: of the caller), in nanoseconds from the begin of the step."""

    activity: StepActivity
    devices: tuple[int, ...]
    start_ns: int
    stop_ns: int


@dataclass(frozen=True)
class StepTimes:
    """The times of one step, in nanoseconds.

    Args:
        step_ns: from its begin to its end.
        spans: the activities one after another, clock by clock.
    """

    step_ns: int
    spans: tuple[RecordedSpan, ...]

    @cached_property
    def spent_ns(self) -> Mapping[StepActivity, int]:
        """Nanoseconds in each activity; with `one_clock` they add up to the step exactly."""
        spent: dict[StepActivity, int] = defaultdict(int)
        for span in self.spans:
            spent[span.activity] += span.stop_ns - span.start_ns
        return dict(spent)


class _Lane:
    """The activities of all steps, timed by the host or by events on one stream.

    Args:
        stream: the stream of an accelerator, asked for at the begin of each step; None for the host's clock.
    """

    def __init__(self, stream: Callable[[], torch.Stream] | None = None) -> None:
        self._find_stream = stream
        self._stream: torch.Stream | None = None
        self._steps: list[list[tuple[StepActivity, tuple[int, ...], Any]]] = []  # with nanoseconds, or events

    def begin(self) -> None:
        self._stream = self._find_stream() if self._find_stream is not None else None
        self._steps.append([])
        self.enter(REST)

    def enter(self, activity: StepActivity, devices: tuple[int, ...] = ()) -> None:
        if not self._steps:
            return
        if self._stream is None:
            self._steps[-1].append((activity, devices, perf_counter_ns()))
            return
        event = torch.Event(self._stream.device, enable_timing=True)
        # Said explicitly, as hooks run in a thread of autograd's.
        event.record(self._stream)
        self._steps[-1].append((activity, devices, event))

    def read(self) -> list[StepTimes]:
        if self._stream is not None:
            torch.accelerator.synchronize(self._stream.device)
        found = []
        for step in self._steps:
            moments = [moment for *_, moment in step]
            if self._stream is not None:
                moments = [round(1e6 * moments[0].elapsed_time(event)) for event in moments]
            spans = [
                RecordedSpan(activity, devices, start - moments[0], stop - moments[0])
                for (activity, devices, _), start, stop in zip(step, moments, moments[1:], strict=False)
            ]
            found.append(StepTimes(moments[-1] - moments[0], tuple(spans)))
        return found


Span = AbstractContextManager[object]


class Recorder:
    """Told by a run where its time goes; this one does nothing with that.

    Attributes:
        marks: called by generated code in front of each layer and behind it; None leaves such calls out of the code.
        sums: the span of waiting for gradient sums, on all devices of this process.
        totals: the span of adding up the gradients of the caller's own parameters.
        sends: the span of waiting until messages have left.
    """

    marks: Marks | None = None
    sums: Span = nullcontext()
    totals: Span = nullcontext()
    sends: Span = nullcontext()

    def runtime(self, devices: Iterable[int] | None = None) -> None:
        """From now on these devices, or without any the caller, are in the runtime itself."""

    def computing(self, device: int) -> None:
        """From now on generated code runs for this device."""

    def moving(self, transfer: Transfer, backward: bool) -> Span:
        """The span of starting a transfer, or that of its gradient, or of waiting for it."""
        return self.sums


class StepTimeline(Recorder):
    """Records steps of the devices that `transport` has here; its spans may be entered any number of times.

    A step runs between `begin` and `end`. An activity lasts until another one is entered on the same clock.

    Attributes:
        device: the logical device that computes now.
        one_clock: all devices, and the caller, are timed by the host's clock.
    """

    def __init__(self, transport: Transport) -> None:
        self.device = transport.owned[0]
        host = _Lane()
        places = {device: transport.physical(device) for device in transport.owned}

        def device_stream(device: int) -> torch.Stream:
            with transport.on(device):
                return torch.accelerator.current_stream(places[device])

        queued = [device for device, place in places.items() if is_accelerator(place)]
        self._lanes = {d: _Lane(partial(device_stream, d)) if d in queued else host for d in places}
        self._caller = _Lane(partial(torch.accelerator.current_stream, places[queued[0]])) if queued else host
        self._all = list(dict.fromkeys([self._caller, *self._lanes.values()]))
        self.one_clock = len(self._all) == 1
        self.marks = self
        sums = StepActivity(ActivityKind.REDUCTION, backward=True)
        self.sums = _TimelineSpan(self, sums, transport.owned)
        self.totals = _TimelineSpan(self, sums, None)
        self.sends = _TimelineSpan(self, StepActivity(ActivityKind.TRANSFER), transport.owned)
        self._moves: dict[tuple[int, bool], _TimelineSpan] = {}  # by the identity of a transfer, and its way

    def begin(self) -> None:
        """A step begins."""
        for lane in self._all:
            lane.begin()

    def end(self) -> None:
        """The step is over."""
        for lane in self._all:
            lane.enter(REST)

    def enter(self, activity: StepActivity, devices: Iterable[int] | None = None) -> None:
        """From now on these devices are in this activity; without devices, the caller is."""
        if devices is None or self.one_clock:
            self._caller.enter(activity, () if devices is None else tuple(devices))
            return
        listed = tuple(devices)
        for lane in dict.fromkeys(self._lanes[device] for device in listed):
            lane.enter(activity, tuple(device for device in listed if self._lanes[device] is lane))

    def steps(self) -> list[StepTimes]:
        """All steps so far; on CUDA waits for the last one. The length of a step is that on the caller's lane."""
        steps = zip(*(lane.read() for lane in self._all), strict=True)
        return [StepTimes(lanes[0].step_ns, tuple(s for times in lanes for s in times.spans)) for lanes in steps]

    def runtime(self, devices: Iterable[int] | None = None) -> None:
        """From now on these devices, or without any the caller, are in the runtime itself."""
        self.enter(REST, devices)

    def computing(self, device: int) -> None:
        """From now on generated code runs for this device."""
        self.device = device

    def moving(self, transfer: Transfer, backward: bool) -> Span:
        """The span of a transfer, told apart from others by the slot that it fills; of gradients summed to slices, that
        of gradient sums."""
        if backward and transfer.weights:
            return self.sums
        known = id(transfer), backward
        if known not in self._moves:
            exchange = transfer.transposed if backward else transfer.exchange
            involved = exchange.shapes.keys() | {piece.source for piece in exchange.pieces}
            activity = StepActivity(ActivityKind.TRANSFER, transfer.target, backward=backward)
            devices = tuple(device for device in self._lanes if device in involved)
            self._moves[known] = _TimelineSpan(self, activity, devices)
        return self._moves[known]

    def before(self, layer: str) -> Callable[[], None]:
        """A function, for generated code, that enters the forward of `layer` on the device that computes now."""

        ahead = {device: StepActivity(ActivityKind.LAYER, layer, device) for device in self._lanes}

        def begin_layer() -> None:
            self.enter(ahead[self.device], (self.device,))

        return begin_layer

    def after(self, layer: str) -> Callable[[Sequence[Tensor]], None]:
        """A function that ends the forward of `layer`, and lets its backward be entered.

        Autograd goes through the operations from the last one made to the first. So a layer's backward lasts from the
        moment the gradient of one of its results is there until the same is true of an earlier layer.
        """

        def reached(device: int, gradient: Tensor) -> None:
            self.enter(back[device], (device,))

        back = {device: StepActivity(ActivityKind.LAYER, layer, device, backward=True) for device in self._lanes}
        hooks = {device: partial(reached, device) for device in self._lanes}

        def end_layer(results: Sequence[Tensor]) -> None:
            self.enter(REST, (self.device,))
            for result in results:
                if result.requires_grad:
                    result.register_hook(hooks[self.device])

        return end_layer


@dataclass(frozen=True)
class _TimelineSpan:
    """Enters an activity, and at its end the runtime itself."""

    timeline: StepTimeline
    activity: StepActivity
    devices: tuple[int, ...] | None

    def __enter__(self) -> None:
        self.timeline.enter(self.activity, self.devices)

    def __exit__(self, *error: object) -> None:
        self.timeline.enter(REST, self.devices)
