"""The driver: candidates, costs, solve, the clock, and everything a person needs to review the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import InfeasiblePlan, PinError, PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Baseline, Decision, LayerFacts, Prediction, Proof, Seconds
from parplan.planner.explain.advice import advice
from parplan.planner.explain.branch_report import along, notes_on, side_by_side
from parplan.planner.explain.layer_facts import layer_facts, overfull, prediction, reasons_in_one_pass
from parplan.planner.explain.pin_prices import with_pins
from parplan.planner.explain.simulated_reasons import reasons_on_the_clock
from parplan.planner.request import Progress, Request
from parplan.planner.search.baselines import baselines
from parplan.planner.search.context import Case, plain
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
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import pin_questions
from parplan.planner.search_space.verifier import check, mismatches
from parplan.planner.simulation.simulator import EFFORT, Effort
from parplan.planner.simulation.timeline import simulate
from parplan.planner.solver.problem import Problem, Solution, Status, evaluate
from parplan.planner.solver.solve import solve

__all__ = ["Progress", "Request", "decide", "predict", "sketch"]

# Part of the time left that each of the usual plans may take.
RIVAL = 0.2


def decide(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request, progress: Progress | None = None
) -> Decision:
    """The fastest plan of `graph` on `cluster` under `costs`, with its proof, reasons and rivals.

    Raises:
        InfeasiblePlan: no plan fits; the text names the limit, what is missing and the layers.
        PinError: a pin names no layer, breaks a rule, or comes with a plan.
        PlanError: `request.plan` is for another model or breaks a rule, or the scheme asked for is not possible.
    """
    begin = time.perf_counter()
    schemes_of(request.scheme, request.plan)
    case = _case(graph, cluster, costs, request, progress)
    asked = pin_questions(request.pins, graph, cluster)
    one_pass = solved(case, asked)
    rivals = baselines(graph, cluster, costs, one_pass.formulation, one_pass.plan, _rival_solver(case))
    found = taken(case, one_pass, asked.whole, rivals)
    rivals = tuple(rival_in_passes(rival, case) for rival in rivals)
    decision = _decision(case, one_pass, found, rivals, asked.whole, begin)
    if request.plan is None and overfull(cluster, decision.prediction):
        raise InfeasiblePlan(nearest_to_fitting(cluster, decision.prediction))
    return with_pins(case, decision, one_pass, asked) if request.pins else decision


def predict(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> Prediction:
    """What one step of `plan` takes; nothing is searched or proven.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    reviewed = _reviewed(plan, graph, cluster)
    candidates = {name: (strategy,) for name, strategy in plain(reviewed).items()}
    formulation = formulate(graph, cluster, costs, candidates)
    step = prediction(formulation, (0,) * len(formulation.problem.nodes), costs)
    return clocked(step, simulate(graph, cluster, costs, reviewed)) if needs_clock(plan, graph) else step


def sketch(graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request) -> Prediction:
    """What one step of the solver's plan takes under its fastest scheme (or of `request.plan`), to compare graphs with.

    Raises:
        InfeasiblePlan, PinError, PlanError: as for `decide`.
    """
    if request.plan is not None:
        return predict(graph, cluster, costs, request.plan)
    case = _case(graph, cluster, costs, request)
    asked = pin_questions(request.pins, graph, cluster)
    one_pass = solved(case, asked)
    step, plan = prediction(one_pass.formulation, one_pass.choice, costs), _in_passes(case, one_pass.plan, asked.whole)
    return clocked(step, case.player.timeline(plan)) if needs_clock(plan, graph) else step


def _in_passes(case: Case, plan: Plan, pinned: Pinned) -> Plan:
    """The solver's plan under its fastest scheme; as it is where it cannot have one that is asked for, others may."""
    try:
        return case.player.fastest(scheduled(case, pinned, plan, ())) or plan
    except (PinError, PlanError):
        return plan


def _case(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request, progress: Progress | None = None
) -> Case:
    """What there is to do, checked."""
    if request.plan is not None:
        if request.pins:
            raise PinError(
                "a plan decides every layer, so there is nothing left to pin; leave out the plan or the pins"
            )
        notes = (*request.notes, *mismatches(request.plan, graph))
        request = replace(request, plan=_reviewed(request.plan, graph, cluster), notes=notes)
    return Case.of(graph, cluster, costs, request, progress)


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


def _rival_solver(case: Case) -> Callable[[Problem], Solution]:
    def solved_as(problem: Problem) -> Solution:
        limit_s = case.deadline.part_s(RIVAL)
        return case.deadline.watched(solve(problem, limit_s), limit_s)

    return solved_as


def _decision(
    case: Case, one_pass: Solved, found: Taken, rivals: tuple[Baseline, ...], pinned: Pinned, begin: float
) -> Decision:
    """The plan that is taken with all that is to be said of it."""
    plan, request, cut_off = found.plan, case.request, _cut_off(case)
    step = prediction(found.formulation, found.choice, case.costs)
    proof = _proof(found, one_pass.solution, request.plan is not None)
    layers = layer_facts(case.graph, found.formulation, found.choice, plan)
    if needs_clock(plan, case.graph):
        step = clocked(step, case.player.timeline(plan))
        layers = clocked_facts(layers, case.graph, case.cluster, case.costs, plan)
        proof = clocked_proof(proof, step.step_s)
    beside = side_by_side(case.graph, plan, layers, found.towers)
    layers = along(layers, beside)
    layers = _with_reasons(case, found, pinned, layers)
    several, over = case.cluster.count > 1, overfull(case.cluster, step)
    return Decision(
        parameters=case.graph.parameter_count,
        cluster=case.cluster,
        precision=request.precision,
        optimizer=request.optimizer,
        plan=plan,
        layers=layers,
        prediction=step,
        baselines=rivals,
        advice=advice(step.step_s, rivals),
        proof=proof,
        seconds=_seconds(request, one_pass.costs_s, begin),
        notes=(
            *request.notes,
            *_one_batch(case.graph),
            *notes_on(found.towers),
            *cut_off,
            *over,
        ),
        times_from=request.times_from,
        links=case.costs.step.links,
        passes=scheme_prices(case, plan, max(step.memory_bytes), pinned) if several else None,
        beside=beside,
    )


def _cut_off(case: Case) -> list[str]:
    """What to say where time ended a search that would have ended by itself."""
    if case.request.plan is not None or not case.deadline.hit:
        return []
    return [
        f"The time limit of {case.deadline.limit_s:g} s ended a search for this plan: with a longer --time-limit, or "
        "on another machine, there may be another one."
    ]


def _one_batch(graph: LayerGraph) -> list[str]:
    """The reason why no layer was offered replicas, where the model was captured at one batch size only."""
    if not graph.one_batch:
        return []
    reason = " ".join(graph.one_batch.split())
    return [f"No layer can have replicas: {graph.model} works for {graph.batch} samples, and not {reason}"]


def _proof(found: Taken, solution: Solution, given: bool) -> Proof:
    objective = evaluate(found.formulation.problem, found.choice).objective
    gap = max(0.0, (objective - solution.bound) / objective) if objective > 0 else 0.0
    status = solution.status.value if gap <= 1e-6 or solution.status is not Status.OPTIMAL else Status.FEASIBLE.value
    return Proof(status, objective, solution.bound, gap, solution.seconds, given)


def _with_reasons(case: Case, found: Taken, pinned: Pinned, layers: Sequence[LayerFacts]) -> tuple[LayerFacts, ...]:
    """The facts with reasons where none is given yet, by what the plan is priced by."""
    said = [facts.name for facts in layers if facts.why]
    if needs_clock(found.plan, case.graph):
        why = reasons_on_the_clock(case, found, pinned, Effort(EFFORT), said)
    else:
        why = reasons_in_one_pass(case.graph, found.formulation, found.choice, found.plan)
    return tuple(replace(facts, why=facts.why or why.get(facts.name, "")) for facts in layers)


def _seconds(request: Request, costs_s: float, begin: float) -> Seconds:
    now = time.perf_counter()
    return Seconds(request.capture_s, costs_s, now - begin - costs_s, now - request.started)
