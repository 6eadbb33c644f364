"""A plan under all three schemes, each played through, and the best of some plans and schemes.

The solver's objective knows plans that run in one pass. What passes save, and what they cost, is on the clock
(timeline.py): so the solver's plan is priced under every scheme, and with it the plan that it would choose if most of
what crosses from many replicas to fewer were hidden. Other plans in passes are not searched, and nothing is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.stages import Stage, stages
from parplan.plan import Plan, Scheme
from parplan.planner.decision import Baseline, LayerFacts, Passes, Prediction, Proof, SchemePrice
from parplan.planner.formulate import Formulation
from parplan.planner.problem import Edge, Problem, Status
from parplan.planner.timeline import Kind, Lane, Timeline, simulate
from parplan.planner.timeline_work import Work, work_of
from parplan.planner.verifier import check

__all__ = [
    "clocked", "clocked_facts", "clocked_proof", "fastest_of", "hidden_boundaries", "needs_clock", "rival_in_passes",
    "scheduled", "scheme_prices", "schemes_of", "under",
]  # fmt: skip

_IN_PASSES = (Scheme.INTERLEAVE, Scheme.BROADCAST)
# Passes have to be faster than one by more than this, relative.
WORTH_IT = 1e-6


def fastest_of(graph: LayerGraph, cluster: Cluster, costs: CostModel, plans: Iterable[Plan | None]) -> Plan | None:
    """The fastest of these plans on the clock, the first of equal ones; None where there is none."""
    found, least_s = None, inf
    for plan in plans:
        step_s = simulate(graph, cluster, costs, plan).step_s if plan is not None else inf
        if step_s < least_s * (1 - WORTH_IT) or (found is None and plan is not None):
            found, least_s = plan, step_s
    return found


def scheduled(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, scheme: str, draft: Plan, others: Sequence[Plan]
) -> Plan:
    """The solver's plan under the scheme that makes it fastest or that is asked for; or another one in passes.

    Args:
        scheme: as in Request.
        others: further plans to try, in passes only.

    Raises:
        PlanError: the scheme that is asked for is not possible.
    """
    asked = schemes_of(scheme)
    tries = [under(draft, graph, one) for one in asked]
    more = [under(plan, graph, one) for one in asked for plan in others]
    found = fastest_of(graph, cluster, costs, [*tries, *(one for one in more if one and one.scheme in _IN_PASSES)])
    if found is None:
        check(replace(draft, scheme=asked[0]), graph)
        raise PlanError(f"{draft.model}: no plan was found that is legal with {asked[0].value}")
    return found


def schemes_of(scheme: str, given: Plan | None = None) -> list[Scheme]:
    """The schemes to try, gather first.

    Raises:
        PlanError: there is no such scheme, or a plan is given that has another one.
    """
    if scheme == "auto":
        return [Scheme.GATHER, *_IN_PASSES]
    if scheme not in [one.value for one in Scheme]:
        raise PlanError(f'scheme {scheme!r} is not known; use "auto", "gather", "broadcast" or "interleave"')
    if given is not None and given.scheme.value != scheme:
        raise PlanError(
            f"the plan's scheme is {given.scheme.value}, and {scheme} is asked for: a given plan keeps its own; leave "
            "the scheme out, or change it in the plan"
        )
    return [Scheme(scheme)]


def rival_in_passes(rival: Baseline, graph: LayerGraph, cluster: Cluster, costs: CostModel) -> Baseline:
    """A usual plan, in passes if that is faster."""
    if rival.plan is None:
        return rival
    tries = [under(rival.plan, graph, scheme) for scheme in (Scheme.GATHER, *_IN_PASSES)]
    best = fastest_of(graph, cluster, costs, tries) if any(tries[1:]) else None
    if best is None or best.scheme is Scheme.GATHER:
        return rival
    return replace(rival, plan=best, step_s=simulate(graph, cluster, costs, best).step_s)


def under(plan: Plan, graph: LayerGraph, scheme: Scheme) -> Plan | None:
    """The plan under a scheme, with gather where nothing runs in passes; None where it is not legal."""
    one = replace(plan, scheme=scheme)
    try:
        if stages(graph, plan.layers, scheme).passes == 1:
            one = replace(plan, scheme=Scheme.GATHER)
        check(one, graph)
    except PlanError:
        return None
    return one


def scheme_prices(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan, memory_bytes: int
) -> Passes | None:
    """What the plan takes under each scheme; None where no layer has fewer replicas than one in front.

    Args:
        memory_bytes: of the fullest device. It is the same for all schemes: what all passes keep for their backward
            is there at once, as all go forward before any goes back. (Where weights are updated between passes it is
            less, and this the most it can be.)
    """
    known = [_price(graph, cluster, costs, replace(plan, scheme=scheme), memory_bytes) for scheme in Scheme]
    if all(one.passes == 1 and not one.why_not for one in known):
        return None
    when = stages(graph, plan.layers, plan.scheme)
    return Passes(plan.scheme, when.most, when.fewest, len(when.layers(Stage.PASSES)), tuple(known))


def _price(graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan, memory_bytes: int) -> SchemePrice:
    try:
        check(plan, graph)
        passes = stages(graph, plan.layers, plan.scheme).passes
    except PlanError as error:
        return SchemePrice(plan.scheme, 1, None, None, None, None, str(error))
    timeline = simulate(graph, cluster, costs, plan)
    samples = -(-plan.batch // passes)
    return SchemePrice(plan.scheme, passes, timeline.step_s, timeline.exposed_transfer_s, memory_bytes, samples)


# ---- the clock in place of the sum -----------------------------------------------------------------------------------


def needs_clock(plan: Plan, graph: LayerGraph) -> bool:
    """Whether layers run in passes, or some on devices that others do not use at all: then they do not add up."""
    if stages(graph, plan.layers, plan.scheme).passes > 1:
        return True
    places = {frozenset(strategy.devices) for strategy in plan.layers.values()}
    return any(one.isdisjoint(other) for one in places for other in places)


def clocked(prediction: Prediction, timeline: Timeline) -> Prediction:
    """A prediction with its step and parts from the clock: where the time goes of the device that is done last."""
    spent, doubt_s = timeline.critical, prediction.high_s - prediction.step_s
    sums_s = _sums_s(timeline)
    return replace(
        prediction,
        step_s=timeline.step_s,
        forward_s=spent.total_s(Kind.FORWARD),
        backward_s=spent.total_s(Kind.BACKWARD),
        transfer_s=spent.total_s(Kind.TRANSFER),
        reduce_s=sums_s,
        exposed_reduce_s=spent.total_s(Kind.REDUCTION),
        update_s=spent.total_s(Kind.UPDATE),
        overhead_s=spent.total_s(Kind.OVERHEAD),
        low_s=max(0.0, timeline.step_s - doubt_s),
        high_s=timeline.step_s + doubt_s,
    )


def clocked_proof(proof: Proof, step_s: float) -> Proof:
    """What is proven is proven of the objective: of plans in one pass whose layers run one after another."""
    gap = max(0.0, (step_s - proof.bound) / step_s) if step_s > 0 else 0.0
    status = Status.FEASIBLE.value if proof.status == Status.OPTIMAL.value else proof.status
    return replace(proof, status=status, objective=step_s, gap=gap, one_pass=True)


def _sums_s(timeline: Timeline) -> float:
    """Seconds that gradient sums take, each counted once, however many devices take part."""
    found: dict[tuple[str, int | None, frozenset[Lane]], float] = {}
    for part in timeline.parts:
        if part.kind is Kind.REDUCTION:
            found[part.what, part.number, frozenset(one.lane for one in part.holds)] = part.seconds
    return sum(found.values())


def clocked_facts(
    facts: Iterable[LayerFacts], graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan
) -> tuple[LayerFacts, ...]:
    """Facts of layers with what they take in all their passes together."""
    work = work_of(graph, cluster.count, costs, plan)
    return tuple(_in_passes(one, work) for one in facts)


def _in_passes(facts: LayerFacts, work: Work) -> LayerFacts:
    layer, times = work.layers[facts.name], work.times(facts.name)
    legs = [leg for move in work.into.get(facts.name, ()) for part in move.legs for leg in part]
    return replace(
        facts,
        forward_s=times * layer.forward_s,
        backward_s=times * layer.backward_s,
        transfer_s=sum(leg.forward_s + leg.backward_s for leg in legs) + 2 * times * layer.statistics_s,
    )


# ---- another plan to try ---------------------------------------------------------------------------------------------


def hidden_boundaries(formulation: Formulation) -> Problem | None:
    """The problem where samples that go from many replicas to few cost their first pass only; None if nothing changes.

    What is optimal here is a plan to try: the rest may turn out not to be hidden.
    """
    counts = [np.array([option.strategy.replicas for option in own]) for own in formulation.options]
    edges = tuple(_hidden(edge, counts) for edge in formulation.problem.edges)
    if all(one is other for one, other in zip(edges, formulation.problem.edges, strict=True)):
        return None
    return replace(formulation.problem, edges=edges)


def _hidden(edge: Edge, counts: Sequence[NDArray[np.int64]]) -> Edge:
    if edge.target >= len(counts):
        return edge
    many, few = counts[edge.source][:, None], counts[edge.target][None, :]
    share = np.where((many > few) & (many % few == 0), few / many, 1.0)
    if (share == 1).all() or not (np.isfinite(edge.ahead) & (edge.ahead > 0) & (share < 1)).any():
        return edge
    return Edge(edge.source, edge.target, share * edge.ahead, share * edge.back)
