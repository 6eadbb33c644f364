"""The page of a measured step: predicted above measured on every device, all parts in a table, no name that acts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.report.pictures.lanes import LaneBlocks, span_lanes
from parplan.report.pictures.page import measured_html
from parplan.runtime.measurement.measured_spans import by_device
from parplan.runtime.measurement.measured_step import Figure, MeasuredPart, MeasuredStep, StepPart
from parplan.runtime.measurement.predicted import BothTimes, Expected, ExpectedLayer
from parplan.runtime.measurement.trace_events import TraceSpan
from tests.report.pictures.drawn import HOSTILE, Page
from tests.report.pictures.test_page import harmless, well_formed


def measured(name: str = "fc1", devices: int = 2) -> MeasuredStep:
    """A layer, a transfer and an update on each device; the layer took twice as long as predicted."""
    parts = (
        MeasuredPart(StepPart.LAYER, Figure(2e-3), Figure(4e-3), name),
        MeasuredPart(StepPart.TRANSFER, Figure(1e-3), Figure(0.0), name, f"{name} -> fc2"),
        MeasuredPart(StepPart.UPDATE, Figure(1e-3)),
        MeasuredPart(StepPart.STEP, Figure(9e-3)),
    )
    predicted, found = list[TraceSpan](), list[TraceSpan]()
    for device in range(devices):
        before, after = f"device {device} (h100), predicted", f"device {device}, measured"
        predicted += [
            TraceSpan(before, "compute", f"{name} · forward", "forward", 0.0, 1e-3, {"of": name}),
            TraceSpan(before, "compute", name, "wait for transfer", 1e-3, 2e-3, {"of": name}),
            TraceSpan(before, "compute", f"{name} · backward", "backward", 2e-3, 4e-3, {"of": name, "micro_batch": 1}),
        ]
        found += [
            TraceSpan(after, "compute", f"{name} · forward", "forward", 0.0, 2e-3),
            TraceSpan(after, "compute", f"{name} · backward", "backward", 3e-3, 7e-3),
            TraceSpan(after, "transfers", f"{name} · transfer forward", "transfer", 2e-3, 3e-3),
            TraceSpan(after, "runtime", "runtime", "runtime", 7e-3, 8e-3),
            TraceSpan(after, "compute", "update", "update", 8e-3, 9e-3),
        ]
    layers = {name: ExpectedLayer(BothTimes(1e-3, 2e-3), "measured")}
    expected = Expected(layers, step_s=4e-3, spans=tuple(predicted))
    spans = tuple(found)
    return MeasuredStep("Net", 8, devices, devices, False, 3, True, 9e-3, parts, expected=expected, spans=spans)


def test_it_is_well_formed_and_loads_nothing() -> None:
    page = Page(measured_html(measured()))
    well_formed(page)
    harmless(page)


def test_it_has_all_lines_of_the_table_and_both_steps() -> None:
    shown = Page(measured_html(measured())).shown.replace("\N{NO-BREAK SPACE}", " ")
    for text in (
        "Predicted step",
        "4.00 ms",
        "Measured step",
        "9.00 ms",
        "2.25 of the prediction",
        "Farthest from what",
    ):
        assert text in shown
    for line in measured().lines:
        assert line.label in shown
    places = [shown.index(f"device {device}, {which}") for device in (0, 1) for which in ("predicted", "measured")]
    assert places == sorted(places)


def test_lanes_are_those_of_the_spans() -> None:
    step = measured(devices=1)
    assert step.expected is not None
    before, after = span_lanes(by_device(step.expected.spans, step.spans))
    assert (before.label, after.label) == ("device 0, predicted", "device 0, measured")
    assert [lane.words for lane in after.lanes] == ["compute", "transfers", "runtime"]
    (compute,) = before.lanes
    assert isinstance(compute, LaneBlocks)
    assert [(one.what, one.kind.value, one.waiting, one.number) for one in compute.blocks] == [
        ("fc1", "forward", False, None),
        ("fc1", "transfer", True, None),
        ("fc1", "backward", False, 0),
    ]
    assert [one.what for one in after.lanes[0].blocks] == ["fc1", "fc1", "update"]


def test_nothing_that_was_predicted_or_recorded() -> None:
    page = Page(measured_html(replace(measured(), expected=None, spans=())))
    well_formed(page)
    harmless(page)
    assert "The step is not drawn: no activities were recorded." in page.shown


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_act_are_text(name: str) -> None:
    page = Page(measured_html(replace(measured(name), model=name)))
    well_formed(page)
    harmless(page)
