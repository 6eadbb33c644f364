"""Predicted beside measured: layers by strategy, then what moves, then the rest of the step and the step itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from parplan.plan import Plan
from parplan.planner.decision import LayerFacts
from parplan.report import units
from parplan.report.page import Column, Page, Span
from parplan.report.sections.layer_groups import LIMIT, Row, group_layers

__all__ = ["Compared", "LookedBack", "render_look_back", "to_json"]

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


class LookedBack(Protocol):
    """A plan that has run."""

    @property
    def plan(self) -> Plan: ...
    @property
    def facts(self) -> Sequence[LayerFacts]: ...
    @property
    def lines(self) -> Sequence[Compared]: ...


def render_look_back(
    found: LookedBack, title: str, notes: Sequence[str], console: Console, all_layers: bool = False
) -> None:
    """Print the comparison; `title` says what ran, `notes` follow at the end."""
    page = Page(console)
    page.paragraph(title, style="bold")
    layers = [line for line in found.lines if line.part.value == "layer"]
    moved = [line for line in found.lines if line.part.value == "transfer"]
    wholes = [line for line in found.lines if line.part.value not in ("layer", "transfer")]
    _print_layers(page, found, layers, all_layers)
    if moved:
        _print_lines(page, "Transfers", moved)
    _print_wholes(page, wholes)
    for note in notes:
        page.blank()
        page.paragraph(note)


def _print_layers(page: Page, found: LookedBack, lines: Sequence[Compared], all_layers: bool) -> None:
    by_name = {line.label: line for line in lines}
    facts = [layer for layer in found.facts if layer.name in by_name]
    groups = group_layers(facts, None if all_layers else LIMIT)
    rows = [row for group in groups for row in group.rows]
    sums = [_sum([by_name[layer.name] for layer in row.layers]) for row in rows]
    table = _Table(page, "Layers", [row.label for row in rows], sums, [_source(row) for row in rows])
    position = 0
    for group in groups:
        words = group.strategy.describe() if group.strategy.replicas * group.strategy.shards > 1 else "whole"
        where = f" on {units.devices(group.strategy.devices)}{group.label}"
        page.paragraph(where, first=words, first_style="bold cyan")
        position = table.print_rows(position, len(group.rows))
    if len(rows) < len(facts):
        folded = f"{len(facts)} layers on {len(rows)} lines, figures summed; `--all-layers` prints each."
        page.paragraph(folded, style="dim")


def _print_lines(page: Page, title: str, lines: Sequence[Compared]) -> None:
    table = _Table(page, title, [line.label for line in lines], [_sum([line]) for line in lines], [])
    table.print_rows(0, len(lines))


@dataclass(frozen=True)
class _Sum:
    """Figures of one line, forward and backward; of several layers those of all together."""

    predicted: tuple[float | None, float | None]
    measured: tuple[float, float]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        total = sum(value for value in self.predicted if value is not None)
        return sum(self.measured) / total if total > 0 else None


def _sum(lines: Sequence[Compared]) -> _Sum:
    known = [line.predicted for line in lines if line.predicted is not None]
    measured = [line.measured for line in lines]
    return _Sum(
        (sum(p.forward_s for p in known), sum(p.backward_s for p in known)) if known else (None, None),
        (sum(m.forward_s for m in measured), sum(m.backward_s for m in measured)),
    )


def _source(row: Row) -> str:
    return " + ".join(dict.fromkeys(layer.source.value for layer in row.layers))


class _Table:
    """Lines with predicted and measured figures of both directions, and their ratio in a colour."""

    def __init__(
        self, page: Page, title: str, labels: Sequence[str], sums: Sequence[_Sum], sources: Sequence[str]
    ) -> None:
        self._page, self._labels, self._sums = page, labels, sums
        values = [value for one in sums for value in (*one.predicted, *one.measured) if value is not None]
        scale = units.time_column(values)
        page.section(title, f"times in {scale.unit}: predicted and measured, medians; - is none")
        self._columns = [
            Column("forward", _cells(scale, [one.predicted[0] for one in sums])),
            Column("measured", _cells(scale, [one.measured[0] for one in sums])),
            Column("backward", _cells(scale, [one.predicted[1] for one in sums])),
            Column("measured", _cells(scale, [one.measured[1] for one in sums])),
            Column("ratio", tuple(_ratio(one.ratio) for one in sums)),
        ]
        self._sources = Column("source", tuple(sources), words=True) if len(set(sources)) > 1 else None
        figures = sum(column.width for column in self._columns) + (self._sources.width if self._sources else 0)
        room = max(12, page.width - figures)
        self._name_width = min(room, max((len(page.plain(label)) + 2 for label in labels), default=12))
        page.headings(self._name_width, [*self._columns, *([self._sources] if self._sources else [])])

    def print_rows(self, first: int, count: int) -> int:
        """Print some rows; give the position of the next one."""
        for index in range(first, first + count):
            self._print_row(index)
        return first + count

    def _print_row(self, index: int) -> None:
        label = f"  {self._page.plain(self._labels[index])}"
        if len(label) > self._name_width:
            for line in self._page.wrap(label.strip(), self._page.width - 2):
                self._page.line(f"  {line}")
            label = ""
        *figures, ratio = self._columns
        cells = "".join(column.place(column.cells[index]) for column in figures)
        tail = self._sources.place(self._sources.cells[index]) if self._sources is not None else ""
        style = _style(self._sums[index].ratio)
        self._page.line(label.ljust(self._name_width), cells, Span(ratio.place(ratio.cells[index]), style), tail)


def _cells(scale: units.Scale, values: Sequence[float | None]) -> tuple[str, ...]:
    return tuple("-" if value is None else scale.figure(value) for value in values)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _style(ratio: float | None) -> str:
    """Measured far from predicted is worth a look."""
    if ratio is None or ratio <= 0:
        return ""
    distance = max(ratio, 1 / ratio)
    return "green" if distance <= CLOSE else "yellow" if distance <= FAR else "red"


def _print_wholes(page: Page, lines: Sequence[Compared]) -> None:
    """What has no directions, and the step, which is the sum of all."""
    measured = [line.measured.forward_s for line in lines]
    predicted = [line.predicted.forward_s if line.predicted is not None else None for line in lines]
    scale = units.time_column([*measured, *(value for value in predicted if value is not None)])
    page.section("Step", f"times in {scale.unit}; all lines above, and these, add up to the step")
    columns = [
        Column("predicted", _cells(scale, predicted)),
        Column("measured", _cells(scale, measured)),
        Column("ratio", tuple(_ratio(line.ratio) for line in lines)),
    ]
    width = max(len(line.label) for line in lines) + 2
    page.headings(width, columns)
    for index, line in enumerate(lines):
        *figures, ratio = columns
        cells = "".join(column.place(column.cells[index]) for column in figures)
        label = Span(f"  {line.label}".ljust(width), "bold" if line.part.value == "step" else "")
        page.line(label, cells, Span(ratio.place(ratio.cells[index]), _style(line.ratio)))


def to_json(found: LookedBack, title: str, notes: Sequence[str]) -> str:
    """The comparison as JSON; times in seconds, null where nothing was predicted."""
    lines = [_line_facts(line) for line in found.lines]
    facts = {"title": title, "plan": json.loads(found.plan.to_json()), "lines": lines, "notes": list(notes)}
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


def _line_facts(line: Compared) -> Mapping[str, Any]:
    predicted = line.predicted
    return {
        "part": line.part.value,
        "label": line.label,
        "predicted_forward_s": None if predicted is None else predicted.forward_s,
        "predicted_backward_s": None if predicted is None else predicted.backward_s,
        "measured_forward_s": line.measured.forward_s,
        "measured_backward_s": line.measured.backward_s,
        "spread": line.spread,
        "ratio": line.ratio,
        "source": line.source,
    }
