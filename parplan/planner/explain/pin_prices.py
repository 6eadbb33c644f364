"""Prices of pins: the plan searched again without each, and without any, in the time and effort that is left."""

from __future__ import annotations

import time
from dataclasses import replace

from parplan.errors import PlanError
from parplan.planner.decision import Decision
from parplan.planner.search.context import Case
from parplan.planner.search.schemes import needs_clock
from parplan.planner.search.select import Solved, plan_of, solver, taken
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import Answer, Questions, fastest, prices
from parplan.planner.solver.problem import Status, evaluate

__all__ = ["with_pins"]

LARGEST_SHARE = 0.2
"""Part of the effort for the plan that each question may take at most."""


def with_pins(case: Case, decision: Decision, one_pass: Solved, asked: Questions) -> Decision:
    """The decision with the prices of the pins, and at every layer which pins decide it."""
    together = {pin for group in asked.groups for pin in group.pins if len(group.pins) > 1}
    layers = tuple(replace(layer, pinned=asked.whole.words(layer.name, together)) for layer in decision.layers)
    if not case.request.price_pins:
        return replace(decision, layers=layers)
    begin = time.perf_counter()
    chosen = Answer(decision.prediction.step_s, decision.proof.status == Status.OPTIMAL.value)
    questions = len(asked.parts) + 1
    left, share = questions, min(LARGEST_SHARE, 1 / questions)

    def ask(pinned: Pinned) -> Answer:
        """The step of the fastest plan under other pins, found and priced as the decision's own."""
        nonlocal left
        answer = _ask(case, decision, one_pass, pinned, 1 / (2 * left), share)
        left = max(1, left - 1)
        return answer.or_better(chosen) if pinned.kept_by(decision.plan.layers) else answer

    pins = prices(asked, chosen, ask)
    more_s = time.perf_counter() - begin
    seconds = replace(decision.seconds, solve=decision.seconds.solve + more_s, total=decision.seconds.total + more_s)
    return replace(decision, pins=pins, layers=layers, seconds=seconds)


def _ask(case: Case, decision: Decision, one_pass: Solved, pinned: Pinned, part: float, share: float) -> Answer:
    """Search a plan under `pinned`, in `part` of the time left and `share` of the usual effort."""
    formulation = one_pass.formulation
    solution = fastest(formulation, pinned, solver(case, formulation, part))
    if solution.choice is None:
        return Answer(None, solution.status is Status.INFEASIBLE)
    plan = plan_of(case, formulation, solution.choice, pinned)
    try:
        found = taken(case, Solved(formulation, solution, solution.choice, plan), pinned, decision.baselines, share)
    except PlanError:
        return Answer(None, False)
    if needs_clock(found.plan, case.graph):
        return Answer(case.player.step_s(found.plan), False)
    step_s = evaluate(found.formulation.problem, found.choice).objective
    return Answer(step_s, solution.status is Status.OPTIMAL)
