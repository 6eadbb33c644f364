"""Passes: in which order samples get from many replicas to layers with fewer, and what the other orders would cost.

Beside it, branches that run at the same time: on which devices, and how much that saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.planner.decision import Beside, Passes, Phase, SchemePrice, Track
from parplan.report import units
from parplan.report.page import Column, Page, Span, Table

__all__ = ["print_beside", "print_passes"]


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


def print_passes(page: Page, passes: Passes) -> None:
    """Print a line per scheme, the taken one in bold."""
    page.section("Passes", f"layers with {passes.most} replicas in front of layers with {_fewest(passes)}")
    known = [one for one in passes.schemes if one.step_s is not None]
    step_s = next((one.step_s for one in known if one.scheme is passes.taken), None) or 0.0
    times, sizes = units.step(step_s), units.size([one.memory_bytes for one in known if one.memory_bytes is not None])
    columns = [
        Column("passes", tuple("" if one.step_s is None else str(one.passes) for one in passes.schemes)),
        Column("samples each", tuple("" if one.samples is None else f"{one.samples:,}" for one in passes.schemes)),
        Column("step", tuple("" if one.step_s is None else times.text(one.step_s) for one in passes.schemes)),
        Column("exposed transfer", tuple(_exposed(one, times) for one in passes.schemes)),
        Column("memory", tuple(_memory(one, sizes) for one in passes.schemes)),
    ]
    table = Table(page, [_name(one, passes) for one in passes.schemes], columns)
    for index, one in enumerate(passes.schemes):
        style = "bold" if one.scheme is passes.taken else ""
        if one.why_not:
            page.line(Span(f"  {_name(one, passes)}", style))
            page.paragraph(f"not possible: {one.why_not}", 4, "dim")
        else:
            table.line(index, style)
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


def _name(one: SchemePrice, passes: Passes) -> str:
    return f"{one.scheme.value} (taken)" if one.scheme is passes.taken else one.scheme.value


def _fewest(passes: Passes) -> str:
    return "1" if passes.fewest == 1 else f"{passes.fewest} or more"


def _memory(one: SchemePrice, sizes: units.Scale) -> str:
    return "" if one.memory_bytes is None else sizes.text(one.memory_bytes)


def _exposed(one: SchemePrice, times: units.Scale) -> str:
    return "" if one.exposed_transfer_s is None else times.text(one.exposed_transfer_s)
