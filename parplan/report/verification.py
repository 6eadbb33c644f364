"""Report on a verification: the largest difference per group of tensors, and whether it is rounding."""

from __future__ import annotations

import math

from rich.console import Console

from parplan.report import units
from parplan.report.page import Column, Page, TableRow
from parplan.verification import TOLERANCE, Verification

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
    rows = []
    for row in found.rows:
        value = row.max_relative_difference
        difference = "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)
        allowed = [f"{row.tolerance:.0e}"] * (lax > TOLERANCE)
        cells = [str(row.count), difference, *allowed, row.worst]
        rows.append(TableRow(row.group, cells, style="" if row.passed else "bold red"))
    columns = [Column("tensors"), Column("relative difference"), Column("largest in", words=True)]
    page.table([*columns[:2], *[Column("allowed")] * (lax > TOLERANCE), *columns[2:]], rows)
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
    failing = [row.group for row in found.rows if not row.passed]
    verb = "differs" if len(failing) == 1 else "differ"
    page.paragraph(f": {', '.join(failing)} {verb} by more than {limit}.", first="FAILED", first_style="bold red")
