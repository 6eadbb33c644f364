"""From a case to the plan that is proven, and from there to the one that is taken.

The solver's plan is the best in one pass whose layers run one after another. Plans in passes and with branches at the
same time are sought from there, judged by the clock (planner/simulation/timeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parplan.errors import InfeasiblePlan
from parplan.plan import Plan, Strategy
from parplan.planner.decision import Baseline
from parplan.planner.search.branch_search import SHARE, Ground, Towers, search
from parplan.planner.search.context import Case, fits, plain
from parplan.planner.search.refine import hidden_boundaries, polished
from parplan.planner.search.schemes import IN_PASSES, scheduled, under
from parplan.planner.search_space.formulation import Formulation, extended, formulate
from parplan.planner.search_space.infeasible_message import why_not
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import Questions, candidates, fastest, no_plan
from parplan.planner.simulation.simulator import EFFORT, Effort
from parplan.planner.solver.problem import Problem, Solution, Status
from parplan.planner.solver.solve import solve

__all__ = ["Solved", "Taken", "choice_of", "solved", "solver", "taken"]

MAIN, AGAIN, HIDDEN = 0.7, 0.5, 0.5
"""Parts of the time left for the proof, for each solve after one whose plan did not fit, and for plans in passes."""

ATTEMPTS = 4
"""How often a plan that does not fit with its transfers makes the solver search again, with so much less memory."""

NEAR = 1.03
"""A plan in passes up to this much slower than the best is improved, too: it may become the best."""

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True)
class Solved:
    """What the solver says: its plan in one pass, and the prices it was found with.

    `costs_s` is how long the prices took.
    """

    formulation: Formulation
    solution: Solution
    choice: tuple[int, ...]
    plan: Plan
    costs_s: float = 0.0


@dataclass(frozen=True)
class Taken:
    """The plan that is taken, with prices of its strategies; `towers` is how that search ended, if there was one."""

    plan: Plan
    formulation: Formulation
    towers: Towers | None = None

    @property
    def choice(self) -> tuple[int, ...]:
        """The plan among the strategies that were priced."""
        return choice_of(self.formulation, self.plan)


def choice_of(formulation: Formulation, plan: Plan) -> tuple[int, ...]:
    """A plan among the strategies that were priced, which know no update periods."""
    return formulation.choice(plain(plan))


# ---- the solver's plan -----------------------------------------------------------------------------------------------


def solved(case: Case, asked: Questions) -> Solved:
    """The fastest plan in one pass that keeps all pins, or the given one, with the solver's proof.

    Raises:
        InfeasiblePlan: no plan fits; the text names the limit, or the pins.
    """
    begin = time.perf_counter()
    formulation = _formulated(case, asked, everywhere=False)
    costs_s = time.perf_counter() - begin
    case.deadline.extend(costs_s)
    case.phase("solve")
    solution = fastest(formulation, asked.whole, solver(case, formulation, MAIN))
    if solution.status is Status.INFEASIBLE and case.cluster.count > 1:
        # Other blocks of devices than the first ones only ever help to spread memory.
        begin = time.perf_counter()
        formulation = _formulated(case, asked, everywhere=True)
        case.deadline.extend(time.perf_counter() - begin)
        solution = fastest(formulation, asked.whole, solver(case, formulation, MAIN))
    choice = _choice(case, formulation, solution, asked)
    return Solved(formulation, solution, choice, plan_of(case, formulation, choice, asked.whole), costs_s)


def _formulated(case: Case, asked: Questions, everywhere: bool) -> Formulation:
    case.phase("costs")
    options: dict[str, Sequence[Strategy]] = candidates(asked, case.graph, case.cluster, everywhere, case.uneven)
    given = plain(case.request.plan) if case.request.plan is not None else {}
    for name, strategy in given.items():
        options[name] = tuple(dict.fromkeys((*options[name], strategy)))
    on_layer = case.progress.advance if case.progress is not None else None
    strict = case.request.rules == "strict"
    return formulate(case.graph, case.cluster, case.costs, options, strict=strict, on_layer=on_layer)


def solver(case: Case, formulation: Formulation, part: float) -> Solve:
    """Solves a problem with the strategies of `formulation`, some of them forbidden perhaps; plans really fit.

    Args:
        part: of the time left, for the first solve.
    """
    tell = case.progress.solver if case.progress is not None else None

    def once(problem: Problem, part: float) -> Solution:
        limit_s = case.deadline.part_s(part)
        return case.deadline.watched(solve(problem, limit_s, on_progress=tell), limit_s)

    def fitting(problem: Problem) -> Solution:
        first = once(problem, part)
        if case.request.plan is not None:
            return first
        return _fitting(case, formulation, problem, first, lambda less: once(less, AGAIN))

    return fitting


def _fitting(case: Case, formulation: Formulation, problem: Problem, solution: Solution, again: Solve) -> Solution:
    """A solution that fits with its transfers, which the solver only estimates: again with so much less memory.

    The bound stays that of the first one, which nothing beats. Where no attempt finds a plan that fits, the first
    solution is returned: another search may still find one, and `decide` refuses a plan that does not fit.
    """
    lowered = limits = problem.limits
    found = solution
    for _ in range(ATTEMPTS):
        peaks = case.costs.peaks(formulation.strategies(found.choice)) if found.choice else None
        if peaks is None:
            break
        over = [max(0.0, peak - limit) for peak, limit in zip(peaks, limits, strict=True)]
        if not any(over):
            return found if found is solution else replace(found, bound=solution.bound)
        lowered = tuple(max(0.0, known - more) for known, more in zip(lowered, over, strict=True))
        found = again(replace(problem, limits=lowered))
    return solution


def _choice(case: Case, formulation: Formulation, solution: Solution, asked: Questions) -> tuple[int, ...]:
    if case.request.plan is not None:
        return choice_of(formulation, case.request.plan)
    if solution.choice is None and case.request.pins:
        each = 1 / (1 + len(asked.parts))
        raise no_plan(formulation, asked, solution, solver(case, formulation, each))
    if solution.choice is None:
        raise InfeasiblePlan(why_not(formulation, solution))
    return solution.choice


def plan_of(case: Case, formulation: Formulation, choice: Sequence[int], pinned: Pinned) -> Plan:
    """The plan that a choice stands for, with pinned update periods; the given plan where there is one."""
    if case.request.plan is not None:
        return case.request.plan
    graph, periods = case.graph, pinned.periods
    chosen = formulation.strategies(choice)
    layers = {name: replace(own, update_period=periods.get(name)) for name, own in chosen.items()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, case.cluster.count, layers, case.request.rules)


# ---- the plan that is taken ------------------------------------------------------------------------------------------


def taken(case: Case, one_pass: Solved, pinned: Pinned, rivals: Sequence[Baseline], share: float = 1.0) -> Taken:
    """The solver's plan, or a faster one by the clock: in passes, or with branches at the same time.

    Args:
        rivals: the usual plans.
        share: of the usual effort and time.
    """
    plan, formulation = one_pass.plan, one_pass.formulation
    if case.request.plan is None and case.cluster.count > 1:
        plan = _on_the_clock(case, one_pass, pinned, rivals, share)
    found = None if pinned.layers else _towers(case, formulation, plan, share)
    if found is not None and found.plan is not None:
        plan = found.plan
        formulation = extended(formulation, plan, case.graph, case.cluster, case.costs)
    return Taken(plan, formulation, found)


def _on_the_clock(case: Case, one_pass: Solved, pinned: Pinned, rivals: Sequence[Baseline], share: float) -> Plan:
    """The fastest scheme of the fastest plan known; what runs in passes is improved by the clock."""
    usual = [rival.plan for rival in rivals if rival.fits and rival.plan is not None and not pinned.layers]
    habits = [replace(plan, rules=case.request.rules) for plan in usual]
    others = [*_hidden(case, one_pass, pinned, share * HIDDEN), *habits]
    tries = scheduled(case, pinned, one_pass.plan, others)
    own = [plan for plan in tries if plan.layers == one_pass.plan.layers]
    best = _fastest(case, tries) or case.player.fastest(own or tries) or one_pass.plan
    in_passes = _fastest(case, [plan for plan in tries if plan.scheme in IN_PASSES])
    near = in_passes is not None and case.player.step_s(in_passes) <= NEAR * case.player.step_s(best)
    start = in_passes if in_passes is not None and near else best
    better = polished(case, one_pass.formulation, start, pinned, Effort(int(share * EFFORT)))
    schemes = {plan.scheme for plan in tries}
    same = [under(better, case.graph, scheme) for scheme in IN_PASSES if scheme in schemes]
    return case.player.fastest([best, better, *same]) or best


def _fastest(case: Case, plans: Sequence[Plan]) -> Plan | None:
    """The fastest of these that fits with its transfers, which the solver and the prices of usual plans know little of;
    None where none does."""
    left = list(plans)
    while (best := case.player.fastest(left)) is not None:
        if fits(case.graph, case.cluster, case.costs, plain(best)):
            return best
        left = [plan for plan in left if plan.layers != best.layers]
    return None


def _hidden(case: Case, one_pass: Solved, pinned: Pinned, part: float) -> list[Plan]:
    """What the solver would choose if passes hid most of what crosses to fewer replicas."""
    problem = hidden_boundaries(one_pass.formulation) if case.request.scheme != "gather" else None
    if problem is None:
        return []
    formulation = replace(one_pass.formulation, problem=problem)
    found = fastest(formulation, pinned, solver(case, formulation, part)).choice
    return [] if found is None else [plan_of(case, formulation, found, pinned)]


def _towers(case: Case, formulation: Formulation, draft: Plan, share: float) -> Towers | None:
    """A faster plan with branches at the same time; not sought where the layers or their order are decided by hand."""
    request = case.request
    if request.plan is not None or request.scheme not in ("auto", "gather") or request.rules == "strict":
        return None
    limit_s = case.deadline.part_s(share * SHARE)
    found = search(Ground(case.graph, case.cluster, case.costs, case.player.step_s), draft, formulation, limit_s, share)
    case.deadline.hit = case.deadline.hit or (found is not None and found.timed_out)
    return found
