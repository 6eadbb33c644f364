"""Report on a verification: the largest difference per group of tensors, and whether it is rounding."""

from __future__ import annotations

import math

from rich.console import Console

from parplan.report import units
from parplan.report.page import Column, Page, TableRow
from parplan.verification import TOLERANCE, Verification, VerificationRow

__all__ = ["render_verification"]


def render_verification(found: Verification, console: Console) -> None:
    """Print the differences as a table, then the verdict."""
    page = Page(console)
    count = found.plan.devices
    where = units.counted(count, "logical CPU device")
    facts = f": {units.counted(found.batch, 'sample')}, on {where} against the plain model, in float64"
    page.paragraph(facts, first=found.plan.model, first_style="bold")
    for note in found.notes:
        page.paragraph(note)
    page.blank()
    lax = max((row.tolerance for row in found.rows), default=TOLERANCE)

    def allowed(row: VerificationRow) -> list[str]:
        return [f"{row.tolerance:.0e}"] if lax > TOLERANCE else []

    rows = []
    for row in found.rows:
        value = row.max_relative_difference
        difference = "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)
        cells = [str(row.count), difference if row.count else "-", *allowed(row), row.worst]
        rows.append(TableRow(row.group, cells, style="bold red" if _fails(row) else ""))
    columns = [Column("tensors"), Column("relative difference"), Column("largest in", words=True)]
    page.table([*columns[:2], *([Column("allowed")] if lax > TOLERANCE else []), *columns[2:]], rows)
    if lax > TOLERANCE:
        types = " and ".join(found.casts)
        page.paragraph(
            f"The model casts to {types} inside; what that reaches may differ by {lax:.0e}, as such sums do."
        )
    page.blank()
    limit = f"{TOLERANCE:.0e}" if lax == TOLERANCE else "what is allowed"
    if found.passed:
        agrees = f": every tensor agrees to {limit}, which is rounding."
        page.paragraph(agrees, first="PASSED", first_style="bold green")
        return
    failing = [row.group for row in found.rows if _fails(row)]
    verb = "differs" if len(failing) == 1 else "differ"
    page.paragraph(f": {', '.join(failing)} {verb} by more than {limit}.", first="FAILED", first_style="bold red")


def _fails(row: VerificationRow) -> bool:
    """Whether it differs too much; a difference that is no number does."""
    return row.count > 0 and not row.passed
