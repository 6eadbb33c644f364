"""Prices of pins: each against the best plan without it, and all together against the best plan without any."""

from __future__ import annotations

from parplan.planner.decision import Pins
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

__all__ = ["print_pins"]

NOT_PROVEN = "of the plans found; not proven"
LONGEST = 40  # columns of pins; a longer one has a line to itself


def print_pins(page: Page, pins: Pins) -> None:
    """Print one line per pin, and one for all of them."""
    page.section("Pins", "price: the best step with it less the best step without it, the others kept")
    scale = units.step(pins.step_s)
    nothing = not pins.proven and not any(one.proven or one.why_not for one in pins.each)

    def row(name: str, layers: str, without_s: float | None, remark: str, style: str = "") -> TableRow:
        figures = ["", "", ""]
        if without_s is not None:
            price_s = pins.step_s - without_s
            sign, price = "+" if price_s > 0 else "-", scale.text(abs(price_s))
            # What is left of a difference of equal floats is nothing.
            price = scale.text(0.0) if price.startswith(("0 ", "<")) else f"{sign}{price}"
            share = price_s / without_s if without_s > 0 else 0.0
            # Below twice the gap up to which a plan counts as the best.
            percent = units.percent(0.0) if abs(share) < 5e-7 else f"{sign}{units.percent(abs(share))}"
            figures = [scale.text(without_s), price, percent]
        return TableRow(name, (layers, *figures), [Styled("" if nothing else remark, "dim")], style)

    rows = []
    for one in pins.each:
        remark = "" if one.proven else NOT_PROVEN
        if one.why_not:
            remark = f"without it: {one.why_not}"
        elif one.price_s is not None and one.price_s < 0 and one.proven:
            remark = "without it the other pins cost more"
        rows.append(row(one.pin, str(one.layers), one.without_s, remark))
    rows.append(row("all pins", "", pins.free_s, "" if pins.proven else NOT_PROVEN, "bold"))
    page.table([Column("layers"), Column("without"), Column("price"), Column("")], rows, LONGEST)
    if nothing:
        page.paragraph("Prices are differences of the plans found; none is proven.", style="dim")
