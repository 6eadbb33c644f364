"""The driver: how a plan is chosen, from priced strategies to the decision that a person reviews.

1. Prices: every layer's legal strategies and the transfers between them      search_space/formulation.py
2. Solve: every shape of plan bounded or solved, with a proof                 search/select.py, solver/solve.py
3. Baselines: the plans people write by hand, under the same costs            search/baselines.py
4. Simulate: the plan's step, device by device                                simulation/timeline.py
5. Explain: the step by parts, and for every layer its best alternative       explain/
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isclose

import torch

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import PRECISIONS
from parplan.errors import InfeasiblePlan, PinError, PlanError
from parplan.fields import counted
from parplan.graph.export.garbage import seldom_collected
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.plan import SCHEDULES, Plan
from parplan.planner.decision import MESHES, Baseline, Decision, Prediction, PricedGraph, Seconds, Simpler
from parplan.planner.explain.advice import ONE, advice, advised, better_batch
from parplan.planner.explain.branch_report import concurrent_branches, with_concurrency
from parplan.planner.explain.layer_report import layer_reports, memory_excess, prediction
from parplan.planner.explain.loss_outside import loss_outside
from parplan.planner.explain.memory_prices import memory_prices
from parplan.planner.explain.pin_prices import with_pins
from parplan.planner.explain.reasons import with_reasons
from parplan.planner.request import Listener, PlanRequest
from parplan.planner.search.baselines import baselines, gpipe, in_fewest_micro_batches
from parplan.planner.search.context import (
    EXACT,
    Case,
    formulated,
    needs_simulation,
    pipeline_peaks,
    plain,
    shape_of,
    simulated_step,
)  # fmt: skip
from parplan.planner.search.micro_batches import MicroBatched, Searched, searched
from parplan.planner.search.schemes import (
    rival_in_passes,
    scheme_prices,
    schemes_of,
    simulated_prediction,
    simulated_reports,
)
from parplan.planner.search.select import ShapeSearch
from parplan.planner.search.simpler import Candidate, Found, differences, plan_by_hand
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.infeasible_message import enough_devices, nearest_to_fitting
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import Questions, pin_questions
from parplan.planner.search_space.rules import parts_words
from parplan.planner.search_space.strategies import offers_uneven
from parplan.planner.search_space.verifier import check, is_legal, mismatches, uneven_replicas
from parplan.planner.simulation.timeline import Timeline
from parplan.planner.solver.problem import Problem, Solution, Status, objective
from parplan.planner.solver.solve import GAP, solve

__all__ = ["Listener", "PlanRequest", "decide", "estimate", "predict"]

BASELINE_TIME = 0.2
"""Part of the time left that the solve of each baseline may take."""

MOST_NAMED = 64
"""Devices up to which a machine that is large enough is looked for: each number takes a second or two."""

OPEN = 1e-3
"""A gap of the search below this says nothing of the plan, however it ended."""


@seldom_collected()
def decide(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: PlanRequest,
    progress: Listener | None = None,
    micro_batched: MicroBatched | None = None,
) -> Decision:
    """The fastest plan of `graph` on `cluster` under `costs`, with its proof, reasons and baselines.

    Args:
        graph: at the size of a micro-batch, if the costs are of one.
        micro_batched: the graph, where it has the whole batch, in as many micro-batches as memory asks for.

    Raises:
        InfeasiblePlan: no plan fits; the text names the limit, what is missing and the layers.
        PinError: a pin names no layer, breaks a rule, or comes with a plan.
        PlanError: `request.plan` is for another model or breaks a rule, or the scheme asked for is not possible.
    """
    begin = time.perf_counter()
    schemes_of(request.scheme, request.plan)
    case = _case(graph, cluster, costs, request, progress)

    def solve_baseline(problem: Problem) -> Solution:
        limit_s = case.deadline.part_s(BASELINE_TIME)
        return case.deadline.watched(solve(problem, limit_s))

    free = micro_batched is not None and request.plan is None and not request.pins and request.rules == "default"

    def enough(counts: range) -> str:
        """The fewest of so many devices that are enough; empty where something is decided by hand, or none are."""
        if not free or not graph.training or cluster.mixed or cluster.home is not None:
            return ""
        return enough_devices(graph, cluster, request.precision, request.optimizer, counts)

    def refused(why: str) -> InfeasiblePlan:
        more = enough(range(2 * cluster.count, MOST_NAMED + 1))
        return InfeasiblePlan(f"{why}\n  {more}" if more else why)

    try:
        result = searched(case, partial(_questions, request, cluster), micro_batched)
    except InfeasiblePlan as reason:
        raise refused(str(reason)) from reason
    search, found, case = result.search, result.found, result.case
    by_hand = _plans_by_hand(result, solve_baseline)
    beside = [one for one in by_hand if one.micro_batches == found.plan.micro_batches]
    simulated = tuple(rival_in_passes(one, case) if one in beside else one for one in by_hand)
    in_stages = gpipe(result.sized) if result.tried or result.peaks else ()
    case, found = _taken(search, found, beside)
    decision = _explained(case, found, (*simulated, *in_stages), search.asked.whole)
    if request.plan is None and memory_excess(cluster, decision.prediction):
        raise refused(nearest_to_fitting(cluster, decision.prediction, by_hand) + result.why_whole)
    if MESHES not in found.proof.covered and not any(one.name == ONE and one.fits for one in by_hand):
        fewer = enough(range(1, cluster.count))  # of models as large as those of meshes that takes ten seconds and more
        decision = replace(decision, notes=(*decision.notes, *[f"{fewer[:1].upper()}{fewer[1:]}."] * bool(fewer)))
    lacking = result.without or memory_prices(case, found.plan, decision.prediction, result.sized, _priced)
    now = time.perf_counter()
    seconds = Seconds(request.capture_s, search.costs_s, now - begin - search.costs_s, now - request.started)
    decision = replace(decision, micro_batches=result.tried, without=lacking, seconds=seconds)
    return with_pins(case, decision, search, search.asked) if request.pins else decision


def _plans_by_hand(result: Searched, solve: Callable[[Problem], Solution]) -> tuple[Baseline, ...]:
    """The plans by hand, data parallel in as few micro-batches as it fits in. Beside a mesh that alone, as all
    strategies of a large model take long to formulate."""
    case, plan = result.case, result.found.plan
    if MESHES in result.found.proof.covered:
        return in_fewest_micro_batches(plan, case.cluster, result.sized, solve)
    known = baselines(case.graph, case.cluster, case.costs, result.search.one_pass(), plan, solve)
    if plan.micro_batches == 1 or case.cluster.mixed:
        return known
    own = {one.name: one for one in in_fewest_micro_batches(plan, case.cluster, result.sized, solve)}
    return tuple(one if one.name == ONE else own.get(one.name, one) for one in known)


def _questions(request: PlanRequest, cluster: Cluster, graph: LayerGraph) -> Questions:
    return pin_questions(request.pins, graph, cluster, request.rules == "strict")


@seldom_collected()
def predict(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> Prediction:
    """The predicted step of `plan`; nothing is searched or proven.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    plan = _reviewed(plan, graph, cluster, costs)
    timeline = simulated_step(plan, graph, cluster, costs)
    return _predicted(plan, graph, cluster, costs, timeline, *formulated(plan, graph, cluster, costs))


@seldom_collected()
def estimate(graph: LayerGraph, cluster: Cluster, costs: CostModel, request: PlanRequest) -> Prediction:
    """The predicted step of the fastest plan (or of `request.plan`), to compare graphs with.

    Raises:
        InfeasiblePlan, PinError, PlanError: as for `decide`.
    """
    if (given := request.given) is not None:
        return predict(graph, request.priced_on(cluster, given), costs, given)
    case = _case(graph, cluster, costs, request)
    result = searched(case, partial(_questions, request, cluster))
    return _priced(result.case, result.found.plan)


def _taken(search: ShapeSearch, found: Found, by_hand: Sequence[Baseline]) -> tuple[Case, Found]:
    """The plan by hand that the tolerance prefers, else the plan found; with the case that it is priced in.

    A plan that the user decides, in part or by its scheme, stays as it is.
    """
    case, request, graph = search.case, search.case.request, search.case.graph
    step_s, before = found.proof.objective, found.proof.simpler
    fastest_s = step_s if before is None else before.fastest_s
    simplest = None
    decided = request.plan is not None or request.pins or (request.stages or 1) > 1
    if not decided and request.scheme in ("auto", "gather"):
        alone = not request.started_ranks
        legal = [one for one in by_hand if (alone or one.name != ONE) and _keeps(one, graph, request.rules)]
        simplest = plan_by_hand(legal, fastest_s, request.tolerance)
    plan = found.plan if simplest is None or simplest.plan is None else replace(simplest.plan, rules=request.rules)
    own = replace(case, cluster=request.priced_on(case.cluster, plan))
    if own.cluster != case.cluster:
        formulation = ShapeSearch(own, search.asked).formulation(shape_of(plan, graph, own.cluster))
        assert formulation is not None  # every layer has a strategy on that device
    elif plan is found.plan:
        return case, found
    else:
        formulation = search.one_pass()
    choice = formulation.choice(plain(plan))
    own_s = own.step_s(plan, objective(formulation.problem, choice))
    simpler = before if simplest is None else None
    gap = max(0.0, 1 - found.proof.bound / own_s) if own_s > 0 else 0.0
    if simplest is not None and own_s > fastest_s * (1 + GAP):
        changes = Candidate(own_s, own_s, plan, formulation, choice).changes
        fastest = Candidate(step_s, step_s, found.plan, found.formulation, found.choice)
        known = before or Simpler(fastest_s, fastest.changes, 0)
        words = differences(found.fastest or found.plan, plan, graph)
        simpler = replace(known, kept=changes, by_hand=simplest.name, differs=words)
    proof = replace(
        found.proof, status=(Status.OPTIMAL if gap <= GAP else Status.FEASIBLE).value, objective=own_s, gap=gap,
        simpler=simpler,
    )  # fmt: skip
    return own, Found(plan, formulation, choice, proof, found.tried, found.without_s)


def _keeps(one: Baseline, graph: LayerGraph, rules: str) -> bool:
    """Whether a plan by hand keeps the rules that are asked for."""
    if one.plan is None or rules == "default":
        return one.plan is not None
    return is_legal(replace(one.plan, rules=rules), graph)


def _priced(case: Case, plan: Plan) -> Prediction:
    """The predicted step of any plan of a case."""
    graph, cluster, costs = case.graph, case.cluster, case.costs
    return _predicted(plan, graph, cluster, costs, case.simulated(plan), *formulated(plan, graph, cluster, costs))


def _predicted(
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    timeline: Timeline | None,
    formulation: Formulation,
    choice: Sequence[int],
) -> Prediction:
    """The step of a plan by the objective of the plan alone; simulated where its parts do not add up."""
    step = prediction(formulation, choice, costs, cluster.count)
    add_up = timeline is None or isclose(timeline.step_s, step.step_s, rel_tol=EXACT)
    if timeline is None or (add_up and not needs_simulation(plan, graph)):
        return step
    found = simulated_prediction(step, timeline)
    in_stages = plan.schedule != SCHEDULES[0]
    return replace(found, memory_bytes=pipeline_peaks(plan, graph, costs)) if in_stages else found


def _case(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: PlanRequest,
    progress: Listener | None = None,
) -> Case:
    """The planning context, with a given plan checked, and a note on where inputs arrive."""
    if (given := request.given) is not None:
        if request.pins:
            raise PinError(
                "a plan decides every layer, so there is nothing left to pin; leave out the plan or the pins"
            )
        plan = _reviewed(given, graph, cluster, costs)
        whole = replace(graph, batch=graph.batch and plan.batch)
        request = replace(request, plan=plan, notes=(*request.notes, *mismatches(given, whole)))
    if cluster.home is not None:
        note = (
            f"Inputs arrive on device {cluster.home} and results go back there: one process runs all devices. Under "
            "torchrun every process brings its own samples."
        )
        request = replace(request, notes=(*request.notes, note))
    one_pass = request.scheme in ("auto", "gather") and not any(pin.update_period for pin in request.pins)
    uneven = one_pass and request.rules != "strict" and offers_uneven(graph.batch, cluster)
    return replace(Case.of(graph, cluster, costs, request, progress), uneven=uneven)


def _reviewed(plan: Plan, graph: LayerGraph, cluster: Cluster, costs: CostModel) -> Plan:
    """A given plan, legal for the batch and the devices it is priced for.

    Raises:
        PlanError: it is for another model or number of devices, or breaks a rule.
    """
    if plan.devices != cluster.count:
        raise PlanError(
            f"the plan is for {plan.devices} devices, to be priced for {cluster.count}; say --gpus {plan.devices}, "
            f"name a --cluster of {plan.devices}, or make a plan for {cluster.count}"
        )
    if plan.micro_batches != costs.step.micro_batches:
        raise PlanError(
            f"the plan has {plan.micro_batches} micro-batches, and layers are priced for {costs.step.micro_batches} of "
            "a step; price the graph at the size of a micro-batch"
        )
    plan = replace(plan, batch=plan.micro_batches * graph.batch if graph.batch else plan.batch)
    check(plan, graph)
    return plan


def _explained(case: Case, found: Found, by_hand: tuple[Baseline, ...], pinned: Pinned) -> Decision:
    """The decision on a plan that was found: its prediction, proof, reasons and notes; how long it took is not told."""
    plan, request = found.plan, case.request
    # The problem of the plan alone counts every transfer once, however many read a value; a search's may count more.
    alone, only = found.formulation, found.choice
    if any(len(options) > 1 for options in alone.options):
        alone, only = formulated(plan, case.graph, case.cluster, case.costs)
    step = _predicted(plan, case.graph, case.cluster, case.costs, case.simulated(plan), alone, only)
    layers = layer_reports(case.graph, alone, only, plan)
    if step.simulated:
        layers = simulated_reports(layers, case.graph, case.cluster, case.costs, plan)
    branches = concurrent_branches(case.graph, plan, layers, found)
    layers = with_concurrency(layers, branches)
    layers = with_reasons(layers, case.graph, found.formulation, found.choice, plan)
    if plan.schedule != SCHEDULES[0]:
        numbers = stage_numbers(case.graph, plan.layers)
        layers = tuple(
            replace(one, why=f"stage {stage} of {numbers.count}", stage=stage)
            for one in layers
            for stage in [1 + numbers.of[one.name]]
        )
    elif MESHES in found.proof.covered:
        layers = tuple(replace(one, why="part of the mesh that was chosen for all equal blocks") for one in layers)
    several, fits = case.cluster.count > 1, not memory_excess(case.cluster, step)
    weights = {case.graph.values[name].dtype for name in case.graph.parameters} or {torch.float32}
    outside = loss_outside(plan, case.graph, case.cluster, case.costs, step)
    notes = (*request.notes, *_notes(case, found, step), *([str(outside)] if outside is not None else []))
    schemes = scheme_prices(case, plan, max(step.memory_bytes), pinned) if several else None
    return Decision(
        parameters=case.graph.parameter_count,
        cluster=case.cluster,
        precision=" and ".join(
            sorted({PRECISIONS.get(case.graph.autocast or weight, request.precision) for weight in weights})
        ),
        optimizer=request.optimizer,
        plan=plan,
        layers=layers,
        prediction=step,
        baselines=by_hand,
        advice=advice(plan, step.step_s, by_hand, found.proof.simpler, better_batch(plan, case.graph), fits),
        proof=found.proof,
        seconds=Seconds(0.0, 0.0, 0.0, 0.0),
        notes=notes,
        times_from=request.times_from,
        links=case.costs.step.links,
        passes=schemes,
        branches=branches,
        advised=advised(plan, step.step_s, by_hand, found.proof.simpler is not None),
        priced=PricedGraph(case.graph, case.costs),
        loss_outside=outside,
    )


def _notes(case: Case, found: Found, step: Prediction) -> Sequence[str]:
    """Sentences on models captured at one batch size only, searches cut short, too much memory."""
    plan, graph, notes = found.plan, case.graph, list[str]()
    if counts := uneven_replicas(plan, graph):
        parts = " and ".join(f"{count} replicas have {parts_words(plan.micro_batch, count)}" for count in counts)
        notes.append(f'{parts} samples; bends R1 (rules "strict" keeps it).')
    outside = not any(isinstance(v, str) and graph.values[v].shape == () for v in graph.user_outputs)
    if plan.micro_batches > 1 and outside:
        notes.append(
            f"{plan.micro_batches} micro-batches need the loss in each: train with `train_step`, or plan with loss=fn, "
            "targets=...; a loss behind a plain call of the model keeps the activations of all."
        )
    if plan.sharded:
        kept = " One process keeps them whole all the same: memory is that of a process per device."
        again = sum(own.state == "gathered" for own in plan.layers.values())
        which = "" if again == len(plan.sharded) else f" of {again} of them"
        freed = f", and{which} freed behind it and gathered again for the backward (ZeRO-3)" if again else " (ZeRO-2)"
        notes.append(
            f"Sharded state: weights, gradients and optimizer state of {counted(len(plan.sharded), 'layer')} lie in "
            f"slices; weights are gathered for each forward{freed}. Vectors stay whole, and weights that layers share."
            f"{kept if case.cluster.home is not None else ''}"
        )
    if plan.schedule != SCHEDULES[0]:
        numbers = stage_numbers(graph, plan.layers)
        notes.append(
            f"Pipeline stages: {numbers.count} on {len(numbers.groups)} groups of devices, which take micro-batches in "
            f"the order {plan.schedule} (docs/pipeline.md). The step is simulated."
        )
    if plan.replayed:
        notes.append(
            f"Recomputation: {counted(len(plan.replayed), 'layer')} keep nothing that their unit makes for the "
            "backward, and run forward again before it (activation checkpointing)."
        )
    if graph.checkpoints:
        calls = counted(sum(graph.checkpoints.values()), "call")
        line = next(filter(None, graph.checkpoints), "")
        notes.append(
            f"{calls} of torch.utils.checkpoint in the forward{f' ({line})' if line else ''} left out by the capture: "
            "plans decide themselves what is computed again (pins saved:replay)."
        )
    if graph.settled:
        more = f" and {len(graph.settled) - 1} more" if len(graph.settled) > 1 else ""
        notes.append(
            f"The model's first call changes it ({graph.settled[0]}{more}): it was captured, and left, as later calls "
            "run."
        )
    if graph.compiling:
        notes.append(
            "The code that the model runs in Python cannot be captured: planned is its code for compilers, which it "
            f"asks for at {graph.compiling[0]}"
        )
    if graph.checks:
        text = counted(len(graph.checks), "assertion")
        notes.append(f"Checked before every step: {text} of the forward on its inputs ({graph.checks[0].line}).")
    if graph.unchecked:
        text = counted(len(graph.unchecked), "assertion")
        notes.append(f"Not checked: {text} of the forward on weights or activations ({graph.unchecked[0]}).")
    if graph.one_batch:
        reason = " ".join(graph.one_batch.split())
        samples = counted(graph.batch or 0, "sample")
        notes.append(f"No layer can have replicas: {graph.model} works for {samples}, and not {reason}")
    known = found.proof.simpler.fastest_s if found.proof.simpler is not None else found.proof.objective
    is_open = known > found.proof.bound * (1 + max(OPEN, case.request.tolerance))
    if case.request.plan is None and case.deadline.hit and is_open:
        notes.append(
            f"The time limit of {case.deadline.limit_s:g} s ended a search: with a longer --time-limit, "
            "or on another machine, the plan may be another one."
        )
    return [*notes, *memory_excess(case.cluster, step)]
