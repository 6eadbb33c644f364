"""Reports as text files whose difference is read in review: `python -m tests.report.golden` writes them anew."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from parplan.planner.decision import Decision
from parplan.report.terminal import Detail, render
from tests.report.decisions import DECISIONS

FOLDER = Path(__file__).parent / "golden"
WIDTHS = (50, 80, 120)
CASES = [(name, width) for name in DECISIONS for width in WIDTHS]


def printed(decision: Decision, width: int, *, terminal: bool = False, detail: Detail = Detail.DEFAULT) -> str:
    """The report on a stream of UTF-8 text that is a terminal or is not."""
    stream = io.StringIO()
    render(decision, Console(file=stream, width=width, force_terminal=terminal), detail)
    return stream.getvalue()


def golden(name: str, width: int) -> Path:
    """Where one report is kept."""
    return FOLDER / f"{name}.{width}.txt"


if __name__ == "__main__":
    for case, columns in CASES:
        golden(case, columns).write_text(printed(DECISIONS[case](), columns), encoding="utf-8")
