"""A step as lanes: compute, sending, receiving and gradient sums of every device, over time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parplan.planner.decision import Decision
from parplan.planner.search.context import SIMULATED
from parplan.planner.simulation.timeline import Kind, Lane, Resource, Timeline, simulate
from parplan.report import units
from parplan.runtime.measurement.trace_events import TraceSpan, side_by_side

__all__ = [
    "LANE_WORDS", "Block", "DeviceLanes", "LaneBlocks", "device_lanes", "drawn_lanes", "predicted_timeline",
    "span_lanes",
]  # fmt: skip

LANE_WORDS: Mapping[Lane, str] = {
    Lane.COMPUTE: "compute",
    Lane.OUT: "sending",
    Lane.IN: "receiving",
    Lane.SUMS: "gradient sums",
}


@dataclass(frozen=True)
class Block:
    """One activity on a lane: of a layer or value, in a pass (None: it happens once), from start to end.

    Args:
        waiting: the lane is empty, and `what` elsewhere is waited for.
        count: how many activities it stands for, in a picture that cannot show all.
        part: the index of the task that it is one lane of; devices that do equal tasks are equal all the same.
    """

    kind: Kind
    what: str
    number: int | None
    start_s: float
    end_s: float
    waiting: bool = False
    count: int = 1
    part: int | None = field(default=None, compare=False)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class LaneBlocks:
    """Blocks of one lane by start, none of which overlap.

    Args:
        place: counts the lanes of those who share one.
        words: names the lane, if it has a name of its own.
    """

    lane: Lane
    place: int
    blocks: tuple[Block, ...]
    words: str = ""


@dataclass(frozen=True)
class DeviceLanes:
    """The lanes of a device, or of several on which everything happens at the same times; `label`: instead of them."""

    devices: tuple[int, ...]
    lanes: tuple[LaneBlocks, ...]
    label: str = ""

    @property
    def words(self) -> str:
        """The name of its rows in a picture."""
        return self.label or units.devices(self.devices)


def predicted_timeline(decision: Decision) -> Timeline | None:
    """The simulated step of the plan; None where there are too many devices, or no graph."""
    priced, plan = decision.priced, decision.plan
    if priced is None or plan.devices > SIMULATED:
        return None
    return simulate(priced.graph, decision.cluster, priced.costs, plan)


def device_lanes(timeline: Timeline) -> tuple[DeviceLanes, ...]:
    """The lanes of every device; what it waits for is on its compute lane."""
    found: dict[Resource, list[Block]] = {}
    for index, (part, span) in enumerate(zip(timeline.parts, timeline.spans, strict=True)):
        if part.kind is not None and span.end_s > span.start_s:
            block = Block(part.kind, part.what, part.number, span.start_s, span.end_s, part=index)
            for resource in (*part.exclusive, *part.capacity):
                if part.kind is not Kind.UPDATE or resource.lane is Lane.COMPUTE:  # it keeps the sums' lane free only
                    found.setdefault(resource, []).append(block)
    for device in dict.fromkeys(timeline.equal.computing):
        waits = (Block(w.kind, w.what, w.number, w.start_s, w.end_s, waiting=True) for w in timeline.waits(device))
        found.setdefault(Resource(Lane.COMPUTE, device), []).extend(waits)
    lanes = {resource: _side_by_side(resource.lane, blocks) for resource, blocks in found.items()}
    return tuple(
        DeviceLanes((device,), tuple(one for lane in Lane for one in lanes.get(timeline.lane(lane, device), ())))
        for device in range(timeline.device_count)
    )


def _side_by_side(lane: Lane, blocks: Iterable[Block]) -> list[LaneBlocks]:
    """Blocks that share a lane, on as many lanes as are busy at once."""
    found: dict[int, list[Block]] = {}
    listed = sorted(blocks, key=lambda one: (one.start_s, one.end_s))
    for block, place in zip(listed, side_by_side((one.start_s, one.end_s) for one in listed), strict=True):
        found.setdefault(place, []).append(block)
    return [LaneBlocks(lane, place, tuple(own)) for place, own in sorted(found.items())]


def span_lanes(spans: Iterable[TraceSpan]) -> tuple[DeviceLanes, ...]:
    """The lanes of every track of a trace, in their order: of predicted (trace.py) and measured ones alike."""
    tracks: dict[str, dict[str, list[Block]]] = {}
    for span in spans:
        kind = span.category.removeprefix("wait for ")
        name = str(span.details.get("of", span.name.partition(" · ")[0]))
        number = span.details.get("micro_batch")
        part = int(number) - 1 if isinstance(number, int) else None
        block = Block(_KINDS.get(kind, Kind.OVERHEAD), name, part, span.start_s, span.end_s, span.category != kind)
        tracks.setdefault(span.track, {}).setdefault(span.lane, []).append(block)
    found = []
    for track, lanes in tracks.items():
        known = ((words, lane, lanes[words]) for words, lane in _LANES.items() if words in lanes)
        rows = [replace(row, words=words) for words, lane, own in known for row in _side_by_side(lane, own)]
        found.append(DeviceLanes((), tuple(rows), _KIND.sub("", track).partition(";")[0]))
    return tuple(found)


_KIND = re.compile(r" \(.*\)(?=, predicted)")
"""The kind of a device in the name of its track: pictures have no room for it."""

_KINDS = {kind.value: kind for kind in Kind}

_LANES = {
    LANE_WORDS[Lane.COMPUTE]: Lane.COMPUTE,
    LANE_WORDS[Lane.OUT]: Lane.OUT,
    LANE_WORDS[Lane.IN]: Lane.IN,
    "transfers": Lane.IN,
    LANE_WORDS[Lane.SUMS]: Lane.SUMS,
    "runtime": Lane.SUMS,
}
"""Lanes of predicted and measured tracks by their names, from the top of a picture down."""


def drawn_lanes(found: Sequence[DeviceLanes], limit: int) -> tuple[DeviceLanes, ...]:
    """The lanes with equal devices as one, and short neighbours of a kind as one until `limit` blocks are left."""
    alike: dict[tuple[str, tuple[LaneBlocks, ...]], DeviceLanes] = {}
    for one in found:
        known = alike.get((one.label, one.lanes))
        alike[one.label, one.lanes] = replace(known, devices=(*known.devices, *one.devices)) if known else one
    drawn = tuple(alike.values())
    end_s = max((block.end_s for one in found for lane in one.lanes for block in lane.blocks), default=0.0)
    shortest_s = end_s / 2**16
    while sum(len(lane.blocks) for one in drawn for lane in one.lanes) > limit and shortest_s < end_s:
        drawn = tuple(
            replace(one, lanes=tuple(replace(lane, blocks=_merged(lane.blocks, shortest_s)) for lane in one.lanes))
            for one in drawn
        )
        shortest_s *= 2
    return drawn


def _merged(blocks: Sequence[Block], shortest_s: float) -> tuple[Block, ...]:
    """Neighbours of a kind, shorter than this together with the gaps between them, as one block."""
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        alike = last is not None and (last.kind, last.waiting) == (block.kind, block.waiting)
        if last is not None and alike and block.end_s - last.start_s < shortest_s:
            what = last.what if last.what == block.what else ""
            found[-1] = replace(
                last, what=what, number=None, end_s=block.end_s, count=last.count + block.count, part=None
            )
        else:
            found.append(block)
    return tuple(found)
