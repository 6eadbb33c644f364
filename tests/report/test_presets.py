"""The list of presets: all of them, at the width of a terminal, with sources."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from parplan.cost_models.devices.hardware_table import CPU, CPU_LINK, GPUS, LINKS
from parplan.report.presets import presets_json, render_presets


def printed(width: int) -> str:
    file = io.StringIO()
    render_presets(Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_every_preset_is_listed_with_its_sources(width: int) -> None:
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    first = [line.split()[0] for line in text.splitlines() if line and not line.startswith(" ")]
    for row in (*GPUS, CPU):
        assert first.count(row.kind) == 2, "a line of the table and one of the sources"
    together = " ".join(text.split())
    for link in (*LINKS, CPU_LINK):
        assert link.bandwidth.text in together


def test_estimates_are_marked() -> None:
    table = printed(80).split("Sources")[0].splitlines()
    assert next(line for line in table if line.startswith("v100-pcie ")).split()[3] == "~112"
    assert next(line for line in table if line.startswith("pcie4 ")).split()[1] == "~27"


def test_json_holds_every_number() -> None:
    data = json.loads(presets_json())
    assert data["schema"] == "parplan.presets/1"
    devices = {device["name"]: device["numbers"] for device in data["devices"]}
    assert set(devices) == {row.kind for row in (*GPUS, CPU)}
    for row in (*GPUS, CPU):
        expected = {number.name: number.value for number in row.numbers()}
        assert {name: number["value"] for name, number in devices[row.kind].items()} == expected
    every = [number for part in ("devices", "links") for row in data[part] for number in row["numbers"].values()]
    assert all(set(number) == {"value", "unit", "source", "estimated"} for number in every)
    assert {number["estimated"] for number in every} == {True, False}
