"""Predicted beside measured: layers by strategy, then what moves, then the rest of the step and the step itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from parplan.plan import Plan
from parplan.planner.decision import LayerReport
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow
from parplan.report.sections.layer_groups import LIMIT, group_layers
from parplan.report.sections.layer_table import heading, print_folded
from parplan.runtime.measurement.measured_step import ComparedLine, StepPart
from parplan.runtime.measurement.predicted import BothTimes

__all__ = ["render_comparison", "to_json"]

# Ratios of measured to predicted that are worth a colour.
CLOSE, FAR = 1.15, 2.0


def render_comparison(
    lines: Sequence[ComparedLine],
    layers: Sequence[LayerReport],
    title: str,
    notes: Sequence[str],
    console: Console,
    full: bool = False,
) -> None:
    """Print predicted beside measured; `layers` are the plan's, `title` says what ran, `notes` follow at the end."""
    page = Page(console)
    page.paragraph(title, style="bold")
    by_name = {line.label: line for line in lines if line.part is StepPart.LAYER}
    reports = [layer for layer in layers if layer.name in by_name]
    rows: list[tuple[ComparedLine, tuple[str, str] | None]] = []
    for group in group_layers(reports, None if full else LIMIT):
        for row in group.rows:
            own = [by_name[layer.name] for layer in row.layers]
            known = [line.predicted for line in own if line.predicted is not None]
            total = replace(
                own[0],
                label=row.label,
                predicted=sum(known, BothTimes()) if known else None,
                measured=sum((line.measured for line in own), BothTimes()),
                source=" + ".join(dict.fromkeys(layer.source.value for layer in row.layers)),
            )
            rows.append((total, heading(group) if row is group.rows[0] else None))
    _print_lines(page, "Layers", rows)
    print_folded(page, len(reports), len(rows))
    if moved := [(line, None) for line in lines if line.part is StepPart.TRANSFER]:
        _print_lines(page, "Transfers", moved)
    # Lines without directions, and the step, which is the sum of all.
    wholes = [line for line in lines if line.part not in (StepPart.LAYER, StepPart.TRANSFER)]
    before = [None if line.predicted is None else line.predicted.forward_s for line in wholes]
    after = [line.measured.forward_s for line in wholes]
    scale = units.time_column([*after, *before])
    page.section("Step", f"times in {scale.unit}; all lines above, and these, add up to the step")
    table = []
    for line, predicted, measured in zip(wholes, before, after, strict=True):
        cells: list[str | Styled] = [_figure(scale, predicted), _figure(scale, measured), _ratio(line.ratio)]
        table.append(TableRow(line.label, cells, style="bold" if line.part is StepPart.STEP else ""))
    page.table([Column("predicted"), Column("measured"), Column("ratio")], table)
    for note in notes:
        page.blank()
        page.paragraph(note)


def _print_lines(page: Page, title: str, rows: Sequence[tuple[ComparedLine, tuple[str, str] | None]]) -> None:
    """Predicted and measured figures of both directions, and their ratio in a colour; some below a heading."""
    seconds: list[list[float | None]] = []
    for line, _ in rows:
        measured = line.measured
        forward_s, backward_s = (p.forward_s, p.backward_s) if (p := line.predicted) is not None else (None, None)
        seconds.append([forward_s, measured.forward_s, backward_s, measured.backward_s])
    scale = units.time_column(value for values in seconds for value in values)
    mixed = len({line.source for line, _ in rows}) > 1
    columns = [Column(name) for name in ("forward", "measured", "backward", "measured", "ratio")]
    table = []
    for (line, above), values in zip(rows, seconds, strict=True):
        figures = [_figure(scale, value) for value in values]
        cells: list[str | Styled] = [*figures, _ratio(line.ratio), *[line.source] * mixed]
        table.append(TableRow(line.label, cells, heading=above))
    page.section(title, f"times in {scale.unit}: predicted and measured, medians; - is none")
    page.table([*columns, *[Column("source", words=True)] * mixed], table)


def _figure(scale: units.Scale, value: float | None) -> str:
    return "-" if value is None else scale.figure(value)


def _ratio(ratio: float | None) -> Styled:
    """Measured over predicted, in a colour: the farther from 1, the more striking."""
    if ratio is None:
        return Styled("-")
    distance = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    style = "green" if distance <= CLOSE else "yellow" if distance <= FAR else "red"
    return Styled(f"{ratio:.2f}", style if ratio > 0 else "")


def to_json(plan: Plan, compared: Sequence[ComparedLine], title: str, notes: Sequence[str]) -> str:
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
        for line in compared
    ]
    facts = {"title": title, "plan": json.loads(plan.to_json()), "lines": lines, "notes": list(notes)}
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
