"""The order of a program's steps.

Forward, a transfer starts as soon as its value is there; backward, as soon as the last reader has given its gradient,
and the sum of a bucket as soon as its last gradient is known. In a staged order every pass goes forward and backward
before the next one, which is what updates between passes need:

    all forward first                      staged
    front    F                       B     front    F             B
    pass 0     F                   B       pass 0     F B
    pass 1       F               B         pass 1         F B
    behind         F   loss   B            (each pass has its loss)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
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

__all__ = ["backward", "forward", "staged"]

FRONT = -1
"""The number of the layers in front, where passes have theirs."""

AnyStep = TypeVar("AnyStep", bound=Step)


def forward(steps: Sequence[Compute], moves: Sequence[ScheduledMove]) -> Iterator[Forward]:
    """Forward steps: transfers of inputs, then every compute step, and behind it the transfers that can start then."""
    for index in range(-1, len(steps)):
        if index >= 0:
            yield steps[index]
        yield from (placed.step for placed in moves if placed.forward_at == index)


def backward(
    steps: Sequence[Compute], moves: Sequence[ScheduledMove], buckets: Sequence[Bucket], freed: Collection[str] = ()
) -> Iterator[Step]:
    """Backward steps: every compute step reversed, and behind it the sums and transfers that can start then.

    Args:
        freed: parameters that are gathered again before the step that uses them.
    """
    complete = defaultdict[int, list[Bucket]](list)  # by the segment whose backward completes them
    for bucket in buckets:
        uses = (i for i, step in enumerate(steps) if any(s.name in bucket.parameters for s in step.states))
        complete[min(uses)].append(bucket)
    for index in range(len(steps), -1, -1):
        here = [placed.step for placed in moves if placed.backward_at == index]
        if index < len(steps):
            yield from (Regather(s) for s in here if isinstance(s, Transfer) and s.weights and s.given.value in freed)
            yield steps[index]
        yield from map(Reduce, complete[index])
        yield from reversed(here)


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
