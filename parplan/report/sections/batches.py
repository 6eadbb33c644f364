"""The batches that one was chosen from: what a step of each takes, and where memory ends."""

from __future__ import annotations

from parplan.planner.batch_size import FLAT
from parplan.planner.decision import BatchTried, Decision
from parplan.report import units
from parplan.report.page import Column, Page, Span

__all__ = ["print_batches"]


def print_batches(page: Page, decision: Decision) -> None:
    """Print a line for every batch tried, the chosen one in bold."""
    tried = decision.batches
    page.section("Batches", "the fastest plan of each; memory on the fullest device")
    columns = _columns(tried)
    page.headings(0, columns)
    for index, one in enumerate(tried):
        figures = "".join(column.place(column.cells[index]) for column in columns)
        is_chosen = one.batch == decision.plan.batch
        page.line(Span(figures, "bold" if is_chosen else ""), "  ", _verdict(one, is_chosen))
    page.paragraph("Plans in one pass; for the chosen batch those in passes and side by side too.", style="dim")
    if all(one.fits for one in tried):
        page.paragraph(f"Larger ones would fit, but two doublings in a row brought less than {FLAT:.0%}.", style="dim")


def _columns(tried: tuple[BatchTried, ...]) -> list[Column]:
    times = units.time_column(one.step_s for one in tried if one.step_s is not None)
    sizes = units.size([one.memory_bytes for one in tried if one.memory_bytes is not None])
    return [
        Column("batch", tuple(f"{one.batch:,}" for one in tried)),
        Column("step", tuple("" if one.step_s is None else times.text(one.step_s) for one in tried)),
        Column("samples/s", tuple(_rate(one) for one in tried)),
        Column("memory", tuple("" if one.memory_bytes is None else sizes.text(one.memory_bytes) for one in tried)),
    ]


def _rate(one: BatchTried) -> str:
    """Samples per second, with digits also where they are few."""
    if one.step_s is None:
        return ""
    return f"{one.samples_per_s:,.0f}" if one.samples_per_s >= 100 else f"{one.samples_per_s:.3g}"


def _verdict(one: BatchTried, is_chosen: bool) -> Span:
    if is_chosen:
        return Span("chosen", "bold green")
    return Span("" if one.fits else "does not fit", "red")
