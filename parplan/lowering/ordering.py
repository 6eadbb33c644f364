"""The order of a program's steps.

Forward, a transfer starts as soon as its value is there; backward, as soon as the last reader has given its gradient,
and the sum of a bucket as soon as its last gradient is known. In a staged order every pass goes forward and backward
before the next one, which is what updates between passes need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from parplan.layout import Range
from parplan.lowering.holdings import Bucket
from parplan.lowering.passes import Pass, local_ranges
from parplan.lowering.placement import ScheduledMove
from parplan.lowering.program import Compute, Forward, Join, OnePass, Reduce, Slot, Split, Staged, Step

__all__ = ["backward", "forward", "staged"]


def forward(
    steps: Sequence[Compute], moves: Sequence[ScheduledMove], start: int = -1, stop: int | None = None
) -> Iterator[Forward]:
    """Forward steps: every compute step from `start` up to `stop`, and behind it the transfers that can start then.

    Args:
        start: index of a step; -1 begins with the transfers of the user's inputs.
        stop: default: the end.
    """
    for index in range(start, len(steps) if stop is None else stop):
        if index >= 0:
            yield steps[index]
        yield from (placed.step for placed in moves if placed.forward_at == index)


def backward(steps: Sequence[Compute], moves: Sequence[ScheduledMove], buckets: Sequence[Bucket]) -> list[Step]:
    """Backward steps: every compute step reversed, and behind it the sums and transfers that can start then."""
    complete = _completed_by(steps, buckets)
    order: list[Step] = []
    for index in range(len(steps), -1, -1):
        if index < len(steps):
            order.append(steps[index])
        order += map(Reduce, complete.get(index, []))
        order += [placed.step for placed in reversed(moves) if placed.backward_at == index]
    return order


def staged(
    steps: Sequence[Compute],
    moves: Sequence[ScheduledMove],
    buckets: Sequence[Bucket],
    slots: Mapping[str, Slot],
    outputs: Sequence[str],
    updates: Iterable[str],
    passes: Sequence[Pass],
    own: Sequence[Range],
) -> Staged | None:
    """The steps pass by pass; None where something needs the samples of several passes.

    Args:
        own: per process, its samples in the whole batch.
    """
    parts = {placed.step.target: placed.step.sources for placed in moves if isinstance(placed.step, Join)}
    turns = [step.turn for step in steps]
    first = next((index for index, turn in enumerate(turns) if turn is not None), len(turns))
    written = any(slot in parts or slots[slot].turn is not None for slot in updates)  # by the passes
    if not passes or None in turns[first:] or not set(outputs) <= set(parts) or written:
        return None
    inner = [placed for placed in moves if not isinstance(placed.step, Join)]
    begins = [turns.index(one.number) for one in passes] + [len(steps)]
    complete = _completed_by(steps, buckets)
    at_once = [placed for placed in inner if not _turn(placed, slots)]
    return Staged(
        before=tuple(forward(steps, at_once, stop=first)),
        passes=tuple(
            OnePass(
                forward=tuple(_pass_forward(steps, inner, slots, one.number, begins)),
                backward=tuple(_pass_back(steps, inner, slots, one.number)),
                outputs=tuple(parts[slot][one.number] for slot in outputs),
                samples=tuple(local_ranges(one.ranges, extent, 1) for extent in own),
            )
            for one in passes
        ),
        sums=tuple(Reduce(b) for i in sorted(complete, reverse=True) if i >= first for b in complete[i]),
        after=tuple(_after(steps[:first], inner, buckets, slots)),
    )  # fmt: skip


def _turn(placed: ScheduledMove, slots: Mapping[str, Slot]) -> int | None:
    """The pass whose part of a value a move brings."""
    return None if isinstance(placed.step, Split | Join) else slots[placed.step.target].turn


def _pass_forward(
    steps: Sequence[Compute],
    moves: Sequence[ScheduledMove],
    slots: Mapping[str, Slot],
    turn: int,
    begins: Sequence[int],
) -> Iterator[Forward]:
    """Forward steps of one pass: the next one's samples leave as it begins, and its results come after it."""
    start, stop = begins[turn], begins[turn + 1]
    coming = [placed for placed in moves if _turn(placed, slots) == turn + 1 and placed.forward_at < stop]
    yield from (placed.step for placed in coming if placed.forward_at < start)
    yield from forward(
        steps, [placed for placed in moves if _turn(placed, slots) in (None, turn)] + coming, start, stop
    )
    yield from (placed.step for placed in moves if _turn(placed, slots) == turn and placed.forward_at >= stop)


def _pass_back(
    steps: Sequence[Compute], moves: Sequence[ScheduledMove], slots: Mapping[str, Slot], turn: int
) -> Iterator[Step]:
    """Backward steps of one pass; those of its moves that go back behind other passes' steps come first or last."""
    own = [placed for placed in reversed(moves) if _turn(placed, slots) == turn]
    at = [index for index, step in enumerate(steps) if step.turn == turn]
    yield from (placed.step for placed in own if placed.backward_at > at[-1])
    for index in reversed(at):
        yield steps[index]
        yield from (placed.step for placed in own if placed.backward_at == index)
    yield from (placed.step for placed in own if placed.backward_at < at[0])


def _after(
    steps: Sequence[Compute], moves: Sequence[ScheduledMove], buckets: Sequence[Bucket], slots: Mapping[str, Slot]
) -> Iterator[Step]:
    """Backward steps from the passes on."""
    own = [placed for placed in reversed(moves) if _turn(placed, slots) is None]
    behind = sorted((p for p in own if p.backward_at >= len(steps)), key=lambda p: -p.backward_at)
    yield from (placed.step for placed in behind)
    within = [placed for placed in reversed(own) if placed.backward_at < len(steps)]
    here = [b for b in buckets if any(s.name in b.parameters for step in steps for s in step.states)]
    yield from backward(steps, within, here)


def _completed_by(steps: Sequence[Compute], buckets: Sequence[Bucket]) -> dict[int, list[Bucket]]:
    """Buckets by the segment whose backward completes them."""
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        first = min(i for i, step in enumerate(steps) if any(s.name in bucket.parameters for s in step.states))
        found.setdefault(first, []).append(bucket)
    return found
