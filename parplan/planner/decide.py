"""The driver: candidates, costs, solve, and everything a person needs to review the answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import InfeasiblePlan, PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.baselines import baselines
from parplan.planner.decision import Baseline, Decision, LayerFacts, Prediction, Proof, Seconds
from parplan.planner.formulate import Formulation, formulate
from parplan.planner.infeasible import why_not
from parplan.planner.problem import Evaluation, Problem, Solution, Status, evaluate
from parplan.planner.reasons import reason
from parplan.planner.solve import solve
from parplan.planner.strategies import cluster_blocks, strategies
from parplan.planner.verifier import bends, check
from parplan.planner.what_if import WhatIf

__all__ = ["Progress", "Request", "decide", "predict"]


class Progress(Protocol):
    """What the driver tells while it works; see report/progress.py."""

    def phase(self, name: str) -> None:
        """A phase begins: "capture", "costs" or "solve"."""
        ...

    def advance(self, done: int, total: int) -> None:
        """So much of the phase is done."""
        ...

    def solver(self, objective: float, bound: float) -> None:
        """Best step time and bound so far, in seconds."""
        ...


@dataclass(frozen=True)
class Request:
    """What is asked of the planner.

    Args:
        rules: "default" or "strict" reading of the divisibility rules.
        plan: a plan to review instead of the solver's own.
        time_limit_s: for the proof; the best plan found is returned with its gap.
        notes: what the reader must know first.
        capture_s: how long capture took, for the record.
        times_from: the file that layers' times come from, if any.
    """

    precision: str = "fp32"
    optimizer: str = "adam"
    rules: str = "default"
    plan: Plan | None = None
    time_limit_s: float = 60.0
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    times_from: str = ""


def decide(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request, progress: Progress | None = None
) -> Decision:
    """The fastest plan of `graph` on `cluster` under `costs`, with its proof, reasons and rivals.

    Raises:
        InfeasiblePlan: no plan fits; the text names the limit, what is missing and the layers.
        PlanError: `request.plan` is for another model or breaks a rule.
    """
    if request.plan is not None:
        request = replace(request, plan=_reviewed(request.plan, graph, cluster))
    begin = time.perf_counter()
    formulation = _formulate(graph, cluster, costs, request, progress, everywhere=False)
    costs_s = time.perf_counter() - begin
    if progress is not None:
        progress.phase("solve")
    solution = _solve(formulation.problem, request, progress)
    if solution.status is Status.INFEASIBLE and cluster.count > 1:
        # Other blocks of devices than the first ones only ever help to spread memory.
        formulation = _formulate(graph, cluster, costs, request, progress, everywhere=True)
        solution = _solve(formulation.problem, request, progress)
    if request.plan is None:
        solution = _fitting(formulation, solution, costs, request, progress)
    choice = _choice(formulation, solution, request)
    draft = _plan(graph, cluster, formulation, choice, request)
    rivals = baselines(graph, cluster, formulation, draft, partial(solve, time_limit_s=10.0))
    total_s = time.perf_counter() - request.started
    seconds = Seconds(request.capture_s, costs_s, time.perf_counter() - begin - costs_s, total_s)
    proof = _proof(formulation, choice, solution, request.plan is not None)
    return _decision(graph, cluster, formulation, choice, draft, proof, rivals, request, seconds, costs)


def predict(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> Prediction:
    """What one step of `plan` takes; nothing is searched or proven.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    reviewed = _reviewed(plan, graph, cluster)
    candidates = {name: (_without_period(strategy),) for name, strategy in reviewed.layers.items()}
    formulation = formulate(graph, cluster, costs, candidates)
    choice = (0,) * len(formulation.problem.nodes)
    return _prediction(formulation, choice, evaluate(formulation.problem, choice), costs)


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


def _formulate(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request, progress: Progress | None, everywhere: bool
) -> Formulation:
    if progress is not None:
        progress.phase("costs")
    blocks = cluster_blocks(cluster, everywhere)
    candidates: dict[str, Sequence[Strategy]] = {
        name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()
    }
    if request.plan is not None:
        for name, strategy in request.plan.layers.items():
            plain = _without_period(strategy)
            if plain not in candidates[name]:
                candidates[name] = (*candidates[name], plain)
    on_layer = progress.advance if progress is not None else None
    return formulate(graph, cluster, costs, candidates, strict=request.rules == "strict", on_layer=on_layer)


def _without_period(strategy: Strategy) -> Strategy:
    return Strategy(strategy.replicas, strategy.shards, strategy.axis, strategy.devices)


def _solve(problem: Problem, request: Request, progress: Progress | None) -> Solution:
    return solve(problem, request.time_limit_s, on_progress=progress.solver if progress is not None else None)


def _fitting(
    formulation: Formulation, solution: Solution, costs: CostModel, request: Request, progress: Progress | None
) -> Solution:
    """A solution that fits with its transfers, which the solver only estimates: again with so much less memory.

    The bound stays that of the first one, which nothing beats; if three more attempts find nothing, so does the plan.
    """
    lowered = limits = formulation.problem.limits
    found = solution
    for _ in range(3):
        chosen = zip(formulation.names, formulation.options, found.choice or (), strict=False)
        peaks = costs.peaks({name: options[k].strategy for name, options, k in chosen}) if found.choice else None
        if peaks is None:
            break
        over = [max(0.0, peak - limit) for peak, limit in zip(peaks, limits, strict=True)]
        if not any(over):
            return found if found is solution else replace(found, bound=solution.bound)
        lowered = tuple(max(0.0, known - more) for known, more in zip(lowered, over, strict=True))
        found = _solve(replace(formulation.problem, limits=lowered), request, progress)
    return solution


def _choice(formulation: Formulation, solution: Solution, request: Request) -> tuple[int, ...]:
    if request.plan is not None:
        return formulation.choice({name: _without_period(s) for name, s in request.plan.layers.items()})
    if solution.choice is None:
        raise InfeasiblePlan(why_not(formulation, solution))
    return solution.choice


def _plan(
    graph: LayerGraph, cluster: Cluster, formulation: Formulation, choice: Sequence[int], request: Request
) -> Plan:
    if request.plan is not None:
        return request.plan
    layers: Mapping[str, Strategy] = {
        name: options[k].strategy
        for name, options, k in zip(formulation.names, formulation.options, choice, strict=False)
    }
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, cluster.count, layers, request.rules)


def _proof(formulation: Formulation, choice: Sequence[int], solution: Solution, given: bool) -> Proof:
    objective = evaluate(formulation.problem, choice).objective
    gap = max(0.0, (objective - solution.bound) / objective) if objective > 0 else 0.0
    status = solution.status.value if gap <= 1e-6 or solution.status is not Status.OPTIMAL else Status.FEASIBLE.value
    return Proof(status, objective, solution.bound, gap, solution.seconds, given)


def _decision(
    graph: LayerGraph,
    cluster: Cluster,
    formulation: Formulation,
    choice: Sequence[int],
    plan: Plan,
    proof: Proof,
    rivals: tuple[Baseline, ...],
    request: Request,
    seconds: Seconds,
    costs: CostModel,
) -> Decision:
    found = evaluate(formulation.problem, choice)
    prediction = _prediction(formulation, choice, found, costs)
    return Decision(
        parameters=graph.parameter_count,
        cluster=cluster,
        precision=request.precision,
        optimizer=request.optimizer,
        plan=plan,
        layers=_facts(graph, formulation, choice, plan),
        prediction=prediction,
        baselines=rivals,
        advice=_advice(prediction.step_s, rivals),
        proof=proof,
        seconds=seconds,
        notes=(*request.notes, *_overfull(cluster, prediction)),
        times_from=request.times_from,
        links=costs.step.links,
    )


def _overfull(cluster: Cluster, prediction: Prediction) -> list[str]:
    """Where transfers, which the solver only estimates, take a device over its limit."""
    over = [
        (number, needed, device.memory_bytes)
        for number, (device, needed) in enumerate(zip(cluster.devices, prediction.memory_bytes, strict=True))
        if needed > device.memory_bytes
    ]
    return [
        f"device {number} needs {needed / 2**30:.2f} GiB with its transfers, {limit / 2**30:.2f} GiB are usable: "
        "lower --batch, or plan with a smaller --memory to leave room"
        for number, needed, limit in over[:1]
    ]


def _prediction(formulation: Formulation, choice: Sequence[int], found: Evaluation, costs: CostModel) -> Prediction:
    step = costs.step
    chosen = [options[k] for options, k in zip(formulation.options, choice, strict=False)]
    forward = sum(option.cost.forward_s for option in chosen)
    backward = sum(option.cost.backward_s for option in chosen)
    update = sum(option.cost.update_s for option in chosen)
    stolen = sum(option.stolen_s for option in chosen)
    transfer = max(0.0, found.ahead + found.back - forward - backward - update - stolen - step.overhead_s)
    strategies = {n: o.strategy for n, o in zip(formulation.names, chosen, strict=False)}
    doubt = sum(option.cost.spread * (option.cost.forward_s + option.cost.backward_s) for option in chosen)
    doubt += step.spread * (transfer + found.exposed + stolen)
    return Prediction(
        step_s=found.objective,
        forward_s=forward,
        backward_s=backward,
        transfer_s=transfer,
        reduce_s=sum(option.reduce_s for option in chosen),
        exposed_reduce_s=found.exposed + stolen,
        memory_bytes=costs.peaks(strategies) or tuple(int(peak) for peak in found.peaks),
        update_s=update,
        overhead_s=step.overhead_s,
        low_s=max(0.0, found.objective - doubt),
        high_s=found.objective + doubt,
    )


def _facts(graph: LayerGraph, formulation: Formulation, choice: Sequence[int], plan: Plan) -> tuple[LayerFacts, ...]:
    problem = formulation.problem
    what_if = WhatIf(problem, choice)
    moved = [0.0] * len(problem.nodes)
    for edge in problem.edges:
        pair = choice[edge.source], choice[edge.target]
        moved[edge.target] += float(edge.ahead[pair] + edge.back[pair])
    facts = []
    for index, (name, options) in enumerate(zip(formulation.names, formulation.options, strict=False)):
        option = options[choice[index]]
        facts.append(
            LayerFacts(
                name=name,
                kind=graph.layers[name].kind,
                strategy=plan.layers[name],
                forward_s=option.cost.forward_s,
                backward_s=option.cost.backward_s,
                transfer_s=option.arrival_s + moved[index] + 2 * option.statistics_s,
                reduce_s=option.reduce_s,
                memory_bytes=option.memory_bytes,
                source=option.cost.source,
                why=reason(graph.layers[name], options, index, choice, problem, what_if, _followed(graph, plan, name)),
                bends=bends(plan, graph, name),
            )
        )
    return tuple(facts)


def _followed(graph: LayerGraph, plan: Plan, name: str) -> str | None:
    """The layer whose layout a layer without weights takes over as it is."""
    layer = graph.layers[name]
    source = next((graph.producer[value] for value in layer.inputs if value in graph.producer), None)
    if layer.parameters or source is None:
        return None
    own, other = plan.layers[name], plan.layers[source]
    same = (own.devices, own.replicas, own.shards) == (other.devices, other.replicas, other.shards)
    return source if same else None


# Closer than this, the simpler habit is worth more than the difference.
WORTH_IT = 0.03


def _closeness(ratio: float) -> str:
    """A given plan may be far slower than the habit."""
    if ratio < 1 - WORTH_IT:
        return f"{1 / ratio:.2f}x as fast as this plan"
    return f"within {WORTH_IT:.0%} of the best plan"


def _advice(step_s: float, rivals: Sequence[Baseline]) -> str:
    by_name = {rival.name: rival for rival in rivals}
    one, data = by_name.get("one device"), by_name.get("pure data parallel")
    if one is not None and one.fits and one.step_s is not None and one.step_s <= step_s * (1 + WORTH_IT):
        which = f", a {one.on}" if one.on else ""
        return f"Use one device{which}: more of them do not make this step faster."
    if data is not None and data.fits and data.step_s is not None and data.step_s <= step_s * (1 + WORTH_IT):
        where = f" on {data.on}" if data.on else ""
        return f"Use plain data parallel{where}: it is {_closeness(data.step_s / step_s)} and needs no planning."
    legal = [rival for rival in rivals if rival.fits and rival.step_s is not None]
    if not legal:
        return "Use this plan: none of the usual ways is legal and fits these devices."
    best = min(legal, key=lambda rival: rival.step_s or 0.0)
    ratio = (best.step_s or 0.0) / step_s
    if ratio < 1 - WORTH_IT:
        return f"Do not use this plan: {best.name} is {1 / ratio:.2f}x as fast."
    if ratio <= 1 + WORTH_IT:
        return f"Use this plan: written by hand it would be {best.name}, which comes within {WORTH_IT:.0%} of it."
    return f"Use this plan: {ratio:.2f}x as fast as {best.name}, the best of the usual ways."
