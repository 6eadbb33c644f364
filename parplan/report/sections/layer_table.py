"""The table of layers: one heading per strategy, aligned figures, and the reason under (or beside) every line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

from parplan.cost_models.costs import Source
from parplan.plan import Strategy
from parplan.planner.decision import LayerReport
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow
from parplan.report.sections.layer_groups import LIMIT, StrategyGroup, TableLine, group_layers

__all__ = ["heading", "print_folded", "print_layers", "sources", "updates"]

LONGEST_NAME = 26  # columns of names; a longer one has a line to itself
WIDE = 70  # columns of a page where the sources have a column
TIMES = ("forward", "backward", "transfer", "reduce")  # columns of seconds; the fields end in _s
REPEATED = 2  # lines with the reason of the line above them, from which on it is not said again
SHORT = {
    Source.MEASURED: "measured",
    Source.SHIPPED: "profile",
    Source.INTERPOLATED: "interpol.",
    Source.ESTIMATED: "estimate",
}


def sources(layers: Sequence[LayerReport]) -> list[Source]:
    """The sources that occur, best first."""
    present = {layer.source for layer in layers}
    return [source for source in Source if source in present]


def print_layers(
    page: Page, layers: Sequence[LayerReport], step_s: float, full: bool = False, notes: Mapping[str, str] | None = None
) -> bool:
    """Print the table; tell whether a line has several sources (a "+").

    Args:
        step_s: of the plan.
        full: give every layer its own line.
        notes: remarks of a person's by layer name.
    """
    noted = notes or {}
    groups = group_layers(layers, None if full else LIMIT)
    lines = [line for group in groups for line in group.rows]
    each = any(line.apart for line in lines)
    times = units.time_column(line.total(f"{name}_s", each) for line in lines for name in TIMES)
    sizes = units.size_column(line.total("memory_bytes", each) for line in lines)
    folded, mixed, wide = any(len(line.layers) > 1 for line in lines), len(sources(layers)) > 1, page.width >= WIDE
    columns = [Column("layers")] * folded + [Column(name) for name in (*TIMES, "memory")]
    columns += [Column("source", words=True)] * (mixed and wide)

    def reason(group: StrategyGroup, line: TableLine) -> str:
        axis = line.head.strategy.axis if line.head is not None and len(group.axes) > 1 else None
        axis = f"cut along {axis}" if axis else ""
        said = line.why if full or line.has_reason(step_s) else ""
        return "; ".join(filter(None, (axis, "" if line.stages else said)))  # the heading says the stages

    def row(group: StrategyGroup, line: TableLine, why: str) -> TableRow:
        found = sources(line.layers)
        source = SHORT[found[-1]] + ("+" if len(found) > 1 else "")  # the least certain
        figures = [times.figure(line.total(f"{name}_s", each)) for name in TIMES]
        figures.append(sizes.figure(line.total("memory_bytes", each)))
        cells = [*[line.count] * folded, *figures, *[source] * (mixed and wide)]
        remarks = [
            Styled("" if group.pinned else line.pinned, "cyan"),
            Styled(source if mixed and not wide else "", "dim"),
            Styled(why, "dim"),
            Styled(f"copies {line.copies}" if line.copies else "", "magenta"),
            Styled(f"bends {line.bends}" if line.bends and full else "", "yellow"),
        ]
        said = [(layer.name, noted[layer.name]) for layer in line.layers if layer.name in noted]
        remarks += [
            Styled(f"note: {text}" if len(line.layers) == 1 else f"note on {name}: {text}") for name, text in said
        ]
        return TableRow(line.label, cells, remarks, heading=heading(group) if line is group.rows[0] else None)

    page.section("Layers", f"times in {times.unit}, memory in {sizes.unit} on each device of a layer; - is none")
    if any(layer.alternatives for layer in layers):
        page.paragraph("Below a line: the best other strategy and what it would add to the step.", style="dim")
        page.blank()
    if each:
        page.paragraph("Blocks that are planned alike are listed once; figures are of each.", style="dim")
        page.blank()
    rows = []
    for group in groups:
        for why, run in groupby(group.rows, key=partial(reason, group)):
            first, *others = run
            if why and len(others) >= REPEATED:  # what is the same for many lines is said once
                rows.append(row(group, first, f"{why}; so for the next {len(others)} lines"))
                rows += [row(group, line, "") for line in others]
            else:
                rows += [row(group, line, why) for line in (first, *others)]
    page.table(columns, rows, LONGEST_NAME)
    print_folded(page, len(layers), len(lines), "of one block each" if each else "summed")
    return any(len(sources(line.layers)) > 1 for line in lines)


def heading(group: StrategyGroup) -> tuple[str, str]:
    """A group's strategy, and where its layers are and when their weights are updated."""
    pinned = f"; {group.pinned}" if group.pinned else ""
    stages = group.whole.stages
    if not group.modules:
        where = ", ".join(filter(None, (units.devices(group.strategy.devices), stages)))
        return group.words, f" on {where}{updates(group.strategy)}{group.label}{pinned}"
    places = " of these blocks" if group.again else f"; {group.places(units.devices)}{'; ' * bool(stages)}{stages}"
    return group.words, f"{updates(group.strategy)}{group.label}{places}{pinned}"


def updates(strategy: Strategy) -> str:
    """When the weights are updated, where that is not after the step."""
    period = strategy.update_period
    return {None: "", 1: ", weights updated after every pass"}.get(period, f", weights updated every {period} passes")


def print_folded(page: Page, layers: int, lines: int, figures: str = "summed") -> None:
    """Say it where layers share a line."""
    if lines < layers:
        on = f"{units.counted(layers, 'layer')} on {units.counted(lines, 'line')}"
        page.paragraph(f"{on}, figures {figures}; `--full` prints each.", style="dim")
