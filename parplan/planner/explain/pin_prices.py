"""What pins cost: the plan again without each of them, and without any, in the time and effort that is left."""

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

MOST = 0.2
"""Part of the effort for the plan that each question may take at most."""


def with_pins(case: Case, decision: Decision, one_pass: Solved, asked: Questions) -> Decision:
    """The decision with what the pins cost, and at every layer which pins decide it."""
    together = {pin for group in asked.groups for pin in group.pins if len(group.pins) > 1}
    layers = tuple(replace(facts, pinned=asked.whole.words(facts.name, together)) for facts in decision.layers)
    if not case.request.price_pins:
        return replace(decision, layers=layers)
    begin = time.perf_counter()
    pins = prices(asked, _answer_of(decision), _Asking(case, decision, one_pass, len(asked.parts) + 1))
    more_s = time.perf_counter() - begin
    seconds = replace(decision.seconds, solve=decision.seconds.solve + more_s, total=decision.seconds.total + more_s)
    return replace(decision, pins=pins, layers=layers, seconds=seconds)


def _answer_of(decision: Decision) -> Answer:
    return Answer(decision.prediction.step_s, decision.proof.status == Status.OPTIMAL.value)


class _Asking:
    """The step of the fastest plan under other pins, found and priced as the decision's own."""

    def __init__(self, case: Case, decision: Decision, one_pass: Solved, questions: int) -> None:
        self.case, self.decision, self.one_pass = case, decision, one_pass
        self.left, self.share = questions, min(MOST, 1 / questions)

    def __call__(self, pinned: Pinned) -> Answer:
        answer = self._ask(pinned, 1 / (2 * self.left))
        self.left = max(1, self.left - 1)
        return answer.or_better(_answer_of(self.decision)) if pinned.kept_by(self.decision.plan.layers) else answer

    def _ask(self, pinned: Pinned, part: float) -> Answer:
        case, formulation = self.case, self.one_pass.formulation
        solution = fastest(formulation, pinned, solver(case, formulation, part))
        if solution.choice is None:
            return Answer(None, solution.status is Status.INFEASIBLE)
        plan = plan_of(case, formulation, solution.choice, pinned)
        start = Solved(formulation, solution, solution.choice, plan)
        try:
            found = taken(case, start, pinned, self.decision.baselines, self.share)
        except PlanError:
            return Answer(None, False)
        if needs_clock(found.plan, case.graph):
            return Answer(case.player.step_s(found.plan), False)
        step_s = evaluate(found.formulation.problem, found.choice).objective
        return Answer(step_s, solution.status is Status.OPTIMAL)
