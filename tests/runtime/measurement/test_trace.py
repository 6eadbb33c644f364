"""The trace of a measured step: beside its prediction on every device, one thing at a time, and all of the step."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import parplan
from parplan.runtime.measurement.measured_spans import by_device
from parplan.runtime.measurement.measured_step import MeasuredStep
from parplan.runtime.measurement.trace_events import TraceSpan
from tests.report.pictures.test_trace import US, lanes, spent


@pytest.fixture(scope="module")
def measured() -> MeasuredStep:
    """A perceptron on two logical devices of this process: a replica on each, and a sharded layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    compiled = parplan.compile(
        net, torch.randn(8, 16), devices=["cpu", "cpu"], pins={"0": "replicas:2", "1": "replicas:2", "2": "shards:2"}
    )
    optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
    return compiled.measure(steps=3, warmup=1, optimizer=optimizer)


def test_predicted_and_measured_stand_below_each_other(measured: MeasuredStep, tmp_path: Path) -> None:
    measured.write_trace(tmp_path / "step.json")
    text = (tmp_path / "step.json").read_text(encoding="utf-8")
    assert list(dict.fromkeys(track for track, _ in lanes(text))) == [
        "device 0 (cpu), predicted",
        "device 0, measured",
        "device 1 (cpu), predicted",
        "device 1, measured",
        "process 0, measured",
    ]
    facts = json.loads(text)["otherData"]
    assert facts["measured_step_s"] == measured.step.seconds
    assert measured.expected is not None
    assert facts["predicted_step_s"] == measured.expected.step_s


def test_measured_spans_follow_each_other_and_are_the_whole_step(measured: MeasuredStep) -> None:
    moments = sorted({(span.start_s, span.end_s) for span in measured.spans})  # some on the tracks of two devices
    assert moments[0][0] == 0
    for one, other in pairwise(moments):
        assert one[1] == other[0]
    assert moments[-1][1] == pytest.approx(measured.step.seconds, rel=1e-9)  # the median of three is one of them


def test_every_layer_is_on_its_devices_forward_and_backward(measured: MeasuredStep) -> None:
    names = {
        track: [e["name"] for e in own] for (track, lane), own in lanes(measured.trace()).items() if lane == "compute"
    }
    for device in (0, 1):
        for layer in ("0", "1", "2"):
            for way in ("forward", "backward"):
                assert f"{layer} · {way}" in names[f"device {device}, measured"]
    assert {"loss", "update"} <= set(names["process 0, measured"])


def test_predicted_lanes_add_up_to_the_prediction(measured: MeasuredStep) -> None:
    assert measured.expected is not None
    for (track, lane), own in lanes(measured.trace()).items():
        if track.endswith("predicted") and lane == "compute":
            assert sum(spent(own).values()) == pytest.approx(measured.expected.step_s, abs=1e-9 * len(own))


def test_a_transfer_is_on_the_lane_of_every_device_that_takes_part(measured: MeasuredStep) -> None:
    assert measured.transfers
    found = lanes(measured.trace())
    moved = [sum(event["dur"] for event in found[f"device {device}, measured", "transfers"]) for device in (0, 1)]
    moments = {(span.start_s, span.end_s) for span in measured.spans if span.lane == "transfers"}
    whole_s = sum(end_s - start_s for start_s, end_s in moments)
    assert all(0 < own * US <= whole_s + 1e-6 for own in moved)


def test_tracks_are_in_the_order_of_devices() -> None:
    spans = [TraceSpan("device 10, measured", "compute", "a · forward", "forward", 0.0, 1.0),
             TraceSpan("process 1, measured", "runtime", "runtime", "runtime", 0.0, 1.0),
             TraceSpan("device 9, measured", "compute", "a · backward", "backward", 1.0, 2.0)]  # fmt: skip
    predicted = [TraceSpan(f"device {d} (cpu), predicted", "compute", "a", "forward", 0.0, 1.0) for d in (9, 10)]
    tracks = [span.track for span in by_device(predicted, spans)]
    assert tracks == ["device 9 (cpu), predicted", "device 9, measured", "device 10 (cpu), predicted",
                      "device 10, measured", "process 1, measured"]  # fmt: skip
