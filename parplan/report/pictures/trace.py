"""The predicted step as trace spans, and as the text of a trace file."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.cluster import Cluster
from parplan.errors import ParplanError
from parplan.planner.decision import Decision
from parplan.planner.simulation.timeline import Timeline
from parplan.report.pictures.lanes import LANE_WORDS, device_lanes, predicted_timeline
from parplan.report.pictures.text import visible
from parplan.report.pictures.timeline import block_words
from parplan.runtime.measurement.trace_events import TraceSpan, trace_json

__all__ = ["predicted_spans", "predicted_trace"]


def predicted_trace(decision: Decision) -> str:
    """The text of a trace of the predicted step.

    Raises:
        ParplanError: the step is not simulated.
    """
    timeline = predicted_timeline(decision)
    if timeline is None:
        why = (
            f"on {decision.plan.devices} devices the step is not simulated" if decision.priced else "no graph is known"
        )
        raise ParplanError(f"there is no trace to write: {why}")
    about = {
        "model": visible(decision.plan.model),
        "cluster": visible(decision.cluster.describe()),
        "predicted_step_s": decision.prediction.step_s,
        "simulated_step_s": timeline.step_s,
        "lanes": "a device's compute lane with its waits adds up to the simulated step",
    }
    return trace_json(predicted_spans(timeline, decision.cluster), about)


def predicted_spans(timeline: Timeline, cluster: Cluster) -> Iterator[TraceSpan]:
    """The simulated step, device by device and lane by lane."""
    for one, device in zip(device_lanes(timeline), cluster.devices, strict=True):
        track = f"device {one.devices[0]} ({visible(device.kind)}), predicted"
        for lane in one.lanes:
            for block in lane.blocks:
                category = f"wait for {block.kind.value}" if block.waiting else block.kind.value
                details = {"of": visible(block.what)} | ({} if block.number is None else {"pass": block.number + 1})
                name = block_words(block)
                yield TraceSpan(track, LANE_WORDS[lane.lane], name, category, block.start_s, block.end_s, details)
