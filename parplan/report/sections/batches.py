"""The batches, or micro-batches, that one was chosen from: what a step of each takes, and where memory ends."""

from __future__ import annotations

from parplan.planner.batch_size import FLAT
from parplan.planner.decision import BatchTried, Decision, MicroBatchesTried
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

__all__ = ["print_batches", "print_micro_batches"]


def print_batches(page: Page, decision: Decision) -> None:
    """Print a line for every batch tried, the chosen one in bold."""
    tried = decision.batches
    times = units.time_column(one.step_s for one in tried)
    sizes = units.size([one.memory_bytes for one in tried])

    def row(one: BatchTried) -> TableRow:
        step = times.text(one.step_s)
        # Digits also where samples per second are few.
        rate = f"{one.samples_per_s:,.0f}" if one.samples_per_s >= 100 else f"{one.samples_per_s:.3g}"
        figures = (f"{one.batch:,}", step, rate if step else "", sizes.text(one.memory_bytes))
        if one.batch == decision.plan.batch:
            return TableRow("", figures, [Styled("chosen", "bold green")], "bold")
        return TableRow("", figures, [Styled("" if one.fits else "does not fit", "red")])

    page.section("Batches", "the fastest plan of each; memory on the fullest device")
    page.table([Column(heading) for heading in ("batch", "step", "samples/s", "memory")], [row(one) for one in tried])
    page.paragraph("Plans in one pass; for the chosen batch those in passes and side by side too.", style="dim")
    if all(one.fits for one in tried):
        page.paragraph(f"Larger ones would fit, but two doublings in a row brought less than {FLAT:.0%}.", style="dim")


def print_micro_batches(page: Page, decision: Decision) -> None:
    """Print a line for every number of micro-batches that was compared, the plan's in bold."""
    tried = decision.micro_batches
    times = units.time_column(one.step_s for one in tried)
    sizes = units.size([one.memory_bytes for one in tried])

    def row(one: MicroBatchesTried) -> TableRow:
        figures = (
            f"{one.count}{', sharded state' * one.sharded}{', recomputation' * one.replayed}{', stages' * one.staged}",
            f"{decision.plan.batch // one.count:,}",
            times.text(one.step_s) if one.fits else "",
            sizes.text(one.memory_bytes),
        )
        ways = bool(decision.plan.sharded), bool(decision.plan.replayed)
        if (one.count, one.sharded, one.replayed) == (decision.plan.micro_batches, *ways):
            return TableRow("", figures, [Styled("chosen", "bold green")], "bold")
        nearest = "no plan fits" if one.memory_bytes is None else "does not fit"
        remark = (
            Styled("" if one.step_s is not None else "none is faster", "dim") if one.fits else Styled(nearest, "red")
        )
        return TableRow("", figures, [remark])

    page.section("Micro-batches", "one after another; memory on the fullest device")
    columns = ("micro-batches", "samples", "step", "memory")
    page.table([Column(heading) for heading in columns], [row(one) for one in tried])
