"""Tasks of a step whose micro-batches go through pipeline stages.

Every micro-batch of a stage has the same tasks. They are listed once for its forward and once for its backward, and
again for the last micro-batch, which sums gradients; then they are taken for every micro-batch in the order of the
schedule. So a step of hundreds of micro-batches is listed about as fast as one of a few.

Of very long steps, tasks that follow each other on one lane count as one where nothing else waits in between
(`joined`). Its times are theirs but for transfers inside of a stage, which share links with messages between stages:
while the whole task goes on they have their mean share of the lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from parplan.lowering.pipeline.orders import Action
from parplan.lowering.pipeline.stages import Pipeline
from parplan.lowering.program import Compute, Reduce, Regather, Split, Step
from parplan.planner.simulation.equal_lanes import EqualLanes
from parplan.planner.simulation.priced_program import PricedProgram
from parplan.planner.simulation.slots import Slots, Tasks
from parplan.planner.simulation.step_tasks import NONE, Kind, Lane, Part, StepTasks

__all__ = ["pipeline_parts"]

JOINED = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.TRANSFER})
"""Kinds of tasks that may count as one; gradient sums are reported one by one."""

Lookup = Callable[["_PipelineTasks"], Iterable[int]]
"""Tasks that others have listed, of the micro-batch that is being taken."""

Filled = tuple[str, Mapping[int, int] | str]
"""A slot with tasks by device that fill it, or with another slot that does."""


class _Listed(Slots):
    """Slots while the tasks of one action are listed; what others have filled is looked up for each micro-batch.

    Args:
        outside: lookups, of which number n stands as -1 - n among the tasks.
        now: the tasks so far: of every micro-batch the same slots are filled when an action is taken.
        gradients: whether they are of gradients, or of values.
    """

    def __init__(self, outside: list[Lookup], now: _PipelineTasks, gradients: bool) -> None:
        super().__init__()
        self.outside, self.now, self.gradients = outside, now, gradients
        self.filled: list[Filled] = []  # in this order, by a task or from another slot
        self._names: dict[str, dict[str, None]] = {}  # of all slots that one is filled from
        self._known: dict[tuple[Any, ...], Tasks] = {}

    def add(self, slot: str, given: Mapping[int, int]) -> None:
        super().add(slot, given)
        self.filled.append((slot, given))

    def alias(self, slot: str, other: str) -> None:
        super().alias(slot, other)
        self.filled.append((slot, other))
        self._names[slot] = self._names.get(slot, {slot: None}) | self._names.get(other, {other: None})

    def at(self, slot: str, device: int) -> Tasks:
        return (*self._before(slot, device, lambda slots, name: slots.at(name, device)), *super().at(slot, device))

    def whole(self, slot: str) -> Tasks:
        return (*self._before(slot, None, lambda slots, name: slots.whole(name)), *super().whole(slot))

    def _before(self, slot: str, device: int | None, tasks: Callable[[Slots, str], Tasks]) -> Tasks:
        """The tasks of others, as one lookup; none where there are none."""
        names, gradients = tuple(self._names.get(slot, {slot: None})), self.gradients
        if (names, device) not in self._known:

            def lookup(own: _PipelineTasks) -> Iterable[int]:
                slots = own.gradients if gradients else own.values
                return chain.from_iterable(tasks(slots, name) for name in names)

            some = any(True for _ in lookup(self.now))
            self.outside += [lookup] * some
            self._known[names, device] = (-len(self.outside),) * some
        return self._known[names, device]


def _last_on(device: int) -> Lookup:
    """The last task on a device's compute lane."""
    return lambda now: now.computed.get(device, ())


@dataclass(frozen=True, eq=False)
class _Listing:
    """The tasks of a stage's forward or backward, whatever the micro-batch.

    Args:
        parts: `after` counts within them; below 0 are those that are looked up.
        filled: slots of values (gradients where it is backward) that others read.
        computed, held: as in StepTasks.
    """

    parts: Sequence[Part]
    outside: Sequence[Lookup]
    filled: Sequence[Filled]
    computed: Mapping[int, Tasks]
    held: Mapping[int, Sequence[int]]

    @staticmethod
    def of(now: _PipelineTasks, steps: Sequence[Step], forward: bool, shown: Callable[[str], bool]) -> _Listing:
        """The listing of steps that are taken now.

        Args:
            shown: whether others read a slot.
        """
        own, outside = StepTasks(now.priced, now.equal), list[Lookup]()
        slots = _Listed(outside, now, not forward)
        for device in own.alike:
            outside.append(_last_on(device))
            own.computed[device] = (-len(outside),)
        outside.append(lambda now: now.begun)
        own.begun, own.micro_batch = (-len(outside),), 0
        if forward:
            own.values = slots
            own.walk(steps, Kind.FORWARD)
        else:
            own.gradients = slots
            own.walk(steps, Kind.BACKWARD, frozenset(now.priced.layers))
        needed, filled = set[str](), list[Filled]()
        for slot, given in reversed(slots.filled):
            if slot in needed or shown(slot):
                filled.append((slot, given))
                needed |= {given} if isinstance(given, str) else set()
        computed = {device: tasks for device, tasks in own.computed.items() if max(tasks, default=0) >= 0}
        return _Listing(own.found, outside, filled[::-1], computed, own.held)

    def joined(self) -> _Listing:
        """The same with tasks that follow each other on one lane as one, where no other comes after one in between."""
        end = [False] * len(self.parts)  # something else comes after these
        for part in self.parts:
            for one in part.after:
                if one >= 0 and (part.exclusive != self.parts[one].exclusive or not _may_join(part)):
                    end[one] = True
        for _, given in self.filled:
            for one in () if isinstance(given, str) else given.values():
                end[one] = True
        runs, place = list[list[Part]](), list[int]()  # the run that each part is in
        known = dict[Any, set[int]]()  # by lanes: what tasks there have come after
        for index, part in enumerate(self.parts):
            before = known.setdefault(part.exclusive, set())
            last = max((k for k in part.after if k >= 0 and self.parts[k].exclusive == part.exclusive), default=-1)
            alone = last < 0 or end[last] or not (_may_join(part) and _may_join(self.parts[last]))
            if alone or runs[place[last]][-1] is not self.parts[last] or not before.issuperset(part.after):
                runs.append([])
                place.append(len(runs) - 1)
            else:
                place.append(place[last])
            runs[place[index]].append(part)
            before.update(part.after, (index,))

        def moved(given: Mapping[int, int] | str) -> Mapping[int, int] | str:
            return given if isinstance(given, str) else {device: place[one] for device, one in given.items()}

        parts = [_one(run, place) for run in runs]
        filled = [(slot, moved(given)) for slot, given in self.filled]
        computed = {device: tuple(place[one] for one in own) for device, own in self.computed.items()}
        held = {device: list(dict.fromkeys(place[one] for one in own)) for device, own in self.held.items()}
        return _Listing(parts, self.outside, filled, computed, held)


def _may_join(part: Part) -> bool:
    """Whether a task may count as one with others: on lanes of compute, in the order of the program."""
    if part.kind not in JOINED or not part.exclusive or part.exclusive[0].lane is not Lane.COMPUTE:
        return False
    return part.move is None or not part.move.apart  # messages are not waited for by what their sender computes next


def _one(run: Sequence[Part], place: Sequence[int]) -> Part:
    """Tasks that follow each other as one, which comes after what the first comes after.

    Args:
        place: the new number of every task.
    """
    first, last = run[0], run[-1]
    after = tuple(dict.fromkeys(place[one] if one >= 0 else one for one in first.after))
    if len(run) == 1:
        return replace(first, after=after)
    seconds, lanes, shares = sum(part.seconds for part in run), defaultdict[Any, float](float), dict[Kind, float]()
    for part in run:
        assert part.kind is not None
        shares[part.kind] = shares.get(part.kind, 0.0) + part.seconds
        for lane, busy in part.capacity.items() if seconds else ():
            lanes[lane] += busy * part.seconds / seconds
    kind = max(shares, key=lambda own: shares[own])
    return replace(
        first, seconds=seconds, capacity=dict(lanes) or NONE, after=after, kind=kind, what=last.what, move=None,
        fractions=tuple((own, part_s / seconds) for own, part_s in shares.items()) if seconds else (),
    )  # fmt: skip


def _slots(step: Step) -> set[str]:
    """The slots that a step reads or fills."""
    if isinstance(step, Reduce | Regather):
        return set()
    if isinstance(step, Compute):
        return {*step.reads, *(result.slot for result in step.results)}
    return {*step.reads, *(step.targets if isinstance(step, Split) else (step.target,))}


class _PipelineTasks(StepTasks):
    """Tasks of all micro-batches, as their actions are taken.

    Args:
        before: prices of every micro-batch before the last.
        joined: tasks that follow each other count as one.
    """

    def __init__(
        self, priced: PricedProgram, before: PricedProgram, equal: EqualLanes | None, pipeline: Pipeline, joined: bool
    ) -> None:
        super().__init__(priced, equal)
        self.last, self.before, self.pipeline, self.joined = priced, before, pipeline, joined
        self._listings: dict[tuple[int, bool, bool], _Listing] = {}  # by stage, direction, and whether it is the last
        # By direction and slot: the stages that read or fill it; -1 is the user.
        self._stages_of: dict[tuple[bool, str], set[int]] = defaultdict(set)
        for number, stage in enumerate(pipeline.stages):
            for slot in chain.from_iterable(map(_slots, stage.forward)):
                self._stages_of[True, slot].add(number)
            for slot in chain.from_iterable(map(_slots, stage.backward)):
                self._stages_of[False, slot].add(number)
        for slot in (*pipeline.homes, *chain.from_iterable(map(_slots, pipeline.deliveries))):
            self._stages_of[True, slot].add(-1)

    def in_order(self, actions: Sequence[Action]) -> tuple[Part, ...]:
        """All tasks of a step; devices take theirs in the order of these actions."""
        pipeline = self.pipeline
        slots = [(Slots(), Slots()) for _ in range(1 + actions[-1].micro_batch)]
        losses = dict[int, Tasks]()  # gates behind the losses of micro-batches

        def enter(number: int) -> None:
            self.micro_batch, (self.values, self.gradients) = number, slots[number]
            self.priced, self.begun = self.last if number + 1 == len(slots) else self.before, ()

        arrived: Tasks = ()
        for number in range(len(slots)):
            enter(number)
            self.begun, before_them = arrived, len(self.found)
            self.walk(pipeline.arrivals, Kind.FORWARD)
            arrived = self.gate(range(before_them, len(self.found)))  # links carry one micro-batch after another
        for action in actions:
            number = action.micro_batch
            enter(number)
            if not action.forward:
                if number not in losses:
                    losses[number] = self.gate(task for slot in pipeline.homes for task in self.values.whole(slot))
                self.begun = losses[number]
            self.take(action.stage, action.forward)
        for number in range(len(slots)):
            enter(number)
            self.walk(pipeline.deliveries, Kind.FORWARD)
        self.begun = ()
        return self.updates(len(slots))

    def listing(self, stage: int, forward: bool) -> _Listing:
        """The tasks of a stage at the prices of this micro-batch."""
        key = stage, forward, self.priced is self.last
        if key not in self._listings:
            steps = self.pipeline.stages[stage]

            def shown(slot: str) -> bool:
                return not self._stages_of[forward, slot] <= {stage}

            found = _Listing.of(self, steps.forward if forward else steps.backward, forward, shown)
            self._listings[key] = found.joined() if self.joined else found
        return self._listings[key]

    def take(self, stage: int, forward: bool) -> None:
        """Take the tasks of a stage for this micro-batch."""
        listing = self.listing(stage, forward)
        first, outside = len(self.found), [tuple(lookup(self)) for lookup in listing.outside]
        for one in listing.parts:
            after = chain.from_iterable((first + own,) if own >= 0 else outside[-1 - own] for own in one.after)
            number = None if one.number is None else self.micro_batch
            about = one.kind, one.what, number, one.devices, one.move, one.reverse, one.fractions
            needed = tuple(dict.fromkeys(after))
            self.found.append(Part(one.seconds, one.exclusive, one.capacity, needed, one.low_priority, *about))
        slots = self.values if forward else self.gradients
        for slot, given in listing.filled:
            if isinstance(given, str):
                slots.alias(slot, given)
            else:
                slots.add(slot, {device: first + own for device, own in given.items()})
        for device, own in listing.computed.items():
            self.computed[device] = tuple(first + one for one in own)
        for device, held in listing.held.items():
            self.held[device] += (first + one for one in held)


def pipeline_parts(
    priced: PricedProgram,
    pipeline: Pipeline,
    actions: Sequence[Action],
    before: PricedProgram,
    equal: EqualLanes | None = None,
    joined: bool = False,
) -> tuple[Part, ...]:
    """Everything there is to do in one training step whose micro-batches go through pipeline stages.

    Args:
        priced: of the last micro-batch.
        before: of those before it.
        equal: lanes of which one has the tasks of all; None: each has its own.
        joined: tasks that follow each other count as one.
    """
    return _PipelineTasks(priced, before, equal, pipeline, joined).in_order(actions)
