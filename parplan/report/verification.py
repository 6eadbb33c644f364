"""What a verification found: the largest difference per group of tensors, and whether it is rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

from parplan.plan import Plan
from parplan.report.page import Column, Page, TableRow

__all__ = ["DifferenceRow", "Verified", "render_verification"]


class DifferenceRow(Protocol):
    """A group of tensors ("outputs", "gradients"), how many, their largest relative difference, and whose it is."""

    @property
    def group(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def max_relative_difference(self) -> float: ...
    @property
    def worst(self) -> str: ...


class Verified(Protocol):
    """The result of `parplan.verify`."""

    @property
    def plan(self) -> Plan: ...
    @property
    def batch(self) -> int: ...
    @property
    def rows(self) -> Sequence[DifferenceRow]: ...
    @property
    def passed(self) -> bool: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def notes(self) -> Sequence[str]: ...


def render_verification(found: Verified, console: Console) -> None:
    """Print the differences as a table, then the verdict."""
    page = Page(console)
    count = found.plan.devices
    where = f"{count} logical CPU device{'s' if count > 1 else ''}"
    facts = f": {found.batch:,} samples, on {where} against the plain model, in float64"
    page.paragraph(facts, first=found.plan.model, first_style="bold")
    for note in found.notes:
        page.paragraph(note)
    page.blank()
    rows = [
        TableRow(
            row.group,
            [str(row.count), _difference(row), row.worst],
            style="bold red" if _fails(row, found.tolerance) else "",
        )
        for row in found.rows
    ]
    page.table([Column("tensors"), Column("relative difference"), Column("largest in", words=True)], rows)
    page.blank()
    limit = f"{found.tolerance:.0e}"
    if found.passed:
        agrees = f": every tensor agrees to {limit}, which is rounding."
        page.paragraph(agrees, first="PASSED", first_style="bold green")
        return
    failing = [row.group for row in found.rows if _fails(row, found.tolerance)]
    verb = "differs" if len(failing) == 1 else "differ"
    page.paragraph(f": {', '.join(failing)} {verb} by more than {limit}.", first="FAILED", first_style="bold red")


def _difference(row: DifferenceRow) -> str:
    if row.count == 0:
        return "-"
    value = row.max_relative_difference
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)


def _fails(row: DifferenceRow, tolerance: float) -> bool:
    """Whether it differs too much; a difference that is no number does."""
    return row.count > 0 and not row.max_relative_difference <= tolerance
