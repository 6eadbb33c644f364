"""The predicted step as trace spans, and as the text of a trace file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

from parplan.cluster import Cluster
from parplan.cost_models.roofline import part_of
from parplan.errors import ParplanError
from parplan.graph.layer_graph import LayerGraph, TensorSpec
from parplan.graph.local import local_shape
from parplan.plan import Strategy
from parplan.planner.decision import Decision
from parplan.planner.simulation.step_tasks import Kind, Lane, Part, Resource
from parplan.planner.simulation.timeline import Timeline
from parplan.report import units
from parplan.report.pictures.lanes import LANE_WORDS, Block, DeviceLanes, device_lanes, predicted_timeline
from parplan.report.pictures.memory import MemoryOverStep, memory_over_step
from parplan.report.pictures.text import visible
from parplan.report.pictures.timeline import block_words
from parplan.runtime.measurement.trace_events import TraceCounter, TraceSpan, trace_json

__all__ = ["predicted_spans", "predicted_trace"]

MOST_ARROWS = 256
"""Arrows of one transfer: between 64 devices that all differ there would be thousands."""


def predicted_trace(decision: Decision) -> str:
    """The text of a trace of the predicted step.

    Raises:
        ParplanError: the step is not simulated.
    """
    timeline, priced = predicted_timeline(decision), decision.priced
    if timeline is None or priced is None:
        why = f"on {decision.plan.devices} devices the step is not simulated" if priced else "no graph is known"
        raise ParplanError(f"there is no trace to write: {why}")
    memory, cluster = memory_over_step(decision, timeline), decision.cluster
    groups = _equal_devices(timeline, cluster, memory)
    about = {
        "model": visible(decision.plan.model),
        "cluster": visible(cluster.describe()),
        "predicted_step_s": decision.prediction.step_s,
        "simulated_step_s": timeline.step_s,
        "lanes": "a device's compute lane with its waits adds up to the simulated step",
        "tracks": "devices on which the same happens at the same times are one track, named by all of them",
        "bytes": "of a transfer those of this lane; of a gradient sum the gradients of one device",
        "arrows": f"from who sends to who receives, {MOST_ARROWS} of a transfer at most",
    }
    counters = []
    if memory is None or memory.starts_s is None:
        about["memory"] = "no counter: layers do not run one after another, so that its phases have no moments"
    else:
        for one in groups:
            (curve,) = (curve for curve in memory.curves if one.devices[0] in curve.devices)
            counters.append(TraceCounter(_track(one, cluster), "memory (MiB)", _held(memory.starts_s, curve.nbytes)))
    spans = predicted_spans(timeline, groups, cluster, priced.graph, decision.plan.layers)
    return trace_json(spans, about, counters)


def _held(starts_s: Sequence[float], nbytes: Sequence[int]) -> list[tuple[float, float]]:
    """MiB by moment; of phases without a duration the most, and what is held after them a nanosecond later."""
    phases: dict[float, list[int]] = {}
    for start_s, held in zip(starts_s, nbytes, strict=True):
        phases.setdefault(start_s, []).append(held)
    found = []
    for at_s, own in phases.items():
        found += [(at_s, max(own) / units.MIB), (at_s + 1e-9, own[-1] / units.MIB)][: 1 + (own[-1] < max(own))]
    return found


def _equal_devices(timeline: Timeline, cluster: Cluster, memory: MemoryOverStep | None) -> tuple[DeviceLanes, ...]:
    """The lanes of devices, those of a kind that do the same and hold the same at all times once."""
    alike: dict[tuple[object, ...], DeviceLanes] = {}
    for one in device_lanes(timeline):
        (device,) = one.devices
        curve = next((n for n, curve in enumerate(memory.curves) if device in curve.devices), None) if memory else None
        key = one.lanes, cluster.devices[device].kind, curve
        alike[key] = replace(alike[key], devices=(*alike[key].devices, device)) if key in alike else one
    return tuple(alike.values())


def _track(one: DeviceLanes, cluster: Cluster) -> str:
    kind = visible(cluster.devices[one.devices[0]].kind)
    alike = f"; {len(one.devices)} equal devices, written once" if len(one.devices) > 1 else ""
    return f"{units.devices(one.devices)} ({kind}), predicted{alike}"


def predicted_spans(
    timeline: Timeline,
    groups: Sequence[DeviceLanes],
    cluster: Cluster,
    graph: LayerGraph,
    strategies: Mapping[str, Strategy],
) -> Iterator[TraceSpan]:
    """The simulated step, device by device and lane by lane.

    Args:
        groups: the lanes of the timeline's devices; of equal ones those of the first.
        strategies: of the layers.
    """
    arrows, sums = _arrows(timeline, groups), _sums(timeline, graph, strategies)
    for one in groups:
        for lane in one.lanes:
            for block in lane.blocks:
                category = f"wait for {block.kind.value}" if block.waiting else block.kind.value
                details: dict[str, object] = {"of": visible(block.what)}
                details |= {} if block.number is None else {"micro_batch": block.number + 1}
                if block.part is not None:
                    own = timeline.lane(lane.lane, one.devices[0])
                    details |= _carried(timeline.parts[block.part], block, own, sums)
                joined = arrows.get((block.part, one.devices[0], lane.lane), ())
                ends = {"sends" if lane.lane is Lane.OUT else "receives": joined}
                yield TraceSpan(_track(one, cluster), LANE_WORDS[lane.lane], block_words(block), category,
                                block.start_s, block.end_s, details, **ends)  # fmt: skip


@dataclass
class _Sum:
    """Sum of a layer's gradients on one device: their bytes, and its seconds in all and on its own lane."""

    nbytes: int
    total_s: float = 0.0
    beside_s: float = 0.0


def _sums(timeline: Timeline, graph: LayerGraph, strategies: Mapping[str, Strategy]) -> Mapping[tuple[str, int], _Sum]:
    """The sums of all layers by layer and device."""

    @cache
    def nbytes(name: str) -> int:
        local = part_of(graph, graph.layers[name], strategies[name])
        trained = [one for one in graph.layers[name].parameters if graph.values[one].requires_grad]
        return sum(TensorSpec(local_shape(graph, local, one), graph.values[one].dtype).nbytes for one in trained)

    found: dict[tuple[str, int], _Sum] = {}
    for part in (part for part in timeline.parts if part.kind is Kind.REDUCTION):
        for device in part.devices:
            own = found.setdefault((part.what, device), _Sum(nbytes(part.what)))
            own.total_s += part.seconds
            own.beside_s += part.seconds if timeline.lane(Lane.SUMS, device) in part.exclusive else 0.0
    return found


def _carried(part: Part, block: Block, lane: Resource, sums: Mapping[tuple[str, int], _Sum]) -> dict[str, object]:
    """Bytes on a lane and their rate: a transfer's, or a layer's gradients, whose sum takes time of the compute too."""
    nbytes, bytes_per_s = 0.0, 0.0
    if lane.lane in (Lane.OUT, Lane.IN):
        nbytes = part.nbytes * float(part.capacity[lane])
        bytes_per_s = nbytes / block.seconds
    elif lane.lane is Lane.SUMS and part.kind is Kind.REDUCTION:
        own = sums[part.what, lane.device]
        nbytes, bytes_per_s = own.nbytes * part.seconds / own.beside_s, own.nbytes / own.total_s
    return {"bytes": round(nbytes), "GB/s": float(f"{bytes_per_s / 1e9:.4g}")} if nbytes else {}


def _arrows(timeline: Timeline, groups: Sequence[DeviceLanes]) -> dict[tuple[int | None, int, Lane], tuple[int, ...]]:
    """Numbers of the arrows that begin on the sending, and end on the receiving lane of a part's devices."""
    first = {device: one.devices[0] for one in groups for device in one.devices}
    drawn = {(block.part, one.devices[0], lane.lane) for one in groups for lane in one.lanes for block in lane.blocks}
    found: dict[tuple[int | None, int, Lane], tuple[int, ...]] = {}
    count = 0
    for index, part in enumerate(timeline.parts):
        ends = dict.fromkeys((first[sender], first[receiver]) for sender, receiver in part.routes)
        both = (((index, sender, Lane.OUT), (index, receiver, Lane.IN)) for sender, receiver in ends)
        for own in islice((pair for pair in both if drawn.issuperset(pair)), MOST_ARROWS):
            count += 1
            for end in own:
                found[end] = (*found.get(end, ()), count)
    return found
