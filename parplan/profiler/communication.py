"""Measures communication as plans use it: through the runtime's own transport, with its packing and putting together.

Copies from one device to another; all-gather, reduce-scatter and all-to-all of a matrix among the first devices, which
the runtime runs as messages between pairs; and the sums of gradients, with the copies into a message and back that
several parameters take: how long they are under way, and what they take from compute that goes on beside them. All
come out of compute, as in a step. A time is that of the slowest device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import isqrt
from statistics import fmean, median
from time import perf_counter

import torch

from parplan.cost_models.communication.measured_links import BESIDE
from parplan.cost_models.measurement.in_context_timing import ProcessGroup, now, reference_now
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import LinkEntry, SessionProfile
from parplan.cost_models.sampling import one_thread, spread_of
from parplan.layout import Grid, Layout, pieces
from parplan.lowering.program import Exchange
from parplan.runtime.transport.base import Held, Pending
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["KINDS", "SIZES", "between_compute", "measure_links"]

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
KINDS = ("copy", "all-gather", "reduce-scatter", "all-to-all", "all-reduce", BESIDE)
# Runs of one size: until so many seconds are spent, within these numbers.
CAP_S, LEAST_RUNS, MOST_RUNS = 0.4, 5, 41
# Up to so many bytes a message takes no longer than compute between messages does: several are timed at a time.
_SMALL = 1 << 20


def measure_links(
    transport: DistributedTransport,
    ranks: ProcessGroup,
    backend: str,
    profile: SessionProfile,
    on_progress: Callable[[int, int], None] | None = None,
    again: bool = False,
    late: Callable[[], bool] = lambda: False,
    cap_s: float = CAP_S,
    sizes: Sequence[int] = SIZES,
) -> bool:
    """Measure all kinds and `sizes` among the members of `ranks` that `profile` does not have, or all `again`.

    Tell whether nothing was left out because it was `late`, of which the members agree.

    Each of them for up to `cap_s` seconds, but at least LEAST_RUNS times.

    Args:
        on_progress: told (done, total) after each.
    """
    known = {(entry.kind, entry.group, entry.nbytes) for entry in profile.links(backend)}
    transport.group(tuple(range(ranks.count)))
    if not ranks.member:
        return True
    device = transport.physical(transport.rank)
    reference = Reference(device)
    for done, (kind, nbytes) in enumerate(product(KINDS, sizes), start=1):
        pair = kind != "copy" or ranks.count == 2
        if ranks.any(pair and (again or (kind, ranks.count, nbytes) not in known)):
            if late():
                return False
            times, references = [], []
            with one_thread(device):
                added = _added(transport, ranks, kind, nbytes, reference)
                started = perf_counter()
                while True:
                    references.append(reference_now(reference, ranks))
                    times.append(added())
                    spent_s = perf_counter() - started
                    enough = len(times) >= LEAST_RUNS and (spent_s >= cap_s or len(times) >= MOST_RUNS)
                    if not ranks.any(not enough):
                        break
            mean_s = fmean(times)
            spread, reference_s = spread_of(times, mean_s), ranks.mean([median(references)])[0]
            entry = LinkEntry(backend, kind, ranks.count, nbytes, mean_s, spread, len(times), reference_s, now())
            profile.put(entry)
        if on_progress is not None:
            on_progress(done, len(KINDS) * len(sizes))
    return True


def _added(
    transport: DistributedTransport, ranks: ProcessGroup, kind: str, nbytes: int, reference: Reference
) -> Callable[[], float]:
    """A function that measures once how much longer compute takes with this communication in it; warm."""
    if kind in ("all-reduce", BESIDE):
        total = _GradientSum(transport, ranks.count, nbytes)
        run = total.run
    else:
        run = _exchange(transport, ranks.count, kind, nbytes)
    if kind != BESIDE:
        run(), run()
        return lambda: between_compute(run, reference, ranks, 4 if nbytes <= _SMALL else 1)
    alone_s = between_compute(run, reference, ranks, 1)
    times = round(ranks.max(2 + round(2 * alone_s / reference.seconds(3))))

    def beside() -> float:
        """Seconds that the sum takes from compute that goes on while it is under way."""
        compute_s = _compute_s(reference, ranks, times)
        start = perf_counter()
        pending = total.start()
        for _ in range(times):
            reference.seconds()
        total.finish(pending)
        reference.wait()
        return max(0.0, ranks.max(perf_counter() - start) - compute_s)

    return beside


def _compute_s(reference: Reference, ranks: ProcessGroup, times: int) -> float:
    """Seconds of the reference kernel, so many times, on the slowest process."""
    ranks.barrier()
    start = perf_counter()
    for _ in range(times):
        reference.seconds()
    return ranks.max(perf_counter() - start)


def between_compute(run: Callable[[], None], reference: Reference, ranks: ProcessGroup, times: int) -> float:
    """Seconds that one `run` adds to compute before and after it, as in a step; zero where noise hides it.

    In a step ranks are not quite in time, and what carries messages has to get hold of a processor first; among runs
    that follow each other without compute neither shows.
    """
    compute_s = _compute_s(reference, ranks, times)
    start = perf_counter()
    for _ in range(times):
        reference.seconds()
        run()
    reference.wait()
    return max(0.0, ranks.max(perf_counter() - start) - compute_s) / times


def _pattern(kind: str, count: int) -> tuple[Layout, Layout, float]:
    """The layouts a matrix goes between, and the share of it that the busiest device receives."""
    grid, rest = Grid(tuple(range(count)), 1, count), (count - 1) / count
    return {
        "copy": (Layout(Grid((0,), 1, 1), None), Layout(Grid((1,), 1, 1), None), 1.0),
        "all-gather": (Layout(grid, None, 1), Layout(grid, None), rest),
        "reduce-scatter": (Layout(grid, None, None, partial=True), Layout(grid, None, 1), rest),
        "all-to-all": (Layout(grid, None, 0), Layout(grid, None, 1), rest / count),
    }[kind]


def _exchange(transport: DistributedTransport, count: int, kind: str, nbytes: int) -> Callable[[], None]:
    """A function that moves a square matrix between two layouts, so that the busiest device receives `nbytes`."""
    source, target, received = _pattern(kind, count)
    side = max(count, isqrt(max(1, round(nbytes / received / 4))) // count * count)

    def shape(layout: Layout) -> tuple[int, ...]:
        return tuple(side // layout.grid.shards if dim == layout.shard_dim else side for dim in range(2))

    moving = tuple(pieces((side, side), source, target))
    shapes = {device: shape(target) for device in target.grid.devices}
    exchange = Exchange(f"{kind} of {nbytes} bytes", moving, shapes, torch.float32)
    held: Held = {}
    if transport.rank in source.grid.devices:
        held[transport.rank] = torch.ones(shape(source), device=transport.physical(transport.rank))

    def run() -> None:
        transport.begin()
        transport.start(exchange, held).wait()
        transport.end()

    return run


class _GradientSum:
    """A gradient sum of two parameters, the message and the way back included."""

    def __init__(self, transport: DistributedTransport, count: int, nbytes: int) -> None:
        self._transport, self._group = transport, tuple(range(count))
        self._elements = max(2, nbytes // 4)
        place = transport.physical(transport.rank)
        halves = (self._elements // 2, self._elements - self._elements // 2)
        self._homes = [torch.zeros(half, device=place) for half in halves]

    def start(self) -> Pending:
        """Send it on its way."""
        flat = self._transport.message(("profile", self._elements), self._homes)
        return self._transport.reduce("a gradient sum", self._group, {self._transport.rank: flat})

    def finish(self, pending: Pending) -> None:
        """Wait for it, and copy it back."""
        total = pending.wait()[self._transport.rank]
        torch._foreach_copy_(self._homes, list(total.split([home.numel() for home in self._homes])))

    def run(self) -> None:
        """Both."""
        self.finish(self.start())
