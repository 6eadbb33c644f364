"""The driver: how a plan is chosen, from priced strategies to the decision that a person reviews.

1. Prices: every layer's legal strategies and the transfers between them      search_space/formulation.py
2. Solve: the fastest plan in one pass, with a proof                          search/select.py, solver/solve.py
   (twice where devices do not divide the batch: with unequal parts and with equal ones)
3. Baselines: the plans people write by hand, under the same costs            search/baselines.py
4. Search: plans in passes, and with branches at the same time, simulated     search/select.py
5. Explain: the step by parts, and for every layer its best alternative       explain/
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import InfeasiblePlan, PinError, PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Baseline, Decision, Prediction, Proof, Seconds
from parplan.planner.explain.advice import advice, better_batch
from parplan.planner.explain.branch_report import concurrent_branches, search_notes, with_concurrency
from parplan.planner.explain.layer_report import layer_reports, memory_excess, prediction
from parplan.planner.explain.pin_prices import with_pins
from parplan.planner.explain.reasons import reasons_in_one_pass
from parplan.planner.explain.simulated_reasons import simulated_reasons
from parplan.planner.request import Listener, PlanRequest
from parplan.planner.search.baselines import baselines
from parplan.planner.search.context import Case, Deadline, plain
from parplan.planner.search.schemes import (
    clocked,
    clocked_facts,
    clocked_proof,
    needs_clock,
    rival_in_passes,
    scheduled,
    scheme_prices,
    schemes_of,
)
from parplan.planner.search.select import Solved, Taken, solved, taken
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.infeasible_message import nearest_to_fitting
from parplan.planner.search_space.pin_constraints import Uneven
from parplan.planner.search_space.pin_search import Questions, pin_questions
from parplan.planner.search_space.rules import parts_words
from parplan.planner.search_space.strategies import offers_uneven
from parplan.planner.search_space.verifier import check, mismatches, uneven_replicas
from parplan.planner.simulation.simulator import EFFORT, Effort
from parplan.planner.simulation.timeline import simulate
from parplan.planner.solver.problem import Problem, Solution, Status, evaluate
from parplan.planner.solver.solve import solve

__all__ = ["Listener", "PlanRequest", "decide", "estimate", "predict"]

BASELINE_TIME = 0.2
"""Part of the time left that the solve of each baseline may take."""

UNEVEN_WORTH = 0.01
"""Unequal parts of the batch have to make a step faster by more than this than every plan with equal ones."""


@dataclass(frozen=True)
class _Searched:
    """The plan that is taken under a case, with the solver's plan in one pass, the usual ones, and the pins kept.

    `equal_parts` says why the batch is split evenly, where a plan with unequal parts was found too.
    """

    case: Case
    pins: Questions
    one_pass: Solved
    by_hand: tuple[Baseline, ...]
    found: Taken
    equal_parts: str = ""

    @property
    def step_s(self) -> float:
        """Predicted seconds of its step; infinite where it does not fit."""
        case, plan = self.case, self.found.plan
        step = prediction(self.found.formulation, self.found.choice, case.costs)
        if memory_excess(case.cluster, step):
            return math.inf
        return case.player.step_s(plan) if needs_clock(plan, case.graph) else step.step_s


def decide(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: PlanRequest,
    progress: Listener | None = None,
) -> Decision:
    """The fastest plan of `graph` on `cluster` under `costs`, with its proof, reasons and baselines.

    Raises:
        InfeasiblePlan: no plan fits; the text names the limit, what is missing and the layers.
        PinError: a pin names no layer, breaks a rule, or comes with a plan.
        PlanError: `request.plan` is for another model or breaks a rule, or the scheme asked for is not possible.
    """
    begin = time.perf_counter()
    schemes_of(request.scheme, request.plan)
    one = _worth_its_parts(_case(graph, cluster, costs, request, progress))
    decision = _explained(one, begin)
    if request.plan is None and memory_excess(cluster, decision.prediction):
        raise InfeasiblePlan(nearest_to_fitting(cluster, decision.prediction))
    return with_pins(one.case, decision, one.one_pass, one.pins) if request.pins else decision


def _worth_its_parts(case: Case) -> _Searched:
    """The fastest plan, with unequal parts of the batch only where those are worth it (UNEVEN_WORTH)."""
    if not case.uneven or case.request.plan is not None:
        return _searched(case)
    first = _searched(replace(case, deadline=Deadline(case.deadline.left_s() / 2)))
    counts = uneven_replicas(first.found.plan, case.graph)
    if not counts:
        return first
    rest = Deadline(case.deadline.left_s())
    rest.hit = first.case.deadline.hit
    try:
        even = _searched(replace(case, deadline=rest, uneven=False), first.by_hand)
    except InfeasiblePlan:
        return first
    gain = even.step_s / first.step_s - 1
    if gain > UNEVEN_WORTH:
        return first
    parts = " or ".join(parts_words(even.found.plan.batch, count) for count in counts)
    note = f"Unequal parts of the batch ({parts} samples) gain {max(0.0, gain):.1%}, and are taken above"
    return replace(even, equal_parts=f"{note} {UNEVEN_WORTH:.0%}.")


def _searched(case: Case, by_hand: tuple[Baseline, ...] | None = None) -> _Searched:
    """The plan that a case takes.

    Args:
        by_hand: the usual plans, where they are known.
    """
    graph, cluster, costs = case.graph, case.cluster, case.costs
    pins = pin_questions(case.request.pins, graph, cluster, _pinned_parts(case))
    one_pass = solved(case, pins)

    def solve_baseline(problem: Problem) -> Solution:
        limit_s = case.deadline.part_s(BASELINE_TIME)
        return case.deadline.watched(solve(problem, limit_s), limit_s)

    if by_hand is None:
        by_hand = baselines(graph, cluster, costs, one_pass.formulation, one_pass.plan, solve_baseline)
    return _Searched(case, pins, one_pass, by_hand, taken(case, one_pass, pins.whole, by_hand))


def _pinned_parts(case: Case) -> Uneven:
    """Whether pinned layers may have unequal parts."""
    if case.request.rules == "strict":
        return Uneven.NONE
    return Uneven.ALL if case.uneven else Uneven.IF_PINNED


def predict(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> Prediction:
    """The predicted step of `plan`; nothing is searched or proven.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    reviewed = _reviewed(plan, graph, cluster)
    candidates = {name: (strategy,) for name, strategy in plain(reviewed).items()}
    formulation = formulate(graph, cluster, costs, candidates)
    step = prediction(formulation, (0,) * len(formulation.problem.nodes), costs)
    return clocked(step, simulate(graph, cluster, costs, reviewed)) if needs_clock(plan, graph) else step


def estimate(graph: LayerGraph, cluster: Cluster, costs: CostModel, request: PlanRequest) -> Prediction:
    """The predicted step of the solver's plan under its fastest scheme (or of `request.plan`), to compare graphs with.

    Raises:
        InfeasiblePlan, PinError, PlanError: as for `decide`.
    """
    if request.plan is not None:
        return predict(graph, cluster, costs, request.plan)
    case = _case(graph, cluster, costs, request)
    pins = pin_questions(request.pins, graph, cluster, _pinned_parts(case))
    one_pass = solved(case, pins)
    plan = one_pass.plan
    with contextlib.suppress(PinError, PlanError):  # it cannot have the scheme that is asked for; others may
        plan = case.player.fastest(scheduled(case, pins.whole, plan, ())) or plan
    step = prediction(one_pass.formulation, one_pass.choice, costs)
    return clocked(step, case.player.timeline(plan)) if needs_clock(plan, graph) else step


def _case(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: PlanRequest,
    progress: Listener | None = None,
) -> Case:
    """The planning context, with a given plan checked."""
    if request.plan is not None:
        if request.pins:
            raise PinError(
                "a plan decides every layer, so there is nothing left to pin; leave out the plan or the pins"
            )
        notes = (*request.notes, *mismatches(request.plan, graph))
        request = replace(request, plan=_reviewed(request.plan, graph, cluster), notes=notes)
    one_pass = request.scheme in ("auto", "gather") and not any(pin.update_period for pin in request.pins)
    uneven = one_pass and request.rules != "strict" and offers_uneven(graph.batch, cluster)
    return replace(Case.of(graph, cluster, costs, request, progress), uneven=uneven)


def _reviewed(plan: Plan, graph: LayerGraph, cluster: Cluster) -> Plan:
    """A given plan, legal for the batch and the devices it is priced for.

    Raises:
        PlanError: it is for another model or number of devices, or breaks a rule.
    """
    if plan.devices != cluster.count:
        raise PlanError(
            f"the plan is for {plan.devices} devices, to be priced for {cluster.count}; say --gpus {plan.devices}, "
            f"name a --cluster of {plan.devices}, or make a plan for {cluster.count}"
        )
    plan = replace(plan, batch=graph.batch or plan.batch)
    check(plan, graph)
    return plan


def _explained(one: _Searched, begin: float) -> Decision:
    """The decision on a plan that was found: its prediction, proof, reasons and notes."""
    case, one_pass, found, pinned = one.case, one.one_pass, one.found, one.pins.whole
    plan, request = found.plan, case.request
    by_hand = tuple(rival_in_passes(baseline, case) for baseline in one.by_hand)
    step = prediction(found.formulation, found.choice, case.costs)
    proof = _proof(found, one_pass.solution, request.plan is not None)
    proof = replace(proof, equal_parts=bool(one.equal_parts))
    layers = layer_reports(case.graph, found.formulation, found.choice, plan)
    simulated = needs_clock(plan, case.graph)
    if simulated:
        step = clocked(step, case.player.timeline(plan))
        layers = clocked_facts(layers, case.graph, case.cluster, case.costs, plan)
        proof = clocked_proof(proof, step.step_s)
    branches = concurrent_branches(case.graph, plan, layers, found.towers)
    layers = with_concurrency(layers, branches)
    if simulated:
        known = [layer.name for layer in layers if layer.why]
        reasons = simulated_reasons(case, found, pinned, Effort(EFFORT), known)
    else:
        reasons = reasons_in_one_pass(case.graph, found.formulation, found.choice, plan)
    layers = tuple(replace(layer, why=layer.why or reasons.get(layer.name, "")) for layer in layers)
    several = case.cluster.count > 1
    notes = (*request.notes, *_notes(case, found, step), *filter(None, [one.equal_parts]))
    schemes = scheme_prices(case, plan, max(step.memory_bytes), pinned) if several else None
    now = time.perf_counter()
    return Decision(
        parameters=case.graph.parameter_count,
        cluster=case.cluster,
        precision=request.precision,
        optimizer=request.optimizer,
        plan=plan,
        layers=layers,
        prediction=step,
        baselines=by_hand,
        advice=advice(step.step_s, by_hand, better_batch(plan, case.graph)),
        proof=proof,
        seconds=Seconds(request.capture_s, one_pass.costs_s, now - begin - one_pass.costs_s, now - request.started),
        notes=notes,
        times_from=request.times_from,
        links=case.costs.step.links,
        passes=schemes,
        branches=branches,
    )


def _notes(case: Case, found: Taken, step: Prediction) -> Sequence[str]:
    """Sentences on a model that was captured at one batch size only, on searches cut short, and on too much memory."""
    graph, plan, notes = case.graph, found.plan, list[str]()
    if counts := uneven_replicas(plan, graph):
        parts = " and ".join(f"{count} replicas have {parts_words(plan.batch, count)}" for count in counts)
        notes.append(f'{parts} samples; bends R1 (rules "strict" keeps it).')
    if graph.one_batch:
        reason = " ".join(graph.one_batch.split())
        notes.append(f"No layer can have replicas: {graph.model} works for {graph.batch} samples, and not {reason}")
    notes += search_notes(found.towers)
    if case.request.plan is None and case.deadline.hit:
        notes.append(
            f"The time limit of {case.request.time_limit_s:g} s ended a search for this plan: with a longer "
            "--time-limit, or on another machine, there may be another one."
        )
    return [*notes, *memory_excess(case.cluster, step)]


def _proof(found: Taken, solution: Solution, given: bool) -> Proof:
    objective = evaluate(found.formulation.problem, found.choice).objective
    gap = max(0.0, (objective - solution.bound) / objective) if objective > 0 else 0.0
    status = solution.status.value if gap <= 1e-6 or solution.status is not Status.OPTIMAL else Status.FEASIBLE.value
    return Proof(status, objective, solution.bound, gap, solution.seconds, given)
