"""What pins cost: each against the best plan without it, and all together against the best plan without any."""

from __future__ import annotations

from parplan.planner.decision import PinPrice, Pins
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
            price = _signed(scale, pins.step_s - without_s)
            figures = [scale.text(without_s), price, _share(pins.step_s, without_s)]
        return TableRow(name, (layers, *figures), [Styled("" if nothing else remark, "dim")], style)

    rows = [row(one.pin, str(one.layers), one.without_s, _remark(one)) for one in pins.each]
    rows.append(row("all pins", "", pins.free_s, "" if pins.proven else NOT_PROVEN, "bold"))
    page.table([Column("layers"), Column("without"), Column("price"), Column("")], rows, LONGEST)
    if nothing:
        page.paragraph("Prices are differences of the plans found; none is proven.", style="dim")


def _remark(pin: PinPrice) -> str:
    if pin.why_not:
        return f"without it: {pin.why_not}"
    if pin.price_s is not None and pin.price_s < 0 and pin.proven:
        return "without it the other pins cost more"
    return "" if pin.proven else NOT_PROVEN


def _signed(scale: units.Scale, seconds: float) -> str:
    """A price with its sign; what is left of a difference of equal floats is nothing."""
    text = scale.text(abs(seconds))
    if text.startswith(("0 ", "<")):
        return scale.text(0.0)
    return f"{'+' if seconds > 0 else '-'}{text}"


def _share(step_s: float, without_s: float) -> str:
    share = (step_s - without_s) / without_s if without_s > 0 else 0.0
    if abs(share) < 5e-7:  # twice the gap up to which a plan counts as the best
        return units.percent(0.0)
    return f"{'+' if share > 0 else '-'}{units.percent(abs(share))}"
