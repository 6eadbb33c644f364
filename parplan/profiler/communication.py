"""Measures communication as plans use it: through the runtime's own transport, with its packing and putting together.

Copies from one device to another; all-gather, reduce-scatter and all-to-all of a matrix among the first devices, which
the runtime runs as messages between pairs; and the sums of gradients, with the copies into a message and back that
several parameters take: how long they are under way, and what they take from compute that goes on beside them. All
come out of compute, as in a step. A time is that of the slowest device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from statistics import median
from time import perf_counter

import torch

from parplan.cost_models.communication.measured_links import BESIDE
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.measurement.sweeps import Company, now, speed_now
from parplan.cost_models.profile.records import LinkEntry, Profile
from parplan.cost_models.sampling import one_thread, spread_of
from parplan.layout import Grid, Layout, pieces
from parplan.lowering.program import Exchange
from parplan.profiler.ranks import Ranks
from parplan.runtime.transport.base import Held, Pending
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["KINDS", "SIZES", "between_compute", "measure_links"]

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
KINDS = ("copy", "all-gather", "reduce-scatter", "all-to-all", "all-reduce", BESIDE)
# Runs of one size: until so many seconds are spent, within these numbers.
CAP_S, LEAST_RUNS, MOST_RUNS = 0.4, 5, 41
# Up to so many bytes a message takes no longer than compute between messages does: several are timed at a time.
_SMALL = 1 << 20


@dataclass(frozen=True)
class _Pattern:
    """The layouts a matrix goes between, and which share of it the busiest device receives."""

    source: Layout
    target: Layout
    received: float


def measure_links(
    transport: DistributedTransport,
    company: Ranks,
    backend: str,
    profile: Profile,
    on_done: Callable[[], None] | None = None,
    cap_s: float = CAP_S,
    again: bool = False,
    sizes: Sequence[int] = SIZES,
) -> None:
    """Measure all kinds and `sizes` among the members of `company` that `profile` does not have, or all `again`.

    Each of them for up to `cap_s` seconds, but at least LEAST_RUNS times.
    """
    known = {(entry.kind, entry.group, entry.nbytes) for entry in profile.links(backend)}
    transport.group(tuple(range(company.count)))
    if not company.member:
        return
    reference = Reference(transport.physical(transport.rank))
    for kind in KINDS:
        for nbytes in sizes:
            if kind == "copy" and company.count > 2:
                wanted = False
            else:
                wanted = again or (kind, company.count, nbytes) not in known
            if company.agree(wanted):
                profile.put(_measured(transport, company, backend, kind, nbytes, reference, cap_s))
            if on_done is not None:
                on_done()


def _measured(
    transport: DistributedTransport,
    company: Ranks,
    backend: str,
    kind: str,
    nbytes: int,
    reference: Reference,
    cap_s: float,
) -> LinkEntry:
    device = transport.physical(transport.rank)
    times, references = [], []
    with one_thread(device):
        added = _added(transport, company, kind, nbytes, reference)
        started = perf_counter()
        while True:
            references.append(speed_now(reference, company))
            times.append(added())
            spent_s = perf_counter() - started
            enough = len(times) >= LEAST_RUNS and (spent_s >= cap_s or len(times) >= MOST_RUNS)
            if not company.agree(not enough):
                break
    middle = median(times)
    spread, reference_s = spread_of(times, middle), company.mean([median(references)])[0]
    return LinkEntry(backend, kind, company.count, nbytes, middle, spread, len(times), reference_s, now())


def _added(
    transport: DistributedTransport, company: Ranks, kind: str, nbytes: int, reference: Reference
) -> Callable[[], float]:
    """What measures once how much longer compute takes with this communication in it; warm."""
    if kind == BESIDE:
        total = _Sum(transport, company.count, nbytes)
        alone_s = between_compute(total.run, reference, company, 1)
        times = 2 + round(2 * alone_s / reference.seconds(3))
        return lambda: _beside(total, reference, company, round(company.largest(times)))
    run = (
        _Sum(transport, company.count, nbytes).run if kind == "all-reduce" else _move(transport, company, kind, nbytes)
    )
    run(), run()
    return lambda: between_compute(run, reference, company, 4 if nbytes <= _SMALL else 1)


def _beside(total: _Sum, reference: Reference, company: Company, times: int) -> float:
    """What a gradient sum takes from compute that goes on while it is under way; zero where that is lost in noise."""
    company.meet()
    start = perf_counter()
    for _ in range(times):
        reference.seconds()
    compute_s = company.largest(perf_counter() - start)
    start = perf_counter()
    pending = total.start()
    for _ in range(times):
        reference.seconds()
    total.finish(pending)
    reference.wait()
    return max(0.0, company.largest(perf_counter() - start) - compute_s)


def between_compute(run: Callable[[], None], reference: Reference, company: Company, times: int) -> float:
    """What `run` adds to compute that it comes out of and goes into, as in a step: seconds for one of `times`.

    In a step ranks are not quite in time, and what carries messages has to get hold of a processor first; among runs
    that follow each other without compute neither shows. Zero where it is lost in the noise of the compute.
    """
    company.meet()
    start = perf_counter()
    for _ in range(times):
        reference.seconds()
    compute_s = company.largest(perf_counter() - start)
    start = perf_counter()
    for _ in range(times):
        reference.seconds()
        run()
    reference.wait()
    both_s = company.largest(perf_counter() - start)
    return max(0.0, both_s - compute_s) / times


def _move(transport: DistributedTransport, company: Ranks, kind: str, nbytes: int) -> Callable[[], None]:
    pattern = _pattern(kind, company.count)
    side = max(company.count, isqrt(max(1, round(nbytes / pattern.received / 4))) // company.count * company.count)
    moving = tuple(pieces((side, side), pattern.source, pattern.target))
    shapes = {device: _shape(side, pattern.target) for device in pattern.target.grid.devices}
    exchange = Exchange(f"{kind} of {nbytes} bytes", moving, shapes, torch.float32)
    here = transport.rank in pattern.source.grid.devices
    place = transport.physical(transport.rank)
    held: Held = {transport.rank: torch.ones(_shape(side, pattern.source), device=place)} if here else {}

    def run() -> None:
        transport.begin()
        transport.start(exchange, held).wait()
        transport.end()

    return run


def _pattern(kind: str, count: int) -> _Pattern:
    everyone = tuple(range(count))
    grid = Grid(everyone, 1, count)
    if kind == "copy":
        return _Pattern(Layout(Grid((0,), 1, 1), None), Layout(Grid((1,), 1, 1), None), 1.0)
    rest = (count - 1) / count
    return {
        "all-gather": _Pattern(Layout(grid, None, 1), Layout(grid, None), rest),
        "reduce-scatter": _Pattern(Layout(grid, None, None, partial=True), Layout(grid, None, 1), rest),
        "all-to-all": _Pattern(Layout(grid, None, 0), Layout(grid, None, 1), rest / count),
    }[kind]


def _shape(side: int, layout: Layout) -> tuple[int, ...]:
    return tuple(side // layout.grid.shards if dim == layout.shard_dim else side for dim in range(2))


class _Sum:
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
