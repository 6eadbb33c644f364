"""Simulated step: the activity of every device and every lane over time.

The objective (planner/solver/problem.py) adds all layers and transfers up, which is exact where every layer is on all
devices and runs once. Here every device is followed, of those that do the same one, so branches on disjoint devices
run at the same time; and the layers behind a boundary run in passes, the samples of one pass on their way while another
is computed.

- A layer's part in one pass takes what `costs.layer(layer, strategy, passes)` says, on each of its devices.
- A transfer uses lanes, out of those who send and into those who receive; transfers under way at the same time share
  them. One between layers that run equally often also exclusive all devices of both, as what comes next needs it. One
  across the boundary of passes does not: it starts when its samples are there and the pass before begins to compute,
  and goes on beside it, while its lanes are free of what devices wait for (as with streams of two priorities); but
  for the share that StepCost.overlap takes from compute, which is all of it on processors that also carry.
- All passes go forward before any goes back (a plain `loss.backward()`), or each goes back at once (`one_f_one_b`, as
  `train_step` does it where weights are updated between passes).
- Micro-batches follow one another, and the last one sums gradients and updates.
- Gradient sums are on their own way beside the backward, except for the share that StepCost.overlap takes from it.
- Updates and the runtime's own time come last, on each device after its backward and its sums.

A device that has nothing to compute waits for something: going back from what it waits for to what that waited for,
each such second is one of a transfer, a sum, or another device's compute. So all parts of a step add up to it,
on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.pipeline.orders import merged, orders
from parplan.lowering.pipeline.stages import pipeline
from parplan.plan import SCHEDULES, Plan
from parplan.planner.simulation.equal_lanes import EqualLanes
from parplan.planner.simulation.list_schedule import NOTHING, Span, schedule
from parplan.planner.simulation.pipeline_tasks import pipeline_parts
from parplan.planner.simulation.priced_program import RUNTIME_POLICY, PassPolicy, lowered, priced
from parplan.planner.simulation.step_tasks import Kind, Lane, Part, Resource, step_parts

__all__ = ["Activity", "Kind", "Lane", "PassPolicy", "Resource", "Timeline", "simulate"]


MOST_BY_LAYER = 100_000
"""Layers x micro-batches up to which a pipeline is simulated layer by layer, in about ten seconds; of more, tasks that
follow each other on a device count as one, and the step is within 1 % of that."""


@dataclass(frozen=True)
class Activity:
    """A part of a task, from `start_s` to `end_s`.

    Args:
        what: the layer or value; empty for a device's updates and overhead.
        number: the pass or micro-batch, None for what happens once.
    """

    kind: Kind
    what: str
    number: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """One simulated step of a plan.

    Attributes:
        parts: its tasks, in the order of the program.
        spans: when each ran.
        equal: lanes of which one has the tasks of all.
    """

    parts: tuple[Part, ...]
    spans: tuple[Span, ...]
    equal: EqualLanes

    @cached_property
    def step_s(self) -> float:
        """Seconds until everything is done."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def last(self) -> int:
        """The device that is done last, the first of several; what its time went into is the step's own account."""
        ends_s = [
            max((self.spans[index].end_s for index in self._computing.get(device, ())), default=0.0)
            for device in self.equal.computing
        ]
        return ends_s.index(max(ends_s))

    @property
    def device_count(self) -> int:
        """How many devices there are."""
        return len(self.equal.computing)

    def lane(self, lane: Lane, device: int) -> Resource:
        """The lane that has the tasks of a device's lane: its own, or one that is equal."""
        links = lane in (Lane.OUT, Lane.IN)
        return Resource(lane, (self.equal.carrying if links else self.equal.computing)[device])

    @property
    def critical_s(self) -> Mapping[Kind, float]:
        """Seconds of the step by kind, on the device that is done last."""
        return self.spent_s(self.last)

    @property
    def exposed_transfer_s(self) -> float:
        """Time in which the device that is done last has nothing to compute because of a transfer."""
        return self.critical_s[Kind.TRANSFER]

    def spent_s(self, device: int) -> Mapping[Kind, float]:
        """Seconds of a step by kind: what a device does itself, and what it waits for, in the end, between that.

        What it does itself includes transfers that hold its compute. All kinds together are the step.
        """
        own_s: dict[Kind | None, float] = dict.fromkeys((*Kind, None), 0.0)
        waits_s = dict.fromkeys(Kind, 0.0)
        for index in self._computing.get(self.equal.computing[device], ()):
            seconds = self.spans[index].end_s - self.spans[index].start_s
            for kind, share in self.parts[index].kinds:
                own_s[kind] += share * seconds
        for one in self.waits(device):
            waits_s[one.kind] += one.end_s - one.start_s
        return {kind: own_s[kind] + waits_s[kind] for kind in Kind}

    def waits(self, device: int) -> tuple[Activity, ...]:
        """The activities elsewhere that a device waits for while its compute lane is empty, cut to those times."""
        found, done_s = list[Activity](), 0.0
        for index in self._computing.get(self.equal.computing[device], ()):
            span = self.spans[index]
            found += self._waited(span.critical_predecessor, done_s, span.start_s)
            done_s = max(done_s, span.end_s)
        last = max(range(len(self.spans)), key=lambda index: self.spans[index].end_s, default=NOTHING)
        found += self._waited(last, done_s, self.step_s)
        return tuple(sorted(found, key=lambda one: one.start_s))

    @cached_property
    def _computing(self) -> Mapping[int, Sequence[int]]:
        """Tasks on the compute lane of each device that has its own, by start."""
        found: dict[int, list[int]] = {}
        for index in sorted(range(len(self.parts)), key=lambda index: (self.spans[index].start_s, index)):
            for resource in self.parts[index].exclusive:
                if resource.lane is Lane.COMPUTE:
                    found.setdefault(resource.device, []).append(index)
        return found

    def _waited(self, index: int, since_s: float, until_s: float) -> Iterator[Activity]:
        """[since, until) along the critical predecessors of the task that ended last before `until`, backwards."""
        while index != NOTHING and until_s > since_s:
            span, part = self.spans[index], self.parts[index]
            start_s, end_s = max(since_s, span.start_s), min(until_s, span.end_s)
            seconds = end_s - start_s
            for kind, share in reversed(part.kinds) if seconds > 0 else ():
                if kind is not None:
                    yield Activity(kind, part.what, part.number, end_s - share * seconds, end_s)
                end_s -= share * seconds
            until_s = span.start_s
            index = span.critical_predecessor


def simulate(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, plan: Plan, policy: PassPolicy = RUNTIME_POLICY
) -> Timeline:
    """Simulate one training step of `plan`, lowered for the cluster's setting.

    Args:
        policy: how passes are run, where that is not as the runtime does it.

    Raises:
        PlanError: the plan's scheme asks for passes that cannot be.
    """
    program = lowered(graph, plan, cluster)
    work, count = priced(graph, program, costs, policy), costs.step.micro_batches
    before = replace(work, layers={n: replace(layer, cost=layer.cost.before_last) for n, layer in work.layers.items()})
    equal = EqualLanes.of(work)
    if plan.schedule != SCHEDULES[0]:
        in_stages = pipeline(graph, program)
        numbers = in_stages.numbers
        actions = merged(orders(plan.schedule, len(numbers.groups), numbers.count, count))
        joined = len(graph.layers) * count > MOST_BY_LAYER
        parts = pipeline_parts(work, in_stages, actions, before, equal, joined)
        return Timeline(parts, schedule(parts), equal)
    parts = step_parts(work, equal)
    last = Timeline(parts, schedule(parts), equal)
    if count == 1:
        return last
    parts = step_parts(before, equal)
    return _one_after_another([Timeline(parts, schedule(parts), equal)] * (count - 1) + [last])


def _one_after_another(timelines: Sequence[Timeline]) -> Timeline:
    """The micro-batches of a step as one timeline: each begins when the one before is done."""
    parts, spans = list[Part](), list[Span]()
    begin_s, before = 0.0, NOTHING  # the end of the micro-batch before, and its task that ended last
    for number, one in enumerate(timelines):
        offset = len(parts)
        parts += (replace(part, number=number) for part in one.parts)
        for span in one.spans:
            alone = span.critical_predecessor == NOTHING
            first = before if alone else span.critical_predecessor + offset
            spans.append(Span(begin_s + span.start_s, begin_s + span.end_s, first))
        before = max(range(offset, len(parts)), key=lambda index: spans[index].end_s)
        begin_s += one.step_s
    return Timeline(tuple(parts), tuple(spans), timelines[0].equal)
