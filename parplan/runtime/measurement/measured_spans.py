"""One measured step over time: what every device was doing from moment to moment, gathered from all processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parplan.lowering.program import Program
from parplan.runtime.execution.timeline import ActivityKind, StepTimes
from parplan.runtime.measurement.trace_events import TraceSpan
from parplan.runtime.transport.base import Transport

__all__ = ["MeasuredSpan", "by_device", "gathered_spans", "measured_trace"]

LANES = {
    ActivityKind.LAYER: "compute",
    ActivityKind.TRANSFER: "transfers",
    ActivityKind.REDUCTION: "gradient sums",
    ActivityKind.LOSS: "compute",
    ActivityKind.UPDATE: "compute",
    ActivityKind.RUNTIME: "runtime",
}


@dataclass(frozen=True)
class MeasuredSpan:
    """An activity of some devices, or without any of a process, in seconds from the begin of the step there.

    `name` is the layer, or the value that moves.
    """

    kind: ActivityKind
    name: str
    backward: bool
    devices: tuple[int, ...]
    process: int
    start_s: float
    end_s: float


def gathered_spans(
    transport: Transport, program: Program, step: StepTimes, one_clock: bool
) -> tuple[MeasuredSpan, ...]:
    """The spans of a step in all processes; every rank has to call this.

    Args:
        one_clock: the host's clock times all devices, so that the time between activities is the runtime's own; on
            CUDA a device may also be waiting then, and nothing is said.
    """
    rows = []
    for span in step.spans:
        activity = span.activity
        if span.stop_ns == span.start_ns or (activity.kind is ActivityKind.RUNTIME and not one_clock):
            continue
        name = activity.name
        if activity.kind is ActivityKind.TRANSFER and name:
            name = program.slots[name].value
        devices = span.devices or (transport.owned if len(transport.owned) == 1 else ())
        rows.append((activity.kind.value, name, activity.backward, list(devices), span.start_ns, span.stop_ns))
    texts = transport.gather_texts(json.dumps(rows))
    return tuple(
        MeasuredSpan(ActivityKind(kind), name, backward, tuple(devices), process, start_ns / 1e9, stop_ns / 1e9)
        for process, text in enumerate(texts)
        for kind, name, backward, devices, start_ns, stop_ns in json.loads(text)
    )


def measured_trace(spans: Iterable[MeasuredSpan]) -> Iterator[TraceSpan]:
    """The spans on lanes of their devices, or of their process."""
    for span in spans:
        way = "backward" if span.backward else "forward"
        layer, moves = span.kind is ActivityKind.LAYER, span.kind is ActivityKind.TRANSFER
        category = way if layer else {ActivityKind.REDUCTION: "reduction"}.get(span.kind, span.kind.value)
        words = way if layer else f"transfer {way}" if moves and span.name else span.kind.value
        name = " · ".join(filter(None, (span.name, words)))
        tracks = [f"device {device}" for device in span.devices] or [f"process {span.process}"]
        for track in tracks:
            yield TraceSpan(f"{track}, measured", LANES[span.kind], name, category, span.start_s, span.end_s)


def by_device(predicted: Iterable[TraceSpan], measured: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Both, every device's predicted track in front of its measured one, processes last."""

    def place(span: TraceSpan) -> tuple[bool, int]:
        kind, number, *_ = span.track.replace(",", " ").split()
        return kind != "device", int(number)

    return sorted((*predicted, *measured), key=place)  # stable: predicted spans come first
