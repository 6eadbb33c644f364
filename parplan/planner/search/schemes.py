"""The shapes of plans that schemes allow, a plan under the three schemes, and its prediction from a simulated step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import PinError, PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.stages import Stage, keeps_apart, stages
from parplan.plan import Plan, Scheme
from parplan.planner.decision import Baseline, LayerReport, Passes, Prediction, SchemePrice
from parplan.planner.search.context import Case, is_simulated, simulated_step
from parplan.planner.search_space.pin_constraints import Pinned, named
from parplan.planner.search_space.pin_search import Questions, candidates
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.priced_program import lowered, priced
from parplan.planner.simulation.timeline import Kind, Lane, Timeline

__all__ = [
    "IN_PASSES",
    "no_updates",
    "rival_in_passes",
    "scheme_prices",
    "schemes_of",
    "shapes",
    "simulated_prediction",
    "simulated_reports",
    "under",
    "updates_lost",
]  # fmt: skip

IN_PASSES = (Scheme.INTERLEAVE, Scheme.BROADCAST)

WORTH_IT = 1e-6
"""A scheme has to be faster by more than this, relative, to be taken instead."""


def updates_lost(plan: Plan, graph: LayerGraph, pinned: Pinned) -> list[str]:
    """Layers whose weights are pinned to be updated between passes, where the plan's scheme has none."""
    if not pinned.periods or plan.scheme in IN_PASSES:
        return []
    passes, inside = passes_of(plan, graph), _inside(plan, graph)
    return [name for name, period in pinned.periods.items() if period < passes and name in inside]


def _inside(plan: Plan, graph: LayerGraph) -> frozenset[str]:
    """Layers that a scheme with passes runs in them; where none is possible, all."""
    try:
        return frozenset(stages(graph, plan.layers, Scheme.INTERLEAVE).layers(Stage.PASSES))
    except PlanError:
        return frozenset(graph.layers)


def passes_of(plan: Plan, graph: LayerGraph) -> int:
    """Trips that a scheme with passes would make: most replicas by fewest."""
    gathered = stages(graph, plan.layers, Scheme.GATHER)
    return gathered.max_replicas // gathered.min_replicas


def no_updates(draft: Plan, graph: LayerGraph, pinned: Pinned, asked: Sequence[Scheme]) -> PinError:
    """The error on weights pinned to be updated between passes, where there can be none or none are asked for."""
    layer = updates_lost(replace(draft, scheme=Scheme.GATHER), graph, pinned)[0]
    pin = pinned.layers[layer].by["update_period"]
    passes = f"{passes_of(draft, graph)} passes"
    where = f"pin {named([pin])}: {layer}'s weights are to be updated between {passes}"
    if not set(asked) & set(IN_PASSES):
        return PinError(f'{where}, and scheme "gather" has one; use "auto", "broadcast" or "interleave"')
    try:
        check(replace(draft, scheme=next(one for one in asked if one in IN_PASSES)), graph)
        why = "no legal plan in passes was found"
    except PlanError as error:
        why = str(error)
    return PinError(f"{where}, and there can be none: {why}; leave out the update")


def schemes_of(scheme: str, given: Plan | None = None) -> list[Scheme]:
    """The schemes to try, gather first.

    Raises:
        PlanError: there is no such scheme, or a plan is given that has another one.
    """
    if scheme == "auto":
        return [Scheme.GATHER, *IN_PASSES]
    if scheme not in [one.value for one in Scheme]:
        raise PlanError(f'scheme {scheme!r} is not known; use "auto", "gather", "broadcast" or "interleave"')
    if given is not None and given.scheme.value != scheme:
        raise PlanError(
            f"the plan's scheme is {given.scheme.value}, and {scheme} is asked for: a given plan keeps its own; leave "
            "the scheme out, or change it in the plan"
        )
    return [Scheme(scheme)]


def shapes(
    case: Case, asked: Questions, lanes: tuple[int, ...], schemes: Sequence[Scheme], pinned: Pinned
) -> Iterator[Shape]:
    """The shapes of plans on the first devices: one pass, then most replicas by fewest, fewer passes first."""
    graph, count = case.graph, case.cluster.count
    periods = set(pinned.periods.values())
    known = {
        one.replicas
        for name, own in candidates(asked, graph, case.cluster, False, fold=case.fold).items()
        if keeps_apart(graph.layers[name])
        for one in own
    }
    if Scheme.GATHER in schemes and periods <= {1}:
        yield Shape(lanes=lanes)
    if case.costs.step.micro_batches > 1 or len(case.states) > 1 or len(case.saved) > 1:
        return  # passes are parts of the batch as well, and weights are gathered once
    given = case.request.plan
    for scheme in IN_PASSES if count > 1 or given is not None else ():
        if scheme not in schemes or (scheme is Scheme.BROADCAST and len(schemes) > 1):
            continue
        if Scheme.GATHER not in schemes:
            for replicas in sorted(known, reverse=True):
                yield Shape(scheme, replicas, replicas, lanes)
        pairs = [(most, few) for most in known for few in known if most > few and most % few == 0]
        for most, few in sorted(pairs, key=lambda pair: (pair[0] // pair[1], -pair[0])):
            if not any((most // few) % period for period in periods):
                yield Shape(scheme, most, few, lanes)


def rival_in_passes(rival: Baseline, case: Case) -> Baseline:
    """A usual plan, in passes if that is faster."""
    if rival.plan is None or rival.step_s is None:
        return rival
    best: Plan | None = None
    if rival.plan.micro_batches > 1:
        return rival
    for plan in (under(rival.plan, case.graph, scheme) for scheme in (Scheme.GATHER, *IN_PASSES)):
        if plan is not None and (best is None or case.step_s(plan) < (1 - WORTH_IT) * case.step_s(best)):
            best = plan
    if best is None or best.scheme is Scheme.GATHER or case.step_s(best) >= rival.step_s:
        return rival
    return replace(rival, plan=best, step_s=case.step_s(best), batch_norm_s=0.0)


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


def scheme_prices(case: Case, plan: Plan, memory_bytes: int, pinned: Pinned) -> Passes | None:
    """What the plan takes under each scheme; None where no layer has fewer replicas than one in front.

    Args:
        memory_bytes: of the fullest device. It is the same for all schemes: what all passes keep for their backward
            is there at once, as all go forward before any goes back. (Where weights are updated between passes it is
            less, and this the most it can be.)
        pinned: may ask for passes.
    """
    graph = case.graph
    if plan.micro_batches > 1 or plan.sharded or plan.replayed:
        return None
    if all(other is not None and other.scheme is Scheme.GATHER for other in (under(plan, graph, s) for s in Scheme)):
        return None
    # All in one measure, that of the plan: where T is its step, simulating the other schemes took 5 s for a Llama.
    simulated = is_simulated(plan, graph, case.cluster)
    known = [_price(case, replace(plan, scheme=scheme), memory_bytes, simulated) for scheme in Scheme]
    when = stages(graph, plan.layers, plan.scheme)
    updated = updates_lost(replace(plan, scheme=Scheme.GATHER), graph, pinned)
    inside = when.layers(Stage.PASSES)
    once = [name for name, own in plan.layers.items() if own.update_period is not None and name not in inside]
    return Passes(
        plan.scheme, when.max_replicas, when.min_replicas, len(inside), tuple(known), tuple(updated), tuple(once)
    )


def _price(case: Case, plan: Plan, memory_bytes: int, simulated: bool) -> SchemePrice:
    graph = case.graph
    try:
        check(plan, graph)
        passes = stages(graph, plan.layers, plan.scheme).passes
    except PlanError as error:
        return SchemePrice(plan.scheme, 1, None, None, None, None, str(error))
    timeline = simulated_step(plan, graph, case.cluster, case.costs) if simulated else None
    exposed_s = timeline.exposed_transfer_s if timeline is not None else None
    step_s = timeline.step_s if timeline is not None else case.objective_s(plan)
    samples = -(-plan.batch // passes)
    return SchemePrice(plan.scheme, passes, step_s, exposed_s, memory_bytes, samples)


# ---- the simulated step in place of the sum --------------------------------------------------------------------------


def simulated_prediction(prediction: Prediction, timeline: Timeline) -> Prediction:
    """A prediction with its step and parts from the simulation: where the time goes of the device that is done last."""
    spent_s, doubt_s = timeline.critical_s, prediction.high_s - prediction.step_s
    sums_s = _sums_s(timeline)
    return replace(
        prediction,
        step_s=timeline.step_s,
        simulated=True,
        forward_s=spent_s[Kind.FORWARD],
        backward_s=spent_s[Kind.BACKWARD],
        transfer_s=spent_s[Kind.TRANSFER],
        reduce_s=sums_s,
        exposed_reduce_s=spent_s[Kind.REDUCTION],
        update_s=spent_s[Kind.UPDATE],
        overhead_s=spent_s[Kind.OVERHEAD],
        low_s=max(0.0, timeline.step_s - doubt_s),
        high_s=timeline.step_s + doubt_s,
    )


def _sums_s(timeline: Timeline) -> float:
    """Seconds that gradient sums take, each counted once, however many devices take part."""
    found: dict[tuple[str, int | None, frozenset[Lane]], float] = {}
    for part in timeline.parts:
        if part.kind is Kind.REDUCTION:
            found[part.what, part.number, frozenset(one.lane for one in part.exclusive)] = part.seconds
    return sum(found.values())


def simulated_reports(
    facts: Iterable[LayerReport], graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan
) -> tuple[LayerReport, ...]:
    """Facts of layers with what they take in all their passes together; a transfer counts for its first reader."""
    found, several = priced(graph, lowered(graph, plan, cluster), costs), costs.step.micro_batches
    moved_s: dict[str | None, float] = {}
    for move in found.moves.values():
        for name in move.readers[:1]:
            moved_s[name] = moved_s.get(name, 0.0) + (move.forward_s + move.backward_s)
    return tuple(
        replace(
            one,
            forward_s=several * work.passes * work.cost.forward_s,
            backward_s=several * work.passes * work.cost.backward_s,
            transfer_s=several * (moved_s.get(one.name, 0) + work.cost.gathers_s),
        )
        for one in facts
        for work in [found.layers[one.name]]
    )
