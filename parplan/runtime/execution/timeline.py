"""What a training step spends its time on, recorded where it happens.

At every moment a step does one thing: it is in a layer, moves a tensor, sums gradients, updates, or is in the runtime
itself. So a recording is a list of moments at which the thing changed, and what is spent on all things adds up to the
step. On the CPU a moment is the host's clock. On CUDA it is an event on the device's own stream, so that nothing waits
for anything that it would not wait for otherwise; events are read when all steps are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from parplan.runtime.transport.base import Transport

__all__ = ["REST", "Activity", "Kind", "StepTimes", "Timeline"]


class Kind(Enum):
    """What kind of thing a step does at a moment."""

    LAYER = "layer"
    TRANSFER = "transfer"
    REDUCTION = "gradient sums"
    LOSS = "loss"
    UPDATE = "update"
    RUNTIME = "runtime"


@dataclass(frozen=True)
class Activity:
    """One thing a step does.

    Args:
        name: the layer, or the slot that a transfer fills; of transfers empty for sends that had not left at the end.
        device: the logical device whose part of a layer it is.
        backward: whether it belongs to the backward pass.
    """

    kind: Kind
    name: str = ""
    device: int | None = None
    backward: bool = False


REST = Activity(Kind.RUNTIME)


@dataclass(frozen=True)
class StepTimes:
    """What one step took, in nanoseconds.

    Args:
        step_ns: from its begin to its end.
        spent_ns: on each thing; where one clock serves all devices, these add up to the step exactly.
    """

    step_ns: int
    spent_ns: Mapping[Activity, int]

    @property
    def runtime_ns(self) -> int:
        """What is left for the runtime itself when everything else is taken off."""
        return self.step_ns - sum(ns for activity, ns in self.spent_ns.items() if activity.kind is not Kind.RUNTIME)


class _Lane(Protocol):
    """One clock and what was recorded by it, per step."""

    def begin(self) -> None: ...
    def enter(self, activity: Activity) -> None: ...
    def end(self) -> None: ...
    def read(self) -> list[StepTimes]: ...


class _HostLane:
    """Moments of the host's clock."""

    def __init__(self) -> None:
        self._steps: list[list[tuple[Activity, int]]] = []
        self._marks: list[tuple[Activity, int]] = []

    def begin(self) -> None:
        self._marks = [(REST, perf_counter_ns())]
        self._steps.append(self._marks)

    def enter(self, activity: Activity) -> None:
        self._marks.append((activity, perf_counter_ns()))

    def end(self) -> None:
        self.enter(REST)

    def read(self) -> list[StepTimes]:
        return [_times([activity for activity, _ in marks], [moment for _, moment in marks]) for marks in self._steps]


class _CudaLane:
    """Events on a stream: the one on which a device computes, or the caller's."""

    def __init__(self, device: torch.device, stream: Callable[[], torch.cuda.Stream]) -> None:
        self._device = device
        self._stream_now = stream
        self._stream = stream()
        self._steps: list[list[tuple[Activity, torch.cuda.Event]]] = []
        self._marks: list[tuple[Activity, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._stream = self._stream_now()
        self._marks = []
        self._steps.append(self._marks)
        self.enter(REST)

    def enter(self, activity: Activity) -> None:
        event = torch.cuda.Event(enable_timing=True)
        # Said explicitly, as hooks run in a thread of autograd's.
        event.record(self._stream)
        self._marks.append((activity, event))

    def end(self) -> None:
        self.enter(REST)

    def read(self) -> list[StepTimes]:
        torch.cuda.synchronize(self._device)
        return [self._read(marks) for marks in self._steps]

    def _read(self, marks: Sequence[tuple[Activity, torch.cuda.Event]]) -> StepTimes:
        first = marks[0][1]
        moments = [round(1e6 * first.elapsed_time(event)) for _, event in marks]
        return _times([activity for activity, _ in marks], moments)


def _times(activities: Sequence[Activity], moments_ns: Sequence[int]) -> StepTimes:
    spent: dict[Activity, int] = defaultdict(int)
    for activity, start, stop in zip(activities, moments_ns, moments_ns[1:], strict=False):
        spent[activity] += stop - start
    return StepTimes(moments_ns[-1] - moments_ns[0], dict(spent))


class Timeline:
    """Records steps of the devices that `transport` has here.

    A step runs between `begin` and `end`. Whoever does something says so with `enter`; it lasts until somebody enters
    something else on the same clock.

    Attributes:
        device: the logical device that computes now.
    """

    def __init__(self, transport: Transport) -> None:
        self.device = transport.owned[0]
        host = _HostLane()
        places = {device: transport.physical(device) for device in transport.owned}
        self._lanes: dict[int, _Lane] = {
            device: _cuda_lane(transport, device) if place.type == "cuda" else host for device, place in places.items()
        }
        own = {device: place for device, place in places.items() if place.type == "cuda"}
        self._caller: _Lane = _callers_lane(next(iter(own.values()))) if own else host
        self._all = list(dict.fromkeys([self._caller, *self._lanes.values()]))
        self._one_clock = len(self._all) == 1

    def begin(self) -> None:
        """A step begins."""
        for lane in self._all:
            lane.begin()

    def end(self) -> None:
        """The step is over."""
        for lane in self._all:
            lane.end()

    def enter(self, activity: Activity, devices: Iterable[int] | None = None) -> None:
        """From now on these devices do this; without devices, the caller does."""
        if devices is None or self._one_clock:
            self._caller.enter(activity)
            return
        for lane in dict.fromkeys(self._lanes[device] for device in devices):
            lane.enter(activity)

    def steps(self) -> list[StepTimes]:
        """All steps so far; on CUDA waits for the last one. A step takes what the caller's clock says."""
        lanes = [lane.read() for lane in self._all]
        return [_joined(step) for step in zip(*lanes, strict=True)]

    # -- what generated code calls --

    def before(self, layer: str) -> Callable[[], None]:
        """A function that says that `layer` begins on the device that computes now."""

        ahead = {device: Activity(Kind.LAYER, layer, device) for device in self._lanes}

        def begin_layer() -> None:
            self.enter(ahead[self.device], (self.device,))

        return begin_layer

    def after(self, layer: str) -> Callable[[Sequence[Tensor]], None]:
        """A function that says that `layer` is done, and has the backward say when it comes to it.

        Autograd goes through the operations from the last one made to the first. So a layer's backward lasts from the
        moment the gradient of one of its results is there until the same is true of an earlier layer.
        """

        reached = {device: self._reached(layer, device) for device in self._lanes}

        def end_layer(results: Sequence[Tensor]) -> None:
            self.enter(REST, (self.device,))
            for result in results:
                if result.requires_grad:
                    result.register_hook(reached[self.device])

        return end_layer

    def _reached(self, layer: str, device: int) -> Callable[[Tensor], None]:
        back = Activity(Kind.LAYER, layer, device, backward=True)
        return lambda gradient: self.enter(back, (device,))


def _joined(lanes: Sequence[StepTimes]) -> StepTimes:
    spent: dict[Activity, int] = defaultdict(int)
    for times in lanes:
        for activity, ns in times.spent_ns.items():
            spent[activity] += ns
    return StepTimes(lanes[0].step_ns, dict(spent))


def _cuda_lane(transport: Transport, device: int) -> _CudaLane:
    place = transport.physical(device)

    def stream() -> torch.cuda.Stream:
        with transport.on(device):
            return torch.cuda.current_stream(place)

    return _CudaLane(place, stream)


def _callers_lane(place: torch.device) -> _CudaLane:
    return _CudaLane(place, lambda: torch.cuda.current_stream(place))
