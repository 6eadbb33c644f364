"""A page of text as wide as the console: lines are laid out here, rich adds colour where there is a terminal.

Laying out lines by hand keeps them the same on a terminal and in a pipe, and lets a test say how long they may be.
Nothing here draws boxes. Where the stream cannot show a character, a plain one is written.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

__all__ = ["Column", "Page", "Span", "Table"]

NARROWEST, WIDEST, PROSE = 60, 150, 100
PLAIN = str.maketrans({
    "µ": "u", "\N{GREEK SMALL LETTER MU}": "u", "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "\N{EM DASH}": "-",
    "\N{MINUS SIGN}": "-", "\N{HORIZONTAL ELLIPSIS}": "...", "\N{RIGHTWARDS ARROW}": "->",
    "\N{LEFT SINGLE QUOTATION MARK}": "'", "\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{NO-BREAK SPACE}": " ",
})  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A piece of a line in one style (a rich style name, such as "bold" or "dim")."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column of cells under a heading (of several lines, if need be), at its right edge or (`words`) at its left."""

    heading: str
    cells: tuple[str, ...]
    words: bool = False

    @property
    def width(self) -> int:
        """Columns on the page, with the gap on the left."""
        return 2 + max(map(len, (*self.heading.split("\n"), *self.cells)))

    @property
    def stacked(self) -> Column:
        """The same with a heading as narrow as its longest word."""
        return replace(self, heading=self.heading.replace(" ", "\n"))

    def place(self, text: str) -> str:
        """The text where it belongs in the column."""
        return f"  {text}".ljust(self.width) if self.words else text.rjust(self.width)


class Page:
    """Prints lines no wider than the console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.width = max(NARROWEST, min(WIDEST, console.width))
        self.prose = min(PROSE, self.width)

    def line(self, *spans: Span | str) -> None:
        """One line as it stands."""
        text = Text()
        for span in spans:
            piece = Span(span) if isinstance(span, str) else span
            text.append(self.plain(piece.text), piece.style)
        text.rstrip()
        self._console.print(text, no_wrap=True, overflow="ignore", crop=False)

    def blank(self) -> None:
        """An empty line."""
        self.line()

    def section(self, title: str, detail: str = "") -> None:
        """A title with a rule below it, after an empty line; the detail follows where there is room."""
        self.blank()
        fits = len(title) + 2 + len(detail) <= self.width
        self.line(Span(title, "bold"), Span(f"  {detail}" if fits and detail else "", "dim"))
        self.line(Span("-" * self.width, "dim"))
        if detail and not fits:
            self.paragraph(detail, style="dim")

    def paragraph(self, text: str, indent: int = 0, style: str = "", first: str = "", first_style: str = "") -> None:
        """Wrapped prose; `first` begins it in a style of its own."""
        lines = self.wrap(f"{first}{text}", self.prose - indent)
        for index, line in enumerate(lines):
            lead = first if index == 0 and line.startswith(first) else ""
            self.line(" " * indent, Span(lead, first_style), Span(line[len(lead) :], style))

    def wrap(self, text: str, width: int) -> list[str]:
        """Lines of at most `width`, broken at spaces, inside a word only if it is longer than a line."""
        return textwrap.wrap(self.plain(text), width, break_on_hyphens=False) or [""]

    def plain(self, text: str) -> str:
        """The text in characters that the stream can show, without control characters."""
        shown = "".join(character if character.isprintable() else " " for character in text)
        encoding = self._console.encoding or "utf-8"
        try:
            shown.encode(encoding)
        except UnicodeEncodeError:
            return shown.translate(PLAIN).encode(encoding, "replace").decode(encoding)
        return shown

    def headings(self, indent: int, columns: Sequence[Column]) -> None:
        """The line above a table; several where a heading has several."""
        lines = [column.heading.split("\n") for column in columns]
        most = max(map(len, lines), default=1)
        for row in zip(*([""] * (most - len(own)) + own for own in lines), strict=True):
            cells = (column.place(text) for column, text in zip(columns, row, strict=True))
            self.line(Span(" " * indent + "".join(cells), "dim"))


class Table:
    """Names with columns of figures beside them.

    Where the page is too narrow, headings are stacked, and a name that leaves its figures no room, or is longer than
    `longest`, has a line to itself.
    """

    def __init__(self, page: Page, names: Sequence[str], columns: Sequence[Column], longest: int = WIDEST) -> None:
        self._page, self._names = page, [f"  {page.plain(name)}" for name in names]
        wide = max(map(len, self._names), default=0) + sum(column.width for column in columns) > page.width
        self._columns = [column.stacked for column in columns] if wide else columns
        room = min(longest, page.width - sum(column.width for column in self._columns))
        self.name_width = max((len(name) for name in self._names if len(name) <= room), default=0)
        page.headings(self.name_width, self._columns)

    def figures(self, index: int) -> str:
        """A line's cells."""
        return "".join(column.place(column.cells[index]) for column in self._columns)

    def room(self, index: int) -> int:
        """Columns left of a line for what stands behind its figures, two blanks between."""
        return self._page.width - self.name_width - len(self.figures(index)) - 2

    def line(self, index: int, style: str = "", behind: Span | str = "") -> None:
        """Print one line; `behind` stands behind its figures."""
        name = self._names[index]
        if len(name) > self.name_width:
            self._page.line(Span(name, style))
            name = ""
        self._page.line(Span(name.ljust(self.name_width), style), Span(self.figures(index), style), "  ", behind)
