"""Recording of one executor's calls on a timeline, and the null object of calls that are not recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from parplan.graph.local import Marks
from parplan.lowering.program import Exchange, Program
from parplan.runtime.execution.timeline import REST, ActivityKind, StepActivity, StepTimeline

__all__ = ["SILENT", "Recorder", "Silent", "TimelineRecorder"]

Span = AbstractContextManager[object]


class Silent:
    """The recorder of calls that are not recorded: does nothing; see `TimelineRecorder`."""

    marks: Marks | None = None
    sums: Span = nullcontext()
    totals: Span = nullcontext()
    sends: Span = nullcontext()

    def runtime(self, devices: Iterable[int] | None = None) -> None:
        """As `TimelineRecorder.runtime`."""

    def computing(self, device: int) -> None:
        """As `TimelineRecorder.computing`."""

    def moving(self, exchange: Exchange) -> Span:
        """As `TimelineRecorder.moving`."""
        return self.sums


class TimelineRecorder:
    """Enters the activities of one program on a timeline; its spans may be entered any number of times.

    Args:
        program: its transfers are told apart by the slot that each fills.
        owned: the logical devices of this process.

    Attributes:
        marks: called by generated code in front of each layer and behind it; None leaves such calls out of the code.
        sums: the span of waiting for gradient sums, on all devices of this process.
        totals: the span of adding up the gradients of the caller's own parameters.
        sends: the span of waiting until messages have left.
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
        """From now on these devices, or without any the caller, are in the runtime itself."""
        self._timeline.enter(REST, devices)

    def computing(self, device: int) -> None:
        """From now on generated code runs for this device."""
        self._timeline.device = device

    def moving(self, exchange: Exchange) -> Span:
        """The span of starting an exchange of the program, or of waiting for it."""
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


Recorder = Silent | TimelineRecorder
SILENT = Silent()
