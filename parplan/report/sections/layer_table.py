"""The table of layers: one heading per strategy, aligned figures, and the reason under (or beside) every line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parplan.cost_models.costs import Source
from parplan.planner.decision import LayerFacts
from parplan.report import units
from parplan.report.page import Column, Page, Span
from parplan.report.sections.layer_groups import LIMIT, Group, Row, group_layers

__all__ = ["print_layers", "sources"]

LONGEST_NAME = 26  # columns of names; a longer one has a line to itself
SHORT_NAME = 12  # columns of names without which the source has no column
REASON = 36  # columns a reason needs beside the figures, else it goes below
SHORT = {
    Source.MEASURED: "measured",
    Source.SHIPPED: "profile",
    Source.INTERPOLATED: "interpol.",
    Source.ESTIMATED: "estimate",
}


def sources(layers: Sequence[LayerFacts]) -> list[Source]:
    """The sources that occur, best first."""
    present = {layer.source for layer in layers}
    return [source for source in Source if source in present]


def print_layers(page: Page, layers: Sequence[LayerFacts], all_layers: bool = False) -> bool:
    """Print the table; `all_layers` gives every layer its own line. Tell whether a line has several sources (a "+")."""
    groups = group_layers(layers, None if all_layers else LIMIT)
    rows = [row for group in groups for row in group.rows]
    times = units.time_column(value for row in rows for value in _times(row))
    sizes = units.size_column(row.total(_memory) for row in rows)
    page.section("Layers", f"times in {times.unit}, memory in {sizes.unit} on each device of a layer; - is none")
    columns = _columns(rows, times, sizes)
    of = Column("source", tuple(_source(row) for row in rows), words=True) if len(sources(layers)) > 1 else None
    table = _Table(page, [row.label for row in rows], columns, of)
    page.headings(table.name_width, table.columns)
    position = 0
    for index, group in enumerate(groups):
        if index:
            page.blank()
        _print_heading(page, group)
        position = table.print_rows(group, position)
    if len(rows) < len(layers):
        lines = "1 line" if len(rows) == 1 else f"{len(rows)} lines"
        folded = f"{len(layers)} layers on {lines}, figures summed; `--all-layers` prints each."
        page.paragraph(folded, style="dim")
    return any(len(sources(row.layers)) > 1 for row in rows)


def _print_heading(page: Page, group: Group) -> None:
    strategy = group.strategy
    words = strategy.describe() if strategy.replicas * strategy.shards > 1 else "whole"
    where = f" on {units.devices(strategy.devices)}{_updates(strategy.update_period)}"
    pinned = f"; {group.pinned}" if group.pinned else ""
    page.paragraph(f"{where}{group.label}{pinned}", first=words, first_style="bold cyan")


def _updates(period: int | None) -> str:
    """When weights are updated, where a plan says so."""
    if period is None:
        return ""
    return f", weights updated {'after every pass' if period == 1 else f'every {period} passes'}"


@dataclass(frozen=True)
class _Remarks:
    """At most one line beside the figures, and lines below them with their indent."""

    beside: tuple[Span, ...]
    below: tuple[Span, ...]
    indent: int


class _Table:
    """Rows of one table, all with the same columns: name, figures, and the reason beside them or below.

    The source is the last column where there is room for it, else a remark.
    """

    def __init__(self, page: Page, labels: Sequence[str], columns: Sequence[Column], source: Column | None) -> None:
        self._page = page
        names = [len(page.plain(label)) + 2 for label in labels]
        self.columns = [*columns, *([source] if source is not None else [])]
        narrow = SHORT_NAME + _width(self.columns) > page.width
        self.columns = list(columns) if narrow else self.columns
        self._source = source if narrow else None
        longest = min(LONGEST_NAME, page.width - _width(self.columns))
        self.name_width = max((width for width in names if width <= longest), default=longest)
        self._indent = self.name_width + _width(self.columns) + 2
        self._beside = page.width - self._indent

    def print_rows(self, group: Group, position: int) -> int:
        """Print the rows of a group, the first of which is the table's `position`-th; give the next one's position."""
        for index, row in enumerate(group.rows, start=position):
            said = [Span("" if group.pinned else row.pinned, "cyan")]
            said += [Span(self._source.cells[index], "dim")] if self._source is not None else []
            self._print_row(row, "".join(column.place(column.cells[index]) for column in self.columns), said)
        return position + len(group.rows)

    def _print_row(self, row: Row, figures: str, said: Sequence[Span]) -> None:
        label = f"  {self._page.plain(row.label)}"
        if len(label) > self.name_width:
            self._page.line(label)
            label = ""
        copies = Span(f"copies {row.copies}" if row.copies else "", "magenta")
        bends = Span(f"bends {row.bends}" if row.bends else "", "yellow")
        remarks = [*said, Span(row.why, "dim"), copies, bends]
        placed = self._arrange([remark for remark in remarks if remark.text])
        self._page.line(label.ljust(self.name_width), figures, "  ", *placed.beside)
        for span in placed.below:
            self._page.line(" " * placed.indent, span)

    def _arrange(self, remarks: Sequence[Span]) -> _Remarks:
        """Beside the figures where there is room for prose, or for a short one alone; else below."""
        if self._beside >= REASON:
            lines = self._wrapped(remarks, self._beside)
            return _Remarks(tuple(lines[:1]), tuple(lines[1:]), self._indent)
        if len(remarks) == 1 and len(remarks[0].text) <= self._beside:
            return _Remarks(tuple(remarks), (), 0)
        return _Remarks((), tuple(self._wrapped(remarks, self._page.prose - 4)), 4)

    def _wrapped(self, remarks: Sequence[Span], width: int) -> list[Span]:
        return [Span(line, remark.style) for remark in remarks for line in self._page.wrap(remark.text, width)]


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns)


def _memory(layer: LayerFacts) -> float:
    return layer.memory_bytes


_TIMES: dict[str, Callable[[LayerFacts], float]] = {
    "forward": lambda layer: layer.forward_s,
    "backward": lambda layer: layer.backward_s,
    "transfer": lambda layer: layer.transfer_s,
    "reduce": lambda layer: layer.reduce_s,
}


def _times(row: Row) -> list[float]:
    return [row.total(figure) for figure in _TIMES.values()]


def _columns(rows: Sequence[Row], times: units.Scale, sizes: units.Scale) -> list[Column]:
    columns = [Column(name, tuple(times.figure(row.total(figure)) for row in rows)) for name, figure in _TIMES.items()]
    columns.append(Column("memory", tuple(sizes.figure(row.total(_memory)) for row in rows)))
    if any(len(row.layers) > 1 for row in rows):
        columns.insert(0, Column("layers", tuple(row.count for row in rows)))
    return columns


def _source(row: Row) -> str:
    """The row's source; of several, the least certain with a plus."""
    found = sources(row.layers)
    return SHORT[found[-1]] + ("+" if len(found) > 1 else "")
