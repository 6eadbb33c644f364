"""Prices of pins: the plan searched again without each, and without any, in the time and effort that is left."""

from __future__ import annotations

import time
from dataclasses import replace

from parplan.errors import InfeasiblePlan, PlanError
from parplan.planner.decision import Decision
from parplan.planner.search.context import Case
from parplan.planner.search.select import ShapeSearch
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import Answer, Questions, prices
from parplan.planner.solver.problem import Status

__all__ = ["with_pins"]


def with_pins(case: Case, decision: Decision, search: ShapeSearch, asked: Questions) -> Decision:
    """The decision with the prices of the pins, and at every layer which pins decide it."""
    together = {pin for group in asked.groups for pin in group.pins if len(group.pins) > 1}
    layers = tuple(replace(layer, pinned=asked.whole.words(layer.name, together)) for layer in decision.layers)
    if not case.request.price_pins:
        return replace(decision, layers=layers)
    begin = time.perf_counter()
    chosen = Answer(decision.prediction.step_s, decision.proof.status == Status.OPTIMAL.value)
    left = len(asked.parts) + 1

    def ask(pinned: Pinned) -> Answer:
        """The step of the fastest plan under other pins, found and priced as the decision's own."""
        nonlocal left
        part, left = 1 / (2 * left), max(1, left - 1)
        try:
            found = search.best(pinned, part)
        except InfeasiblePlan:
            answer = Answer(None, True)
        except PlanError:
            answer = Answer(None, False)
        else:
            answer = Answer(case.step_s(found.plan), found.proof.status == Status.OPTIMAL.value)
        return answer.or_better(chosen) if pinned.kept_by(decision.plan.layers) else answer

    pins = prices(asked, chosen, ask)
    more_s = time.perf_counter() - begin
    seconds = replace(decision.seconds, solve=decision.seconds.solve + more_s, total=decision.seconds.total + more_s)
    return replace(decision, pins=pins, layers=layers, seconds=seconds)
