"""The plans people write by hand, solved under the same costs: each is a restriction of the strategies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf

import networkx as nx
import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.memory.layer_memory import training_state_bytes
from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Scheme, Strategy
from parplan.planner.decision import Baseline
from parplan.planner.search.context import Case, formulated
from parplan.planner.search.stages import equal_parts, why_not
from parplan.planner.search_space.formulation import Formulation, reassembled
from parplan.planner.search_space.options import Option, node_parts
from parplan.planner.search_space.rules import divisors, parts_words
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.search_space.verifier import check, uneven_replicas
from parplan.planner.solver.problem import Problem, Solution, objective, restrict

__all__ = ["baselines", "choices_by_hand", "gpipe", "in_fewest_micro_batches"]

DATA = "pure data parallel"

_LESS_MEMORY = {
    "ZeRO-2 data parallel": (STATES[1], SAVED[0]),
    "fully sharded data parallel": (STATES[-1], SAVED[0]),
    "fully sharded, recomputation": (STATES[-1], SAVED[-1]),
}
"""Names of plans by hand that need less memory, with the state and what is saved of their layers."""

_DATA_PARALLEL = {DATA: (STATES[0], SAVED[0]), **_LESS_MEMORY}
"""The same of all that have every layer on every device."""

BUSY = 4
"""Micro-batches for each stage from which waiting costs next to nothing, as GPipe's authors found (arXiv
1811.06965)."""

MOST_RUNS = 20_000
"""Runs of layers in a step, layers x micro-batches, up to which GPipe is priced: simulating them takes two seconds."""

Solve = Callable[[Problem], Solution]
Allowed = Callable[[str, Strategy], bool]


@dataclass(frozen=True)
class _Place:
    """Devices a habit could use; `words` say which where there are several kinds."""

    devices: tuple[int, ...]
    words: str = ""


@dataclass(frozen=True)
class _Habit:
    """A way to parallelise by hand: which strategies it allows, or why it is not legal here.

    `alone`: the other devices are not used at all, so no inputs come from them and no results are delivered to them.
    `local_batch_norm`: each device takes the statistics of its own samples.
    `ways`: state and saved of a layer's strategies, where it has such ones.
    """

    name: str
    place: _Place
    allowed: Allowed
    why_not: str = ""
    alone: bool = False
    local_batch_norm: bool = False
    ways: tuple[str, str] = (STATES[0], SAVED[0])


def baselines(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, formulation: Formulation, plan: Plan, solve: Solve
) -> tuple[Baseline, ...]:
    """One device, pure data parallel, pure model parallel, cuda-convnet2's hybrid, and on several hosts tensor shards
    inside of each with replicas between them; where the formulation has them, data parallel with gradients and
    optimizer state in slices (ZeRO-2), with all state gathered for every use, as `fully_shard` does it, and with all
    units replayed beside.

    Data parallel is priced as DistributedDataParallel runs: gradients summed in buckets beside the backward pass (as
    all plans have it), and batch norm over each device's own samples.
    Where there are several kinds of devices, each on the devices it is fastest on: those of one kind, or all.
    `plan` gives model and batch; its layers are replaced. Memory is what `costs` predict with transfers, as for the
    plan itself, so that a baseline which would run out of memory is never said to fit.
    """
    return tuple(
        _fastest([_baseline(habit, graph, cluster, costs, formulation, plan, solve) for habit in family])
        for family in _families(graph, cluster, formulation, plan)
    )


def choices_by_hand(
    graph: LayerGraph, cluster: Cluster, formulation: Formulation, plan: Plan, solve: Solve
) -> list[list[int]]:
    """The choices of these plans in the formulation, of which no memory is looked up; without those that are none."""
    habits = [habit for family in _families(graph, cluster, formulation, plan) for habit in family]
    found = [_solved(habit, formulation, solve)[0] for habit in habits]
    return [choice for choice in found if choice is not None]


def _families(graph: LayerGraph, cluster: Cluster, formulation: Formulation, plan: Plan) -> list[list[_Habit]]:
    """The habits, those that differ in their devices alone together."""
    families = [[_one_device(place) for place in _single(cluster)]]
    if cluster.count > 1:
        places = _several(cluster)
        families.append([_data_parallel(graph, place, plan) for place in places])
        families.append([_model_parallel(graph, formulation, place) for place in places])
        families.append([_hybrid(graph, formulation, place, plan) for place in places])
        if not cluster.mixed and 1 < cluster.links[0].size < cluster.count:
            families.append([_tensor_in_hosts(graph, formulation, cluster)])
    known = {(one.strategy.state, one.strategy.saved) for options in formulation.options for one in options}
    every = replace(_data_parallel(graph, _Place(tuple(range(cluster.count))), plan), local_batch_norm=False)
    return families + [[replace(every, name=name, ways=ways)] for name, ways in _LESS_MEMORY.items() if ways in known]


def in_fewest_micro_batches(
    plan: Plan, cluster: Cluster, sized: Callable[[int], Case | None], solve: Solve
) -> tuple[Baseline, ...]:
    """One device, and data parallel with everything whole, in slices, and replayed, each in the fewest micro-batches in
    which it fits. Each is one plan, so that no problem of all strategies is formulated.

    Args:
        plan: gives model and batch.
        cluster: of one kind of devices.
        sized: the case at the size of so many micro-batches, counted in those that were asked for; None where there is
            none.
    """
    whole = sized(1)
    if whole is None:
        return ()
    plan, (alone,) = replace(plan, micro_batches=whole.costs.step.micro_batches), _single(cluster)
    found = [_of_one_plan(_one_device(alone), whole, plan, solve)]
    every = _data_parallel(whole.graph, _several(cluster)[0], plan)
    each, over = divmod(whole.graph.batch or 1, cluster.count)
    for name, ways in _DATA_PARALLEL.items():
        habit, best = replace(every, name=name, ways=ways, local_batch_norm=name == DATA), None
        cases: Iterable[Case | None] = map(sized, divisors(each) if not over else (1,))
        cases = takewhile(lambda case: case is not None, cases)
        held = training_state_bytes(whole.graph, whole.request.optimizer, ways[0], cluster.count)
        if held > max(cluster.memory_bytes):
            cases = deque(cases, 1)  # fits in none: what it takes in the most
        for case in filter(None, cases):
            best = _of_one_plan(habit, case, plan, solve)
            if best.fits:
                break
        found += [best] if best is not None else []
    return tuple(found)


def gpipe(sized: Callable[[int], Case | None]) -> tuple[Baseline, ...]:
    """GPipe of equal parts: a stage of whole layers on each device, in the fewest micro-batches from four for each of
    them on (it holds the activations of all, so that more of them need as much memory), or in one for every sample.
    Empty where there are no stages, or where simulating them takes long.

    Args:
        sized: as for `in_fewest_micro_batches`.
    """
    whole = sized(1)
    if whole is None or why_not(whole):
        return ()
    each, stages = whole.costs.step.micro_batches, whole.cluster.count
    known = divisors(whole.graph.batch or 1)
    count = next((n for n in known if n * each >= BUSY * stages), known[-1])
    if count * each < stages or count * each * len(whole.graph.layers) > MOST_RUNS:
        return ()
    own = sized(count)
    staged = equal_parts(own) if own is not None else None
    if staged is None:
        return ()
    peak, limit = whole.cluster.fullest(staged.peaks)
    return (
        Baseline(
            "GPipe of equal parts", staged.step_s, int(peak), peak <= limit, plan=staged.plan, limit_bytes=int(limit),
            micro_batches=staged.plan.micro_batches,
        ),
    )  # fmt: skip


def _of_one_plan(habit: _Habit, case: Case, plan: Plan, solve: Solve) -> Baseline:
    """A habit that leaves no choice."""
    graph, several = case.graph, case.costs.step.micro_batches
    layers = data_parallel(graph, habit.place.devices, *habit.ways)
    own = replace(
        plan, layers=layers, micro_batches=several, scheme=Scheme.GATHER, schedule=SCHEDULES[0], rules="default"
    )
    try:
        check(own, graph)
    except PlanError as reason:
        return Baseline(habit.name, None, None, False, str(reason).partition(";")[0])
    formulation, _ = formulated(own, graph, case.cluster, case.costs)
    return _baseline(habit, graph, case.cluster, case.costs, formulation, own, solve)


def _single(cluster: Cluster) -> list[_Place]:
    """One device of each kind."""
    return [_Place(group.members[:1], group.device.kind if cluster.mixed else "") for group in cluster.groups]


def _several(cluster: Cluster) -> list[_Place]:
    """All devices, and where there are several kinds those of each kind."""
    every = _Place(tuple(range(cluster.count)), "all" if cluster.mixed else "")
    kinds = [group for group in cluster.groups if cluster.mixed and len(group.members) > 1]
    return [every, *(_Place(group.members, f"{len(group.members)} x {group.device.kind}") for group in kinds)]


def _fastest(found: Sequence[Baseline]) -> Baseline:
    """The fastest that fits, else the fastest, else the first."""
    return min(found, key=lambda b: (b.step_s is None, not b.fits, b.step_s or 0.0))


def _one_device(place: _Place) -> _Habit:
    return _Habit("one device", place, lambda name, s: s.devices == place.devices, alone=True)


def _without_samples(graph: LayerGraph) -> set[str]:
    """Layers that have no samples to share, and lie on one device."""
    return {n for n, layer in graph.layers.items() if layer.batch is None and not layer.constant}


def _data_parallel(graph: LayerGraph, place: _Place, plan: Plan) -> _Habit:
    whole, count = _without_samples(graph), len(place.devices)

    def allowed(name: str, s: Strategy) -> bool:
        if name in whole:
            return len(s.devices) == 1 and s.devices[0] in place.devices
        return s.devices == place.devices and (s.replicas, s.shards) == (count, 1)

    split = plan.micro_batch % count == 0 or (plan.rules != "strict" and plan.micro_batch > count)
    divides = -(-plan.micro_batch // count) * count
    why_not = "" if split else f"R1: a batch of {plan.micro_batch} does not divide by {count}; {divides} does"
    return _Habit(DATA, place, allowed, why_not, local_batch_norm=True)


def _model_parallel(graph: LayerGraph, formulation: Formulation, place: _Place) -> _Habit:
    def all_shards(s: Strategy) -> bool:
        return s.devices == place.devices and s.replicas == 1

    cut = {
        name
        for name, options in zip(formulation.names, formulation.options, strict=False)
        if any(all_shards(o.strategy) for o in options)
    }

    def allowed(name: str, s: Strategy) -> bool:
        return all_shards(s) if name in cut else len(s.devices) == 1 and s.devices[0] in place.devices

    weighted = [name for name in cut if graph.layers[name].parameters]
    why_not = "" if weighted else f"R5: no layer with weights divides by {len(place.devices)}"
    return _Habit("pure model parallel", place, allowed, why_not)


def _hybrid(graph: LayerGraph, formulation: Formulation, place: _Place, plan: Plan) -> _Habit:
    """Replicas up to the first fully-connected layer, shards of out-features from there on."""
    linear = {name for name, layer in graph.layers.items() if layer.kind == "linear"}
    after = linear.union(*(nx.descendants(graph.digraph, name) for name in linear)) if linear else set()
    convolutions = [name for name, layer in graph.layers.items() if layer.kind == "conv"]
    data = _data_parallel(graph, place, plan)
    model = _model_parallel(graph, formulation, place)

    def allowed(name: str, s: Strategy) -> bool:
        if name not in after:
            return data.allowed(name, s)
        return model.allowed(name, s) and s.axis in (None, "out-features", "features")

    missing = "" if linear and convolutions else "it is for convolutions followed by fully-connected layers"
    return _Habit("cuda-convnet2's hybrid", place, allowed, missing or data.why_not)


def _tensor_in_hosts(graph: LayerGraph, formulation: Formulation, cluster: Cluster) -> _Habit:
    """Every layer that can be in tensor shards on the devices of each host, replicas on different hosts, as Megatron-LM
    has it; the others in replicas on all devices."""
    every, each = _Place(tuple(range(cluster.count))), cluster.links[0].size

    def in_hosts(s: Strategy) -> bool:
        return s.devices == every.devices and s.shards == each

    named = zip(formulation.names, formulation.options, strict=False)
    cut = {name for name, options in named if any(in_hosts(one.strategy) for one in options)}
    whole = _without_samples(graph)

    def allowed(name: str, s: Strategy) -> bool:
        if name in cut:
            return in_hosts(s)
        return len(s.devices) == 1 if name in whole else s.devices == every.devices and s.shards == 1

    weighted = any(graph.layers[name].parameters for name in cut)
    why_not = "" if weighted else f"R5: no layer with weights divides by {each} inside hosts"
    return _Habit("tensor x data parallel", every, allowed, why_not)


def _baseline(
    habit: _Habit,
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    formulation: Formulation,
    plan: Plan,
    solve: Solve,
) -> Baseline:
    choice, step_s, why_not = _solved(habit, formulation, solve)
    if choice is None:
        return Baseline(habit.name, None, None, False, why_not)
    layers = formulation.strategies(choice)
    own_plan = replace(plan, layers=layers, rules="default", schedule=SCHEDULES[0])
    # Alone a device has no transfers, and the costs of several devices would have its inputs arrive from all of them.
    peaks = None if habit.alone else costs.peaks(layers)
    peaks = peaks or formulation.device_peaks(formulation.choice(layers), cluster.count)
    peak, limit = cluster.fullest(peaks)
    fits = peak <= limit
    parts = [f"R1: {parts_words(plan.micro_batch, count)} samples" for count in uneven_replicas(own_plan, graph)]
    return Baseline(
        habit.name,
        step_s,
        int(peak),
        fits,
        plan=own_plan,
        on=habit.place.words,
        limit_bytes=int(limit),
        bends=", ".join(parts),
        batch_norm_s=objective(formulation.problem, choice) - step_s if habit.local_batch_norm else 0,
        micro_batches=plan.micro_batches,
    )


def _solved(habit: _Habit, formulation: Formulation, solve: Solve) -> tuple[list[int] | None, float, str]:
    """The fastest choice of a habit, by its own seconds, and these; None and why there is none."""
    if habit.why_not:
        return None, inf, habit.why_not
    kept = _kept(habit, formulation)
    if not all(kept):
        return None, inf, f"{formulation.names[kept.index([])]} cannot be placed that way"
    problem = _alone(formulation) if habit.alone else formulation.problem
    problem = _local_batch_norm(formulation) if habit.local_batch_norm else problem
    solution = solve(_restricted(problem, kept))
    if solution.choice is None:
        return None, inf, "no such plan was found"
    choice = [own[k] for own, k in zip(kept, solution.choice, strict=True)]
    return choice, objective(problem, choice), ""


def _kept(habit: _Habit, formulation: Formulation) -> list[list[int]]:
    def own(name: str, options: Sequence[Option]) -> list[int]:
        known = [(k, one.strategy) for k, one in enumerate(options) if habit.allowed(name, one.strategy)]
        state, saved = habit.ways
        known = [one for one in known if one[1].state == state] or [one for one in known if one[1].state == STATES[0]]
        known = [one for one in known if one[1].saved == saved] or [one for one in known if one[1].saved == SAVED[0]]
        return [k for k, _ in known]

    layers = [own(name, options) for name, options in zip(formulation.names, formulation.options, strict=False)]
    reused = {reuse.node: list(range(len(reuse.source))) for reuse in formulation.reused}
    return layers + [reused.get(v, [0]) for v in range(len(layers), len(formulation.problem.nodes))]


def _alone(formulation: Formulation) -> Problem:
    """The problem where inputs are at hand and results stay where they are."""
    parts, delivery = formulation.parts, len(formulation.options)
    nodes = [replace(own, arrival_s=np.zeros_like(own.arrival_s)) for own in parts.nodes]
    edges = [edge for edge in parts.edges if edge.counted_at != delivery]
    return reassembled(formulation, replace(parts, nodes=nodes, edges=edges))


def _local_batch_norm(formulation: Formulation) -> Problem:
    """The problem where no device waits for the others' batch statistics."""
    parts, nodes = formulation.parts, [*formulation.parts.nodes]
    for index, options in enumerate(formulation.options):
        if any(option.batch_norm_sync_s for option in options):
            local = node_parts([replace(option, batch_norm_sync_s=0.0) for option in options], parts.shape)
            nodes[index] = local.scaled(formulation.times(index))
    return reassembled(formulation, replace(parts, nodes=nodes))


def _restricted(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """The problem with fewer strategies per node, no rules and no memory limit."""
    free = replace(problem, nodes=tuple(replace(node, usages=()) for node in problem.nodes), limits=(), linear=())
    masks = [np.isin(np.arange(node.size), own) for node, own in zip(problem.nodes, kept, strict=True)]
    return restrict(free, masks).problem
