"""Trace events (the JSON that Perfetto and chrome://tracing read) from plain spans of time on named lanes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["TraceCounter", "TraceSpan", "side_by_side", "trace_json"]


@dataclass(frozen=True)
class TraceSpan:
    """One activity from `start_s` to `end_s` on a lane of a track.

    Args:
        track: a group of lanes, which Perfetto calls a process: a device.
        lane: what does one thing at a time, Perfetto's thread; spans that overlap get further lanes of the name.
        category: the kind of activity.
        details: more about it, shown when it is selected.
        sends, receives: numbers of the arrows that begin and end here.
    """

    track: str
    lane: str
    name: str
    category: str
    start_s: float
    end_s: float
    details: Mapping[str, object] = field(default_factory=dict)
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()


@dataclass(frozen=True)
class TraceCounter:
    """Values of one quantity of a track over time; each holds until the next."""

    track: str
    name: str
    values: Sequence[tuple[float, float]]


def side_by_side(times: Iterable[tuple[float, float]]) -> list[int]:
    """A place for each (start, end), in their order, so that at one place none overlap; as few places as suffice.

    >>> side_by_side([(0, 2), (1, 3), (2, 4)])
    [0, 1, 0]
    """
    listed = list(times)
    ends: list[float] = []
    places = [0] * len(listed)
    for index in sorted(range(len(listed)), key=lambda one: listed[one]):
        start, end = listed[index]
        place = next((number for number, until in enumerate(ends) if until <= start), len(ends))
        ends[place : place + 1] = [end]
        places[index] = place
    return places


def trace_json(spans: Iterable[TraceSpan], about: Mapping[str, object], counters: Iterable[TraceCounter] = ()) -> str:
    """The JSON text: complete events in microseconds to a nanosecond, tracks and lanes named in order of appearance.

    Args:
        about: facts about all of it.
        counters: of tracks that have spans.
    """
    lanes: dict[tuple[str, str], list[TraceSpan]] = {}
    for span in spans:
        lanes.setdefault((span.track, span.lane), []).append(span)
    processes = {track: number for number, track in enumerate(dict.fromkeys(track for track, _ in lanes))}
    events: list[dict[str, object]] = []
    for track, pid in processes.items():
        events.append(_named("process_name", pid, 0, {"name": track}))
        events.append(_named("process_sort_index", pid, 0, {"sort_index": pid}))
        tid = 0
        for (own, lane), found in lanes.items():
            if own != track:
                continue
            times = [(round(span.start_s * 1e6, 3), round(span.end_s * 1e6, 3)) for span in found]
            places = side_by_side(times)
            for place in sorted(set(places)):
                events.append(
                    _named("thread_name", pid, tid + place, {"name": f"{lane} ({place + 1})" if place else lane})
                )
                events.append(_named("thread_sort_index", pid, tid + place, {"sort_index": tid + place}))
            for span, place, (start, end) in sorted(zip(found, places, times, strict=True), key=lambda one: one[2]):
                events.append(
                    {
                        "ph": "X", "name": span.name, "cat": span.category, "pid": pid, "tid": tid + place, "ts": start,
                        "dur": round(end - start, 3), "args": dict(span.details),
                    }
                )  # fmt: skip
                events += _arrows(span, pid, tid + place, start, end)
            tid += max(places) + 1
    for counter in counters:
        sample: dict[str, object] = {"ph": "C", "name": counter.name, "pid": processes[counter.track], "tid": 0}
        events += [{**sample, "ts": round(at_s * 1e6, 3), "args": {"value": value}} for at_s, value in counter.values]
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
    return json.dumps(whole, allow_nan=False, separators=(",", ":")) + "\n"


def _arrows(span: TraceSpan, pid: int, tid: int, start: float, end: float) -> Iterator[dict[str, object]]:
    """Begins and ends of arrows inside of a span: on its edges they could be taken for its neighbours'."""
    for phase, numbers, part in (("s", span.sends, 0.25), ("f", span.receives, 0.75)):
        at = round(start + part * (end - start), 4)
        own = {"ph": phase, "name": "transfer", "cat": "flow", "pid": pid, "tid": tid, "ts": at}
        yield from ({**own, "id": number, **({"bp": "e"} if phase == "f" else {})} for number in numbers)


def _named(what: str, pid: int, tid: int, args: Mapping[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
