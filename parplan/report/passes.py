"""Passes: in which order samples get from many replicas to layers with fewer, and what the other orders would cost."""

from __future__ import annotations

from parplan.planner.decision import Passes, SchemePrice
from parplan.report import units
from parplan.report.page import Column, Page, Span

__all__ = ["print_passes"]


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
    width = 2 + max(len(_name(one, passes)) for one in passes.schemes)
    page.headings(width, columns)
    for index, one in enumerate(passes.schemes):
        _print_line(page, passes, one, index, width, columns)
    if passes.updated:
        page.paragraph(_updated(passes), style="dim")


def _updated(passes: Passes) -> str:
    """Why it may be a slower scheme than gather."""
    first, *more = passes.updated
    which = f"{first}{f' and {len(more)} more layers' if len(more) > 1 else f' and {more[0]}' if more else ''}"
    return f"Pins have the weights of {which} updated between passes, so not all samples are gathered at once."


def _print_line(page: Page, passes: Passes, one: SchemePrice, index: int, width: int, columns: list[Column]) -> None:
    name = f"  {_name(one, passes)}".ljust(width)
    style = "bold" if one.scheme is passes.taken else ""
    if one.why_not:
        page.line(Span(name, style))
        page.paragraph(f"not possible: {one.why_not}", 4, "dim")
        return
    page.line(Span(name, style), Span("".join(column.place(column.cells[index]) for column in columns), style))


def _name(one: SchemePrice, passes: Passes) -> str:
    return f"{one.scheme.value} (taken)" if one.scheme is passes.taken else one.scheme.value


def _fewest(passes: Passes) -> str:
    return "1" if passes.fewest == 1 else f"{passes.fewest} or more"


def _memory(one: SchemePrice, sizes: units.Scale) -> str:
    return "" if one.memory_bytes is None else sizes.text(one.memory_bytes)


def _exposed(one: SchemePrice, times: units.Scale) -> str:
    return "" if one.exposed_transfer_s is None else times.text(one.exposed_transfer_s)
