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
from parplan.planner.strategies import strategies
from parplan.planner.verifier import bends, check
from parplan.planner.what_if import WhatIf

__all__ = ["Progress", "Request", "decide"]


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
    """

    precision: str = "fp32"
    optimizer: str = "adam"
    rules: str = "default"
    plan: Plan | None = None
    time_limit_s: float = 60.0
    notes: tuple[str, ...] = ()
    capture_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)


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
    choice = _choice(formulation, solution, request)
    draft = _plan(graph, cluster, formulation, choice, request)
    rivals = baselines(graph, formulation, draft, partial(solve, time_limit_s=10.0))
    total_s = time.perf_counter() - request.started
    seconds = Seconds(request.capture_s, costs_s, time.perf_counter() - begin - costs_s, total_s)
    proof = _proof(formulation, choice, solution, request.plan is not None)
    return _decision(graph, cluster, formulation, choice, draft, proof, rivals, request, seconds)


def _reviewed(plan: Plan, graph: LayerGraph, cluster: Cluster) -> Plan:
    """A given plan, legal for the batch and the devices it is priced for.

    Raises:
        PlanError: it is for another model or number of devices, or breaks a rule.
    """
    if plan.devices != cluster.count:
        raise PlanError(
            f"the plan is for {plan.devices} devices, to be priced for {cluster.count}; say --gpus {plan.devices}, "
            f"or make a plan for {cluster.count}"
        )
    plan = replace(plan, batch=graph.batch or plan.batch)
    check(plan, graph)
    return plan


def _formulate(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request, progress: Progress | None, everywhere: bool
) -> Formulation:
    if progress is not None:
        progress.phase("costs")
    candidates: dict[str, Sequence[Strategy]] = {
        name: strategies(layer, graph.batch or 1, cluster.count, everywhere) for name, layer in graph.layers.items()
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
) -> Decision:
    found = evaluate(formulation.problem, choice)
    prediction = _prediction(formulation, choice, found)
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
        notes=request.notes,
    )


def _prediction(formulation: Formulation, choice: Sequence[int], found: Evaluation) -> Prediction:
    chosen = [options[k] for options, k in zip(formulation.options, choice, strict=False)]
    forward = sum(option.cost.forward_s for option in chosen)
    backward = sum(option.cost.backward_s for option in chosen)
    return Prediction(
        step_s=found.objective,
        forward_s=forward,
        backward_s=backward,
        transfer_s=found.ahead + found.back - forward - backward,
        reduce_s=sum(option.reduce_s for option in chosen),
        exposed_reduce_s=found.exposed,
        memory_bytes=tuple(int(peak) for peak in found.peaks),
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
                transfer_s=moved[index] + 2 * option.statistics_s,
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
        return "Use one device: more of them do not make this step faster."
    if data is not None and data.fits and data.step_s is not None and data.step_s <= step_s * (1 + WORTH_IT):
        return f"Use plain data parallel: it is {_closeness(data.step_s / step_s)} and needs no planning."
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
