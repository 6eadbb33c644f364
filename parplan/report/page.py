"""A page of text as wide as the console: paragraphs, and tables that rich aligns; colour where there is a terminal.

The text is the same on a terminal and in a pipe, without boxes and without blanks at the end of a line. Where the
stream cannot show a character, a plain one is written.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parplan.report import units

__all__ = ["Column", "Page", "Styled", "TableRow", "printed"]

NARROWEST, WIDEST, PROSE = 50, 150, 120
NARROW = 60  # columns of a page below which a table that is too wide is set more closely
REMARKS = 36  # columns that wrapped remarks need beside the figures, else they go below
PLAIN = str.maketrans({
    "µ": "u", "\N{GREEK SMALL LETTER MU}": "u", "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "\N{EM DASH}": "-",
    "\N{MINUS SIGN}": "-", "\N{HORIZONTAL ELLIPSIS}": "...", "\N{RIGHTWARDS ARROW}": "->",
    "\N{LEFT SINGLE QUOTATION MARK}": "'", "\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{NO-BREAK SPACE}": " ",
})  # fmt: skip


def printed(write: Callable[[Console], None], width: int = 80) -> str:
    """The text that `write` prints on a console of so many columns without colours."""
    stream = StringIO()
    write(Console(file=stream, width=width, color_system=None, force_terminal=False))
    return stream.getvalue().rstrip("\n")


@dataclass(frozen=True)
class Styled:
    """Text in one style (a rich style name, such as "bold" or "dim")."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A heading with its cells below it, aligned right (figures) or left (`words`)."""

    heading: str
    words: bool = False


@dataclass(frozen=True)
class TableRow:
    """A line of a table.

    Args:
        name: stands left of the figures, on a line of its own where it is too long.
        figures: a cell for every column.
        remarks: stand beside the figures where there is room, else below.
        style: of name and figures.
        heading: a paragraph above the row: its first words, in bold, and the rest.
    """

    name: str
    figures: Sequence[str | Styled]
    remarks: Sequence[Styled] = ()
    style: str = ""
    heading: tuple[str, str] | None = None


class Page:
    """Prints lines no wider than the console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.width = max(NARROWEST, min(WIDEST, console.width))
        self.prose = min(PROSE, self.width)

    def line(self, *parts: Styled | Text | str) -> None:
        """One line as it stands."""
        text = Text()
        for part in parts:
            if isinstance(part, Text):
                text.append_text(part)
            else:
                styled = Styled(part) if isinstance(part, str) else part
                text.append(self.plain(styled.text), styled.style)
        text.rstrip()
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False)

    def blank(self) -> None:
        """An empty line."""
        self.line()

    def section(self, title: str, detail: str = "") -> None:
        """A title with a rule below it, after an empty line; the detail follows where there is room."""
        self.blank()
        fits = len(title) + 2 + len(detail) <= self.width
        self.line(Styled(title, "bold"), Styled(f"  {detail}" if fits and detail else "", "dim"))
        self.line(Styled("-" * self.width, "dim"))
        if detail and not fits:
            self.paragraph(detail, style="dim")

    def paragraph(self, text: str, indent: int = 0, style: str = "", first: str = "", first_style: str = "") -> None:
        """Wrapped prose; `first` begins it in a style of its own."""
        lines = self.wrap(f"{first}{text}", self.prose - indent)
        for index, line in enumerate(lines):
            lead = first if index == 0 and line.startswith(first) else ""
            self.line(" " * indent, Styled(lead, first_style), Styled(line[len(lead) :], style))

    def labelled(self, label: str, text: str, style: str, columns: int) -> None:
        """Wrapped prose beside a label that has so many columns."""
        for index, line in enumerate(self.wrap(text, self.prose - columns)):
            self.line(Styled(("" if index else label).ljust(columns), style), line)

    def wrap(self, text: str, width: int) -> list[str]:
        """Lines of at most `width`, broken at spaces, though not before a unit, and inside words longer than a line."""
        together = units.together(self.plain(text))
        lines = textwrap.wrap(together, width, break_on_hyphens=False) or [""]
        return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]

    def plain(self, text: str) -> str:
        """The text in characters that the stream can show, without control characters."""
        shown = "".join(character if character.isprintable() else " " for character in text)
        encoding = self._console.encoding or "utf-8"
        try:
            shown.encode(encoding)
        except UnicodeEncodeError:
            return shown.translate(PLAIN).encode(encoding, "replace").decode(encoding)
        return shown

    def table(
        self, columns: Sequence[Column], rows: Sequence[TableRow], longest: int = WIDEST, indent: int = 2
    ) -> None:
        """Print names with aligned figures and remarks.

        Args:
            longest: columns of a name; a longer one has a line to itself, as one that leaves its figures no room.
            indent: blanks in front of names.
        """
        names = [" " * indent + self.plain(row.name) if row.name else "" for row in rows]
        head, figures = self._aligned(columns, rows)
        if max(map(len, names), default=0) + max(map(len, figures), default=0) > self.width:
            stacked = [replace(column, heading=column.heading.replace(" ", "\n")) for column in columns]
            head, figures = self._aligned(stacked, rows, 2 if self.width >= NARROW else 1)
        room = min(longest, self.width - max(map(len, figures), default=0))
        width = max((len(name) for name in names if len(name) <= room), default=0)
        for line in head:
            self.line(" " * width, line)
        for index, (row, name, cells) in enumerate(zip(rows, names, figures, strict=True)):
            if row.heading is not None:
                if index:
                    self.blank()
                self.paragraph(row.heading[1], first=row.heading[0], first_style="bold cyan")
            if len(name) > width:
                self.line(Styled(name, row.style))
                name = ""
            # Remarks beside the figures where there is room to wrap them, or for a short one alone; else below.
            remarks, indent = [one for one in row.remarks if one.text], width + len(cells) + 2
            space = self.width - indent
            beside = space >= REMARKS or (len(remarks) == 1 and len(remarks[0].text) <= space)
            if not beside:
                indent, space = 4, self.prose - 4
            wrapped = [Styled(text, one.style) for one in remarks for text in self.wrap(one.text, space)]
            self.line(Styled(name.ljust(width), row.style), cells, "  ", *wrapped[: int(beside)])
            for remark in wrapped[int(beside) :]:
                self.line(" " * indent, remark)

    def _aligned(
        self, columns: Sequence[Column], rows: Sequence[TableRow], gap: int = 2
    ) -> tuple[list[Text], list[Text]]:
        """The lines of the headings, and the figures of every row on one line, as rich aligns them."""
        headed = any(column.heading for column in columns)
        table = Table(box=None, padding=(0, 0, 0, gap), header_style="dim", show_header=headed)
        for column in columns:
            table.add_column(Text(column.heading), justify="left" if column.words else "right", vertical="bottom")
        for row in rows:
            cells = (cell if isinstance(cell, Styled) else Styled(cell) for cell in row.figures)
            table.add_row(*(Text(self.plain(cell.text), cell.style) for cell in cells), style=row.style)
        options = self._console.options.update(width=10 * WIDEST)
        drawn = self._console.render_lines(table, options, pad=False)
        lines = [Text.assemble(*((part.text, part.style or "") for part in line)) for line in drawn]
        heads = len(lines) - len(rows)
        return lines[:heads], lines[heads:]
