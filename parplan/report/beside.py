"""Branches that run at the same time: which, on which devices, and what that saves."""

from __future__ import annotations

from parplan.planner.decision import Beside, Phase, Track
from parplan.report import units
from parplan.report.page import Column, Page, Span

__all__ = ["print_beside"]


def print_beside(page: Page, beside: Beside, step_s: float) -> None:
    """Print the branches that run at the same time, one stretch after another; without any what was tried."""
    times = units.step(step_s)
    if not beside.phases:
        page.blank()
        tried = f"{beside.tried} plans" if beside.tried > 1 else "a plan"
        page.paragraph(f"Branches at the same time, on devices of their own: {tried} tried, none faster.", style="dim")
        return
    page.section("At the same time", "forward and backward of branches on devices of their own")
    width = 2 + max(len(_track_name(track)) for phase in beside.phases for track in phase.tracks)
    for index, phase in enumerate(beside.phases):
        if index:
            page.blank()
        _print_phase(page, phase, width, times)
    if beside.without_s is not None:
        gain = (
            f"{times.text(beside.without_s - step_s)} faster than the best plan without, {times.text(beside.without_s)}"
        )
        page.blank()
        page.paragraph(f"{gain}; found by search, {beside.tried} plans tried.")


def _print_phase(page: Page, phase: Phase, width: int, times: units.Scale) -> None:
    column = Column("compute", tuple(times.text(track.compute_s) for track in phase.tracks))
    for cell, track in zip(column.cells, phase.tracks, strict=True):
        page.line(
            Span(f"  {_track_name(track)}".ljust(width)), column.place(cell), f"  on {units.devices(track.devices)}"
        )
    page.line(Span(f"  {times.text(phase.saved_s)} less than one after the other", "dim"))


def _track_name(track: Track) -> str:
    ends = " .. ".join(dict.fromkeys((track.layers[0], track.layers[-1])))
    return ends if len(track.layers) < 3 else f"{ends} ({len(track.layers)} layers)"
