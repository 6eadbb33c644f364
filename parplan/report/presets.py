"""The presets as a list for people and for programs: every number, its unit, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console

from parplan.cost_models.devices.hardware_table import ALIASES, CPU, CPU_LINK, GPUS, LINKS, GpuRow, LinkRow, Number
from parplan.cost_models.devices.presets import USABLE_MEMORY
from parplan.report.page import Column, Page

__all__ = ["SCHEMA", "presets_json", "render_presets"]

SCHEMA = "parplan.presets/1"
DEVICES, ALL_LINKS = (*GPUS, CPU), (*LINKS, CPU_LINK)
_RATES = ("fp32", "tf32", "fp16", "bf16")  # fp64 is half of fp32 where there is none


def render_presets(console: Console) -> None:
    """Print the devices, the links, and the sources of their numbers."""
    page = Page(console)
    page.section("Devices", "peak TFLOP/s by precision, memory in GiB, memory bandwidth in GB/s")
    _print_table(page, [row.kind for row in DEVICES], _device_columns())
    page.blank()
    page.paragraph(
        f"~ is estimated. A plan may use {USABLE_MEMORY:.0%} of the memory (assumed: the driver and the allocator take "
        "the rest). Network: what joins hosts, and how many adapters a host has. Short names: "
        f"{', '.join(f'{name} ({kind})' for name, kind in ALIASES.items())}."
    )
    page.section("Links", "GB/s that one pair gets in one direction, latency per message in µs")
    _print_table(page, [row.name for row in ALL_LINKS], _link_columns())
    page.blank()
    page.paragraph(
        "Shared: what is left of the bandwidth when all devices talk at once out of their islands of so many devices. "
        "Overlap: the most of a gradient reduction that runs beside the backward pass, where that is less than all of "
        "it. A link marked network joins hosts."
    )
    page.section("Sources")
    for name, numbers in _rows():
        page.line(name)
        for text, names in _by_source(numbers):
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


def _rows() -> Iterator[tuple[str, list[Number]]]:
    for device in DEVICES:
        yield device.kind, list(device.numbers())
    for link in ALL_LINKS:
        yield link.name, list(link.numbers())


def _by_source(numbers: Iterable[Number]) -> list[tuple[str, list[str]]]:
    """The names of the numbers that share a source, with its text."""
    found: dict[str, list[str]] = {}
    for number in numbers:
        found.setdefault(number.origin.text, []).append(number.name)
    return list(found.items())


def _figure(numbers: Iterable[Number], name: str) -> str:
    """A number as the table shows it: `19.5`, `~112` where it is estimated, `-` where there is none."""
    number = next((number for number in numbers if number.name == name), None)
    return "-" if number is None else f"{'~' if number.origin.estimated else ''}{number.value:g}"


def _device_columns() -> list[Column]:
    def column(heading: str, name: str) -> Column:
        return Column(heading, tuple(_figure(row.numbers(), name) for row in DEVICES))

    return [
        *(column(rate, rate) for rate in _RATES),
        column("GiB", "memory"),
        column("GB/s", "bandwidth"),
        Column("link", tuple(row.link for row in DEVICES), words=True),
        Column("network", tuple(_network(row) for row in DEVICES), words=True),
    ]


def _network(row: GpuRow) -> str:
    adapters = _figure(row.numbers(), "adapters")
    return row.network if row.nics == 1 else f"{adapters} {row.network}"


def _link_columns() -> list[Column]:
    def shared(row: LinkRow) -> str:
        rest = _figure(row.numbers(), "contention")
        return f"{rest} out of {row.island}" if row.island else ""

    def overlap(row: LinkRow) -> str:
        return _figure(row.numbers(), "overlap") if row.overlap < 1 else ""

    return [
        Column("GB/s", tuple(_figure(row.numbers(), "bandwidth") for row in ALL_LINKS)),
        Column("latency", tuple(_figure(row.numbers(), "latency") for row in ALL_LINKS)),
        Column("shared", tuple(shared(row) for row in ALL_LINKS), words=True),
        Column("overlap", tuple(overlap(row) for row in ALL_LINKS), words=True),
        Column("", tuple("network" if row.network else "" for row in ALL_LINKS), words=True),
    ]


def _print_table(page: Page, names: list[str], columns: list[Column]) -> None:
    width = max(map(len, names))
    page.headings(width, columns)
    for index, name in enumerate(names):
        page.line(name.ljust(width) + "".join(column.place(column.cells[index]) for column in columns))
