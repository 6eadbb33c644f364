"""What all parts of a decision work on: the model, the devices, their costs, what is asked, and the time left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic as now_s

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, Moments
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import Fold, fold
from parplan.lowering.pipeline.orders import most_in_flight, orders
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.lowering.stages import stages
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Strategy
from parplan.planner.request import Listener, PlanRequest
from parplan.planner.search.branches import foldable, homes_of
from parplan.planner.search_space.formulation import Formulation, formulate
from parplan.planner.search_space.shape import ONE_PASS, Shape
from parplan.planner.simulation.timeline import Timeline, simulate
from parplan.planner.solver.problem import Solution, objective

__all__ = [
    "EXACT", "SIMULATED", "Case", "Deadline", "fits", "followed", "formulated", "gathered_together", "is_simulated",
    "needs_simulation", "pipeline_peaks", "plain", "shape_of", "simulated_step",
]  # fmt: skip


SIMULATED = 64
"""Devices up to which steps are simulated; on more, and of repeated blocks, the objective predicts them."""

EXACT = 1e-6
"""Part of a step up to which its T and its simulation count as equal."""


class Deadline:
    """One limit for all the searches of a decision. Each may take a part of what is left, and a little in any case.

    Searches end by themselves, after a fixed effort or with a proof; the limit is there for machines on which that
    takes too long. Where it ended one (`hit`), another machine may find another plan, and the report says so.
    """

    LEAST = 0.02
    """Part of the limit that a search gets even where nothing is left: enough for a first choice."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.hit = False
        self._until = now_s() + limit_s

    def left_s(self) -> float:
        """Seconds until the limit, 0 when it is over."""
        return max(0.0, self._until - now_s())

    def over(self) -> bool:
        """Whether no time is left for another search, which counts as one that the limit ended."""
        self.hit = self.hit or self.left_s() <= 0
        return self.left_s() <= 0

    def extend(self, seconds: float) -> None:
        """What is not a search, such as measuring layers, does not count."""
        self._until += seconds

    def part_s(self, part: float) -> float:
        """What a search may take: a part of what is left."""
        return max(part * self.left_s(), self.LEAST * self.limit_s)

    def watched(self, found: Solution) -> Solution:
        """A solution, after looking whether the clock had a part in it."""
        self.hit = self.hit or found.limited
        return found


@dataclass(frozen=True, eq=False)
class Case:
    """A model to plan for some devices.

    Args:
        deadline: for everything that is searched.
        uneven: replicas may have parts of the batch that differ by one sample.
        fold: repeated blocks that are planned alike.
        widest: layers are on as many devices as can share them, or on one.
        states, saved: that layers may have (plan.Strategy), as memory asks for them.
        steps_s: seconds of steps that were asked for, by scheme and strategies; of this case alone, as what follows.
        fastest: the simulated step that is fastest so far, by the same.
    """

    graph: LayerGraph
    cluster: Cluster
    costs: CostModel
    request: PlanRequest
    deadline: Deadline
    progress: Listener | None = None
    uneven: bool = False
    fold: Fold | None = None
    widest: bool = False
    states: tuple[str, ...] = STATES[:1]
    saved: tuple[str, ...] = SAVED[:1]
    steps_s: dict[tuple[object, ...], float] = field(default_factory=dict, init=False)
    fastest: dict[tuple[object, ...], Timeline] = field(default_factory=dict, init=False)

    @property
    def saves_memory(self) -> bool:
        """Whether layers may have ways to need less memory."""
        return len(self.states) > 1 or len(self.saved) > 1

    @staticmethod
    def of(
        graph: LayerGraph,
        cluster: Cluster,
        costs: CostModel,
        request: PlanRequest,
        progress: Listener | None = None,
    ) -> Case:
        """A case with its whole time limit left."""
        alike, free = fold(graph), request.plan is None and request.rules != "strict"
        deadline = Deadline(request.time_limit_s)
        return Case(graph, cluster, costs, request, deadline, progress, fold=alike if free else None)

    def phase(self, name: str) -> None:
        """Tell the listener that a phase begins."""
        if self.progress is not None:
            self.progress.phase(name)

    def objective_s(self, plan: Plan) -> float:
        """T of a plan.

        Raises:
            PlanError: the plan's scheme asks for passes that cannot be.
        """
        formulation, choice = formulated(plan, self.graph, self.cluster, self.costs)
        return objective(formulation.problem, choice)

    def step_s(self, plan: Plan, objective_s: float | None = None) -> float:
        """Seconds of a plan's step, simulated or else T; kept for the next call.

        Args:
            objective_s: its T, where that is known.

        Raises:
            PlanError: the plan's scheme asks for passes that cannot be.
        """
        key = _step_key(plan)
        if key not in self.steps_s:
            timeline = self.simulated(plan)
            if timeline is not None:
                self.steps_s[key] = timeline.step_s
            else:
                self.steps_s[key] = self.objective_s(plan) if objective_s is None else objective_s
        return self.steps_s[key]

    def simulated(self, plan: Plan) -> Timeline | None:
        """The simulated step of a plan, that of the fastest kept for the next call; None where T is its prediction.

        Raises:
            PlanError: the plan's scheme asks for passes that cannot be.
        """
        key = _step_key(plan)
        if key in self.fastest:
            return self.fastest[key]
        timeline = simulated_step(plan, self.graph, self.cluster, self.costs)
        if timeline is not None and all(timeline.step_s < known.step_s for known in self.fastest.values()):
            self.fastest.clear()
            self.fastest[key] = timeline
        return timeline


def _step_key(plan: Plan) -> tuple[object, ...]:
    """All that plans of one case differ in."""
    return plan.scheme, plan.schedule, *plan.layers.values()


def simulated_step(plan: Plan, graph: LayerGraph, cluster: Cluster, costs: CostModel) -> Timeline | None:
    """The simulated step of a plan; None where T is its prediction.

    Raises:
        PlanError: the plan's scheme asks for passes that cannot be.
    """
    return simulate(graph, cluster, costs, plan) if is_simulated(plan, graph, cluster) else None


def is_simulated(plan: Plan, graph: LayerGraph, cluster: Cluster) -> bool:
    """Whether the step of a plan is simulated: in stages, which T does not describe; else not on many devices, nor for
    repeated blocks alike in series, where T is exact, and fast.

    Raises:
        PlanError: the plan's scheme asks for passes that cannot be.
    """
    alike = fold(graph)
    equal = alike is not None and _alike(plan, graph, alike)
    few = cluster.count <= SIMULATED or plan.schedule != SCHEDULES[0]
    return few and not (equal and not needs_simulation(plan, graph))


def _alike(plan: Plan, graph: LayerGraph, alike: Fold) -> bool:
    """Whether a plan treats equal blocks alike, and T of them folded is exact."""
    gathered = {name for name, own in plan.layers.items() if own.state == "gathered"}
    return alike.treated_alike(plain(plan)) and gathered_together(graph, alike, gathered)


def gathered_together(graph: LayerGraph, alike: Fold, gathered: Collection[str]) -> bool:
    """Whether all layers with matrices of a repeated block gather their weights again, or none: for others T of folded
    blocks is not exact (formulation.py)."""
    names, able = list(graph.layers), set[str]()
    for name, layer in graph.layers.items():
        able |= {name} if any(len(graph.values[parameter].shape) > 1 for parameter in layer.parameters) else set()
    blocks = (able.intersection(names[own.begin : own.begin + own.period]) for own in alike.blocks)
    return all(block.issubset(gathered) or block.isdisjoint(gathered) for block in blocks)


def needs_simulation(plan: Plan, graph: LayerGraph) -> bool:
    """Whether layers run in passes, or some on devices that others do not use at all: then they do not add up."""
    if plan.schedule != SCHEDULES[0]:
        return True
    if stages(graph, plan.layers, plan.scheme).passes > 1:
        return True
    places = {frozenset(strategy.devices) for strategy in plan.layers.values()}
    return any(one.isdisjoint(other) for one in places for other in places)


def plain(plan: Plan) -> dict[str, Strategy]:
    """A plan's layers as the solver knows them."""
    return {name: replace(strategy, update_period=None) for name, strategy in plan.layers.items()}


def pipeline_peaks(plan: Plan, graph: LayerGraph, costs: CostModel) -> tuple[int, ...]:
    """Peak bytes per device of a plan in pipeline stages: of one micro-batch, and what others in flight have saved."""
    held = costs.memory_over_step(plan.layers)
    if held is None:  # no more is known than what layers add up to
        held = np.zeros((Moments(len(graph.layers)).end, plan.devices), dtype=np.int64)
        for name, strategy in plan.layers.items():
            for one in costs.memory(graph.layers[name], strategy).held:
                held[one.start : one.end, list(strategy.devices)] += one.nbytes
    numbers, loss = stage_numbers(graph, plan.layers), Moments(len(graph.layers)).loss
    groups, count = len(numbers.groups), numbers.count
    peaks = held.max(axis=0)
    for devices, own in zip(numbers.groups, orders(plan.schedule, groups, count, plan.micro_batches), strict=True):
        here = list(devices)
        saved = held[loss, here] - held[0, here]
        peaks[here] += ((most_in_flight(own, count // groups) - 1) * saved).astype(peaks.dtype)
    return tuple(peaks.tolist())


def fits(graph: LayerGraph, cluster: Cluster, costs: CostModel, layers: Mapping[str, Strategy]) -> bool:
    """Whether every device's memory suffices for a plan with these layers, transfers included."""
    peaks: Sequence[float] | None = costs.peaks(layers)
    if peaks is None:
        alone = formulate(graph, cluster, costs, {name: (own,) for name, own in layers.items()})
        peaks = alone.device_peaks([0] * len(alone.options), cluster.count)
    return cluster.has_room(peaks)


def followed(cluster: Cluster, blocks: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Devices of which one has, at any moment, as much to do and to hold as any other, for layers on these blocks.

    The first of each kind, and of those that are in the same blocks one, where no device of its kind is in all of these
    and more.
    """
    within: list[list[int]] = [[] for _ in cluster.devices]
    for number, block in enumerate(set(map(tuple, blocks))):
        for device in block:
            within[device].append(number)
    lanes = {group.members[0] for group in cluster.groups}
    for group in cluster.groups:
        first = dict[frozenset[int], int]()
        for device in group.members:
            first.setdefault(frozenset(within[device]), device)
        lanes |= {device for own, device in first.items() if not any(own < other for other in first)}
    return tuple(sorted(lanes))


def shape_of(plan: Plan, graph: LayerGraph, cluster: Cluster) -> Shape:
    """The shape of a plan: its passes, the branches that it runs at the same time, and the devices to follow.

    Raises:
        PlanError: the plan's scheme asks for passes that cannot be.
    """
    when = stages(graph, plain(plan), plan.scheme)
    shape = Shape(plan.scheme, when.max_replicas, when.min_replicas) if when.passes > 1 else ONE_PASS
    homes = homes_of(graph, {name: own.devices for name, own in plan.layers.items()}) if when.passes == 1 else ()
    placed = {name for phase in homes for branch, _ in phase for name in branch}
    lanes = {
        *followed(cluster, (own.devices for name, own in plan.layers.items() if name not in placed)),
        *(min(block) for phase in homes for _, block in phase),
    }
    return replace(shape, lanes=tuple(sorted(lanes)), homes=tuple((one,) for one in homes), placed=True)


def formulated(
    plan: Plan, graph: LayerGraph, cluster: Cluster, costs: CostModel
) -> tuple[Formulation, tuple[int, ...]]:
    """The problem whose only choice is a plan, and that choice.

    Raises:
        PlanError: the plan's scheme asks for passes that cannot be.
    """
    own = {name: (strategy,) for name, strategy in plain(plan).items()}
    alike, shape = fold(graph), shape_of(plan, graph, cluster)
    phases = [tuple(branch for branch, _ in placement) for (placement,) in shape.homes]
    if alike is not None and not (_alike(plan, graph, alike) and foldable(phases, alike.kept) == phases):
        alike = None
    beyond_s = far_s(graph, cluster, costs, own, alike, shape)
    formulation = formulate(graph, cluster, costs, own, shape=shape, far_s=beyond_s, fold=alike)
    return formulation, formulation.choice(plain(plan), stages(graph, plain(plan), plan.scheme).of)


def far_s(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    candidates: Mapping[str, Sequence[Strategy]],
    alike: Fold | None,
    shape: Shape,
) -> float:
    """Seconds that no step worth considering takes: twice those of every layer's first strategy, one after another; 0
    for a shape whose options all use every device and wait for the same."""
    if not shape.by_device and all(one.state != "gathered" for own in candidates.values() for one in own):
        return 0.0
    alone = formulate(graph, cluster, costs, {name: own[:1] for name, own in candidates.items()}, fold=alike)
    return 2 * objective(alone.problem, [0] * len(alone.problem.nodes))
