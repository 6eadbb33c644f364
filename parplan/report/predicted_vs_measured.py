"""Predicted beside measured: layers by strategy, then what moves, then the rest of the step and the step itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from parplan.plan import Plan
from parplan.planner.decision import LayerReport
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow
from parplan.report.sections.layer_groups import LIMIT, group_layers
from parplan.report.sections.layer_table import heading, print_folded

__all__ = ["Compared", "Comparison", "render_comparison", "to_json"]

# Ratios of measured to predicted that are worth a colour.
CLOSE, FAR = 1.15, 2.0


class Directions(Protocol):
    """Seconds forward and backward."""

    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...


class Named(Protocol):
    """What a line is about: "layer", "transfer", "step", ..."""

    @property
    def value(self) -> str: ...


class Compared(Protocol):
    """One line: predicted (None where nothing was) beside measured."""

    @property
    def part(self) -> Named: ...
    @property
    def label(self) -> str: ...
    @property
    def predicted(self) -> Directions | None: ...
    @property
    def measured(self) -> Directions: ...
    @property
    def source(self) -> str: ...
    @property
    def spread(self) -> float: ...
    @property
    def ratio(self) -> float | None: ...


class Comparison(Protocol):
    """A plan that has run."""

    @property
    def plan(self) -> Plan: ...
    @property
    def layers(self) -> Sequence[LayerReport]: ...
    @property
    def lines(self) -> Sequence[Compared]: ...


def render_comparison(
    found: Comparison, title: str, notes: Sequence[str], console: Console, all_layers: bool = False
) -> None:
    """Print the comparison; `title` says what ran, `notes` follow at the end."""
    page = Page(console)
    page.paragraph(title, style="bold")
    layers = [line for line in found.lines if line.part.value == "layer"]
    moved = [line for line in found.lines if line.part.value == "transfer"]
    wholes = [line for line in found.lines if line.part.value not in ("layer", "transfer")]
    _print_layers(page, found, layers, all_layers)
    if moved:
        _print_lines(page, "Transfers", [_Line(line.label, _TimeSums.of([line])) for line in moved])
    _print_wholes(page, wholes)
    for note in notes:
        page.blank()
        page.paragraph(note)


def _print_layers(page: Page, found: Comparison, compared: Sequence[Compared], all_layers: bool) -> None:
    by_name = {line.label: line for line in compared}
    reports = [layer for layer in found.layers if layer.name in by_name]
    groups = group_layers(reports, None if all_layers else LIMIT)
    lines = [
        _Line(
            row.label,
            _TimeSums.of([by_name[layer.name] for layer in row.layers]),
            " + ".join(dict.fromkeys(layer.source.value for layer in row.layers)),
            heading(group) if row is group.rows[0] else None,
        )
        for group in groups
        for row in group.rows
    ]
    _print_lines(page, "Layers", lines)
    print_folded(page, len(reports), len(lines))


@dataclass(frozen=True)
class _TimeSums:
    """Seconds forward and backward; of several layers those of all together, None where nothing was predicted."""

    predicted: tuple[float | None, float | None]
    measured: tuple[float, float]

    @staticmethod
    def of(lines: Sequence[Compared]) -> _TimeSums:
        """The sum of these lines."""
        known = [line.predicted for line in lines if line.predicted is not None]
        measured = [line.measured for line in lines]
        return _TimeSums(
            (sum(p.forward_s for p in known), sum(p.backward_s for p in known)) if known else (None, None),
            (sum(m.forward_s for m in measured), sum(m.backward_s for m in measured)),
        )

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        total = sum(value for value in self.predicted if value is not None)
        return sum(self.measured) / total if total > 0 else None


@dataclass(frozen=True)
class _Line:
    label: str
    sums: _TimeSums
    source: str = ""
    heading: tuple[str, str] | None = None


def _print_lines(page: Page, title: str, lines: Sequence[_Line]) -> None:
    """Predicted and measured figures of both directions, and their ratio in a colour."""
    values = [value for line in lines for value in (*line.sums.predicted, *line.sums.measured)]
    scale = units.time_column(value for value in values if value is not None)
    mixed = len({line.source for line in lines}) > 1
    columns = [Column(name) for name in ("forward", "measured", "backward", "measured", "ratio")]
    rows = []
    for line in lines:
        pairs = zip(line.sums.predicted, line.sums.measured, strict=True)
        figures = [_figure(scale, value) for pair in pairs for value in pair]
        cells: list[str | Styled] = [*figures, _ratio(line.sums.ratio), *[line.source] * mixed]
        rows.append(TableRow(line.label, cells, heading=line.heading))
    page.section(title, f"times in {scale.unit}: predicted and measured, medians; - is none")
    page.table([*columns, *[Column("source", words=True)] * mixed], rows)


def _figure(scale: units.Scale, value: float | None) -> str:
    return "-" if value is None else scale.figure(value)


def _ratio(ratio: float | None) -> Styled:
    """Measured over predicted, in a colour: far from 1 is worth a look."""
    if ratio is None:
        return Styled("-")
    distance = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    style = "green" if distance <= CLOSE else "yellow" if distance <= FAR else "red"
    return Styled(f"{ratio:.2f}", style if ratio > 0 else "")


def _print_wholes(page: Page, lines: Sequence[Compared]) -> None:
    """Print lines without directions, and the step, which is the sum of all."""
    measured = [line.measured.forward_s for line in lines]
    predicted = [line.predicted.forward_s if line.predicted is not None else None for line in lines]
    scale = units.time_column([*measured, *(value for value in predicted if value is not None)])
    page.section("Step", f"times in {scale.unit}; all lines above, and these, add up to the step")
    rows = [
        TableRow(
            line.label,
            [_figure(scale, before), _figure(scale, after), _ratio(line.ratio)],
            style="bold" if line.part.value == "step" else "",
        )
        for line, before, after in zip(lines, predicted, measured, strict=True)
    ]
    page.table([Column("predicted"), Column("measured"), Column("ratio")], rows)


def to_json(found: Comparison, title: str, notes: Sequence[str]) -> str:
    """The comparison as JSON; times in seconds, null where nothing was predicted."""
    lines = [
        {
            "part": line.part.value,
            "label": line.label,
            "predicted_forward_s": None if line.predicted is None else line.predicted.forward_s,
            "predicted_backward_s": None if line.predicted is None else line.predicted.backward_s,
            "measured_forward_s": line.measured.forward_s,
            "measured_backward_s": line.measured.backward_s,
            "spread": line.spread,
            "ratio": line.ratio,
            "source": line.source,
        }
        for line in found.lines
    ]
    facts = {"title": title, "plan": json.loads(found.plan.to_json()), "lines": lines, "notes": list(notes)}
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
