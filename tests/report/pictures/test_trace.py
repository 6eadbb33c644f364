"""The trace of the predicted step: Perfetto's rules, lanes without overlaps, and sums that are the report's."""

from __future__ import annotations

import json
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
        assert event["ph"] in ("M", "X")
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
    assert len(compute) == decision.plan.devices
    for device, (track, own) in enumerate(compute.items()):
        assert track == f"device {device} (v100-sxm2), predicted"
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


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_json(name: str) -> None:
    spans = [TraceSpan(name, name, name, name, 0.0, 1.0, {"of": name})]
    assert sum(map(len, lanes(trace_json(spans, {"model": name})).values())) == 1


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
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
