"""One measured step over time: what every device was doing from moment to moment, gathered from all processes."""

from __future__ import annotations

import json
from collections.abc import Iterable

from parplan.lowering.program import Program
from parplan.runtime.execution.timeline import ActivityKind, StepActivity, StepTimes
from parplan.runtime.measurement.trace_events import TraceSpan
from parplan.runtime.transport.base import Transport

__all__ = ["by_device", "gathered_spans"]

LANES = {
    ActivityKind.LAYER: "compute",
    ActivityKind.TRANSFER: "transfers",
    ActivityKind.REDUCTION: "gradient sums",
    ActivityKind.LOSS: "compute",
    ActivityKind.UPDATE: "compute",
    ActivityKind.RUNTIME: "runtime",
}


def gathered_spans(transport: Transport, program: Program, step: StepTimes, one_clock: bool) -> tuple[TraceSpan, ...]:
    """The spans of a step in all processes, on lanes of their devices, or of their process; every rank has to call it.

    Seconds count from the begin of the step in each process.

    Args:
        one_clock: the host's clock times all devices, so that the time between activities is the runtime's own; on
            CUDA a device may also be waiting then, and nothing is said.
    """
    rows = []
    for span in step.spans:
        activity = span.activity
        if span.stop_ns == span.start_ns or (activity.kind is ActivityKind.RUNTIME and not one_clock):
            continue
        devices = span.devices or (transport.owned if len(transport.owned) == 1 else ())
        tracks = [f"device {device}" for device in devices]
        rows.append((tracks, LANES[activity.kind], *_words(activity, program), span.start_ns / 1e9, span.stop_ns / 1e9))
    texts = transport.gather_texts(json.dumps(rows))
    return tuple(
        TraceSpan(f"{track}, measured", *described)
        for process, text in enumerate(texts)
        for tracks, *described in json.loads(text)
        for track in tracks or [f"process {process}"]
    )


def _words(activity: StepActivity, program: Program) -> tuple[str, str]:
    """The name of an activity, with the layer or the value that moves, and its category."""
    way, name, words = "backward" if activity.backward else "forward", activity.name, activity.kind.value
    if activity.kind is ActivityKind.LAYER:
        return f"{name} · {way}", way
    if activity.kind is ActivityKind.TRANSFER and name:
        return f"{program.slots[name].value} · transfer {way}", words
    return words, "reduction" if activity.kind is ActivityKind.REDUCTION else words


def by_device(predicted: Iterable[TraceSpan], measured: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Both, every device's predicted track in front of its measured one, processes last."""

    def place(span: TraceSpan) -> tuple[bool, int]:
        kind, number, *_ = span.track.replace(",", " ").split()
        return kind != "device", int(number)

    return sorted((*predicted, *measured), key=place)  # stable: predicted spans come first
