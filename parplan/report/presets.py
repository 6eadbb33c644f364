"""The presets as a list for people and for programs: every number, its unit, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from parplan.cost_models.devices.hardware_table import ALIASES, CPU, CPU_LINK, GPUS, LINKS, Number
from parplan.cost_models.devices.presets import USABLE_MEMORY
from parplan.report.page import Column, Page, TableRow

__all__ = ["SCHEMA", "presets_json", "render_presets"]

SCHEMA = "parplan.presets/1"
DEVICES, ALL_LINKS = (*GPUS, CPU), (*LINKS, CPU_LINK)
_RATES = ("fp32", "tf32", "fp16", "bf16")  # fp64 is half of fp32 where there is none


def render_presets(console: Console) -> None:
    """Print the devices, the links, and the sources of their numbers."""
    page = Page(console)
    page.section("Devices", "peak TFLOP/s by precision, memory in GiB, memory bandwidth in GB/s")
    devices = []
    for gpu in DEVICES:
        figures = [_figure(gpu.numbers(), name) for name in (*_RATES, "memory", "bandwidth")]
        network = gpu.network if gpu.nics == 1 else f"{_figure(gpu.numbers(), 'adapters')} {gpu.network}"
        devices.append(TableRow(gpu.kind, [*figures, gpu.link, network]))
    columns = [*map(Column, (*_RATES, "GiB", "GB/s")), Column("link", True), Column("network", True)]
    page.table(columns, devices, indent=0)
    page.blank()
    page.paragraph(
        f"~ is estimated. A plan may use {USABLE_MEMORY:.0%} of the memory (assumed: the driver and the allocator take "
        "the rest). Network: what joins hosts, and how many adapters a host has. Short names: "
        f"{', '.join(f'{name} ({kind})' for name, kind in ALIASES.items())}."
    )
    page.section("Links", "GB/s that one device gets in one direction, latency per message in µs")
    shown = ("bandwidth", "latency", "pair", "island", "contention", "across", "overlap", "slowdown")
    links = [
        TableRow(link.name, [*(_figure(link.numbers(), name) for name in shown), "network" if link.network else ""])
        for link in ALL_LINKS
    ]
    headings = ("GB/s", "latency", "pair", "island", "shared", "across", "overlap", "slow")
    page.table([*map(Column, headings), Column("", words=True)], links, indent=0)
    page.blank()
    page.paragraph(
        "Pair: what one pair gets of the bandwidth, where each has wires of its own. Island: so many devices are "
        "joined directly; shared: what is left of the bandwidth when all of them talk at once to others outside; "
        "across: GB/s there, where they differ. Overlap: the most of a gradient reduction that runs beside the "
        "backward pass, where that is less than all of it. Slow: the share of a reduction's time by which it holds up "
        "the backward pass beside it; where none is given, none is published. A link marked network joins hosts."
    )
    page.section("Sources")
    numbers = {**{row.kind: row.numbers() for row in DEVICES}, **{row.name: row.numbers() for row in ALL_LINKS}}
    for name, known in numbers.items():
        page.line(name)
        by_source: dict[str, list[str]] = {}
        for number in known:
            by_source.setdefault(number.origin.text, []).append(number.name)
        for text, names in by_source.items():
            page.paragraph(f"{', '.join(names)}: {text}", 2, "dim")


def presets_json() -> str:
    """Every number of every preset with its unit, source and whether it is estimated, as JSON text."""
    data = {
        "schema": SCHEMA,
        "usable_memory": USABLE_MEMORY,
        "aliases": dict(ALIASES),
        "devices": [
            {"name": row.kind, "link": row.link, "network": row.network, "numbers": _numbers(row.numbers())}
            for row in DEVICES
        ],
        "links": [{"name": row.name, "network": row.network, "numbers": _numbers(row.numbers())} for row in ALL_LINKS],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _numbers(numbers: Iterable[Number]) -> dict[str, Any]:
    return {
        number.name: {
            "value": number.value,
            "unit": number.unit,
            "source": number.origin.text,
            "estimated": number.origin.estimated,
        }
        for number in numbers
    }


def _figure(numbers: Iterable[Number], name: str) -> str:
    """A number as the table shows it: `19.5`, `~112` where it is estimated, `-` where there is none."""
    number = next((number for number in numbers if number.name == name), None)
    return "-" if number is None else f"{'~' if number.origin.estimated else ''}{number.value:g}"
