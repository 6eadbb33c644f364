"""Passes: which samples layers with fewer replicas work on at a time, and the price of every scheme.

Branches that run at the same time: on which devices, and how much that saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.planner.decision import ConcurrentBranches, Passes, SchemePrice
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

__all__ = ["print_branches", "print_passes"]


def print_branches(page: Page, branches: ConcurrentBranches, step_s: float) -> None:
    """Print the branches that run at the same time, one stretch after another; without any what was tried."""
    times = units.step(step_s)
    if not branches.phases:
        page.blank()
        tried = f"{branches.tried} plans" if branches.tried > 1 else "a plan"
        page.paragraph(f"Branches at the same time, on devices of their own: {tried} tried, none taken.", style="dim")
        return
    page.section("At the same time", "forward and backward of branches on devices of their own")
    for index, phase in enumerate(branches.phases):
        if index:
            page.blank()
        rows = []
        for track in phase.tracks:
            ends = " .. ".join(dict.fromkeys((track.layers[0], track.layers[-1])))
            name = ends if len(track.layers) < 3 else f"{ends} ({len(track.layers)} layers)"
            rows.append(TableRow(name, [times.text(track.compute_s), f"on {units.devices(track.devices)}"]))
        page.table([Column("compute"), Column("", words=True)], rows)
        page.line(Styled(f"  {times.text(phase.saved_s)} less than one after the other", "dim"))
    if branches.without_s is not None:
        without, gain = times.text(branches.without_s), times.text(branches.without_s - step_s)
        page.blank()
        tried = units.counted(branches.tried, "plan")
        page.paragraph(f"{gain} faster than the best plan without, {without}; found by search, {tried} tried.")


def print_passes(page: Page, passes: Passes) -> None:
    """Print a line per scheme, the taken one in bold; where no layer runs in passes, that none of them is faster."""
    if passes.count == 1 and not passes.updated:
        tried = " and ".join(one.scheme.value for one in passes.schemes if one.scheme is not passes.taken)
        page.blank()
        page.paragraph(f"In passes over parts of the batch ({tried}): not faster.", style="dim")
        return
    narrow = f"layers with fewer than {passes.max_replicas} replicas"
    page.section("Passes", f"{narrow}, and all behind them, run once a pass")
    known = [one for one in passes.schemes if one.step_s is not None]
    step_s = next((one.step_s for one in known if one.scheme is passes.taken), None) or 0.0
    times, sizes = units.step(step_s), units.size([one.memory_bytes for one in known])

    def row(one: SchemePrice) -> TableRow:
        is_taken = one.scheme is passes.taken
        figures = (
            "" if one.step_s is None else str(one.passes),
            "" if one.samples is None else f"{one.samples:,}",
            times.text(one.step_s),
            times.text(one.exposed_transfer_s),
            sizes.text(one.memory_bytes),
        )
        remark = Styled(f"not possible: {one.why_not}" if one.why_not else "", "dim")
        return TableRow(f"{one.scheme.value}{' (taken)' * is_taken}", figures, [remark], "bold" if is_taken else "")

    headings = ("passes", "samples each", "step", "exposed transfer", "memory")
    page.table([Column(heading) for heading in headings], [row(one) for one in passes.schemes])
    shares = "gather: one pass of all samples; broadcast: of one replica's; interleave: of a share of each replica's."
    page.paragraph(shares, style="dim")
    if passes.updated:
        text = f"Pins have the weights of {_few(passes.updated)} updated between passes"
        page.paragraph(f"{text}, so not all samples are gathered at once.", style="dim")
    if passes.in_front and passes.count > 1:
        runs, its = ("run", "their") if len(passes.in_front) > 1 else ("runs", "its")
        text = f"{_few(passes.in_front)} {runs} once, in front of the passes: {its} weights are updated once."
        page.paragraph(text, style="dim")


def _few(layers: Sequence[str]) -> str:
    """Two layers, or the first and how many more."""
    first, *more = layers
    return f"{first}{f' and {len(more)} more layers' if len(more) > 1 else f' and {more[0]}' if more else ''}"
