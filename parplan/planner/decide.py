"""The driver: candidates, costs, solve, and everything a person needs to review the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import InfeasiblePlan, PinError, PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.pins import Pin
from parplan.plan import Plan, Strategy
from parplan.planner.baselines import baselines
from parplan.planner.decision import Arrival, Baseline, Decision, LayerFacts, Prediction, Proof, Seconds
from parplan.planner.formulate import Formulation, formulate
from parplan.planner.infeasible import why_not
from parplan.planner.pin_search import Answer, Questions, candidates, fastest, no_plan, prices, questions
from parplan.planner.pinned import Pinned
from parplan.planner.problem import Evaluation, Problem, Solution, Status, evaluate
from parplan.planner.reasons import reason
from parplan.planner.scheme_prices import (
    clocked,
    clocked_facts,
    clocked_proof,
    hidden_boundaries,
    needs_clock,
    rival_in_passes,
    scheduled,
    scheme_prices,
    schemes_of,
)
from parplan.planner.side_by_side import along, extended, notes_on, on_the_clock, side_by_side
from parplan.planner.solve import solve
from parplan.planner.timeline import simulate
from parplan.planner.towers import SHARE, Towers, search
from parplan.planner.verifier import bends, check
from parplan.planner.what_if import WhatIf

__all__ = ["Progress", "Request", "decide", "predict", "sketch"]

# A further plan is searched for passes where the solver took no longer than this.
CHEAP_S = 10.0


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
        pins: what is decided by hand; only the rest is searched.
        price_pins: find out what each costs, for a report; that takes a search for every pin.
        scheme: how samples get from many replicas to fewer: "gather", "broadcast", "interleave", or as is fastest.
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
    pins: tuple[Pin, ...] = ()
    scheme: str = "auto"
    price_pins: bool = True


def decide(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request, progress: Progress | None = None
) -> Decision:
    """The fastest plan of `graph` on `cluster` under `costs`, with its proof, reasons and rivals.

    Raises:
        InfeasiblePlan: no plan fits; the text names the limit, what is missing and the layers.
        PinError: a pin names no layer, breaks a rule, or comes with a plan.
        PlanError: `request.plan` is for another model or breaks a rule, or the scheme asked for is not possible.
    """
    schemes_of(request.scheme, request.plan)
    if request.plan is not None:
        request = replace(request, plan=_reviewed(request.plan, graph, cluster))
    asked = _questions(graph, cluster, request)
    begin = time.perf_counter()
    formulation = _formulate(graph, cluster, costs, request, progress, asked, everywhere=False)
    costs_s = time.perf_counter() - begin
    if progress is not None:
        progress.phase("solve")
    solution = fastest(formulation, asked.whole, _solver(formulation, costs, request, progress))
    if solution.status is Status.INFEASIBLE and cluster.count > 1:
        # Other blocks of devices than the first ones only ever help to spread memory.
        formulation = _formulate(graph, cluster, costs, request, progress, asked, everywhere=True)
        solution = fastest(formulation, asked.whole, _solver(formulation, costs, request, progress))
    choice = _choice(formulation, solution, request, asked, costs)
    draft = _plan(graph, cluster, formulation, choice, request, asked.whole)
    rivals = baselines(graph, cluster, formulation, draft, partial(solve, time_limit_s=10.0))
    if request.plan is None and cluster.count > 1:
        near = _near(graph, cluster, formulation, solution, request, asked.whole, costs)
        habits = [rival.plan for rival in rivals if rival.fits and rival.plan is not None and not request.pins]
        draft = scheduled(graph, cluster, costs, request.scheme, draft, [*near, *habits])
        choice = formulation.choice({name: _without_period(s) for name, s in draft.layers.items()})
    found = _towers(graph, cluster, costs, formulation, draft, request)
    if found is not None and found.plan is not None:
        draft, formulation = found.plan, extended(formulation, found.plan, graph, cluster, costs)
        choice = formulation.choice(draft.layers)
    rivals = tuple(rival_in_passes(rival, graph, cluster, costs) for rival in rivals)
    total_s = time.perf_counter() - request.started
    seconds = Seconds(request.capture_s, costs_s, time.perf_counter() - begin - costs_s, total_s)
    proof = _proof(formulation, choice, solution, request.plan is not None)
    request = replace(request, notes=(*request.notes, *notes_on(found)))
    decision = _decision(graph, cluster, formulation, choice, draft, proof, rivals, request, seconds, costs)
    tracks = side_by_side(graph, draft, decision.layers, found)
    decision = replace(decision, layers=along(decision.layers, tracks), beside=tracks)
    return _with_pins(decision, graph, formulation, asked, request, costs) if request.pins else decision


def predict(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan) -> Prediction:
    """What one step of `plan` takes; nothing is searched or proven.

    Raises:
        PlanError: the plan is for another model or number of devices, or breaks a rule.
    """
    reviewed = _reviewed(plan, graph, cluster)
    candidates = {name: (_without_period(strategy),) for name, strategy in reviewed.layers.items()}
    formulation = formulate(graph, cluster, costs, candidates)
    choice = (0,) * len(formulation.problem.nodes)
    prediction = _prediction(formulation, choice, evaluate(formulation.problem, choice), costs)
    return clocked(prediction, simulate(graph, cluster, costs, reviewed)) if needs_clock(plan, graph) else prediction


def sketch(graph: LayerGraph, cluster: Cluster, costs: CostModel, request: Request) -> Prediction:
    """What one step of the fastest plan in one pass takes (or of `request.plan`), to compare graphs with.

    Raises:
        InfeasiblePlan, PinError, PlanError: as for `decide`.
    """
    if request.plan is not None:
        return predict(graph, cluster, costs, request.plan)
    asked = _questions(graph, cluster, request)
    for everywhere in (False, True):
        formulation = _formulate(graph, cluster, costs, request, None, asked, everywhere=everywhere)
        solution = fastest(formulation, asked.whole, _solver(formulation, costs, request))
        if solution.status is not Status.INFEASIBLE or cluster.count == 1:
            break
    choice = _choice(formulation, solution, request, asked, costs)
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


def _questions(graph: LayerGraph, cluster: Cluster, request: Request) -> Questions:
    if request.plan is not None and request.pins:
        raise PinError("a plan decides every layer, so there is nothing left to pin; leave out the plan or the pins")
    return questions(request.pins, graph, cluster)


def _formulate(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    request: Request,
    progress: Progress | None,
    asked: Questions,
    everywhere: bool,
) -> Formulation:
    if progress is not None:
        progress.phase("costs")
    options = candidates(asked, graph, cluster, everywhere)
    if request.plan is not None:
        for name, strategy in request.plan.layers.items():
            plain = _without_period(strategy)
            if plain not in options[name]:
                options[name] = (*options[name], plain)
    on_layer = progress.advance if progress is not None else None
    return formulate(graph, cluster, costs, options, strict=request.rules == "strict", on_layer=on_layer)


def _without_period(strategy: Strategy) -> Strategy:
    return Strategy(strategy.replicas, strategy.shards, strategy.axis, strategy.devices)


def _solve(problem: Problem, request: Request, progress: Progress | None) -> Solution:
    return solve(problem, request.time_limit_s, on_progress=progress.solver if progress is not None else None)


def _solver(
    formulation: Formulation, costs: CostModel, request: Request, progress: Progress | None = None
) -> Callable[[Problem], Solution]:
    """Solves a problem with the strategies of `formulation`, some of them forbidden perhaps; plans really fit."""

    def solved(problem: Problem) -> Solution:
        solution = _solve(problem, request, progress)
        if request.plan is not None:
            return solution
        return _fitting(formulation, problem, solution, costs, request, progress)

    return solved


def _fitting(
    formulation: Formulation,
    problem: Problem,
    solution: Solution,
    costs: CostModel,
    request: Request,
    progress: Progress | None,
) -> Solution:
    """A solution that fits with its transfers, which the solver only estimates: again with so much less memory.

    The bound stays that of the first one, which nothing beats; if three more attempts find nothing, so does the plan.
    """
    lowered = limits = problem.limits
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
        found = _solve(replace(problem, limits=lowered), request, progress)
    return solution


def _choice(
    formulation: Formulation, solution: Solution, request: Request, asked: Questions, costs: CostModel
) -> tuple[int, ...]:
    if request.plan is not None:
        return formulation.choice({name: _without_period(s) for name, s in request.plan.layers.items()})
    if solution.choice is None and request.pins:
        raise no_plan(formulation, asked, solution, _solver(formulation, costs, _briefly(request)))
    if solution.choice is None:
        raise InfeasiblePlan(why_not(formulation, solution))
    return solution.choice


def _briefly(request: Request) -> Request:
    """The same asked for every pin, each up to four times (see `_fitting`), all in the time of one."""
    return replace(request, time_limit_s=request.time_limit_s / (4 * (1 + len(request.pins))))


def _with_pins(
    decision: Decision,
    graph: LayerGraph,
    formulation: Formulation,
    asked: Questions,
    request: Request,
    costs: CostModel,
) -> Decision:
    """What the pins cost, and at every layer which pins decide it."""
    layers = tuple(replace(facts, pinned=asked.whole.words(facts.name)) for facts in decision.layers)
    if not request.price_pins:
        return replace(decision, layers=layers)
    begin, brief = time.perf_counter(), _briefly(request)
    habits = [rival.plan for rival in decision.baselines if rival.fits and rival.plan is not None]

    found = Answer(decision.prediction.step_s, decision.proof.status == Status.OPTIMAL.value)

    def ask(pinned: Pinned) -> Answer:
        more = [] if pinned.layers else habits
        answer = _answer(graph, decision.cluster, formulation, brief, pinned, costs, more)
        return answer.or_better(found) if pinned.kept_by(decision.plan.layers) else answer

    pins = prices(asked, found, ask)
    more_s = time.perf_counter() - begin
    seconds = replace(decision.seconds, solve=decision.seconds.solve + more_s, total=decision.seconds.total + more_s)
    return replace(decision, pins=pins, layers=layers, seconds=seconds)


def _answer(
    graph: LayerGraph,
    cluster: Cluster,
    formulation: Formulation,
    request: Request,
    pinned: Pinned,
    costs: CostModel,
    more: Sequence[Plan],
) -> Answer:
    """The step of the fastest plan under other pins, found and priced as the decision's own."""
    solution = fastest(formulation, pinned, _solver(formulation, costs, request))
    if solution.choice is None:
        return Answer(None, solution.status is Status.INFEASIBLE)
    plan = _plan(graph, cluster, formulation, solution.choice, request, pinned)
    near = _near(graph, cluster, formulation, solution, request, pinned, costs)
    try:
        plan = scheduled(graph, cluster, costs, request.scheme, plan, [*near, *more]) if cluster.count > 1 else plan
    except PlanError:
        return Answer(None, False)
    towers = None if pinned.layers else _towers(graph, cluster, costs, formulation, plan, replace(request, pins=()))
    if towers is not None and towers.plan is not None:
        return Answer(simulate(graph, cluster, costs, towers.plan).step_s, False)
    if needs_clock(plan, graph):
        return Answer(simulate(graph, cluster, costs, plan).step_s, False)
    choice = formulation.choice({name: _without_period(s) for name, s in plan.layers.items()})
    return Answer(evaluate(formulation.problem, choice).objective, solution.status is Status.OPTIMAL)


def _plan(
    graph: LayerGraph,
    cluster: Cluster,
    formulation: Formulation,
    choice: Sequence[int],
    request: Request,
    pinned: Pinned,
) -> Plan:
    if request.plan is not None:
        return request.plan
    periods = pinned.periods
    layers: Mapping[str, Strategy] = {
        name: replace(options[k].strategy, update_period=periods.get(name))
        for name, options, k in zip(formulation.names, formulation.options, choice, strict=False)
    }
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, cluster.count, layers, request.rules)


def _near(
    graph: LayerGraph,
    cluster: Cluster,
    formulation: Formulation,
    solution: Solution,
    request: Request,
    pinned: Pinned,
    costs: CostModel,
) -> list[Plan]:
    """What the solver would choose if passes hid most of what crosses to fewer replicas; nothing where that is costly.
    """
    hidden = hidden_boundaries(formulation) if solution.seconds <= CHEAP_S and request.scheme != "gather" else None
    if hidden is None:
        return []
    brief = replace(request, time_limit_s=min(CHEAP_S, request.time_limit_s))
    found = fastest(replace(formulation, problem=hidden), pinned, _solver(formulation, costs, brief)).choice
    return [] if found is None else [_plan(graph, cluster, formulation, found, request, pinned)]


def _towers(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, formulation: Formulation, draft: Plan, request: Request
) -> Towers | None:
    """A faster plan with branches at the same time; not sought where the layers or their order are decided by hand."""
    by_hand = request.plan is not None or request.pins or request.scheme not in ("auto", "gather")
    if by_hand or request.rules == "strict":
        return None
    step_s = on_the_clock(graph, cluster, costs)
    return search(graph, cluster, costs, draft, formulation, step_s, SHARE * request.time_limit_s)


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
    layers = _facts(graph, formulation, choice, plan)
    if needs_clock(plan, graph):
        prediction = clocked(prediction, simulate(graph, cluster, costs, plan))
        layers = clocked_facts(layers, graph, cluster, costs, plan)
        proof = clocked_proof(proof, prediction.step_s)
    return Decision(
        parameters=graph.parameter_count,
        cluster=cluster,
        precision=request.precision,
        optimizer=request.optimizer,
        plan=plan,
        layers=layers,
        prediction=prediction,
        baselines=rivals,
        advice=_advice(prediction.step_s, rivals),
        proof=proof,
        seconds=seconds,
        notes=(*request.notes, *_overfull(cluster, prediction)),
        times_from=request.times_from,
        links=costs.step.links,
        passes=scheme_prices(graph, cluster, costs, plan, max(prediction.memory_bytes)) if cluster.count > 1 else None,
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
    unhidden = sum(option.stolen_s + option.late_s for option in chosen)
    transfer = max(0.0, found.ahead + found.back - forward - backward - update - unhidden - step.overhead_s)
    strategies = {n: o.strategy for n, o in zip(formulation.names, chosen, strict=False)}
    doubt = sum(option.cost.spread * (option.cost.forward_s + option.cost.backward_s) for option in chosen)
    doubt += step.spread * (transfer + found.exposed + unhidden)
    return Prediction(
        step_s=found.objective,
        forward_s=forward,
        backward_s=backward,
        transfer_s=transfer,
        reduce_s=sum(option.reduce_s for option in chosen),
        exposed_reduce_s=found.exposed + unhidden,
        memory_bytes=costs.peaks(strategies) or tuple(int(peak) for peak in found.peaks),
        update_s=update,
        overhead_s=step.overhead_s,
        low_s=max(0.0, found.objective - doubt),
        high_s=found.objective + doubt,
        most_hidden=step.most_hidden,
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
                copies=_copies(graph, plan, name),
            )
        )
    return tuple(facts)


def _copies(graph: LayerGraph, plan: Plan, name: str) -> tuple[Arrival, ...]:
    """The inputs that other layers make on other devices, or on these in another order."""
    sources = dict.fromkeys(graph.producer[value] for value in graph.layers[name].inputs if value in graph.producer)
    own = plan.layers[name].devices
    return tuple(
        Arrival(source, plan.layers[source].devices)
        for source in sources
        if plan.layers[source].devices != own and not graph.layers[source].constant
    )


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
