"""The section on pins: what is said once, and what of each."""

from __future__ import annotations

from dataclasses import replace

from parplan.planner.decision import Decision
from tests.report.decisions import pinned
from tests.report.golden import printed

NOT_PROVEN = "not proven"


def unproven() -> Decision:
    """The pins of which a price is known, none of them proven."""
    decision = pinned()
    assert decision.pins is not None
    each = tuple(replace(one, proven=False) for one in decision.pins.each if not one.why_not)
    return replace(decision, pins=replace(decision.pins, each=each, proven=False))


def section(decision: Decision) -> str:
    text = printed(decision, 80)
    return text[text.index("\nPins") : text.index("\nAgainst other plans")]


def test_where_no_price_is_proven_it_is_said_once() -> None:
    text = section(unproven())
    assert NOT_PROVEN not in text
    assert text.count("none is proven") == 1


def test_where_some_are_proven_the_others_say_so() -> None:
    decision = pinned()
    assert decision.pins is not None
    open_ones = sum(not one.proven for one in decision.pins.each) + (not decision.pins.proven)
    assert section(decision).count(NOT_PROVEN) == open_ones > 0
    assert "none is proven" not in section(decision)
