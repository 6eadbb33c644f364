"""The trace of the predicted step: Perfetto's rules, lanes without overlaps, and sums that are the report's."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from parplan.errors import ParplanError
from parplan.plan import Scheme, Strategy
from parplan.planner.decision import Decision
from parplan.report.pictures.trace import predicted_trace
from parplan.runtime.measurement.trace_events import TraceSpan, side_by_side, trace_json
from tests.every_case import every_case
from tests.planner.simulation.test_timeline import alexnet as paper_net
from tests.planner.simulation.test_timeline import hybrid
from tests.report.decisions import alexnet
from tests.report.pictures.drawn import HOSTILE, data_parallel, priced, residual

US = 1e-6
ROUNDING = 2e-9  # seconds by which a duration may be off


def lanes(text: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Complete events by the names of their track and lane, after Perfetto's rules for JSON."""
    whole = json.loads(text)
    assert set(whole) >= {"traceEvents", "displayTimeUnit"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[int, str] = {}
    names: dict[tuple[int, int], str] = {}
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in whole["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], (int, float))
        assert event["ph"] in ("M", "X", "s", "f", "C")
        if event["ph"] == "M" and event["name"] == "process_name":
            tracks[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            found[tracks[event["pid"]], names[event["pid"], event["tid"]]].append(event)
    assert len(set(tracks.values())) == len(tracks)
    assert len({(track, name) for (track, _), name in names.items()}) == len(names)
    for own in found.values():
        for one, other in pairwise(own):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    return dict(found)


def devices_of(track: str) -> list[int]:
    """The devices that a predicted track is of: `devices 0-3 (v100-sxm2), predicted; 4 equal devices, written once`."""
    named = re.fullmatch(r"devices? ([\d, -]+) \(v100-sxm2\), predicted(?:; (\d+) equal devices, written once)?", track)
    assert named is not None, track
    ends = [[int(end) for end in run.split("-")] for run in named[1].split(", ")]
    found = [device for run in ends for device in range(run[0], run[-1] + 1)]
    assert len(found) == int(named[2] or 1)
    return found


def events(decision: Decision, *phases: str) -> list[dict[str, Any]]:
    """The trace's events of these phases, in the order of the file."""
    return [one for one in json.loads(predicted_trace(decision))["traceEvents"] if one["ph"] in phases]


def inside(event: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
    """The one complete event that an arrow's end lies in."""
    here = [one for one in spans if (one["pid"], one["tid"]) == (event["pid"], event["tid"])]
    (found,) = (one for one in here if one["ts"] < event["ts"] < one["ts"] + one["dur"])
    return found


@pytest.mark.parametrize("name", ["shards", "passes", "apart"])
def test_an_arrow_goes_from_each_sending_to_the_receiving_of_the_same(name: str) -> None:
    decision = DECISIONS[name]()
    spans, lane_of = events(decision, "X"), {}
    for one in events(decision, "M"):
        if one["name"] == "thread_name":
            lane_of[one["pid"], one["tid"]] = one["args"]["name"].split(" (")[0]
    ends: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in events(decision, "s", "f"):
        assert one["ph"] not in ends[one["id"]]
        assert one.get("bp") == (None if one["ph"] == "s" else "e")
        ends[one["id"]][one["ph"]] = one
    assert ends
    for pair in ends.values():
        assert pair["s"]["ts"] < pair["f"]["ts"]
        sent, received = inside(pair["s"], spans), inside(pair["f"], spans)
        assert lane_of[sent["pid"], sent["tid"]] == "sending"
        assert lane_of[received["pid"], received["tid"]] == "receiving"
        assert (sent["name"], sent["ts"], sent["dur"]) == (received["name"], received["ts"], received["dur"])
    moved = [one for one in spans if lane_of[one["pid"], one["tid"]] in ("sending", "receiving")]
    joined = {
        (one["pid"], one["tid"], one["ts"]) for own in ends.values() for e in own.values() for one in [inside(e, spans)]
    }
    assert joined == {(one["pid"], one["tid"], one["ts"]) for one in moved}


def test_transfers_and_sums_say_bytes_and_their_rate() -> None:
    decision = DECISIONS["apart"]()  # all before `fc` on both devices, which is on device 1 alone
    (fed,) = decision.priced.graph.layers["fc"].inputs if decision.priced else ()
    moved = [
        one
        for one in events(decision, "X")
        if one["args"]["of"] == fed and one["cat"] == "transfer" and "bytes" in one["args"]
    ]
    assert {one["args"]["bytes"] for one in moved} == {4 * 8 * 64 * 4}  # samples of one replica, features, of float32
    for one in moved:
        assert one["args"]["GB/s"] == pytest.approx(one["args"]["bytes"] / one["dur"] * 1e-3, rel=1e-2)
    sums = {one["args"]["of"]: one["args"]["bytes"] for one in events(DECISIONS["data parallel"](), "X")
            if one["cat"] == "reduction" and "bytes" in one["args"]}  # fmt: skip
    assert sums["second"] == 4 * (8 * 8 * 9 + 8)


def test_memory_is_a_counter_whose_highest_value_is_the_predicted_peak() -> None:
    decision = DECISIONS["apart"]()
    tracks = {one["pid"]: one["args"]["name"] for one in events(decision, "M") if one["name"] == "process_name"}
    held: dict[int, list[float]] = defaultdict(list)
    for one in events(decision, "C"):
        assert one["name"] == "memory (MiB)"
        held[devices_of(tracks[one["pid"]])[0]].append(one["args"]["value"])
        assert 0 <= one["ts"] * US <= decision.prediction.step_s
    peaks = [nbytes / 2**20 for nbytes in decision.prediction.memory_bytes]
    assert [max(held[device]) for device in (0, 1)] == pytest.approx(peaks)


def test_a_step_in_passes_says_why_it_has_no_memory_counter() -> None:
    decision = in_passes()
    assert events(decision, "C") == []
    assert "do not run one after another" in json.loads(predicted_trace(decision))["otherData"]["memory"]


def test_equal_devices_are_written_once_with_a_note() -> None:
    decision = DECISIONS["data parallel"]()
    names = [one["args"]["name"] for one in events(decision, "M") if one["name"] == "process_name"]
    assert names == ["devices 0, 1 (v100-sxm2), predicted; 2 equal devices, written once"]
    apart = [one["args"]["name"] for one in events(DECISIONS["apart"](), "M") if one["name"] == "process_name"]
    assert [devices_of(name) for name in apart] == [[0], [1]]


def spent(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by category."""
    total: dict[str, float] = defaultdict(float)
    for event in events:
        total[event["cat"]] += event["dur"] * US
    return dict(total)


def in_passes() -> Decision:
    """cuda-convnet2's hybrid: replicas in front of shards, which run once per replica."""
    return priced(paper_net(512), hybrid(4, Scheme.INTERLEAVE))


DECISIONS: dict[str, Callable[[], Decision]] = {
    "data parallel": lambda: priced(residual(), data_parallel(residual(), 2)),
    "one device": lambda: priced(residual(), data_parallel(residual(), 1)),
    "shards": lambda: priced(
        residual(), data_parallel(residual(), 2).with_layers({"fc": Strategy(1, 2, "out-features", (0, 1))})
    ),
    "passes": in_passes,
    "apart": lambda: priced(residual(), data_parallel(residual(), 2).with_layers({"fc": Strategy(devices=(1,))})),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_every_lane_is_named_and_the_compute_lanes_add_up_to_the_step(name: str) -> None:
    decision = DECISIONS[name]()
    found = lanes(predicted_trace(decision))
    compute = {track: own for (track, lane), own in found.items() if lane == "compute"}
    assert [device for track in compute for device in devices_of(track)] == list(range(decision.plan.devices))
    for own in compute.values():
        total_s = sum(spent(own).values())
        assert total_s == pytest.approx(decision.prediction.step_s, rel=1e-6, abs=ROUNDING * len(own))


@pytest.mark.parametrize("name", DECISIONS)
def test_parts_of_the_step_are_those_of_the_report(name: str) -> None:
    decision = DECISIONS[name]()
    step = decision.prediction
    found = lanes(predicted_trace(decision))
    figures = {"forward": step.forward_s, "backward": step.backward_s, "transfer": step.transfer_s,
               "reduction": step.exposed_reduce_s, "update": step.update_s}  # fmt: skip
    sums = [spent(own) for (_, lane), own in found.items() if lane == "compute"]
    totals = [{kind: own.get(kind, 0.0) + own.get(f"wait for {kind}", 0.0) for kind in figures} for own in sums]
    assert any(total == pytest.approx(figures, rel=1e-5, abs=1e-8) for total in totals)


def test_transfers_that_share_a_link_are_on_lanes_of_their_own() -> None:
    spans = [TraceSpan("device 0", "sending", name, "transfer", start, end) for name, start, end in
             (("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 2.0, 4.0))]  # fmt: skip
    found = lanes(trace_json(spans, {}))
    assert {lane: [event["name"] for event in own] for (_, lane), own in found.items()} == {
        "sending": ["a", "c"],
        "sending (2)": ["b"],
    }


def test_places_are_as_many_as_are_busy_at_once() -> None:
    assert side_by_side([]) == []
    assert side_by_side([(0, 5), (1, 2), (2, 3), (1, 4), (4, 5)]) == [0, 1, 1, 2, 1]


def test_rounding_to_nanoseconds_makes_no_overlap() -> None:
    edges = [index * 1.0000000007e-7 / 3 for index in range(200)]
    spans = [TraceSpan("d", "compute", "x", "forward", *pair) for pair in pairwise(edges)]
    assert list(lanes(trace_json(spans, {}))) == [("d", "compute")]


@every_case("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_json(name: str) -> None:
    spans = [TraceSpan(name, name, name, name, 0.0, 1.0, {"of": name})]
    assert sum(map(len, lanes(trace_json(spans, {"model": name})).values())) == 1


@every_case("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_trace_has_no_character_that_cannot_be_seen(name: str) -> None:
    graph = residual()
    decision = priced(graph, data_parallel(graph, 2))
    found = json.loads(predicted_trace(replace(decision, plan=replace(decision.plan, model=name))))
    assert found["otherData"]["model"].isprintable()


def test_a_step_that_is_not_simulated_has_no_trace() -> None:
    with pytest.raises(ParplanError, match="no graph is known"):
        predicted_trace(alexnet())
    graph = residual()
    many = data_parallel(graph, 1)
    with pytest.raises(ParplanError, match="on 128 devices the step is not simulated"):
        predicted_trace(priced(graph, type(many)(many.model, many.fingerprint, 8, 128, many.layers)))
