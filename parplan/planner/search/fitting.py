"""Plans that fit with their transfers, whose memory no formulation knows: the search is repeated with less memory.

Beside it, what more memory would gain, and the plan with the state of its layers in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.holdings import slices
from parplan.plan import STATES, Plan, Strategy
from parplan.planner.search.context import Case, far_s
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import masked
from parplan.planner.solver.problem import Problem, Solution, Status, Usage, evaluate
from parplan.planner.solver.solve import solve

__all__ = ["ABOUT", "Lacking", "fitting", "held_up", "in_replicas", "in_slices", "lacking"]

ABOUT = 0.01
"""Plans in replicas are sought until none is faster by this part: closer takes ten times as long."""

LEAST_GAIN = 1e-3
"""Part of a step that all the memory there could be has to gain, for more micro-batches to be tried."""

UNBOUND = 0.2
"""Part of the time left for finding out what more memory would gain: it is refuted in most cases."""

ATTEMPTS = 4
"""How often a plan that does not fit with its transfers makes the solver search again, with so much less memory."""


@dataclass(frozen=True)
class Lacking:
    """A choice that lacks so many bytes on some device, transfers included."""

    lacking_bytes: float
    choice: tuple[int, ...]


def fitting(
    case: Case, formulation: Formulation, problem: Problem, solve: Callable[[Problem, bool], Solution]
) -> tuple[Solution, Lacking | None]:
    """A solution that fits with its transfers, and of those tried that do not the nearest to it.

    What transfers need is known once a plan is lowered; before, layers estimate it. So the first solution is one
    without estimates: what it says of all plans (that none fits, the bound) holds. Where its plan does not fit, the
    estimates count too. Where they are not enough, what its layers take beside them counts for strategies like theirs.
    Where that does not rule the plan out either, the next one has to take less by what is lacking, without its
    transfers: below the limit and below what this one takes, or this one would be found again. Where nothing fits with
    the estimates, they are left again, and what the first plan's layers take counts at once. Where nothing that fits is
    found, the first solution is returned: another shape may still have a plan, and `decide` refuses one that does
    not fit.

    Args:
        solve: a solution of a problem; told whether it is the first.
    """
    first, closest = solve(problem.relaxed, True), None
    found, limits, estimates = first, problem.limits, True
    for again in range(ATTEMPTS + 1):
        if again:
            found = solve(replace(problem, limits=limits), False)
        if again == 0 and found.status is Status.UNKNOWN:
            continue  # the smaller problem may be easier
        if again and found.status is Status.INFEASIBLE and estimates:
            # They may say too much of every plan that fits.
            problem, estimates, found = problem.relaxed, False, first
        over = lacking(case, formulation, found.choice) if found.choice is not None else None
        if found.choice is None or over is None:
            break
        if not any(over):
            return found if found is first else replace(found, bound=first.bound), closest
        if closest is None or max(over) < closest.lacking_bytes:
            closest = Lacking(max(over), found.choice)
        alone = formulation.device_peaks(found.choice, case.cluster.count)
        lanes = list(zip(formulation.shape.lanes, limits, over, strict=True))
        if again == 0 and any(more and alone[lane] > most for lane, most, more in lanes):
            continue  # the estimates rule it out too: what is lacking may be no more than they count
        counted = replace(_counted(case, formulation, problem, found.choice), limits=limits)
        if not evaluate(counted, found.choice).feasible:
            problem = counted
            continue
        known = (most if not more else min(most, alone[lane]) for lane, most, more in lanes)
        limits = tuple(max(0.0, most - more) for most, more in zip(known, over, strict=True))
    return first, closest


def in_replicas(case: Case, formulation: Formulation) -> Formulation:
    """The plans of a formulation with replicas of every layer on all devices, the layers of a gather group in any one
    state, replayed or not.

    What such plans hold is known best, as nothing is moved to another layout. Equal blocks are apart, so that as many
    of them are replayed, or in slices, as memory asks for. Layers that cannot be in such replicas have all strategies.
    """
    graph, every, own = case.graph, tuple(range(case.cluster.count)), dict[str, Sequence[Strategy]]()
    for name, index in formulation.layers.items():
        known = [option.strategy for option in formulation.options[index]]
        own[name] = [one for one in known if one.devices == every and one.shards == 1] or known
    beyond_s = far_s(graph, case.cluster, case.costs, own, None, formulation.shape)
    return formulate(graph, case.cluster, case.costs, own, shape=formulation.shape, far_s=beyond_s, state_by_group=True)


def _counted(case: Case, formulation: Formulation, problem: Problem, choice: Sequence[int]) -> Problem:
    """The problem with what the layers of a choice take beyond their estimates, where and when a device lacks most.

    It counts for strategies like theirs, whatever their state: what is moved to a layer depends on others, and is as
    much where those stay as they are.
    """
    layers, devices = formulation.strategies(choice), case.cluster.devices
    held = case.costs.memory_over_step(layers)
    assert held is not None  # as its peaks are known
    over = held - np.array(case.cluster.memory_bytes)
    point, device = (int(place) for place in np.unravel_index(over.argmax(), over.shape))
    resource = next(k for k, lane in enumerate(formulation.shape.lanes) if devices[lane] == devices[device])
    taken, nodes = np.zeros(len(formulation.options)), [*problem.nodes]
    for name, nbytes in case.costs.memory_by_layer(layers, [point], device)[0].items():
        taken[formulation.layers[name]] += nbytes
    for index, options in enumerate(formulation.options):
        k, here = choice[index], [u for u in nodes[index].usages if u.resource == resource and u.start <= point < u.end]
        more = taken[index] - sum(usage.amounts[k] for usage in here)
        alike = [replace(one.strategy, state=options[k].strategy.state) == options[k].strategy for one in options]
        if more > 0:
            beside = Usage(resource, point, point + 1, more * np.array(alike), estimated=True)
            nodes[index] = replace(nodes[index], usages=(*nodes[index].usages, beside))
    return replace(problem, nodes=tuple(nodes))


def lacking(case: Case, formulation: Formulation, choice: Sequence[int]) -> list[float] | None:
    """Bytes that a choice lacks by kind of device, transfers included; None where costs do not know."""
    peaks, devices = case.costs.peaks(formulation.strategies(choice)), case.cluster.devices
    if peaks is None:
        return None
    # A device that is followed stands for all of its kind.
    kinds = [devices[lane] for lane in formulation.shape.lanes]
    most = (max(p for p, own in zip(peaks, devices, strict=True) if own == kind) for kind in kinds)
    return [max(0.0, peak - kind.memory_bytes) for peak, kind in zip(most, kinds, strict=True)]


def held_up(case: Case, formulation: Formulation, pinned: Pinned, step_s: float) -> bool:
    """Whether a plan of a formulation would take less than `step_s` if devices had all the memory it wants."""
    options = enumerate(formulation.options)
    wanted = sum(formulation.times(index) * max(one.memory.most_bytes for one in own) for index, own in options)
    if wanted <= min(case.cluster.memory_bytes):
        return False
    problem = masked(formulation, pinned)
    free = replace(problem, limits=(inf,) * len(problem.limits))
    found = solve(free, case.deadline.part_s(UNBOUND), cutoff=(1 - LEAST_GAIN) * step_s, refute=True)
    return case.deadline.watched(found).status is not Status.INFEASIBLE


def in_slices(graph: LayerGraph, plan: Plan) -> Plan:
    """The plan with sharded state of all layers that can have it."""
    sharded = {name: replace(own, state=STATES[1]) for name, own in plan.layers.items()}
    return plan.with_layers({n: own for n, own in sharded.items() if slices(graph, graph.layers[n], own)})
