"""The order of a program's steps.

Forward, a transfer starts as soon as its value is there; backward, as soon as the last reader has given its gradient,
and the sum of a bucket as soon as its last gradient is known. Weights that lie in slices are gathered one group of
layers ahead, both ways, so that they arrive while the group before computes (FSDP's prefetch). In a staged order every
pass goes forward and backward before the next one, which is what updates between passes need:

    all forward first                      staged
    front    F                       B     front    F             B
    pass 0     F                   B       pass 0     F B
    pass 1       F               B         pass 1         F B
    behind         F   loss   B            (each pass has its loss)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from parplan.lowering.holdings import Bucket
from parplan.lowering.passes import Pass, local_ranges
from parplan.lowering.placement import ScheduledMove
from parplan.lowering.program import (
    Compute,
    Forward,
    Join,
    OnePass,
    Program,
    Reduce,
    Regather,
    Slot,
    Staged,
    Step,
    Transfer,
)
from parplan.lowering.step_setting import StepSetting

__all__ = ["Gathers", "backward", "forward", "runs_on_replicas", "staged"]

FRONT = -1
"""The number of the layers in front, where passes have theirs."""

AnyStep = TypeVar("AnyStep", bound=Step)


class Gathers:
    """When weights are gathered from slices: all of a gather group when the group before it begins to compute.

    Args:
        steps: all segments, each of layers of one group.
        group_of: the number of every layer's group.
    """

    def __init__(self, steps: Sequence[Compute], group_of: Mapping[str, int]) -> None:
        numbers = [group_of[step.layers[0]] for step in steps]
        self._groups = [list(own) for _, own in groupby(range(len(steps)), numbers.__getitem__)]  # of segments
        self._place = {index: place for place, own in enumerate(self._groups) for index in own}

    def forward_at(self, reader: int) -> int:
        """The segment behind which weights for another one are gathered."""
        return self._groups[max(0, self._place[reader] - 1)][0] - 1

    def backward_at(self, reader: int) -> int:
        """The segment before whose backward they are gathered again."""
        return self._groups[min(len(self._groups) - 1, self._place[reader] + 1)][-1]


def forward(steps: Sequence[Compute], moves: Sequence[ScheduledMove], gathers: Gathers) -> Iterator[Forward]:
    """Forward steps: transfers of inputs, then every compute step, and behind it the transfers that can start then."""
    starting = defaultdict[int, list[Forward]](list)
    for placed in moves:
        weights = isinstance(placed.step, Transfer) and placed.step.weights
        starting[gathers.forward_at(placed.backward_at) if weights else placed.forward_at].append(placed.step)
    for index in range(-1, len(steps)):
        if index >= 0:
            yield steps[index]
        yield from starting[index]


def backward(
    steps: Sequence[Compute], moves: Sequence[ScheduledMove], buckets: Sequence[Bucket], gathers: Gathers,
    freed: Collection[str] = (),
) -> Iterator[Step]:  # fmt: skip
    """Backward steps: every compute step reversed, and behind it the sums and transfers that can start then.

    Args:
        freed: parameters that are gathered again for the step that uses them.
    """
    first = {state.name: index for index, step in reversed([*enumerate(steps)]) for state in step.states}
    complete = defaultdict[int, list[Bucket]](list)  # by the segment whose backward completes them
    for bucket in buckets:
        complete[min(first[parameter] for parameter in bucket.parameters)].append(bucket)
    again, back = defaultdict[int, list[Regather]](list), defaultdict[int, list[Step]](list)
    for placed in reversed(moves):
        step = placed.step
        back[placed.backward_at].append(step)
        if isinstance(step, Transfer) and step.weights and step.given.value in freed:
            again[gathers.backward_at(placed.backward_at)].append(Regather(step))
    for index in range(len(steps), -1, -1):
        if index < len(steps):
            yield from again[index]
            yield steps[index]
        yield from map(Reduce, complete[index])
        yield from back[index]


def staged(program: Program, passes: Sequence[Pass], step_setting: StepSetting) -> Staged | None:
    """The steps of a program with passes, pass by pass; None where something needs the samples of several passes.

    The steps of a pass keep their order. A transfer of its samples is one of them; forward, one that starts earlier is
    a step of the pass before, beside whose compute it goes on, behind those that can start at the same time.
    """
    joined = {step.target: step.sources for step in program.forward if isinstance(step, Join)}
    written = any(slot in joined or program.slots[slot].pass_number is not None for slot in program.updates.values())
    if written or program.computes[-1].pass_number is None or not joined.keys() >= set(program.outputs):
        return None
    there, back, sums = defaultdict[int, list[tuple[int, bool, Forward]]](list), defaultdict[int, list[Step]](list), []
    for ahead, place, now, number in _with_pass(program.forward):
        part = now if number is None else min(max(now, number - 1), number)
        there[part].append((place, number == part + 1, ahead))
    for step, _, now, number in _with_pass(program.backward):
        if isinstance(step, Reduce) and now != FRONT:
            sums.append(step)
        else:
            back[FRONT if number is None else number].append(step)
    own = [step_setting.own(process) for process in range(step_setting.ranks)]
    return Staged(
        before=tuple(step for *_, step in there[FRONT]),
        passes=tuple(
            OnePass(
                forward=tuple(step for *_, step in sorted(there[one.number], key=itemgetter(0, 1))),
                backward=tuple(back[one.number]),
                outputs=tuple(joined[slot][one.number] for slot in program.outputs),
                samples=tuple(local_ranges(one.ranges, extent, 1) for extent in own),
            )
            for one in passes
        ),
        sums=tuple(sums),
        after=tuple(back[FRONT]),
    )


def _with_pass(steps: Iterable[AnyStep]) -> Iterator[tuple[AnyStep, int, int, int | None]]:
    """Steps but joins, each with how many are computed by then, in which pass the last, and whose samples it has."""
    place, now = 0, FRONT
    for step in steps:
        own = step.wanted if isinstance(step, Transfer) else step
        number = own.pass_number if isinstance(own, Compute | Slot) else None
        if isinstance(step, Compute):
            place, now = place + 1, FRONT if number is None else number
        if not isinstance(step, Join):
            yield step, place, now, number


def runs_on_replicas(program: Program) -> bool:
    """Whether every device that computes takes all steps for samples of its own, or there is one; all of them take part
    in every transfer."""
    steps = program.computes
    devices = {device for step in steps for device in step.grid.devices}
    moves = program.transfers
    alike = len(steps) + len(moves) == len(program.forward) and not program.slices and not program.updates
    again = any(step.unit is not None or step.pass_number is not None for step in steps)
    joined = all(set(slot.devices) == devices for one in moves for slot in (one.given, one.wanted))
    return alike and not again and joined and all(step.grid.replicas == len(devices) for step in steps)
