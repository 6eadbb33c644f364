"""Recording of one executor's calls on a timeline, and the null object of calls that are not recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from parplan.graph.local import Marks
from parplan.lowering.program import Exchange, Program
from parplan.runtime.execution.timeline import REST, ActivityKind, StepActivity, StepTimeline

__all__ = ["SILENT", "Recorder", "Silent", "TimelineRecorder"]

Span = AbstractContextManager[object]


class Recorder(Protocol):
    """Told by a run where its time goes; spans may be entered any number of times.

    Attributes:
        marks: called by generated code in front of each layer and behind it; None leaves such calls out of the code.
        sums: the span of waiting for gradient sums, on all devices of this process.
        totals: the span of adding up the gradients of the caller's own parameters.
        sends: the span of waiting until messages have left.
    """

    marks: Marks | None
    sums: Span
    totals: Span
    sends: Span

    def runtime(self, devices: Iterable[int] | None = None) -> None:
        """From now on these devices, or without any the caller, are in the runtime itself."""
        ...

    def computing(self, device: int) -> None:
        """From now on generated code runs for this device."""
        ...

    def moving(self, exchange: Exchange) -> Span:
        """The span of starting an exchange of the program, or of waiting for it."""
        ...


class Silent:
    """The recorder of a call that is not recorded: does nothing."""

    marks: Marks | None = None
    sums: Span = nullcontext()
    totals: Span = nullcontext()
    sends: Span = nullcontext()

    def runtime(self, devices: Iterable[int] | None = None) -> None:
        """As `Recorder.runtime`."""

    def computing(self, device: int) -> None:
        """As `Recorder.computing`."""

    def moving(self, exchange: Exchange) -> Span:
        """As `Recorder.moving`."""
        return self.sums


SILENT = Silent()


class TimelineRecorder:
    """Enters the activities of one program on a timeline.

    Args:
        program: its transfers are told apart by the slot that each fills.
        owned: the logical devices of this process.
    """

    def __init__(self, timeline: StepTimeline, program: Program, owned: tuple[int, ...]) -> None:
        self._timeline = timeline
        self.marks: Marks | None = timeline
        sums = StepActivity(ActivityKind.REDUCTION, backward=True)
        self.sums: Span = _Span(timeline, sums, owned)
        self.totals: Span = _Span(timeline, sums, None)
        self.sends: Span = _Span(timeline, StepActivity(ActivityKind.TRANSFER), owned)
        self._moves: dict[int, _Span] = {}
        for transfer in program.transfers:
            for exchange, backward in ((transfer.exchange, False), (transfer.transposed, True)):
                involved = exchange.shapes.keys() | {piece.source for piece in exchange.pieces}
                activity = StepActivity(ActivityKind.TRANSFER, transfer.target, backward=backward)
                devices = tuple(device for device in owned if device in involved)
                self._moves[id(exchange)] = _Span(timeline, activity, devices)

    def runtime(self, devices: Iterable[int] | None = None) -> None:
        """As `Recorder.runtime`."""
        self._timeline.enter(REST, devices)

    def computing(self, device: int) -> None:
        """As `Recorder.computing`."""
        self._timeline.device = device

    def moving(self, exchange: Exchange) -> Span:
        """As `Recorder.moving`."""
        return self._moves[id(exchange)]


@dataclass(frozen=True)
class _Span:
    """Enters an activity, and at its end the runtime itself."""

    timeline: StepTimeline
    activity: StepActivity
    devices: tuple[int, ...] | None

    def __enter__(self) -> None:
        self.timeline.enter(self.activity, self.devices)

    def __exit__(self, *error: object) -> None:
        self.timeline.enter(REST, self.devices)
