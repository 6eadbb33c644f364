"""Times parts of layers in the company they keep: one after another forward, then backward in reverse order.

A part timed alone, over and over, finds its weights in the cache and its memory at hand, and comes out up to a fifth
faster than in a step. So parts are swept through as a step does: forward in the model's order, each on inputs that were
written just before (as the layer before would have), backward in reverse on gradients written just before, with
everything freed where a step frees it, and weight gradients kept until the end.

What it takes to call a piece of code at all (Python, the autograd engine) is timed in the same sweep on a piece that
does nothing and taken off every part: a step pays it once, and the runtime's own time is a figure of its own.

CUDA events are recorded around each part and read after the sweep: nothing waits inside the timed region. On a CPU one
thread is used, as by a logical CPU device at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.measurement.runnable_parts import Piece
from parplan.cost_models.sampling import Effort, Measurement, one_thread, spread_of

__all__ = ["Alone", "Company", "now", "speed_now", "sweep_all"]


class Company(Protocol):
    """Other processes that measure the same at the same time, so that all are as busy as they will be.

    Attributes:
        lead: whether this is the one that does what only one does.
    """

    @property
    def lead(self) -> bool: ...

    def meet(self) -> None:
        """Wait until all are here."""
        ...

    def agree(self, wish: bool) -> bool:
        """Whether any wants to."""
        ...

    def mean(self, figures: Sequence[float]) -> list[float]:
        """Each figure's mean over all."""
        ...

    def largest(self, figure: float) -> float:
        """The largest of all."""
        ...


class Alone:
    """No other process."""

    lead = True

    def meet(self) -> None:
        """Nobody to wait for."""

    def agree(self, wish: bool) -> bool:
        """The only opinion."""
        return wish

    def mean(self, figures: Sequence[float]) -> list[float]:
        """The only figures."""
        return list(figures)

    def largest(self, figure: float) -> float:
        """The only figure."""
        return figure


def speed_now(reference: Reference, company: Company, runs: int = 1) -> float:
    """Seconds of the reference kernel on one process while the others wait; the same on all.

    How much devices that work at once take from each other is a matter of what they do, not of the machine's speed.
    """
    company.meet()
    return company.largest(reference.seconds(runs) if company.lead else 0.0)


@dataclass
class _Clock:
    """Marks moments without waiting for the device; `between` reads two marks once the device is done."""

    device: torch.device

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self.device.type == "cuda" else float(end - start)


@dataclass
class _Figures:
    """Seconds of every run of one piece so far."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """How far runs are from their median, relative."""
        totals = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        return spread_of(totals, median(totals))

    @property
    def error(self) -> float:
        """Relative standard error of the median."""
        return 1.25 * self.spread / sqrt(len(self.forward))


@dataclass
class _Call:
    """What one piece's forward took and gave; emptied by its backward."""

    inputs: list[Tensor]
    results: list[Any]


def sweep_all(
    pieces: Sequence[Piece], device: torch.device, effort: Effort | None = None, company: Company | None = None
) -> list[Measurement]:
    """Sweep through `pieces`, in forward order, until every median is known well enough; their own times, in order.

    Goes on until all standard errors are below `effort.error`, or `effort.cap_s` seconds per piece are spent.

    Raises:
        whatever a piece's code raises on its inputs.
    """
    effort, company, clock = effort or Effort(), company or Alone(), _Clock(device)
    idle = Piece.idle(device)
    everything = [*pieces, idle]
    figures = [_Figures() for _ in everything]
    reference, references = Reference(device), []
    cap_s = effort.cap_s * len(pieces)
    with one_thread(device):
        company.meet()
        started = perf_counter()
        _sweep(everything, clock)  # the first is a warm-up: code is compiled, memory found
        while True:
            references.append(speed_now(reference, company))
            for figure, (forward_s, backward_s) in zip(figures, _sweep(everything, clock), strict=True):
                figure.forward.append(forward_s)
                figure.backward.append(backward_s)
            spent_s, runs = perf_counter() - started, len(references)
            enough = runs >= effort.least_runs and all(figure.error <= effort.error for figure in figures[:-1])
            if not company.agree(not (enough or runs >= effort.most_runs or spent_s >= cap_s)):
                break
    return _own_times(figures, references, company)


def _sweep(pieces: Sequence[Piece], clock: _Clock) -> list[tuple[float, float]]:
    """Seconds forward and backward of each piece, in one sweep."""
    marks: list[list[Any]] = [[] for _ in pieces]
    held: list[_Call] = []
    for piece, own in zip(pieces, marks, strict=True):
        inputs = piece.fresh_inputs()
        own.append(clock.mark())
        results = piece.run(inputs)
        own.append(clock.mark())
        held.append(_Call(inputs, list(results)))
        del inputs, results
    gradients = []
    for piece, own in zip(reversed(pieces), reversed(marks), strict=True):
        gradients.append(_back(piece, held.pop(), own, clock))
    for kept, own in zip(gradients, reversed(marks), strict=True):
        own.append(clock.mark())
        kept.clear()
        own.append(clock.mark())
    clock.wait()
    return [(clock.between(m[0], m[1]), clock.between(m[2], m[3]) + clock.between(m[4], m[5])) for m in marks]


def _back(piece: Piece, call: _Call, marks: list[Any], clock: _Clock) -> list[Tensor | None]:
    """One piece's backward; what it needed is freed before the clock is read, its weight gradients are kept."""
    ends = [result for result in call.results if isinstance(result, Tensor) and result.requires_grad]
    leaves = [tensor for tensor in call.inputs if tensor.requires_grad]
    arriving = [torch.ones_like(end) for end in ends]
    moving = sum(tensor.requires_grad for tensor in call.inputs[: piece.arriving])
    marks.append(clock.mark())
    kept: list[Tensor | None] = []
    if ends and leaves:
        kept += torch.autograd.grad(ends, leaves, arriving, allow_unused=True)[moving:]
    for used in (call.results, call.inputs, ends, leaves, arriving):
        used.clear()
    marks.append(clock.mark())
    return kept


def _own_times(figures: Sequence[_Figures], references: Sequence[float], company: Company) -> list[Measurement]:
    """Medians, less what calling takes."""
    *own, idle = ((median(figure.forward), median(figure.backward)) for figure in figures)
    flat = company.mean([second for pair in own for second in pair] + [*idle, median(references)])
    calling_forward, calling_backward, reference_s = flat[-3:]
    when = now()
    return [
        Measurement(
            forward_s=max(0.0, flat[2 * index] - calling_forward),
            backward_s=max(0.0, flat[2 * index + 1] - calling_backward),
            spread=figure.spread,
            runs=len(figure.forward),
            reference_s=reference_s,
            when=when,
        )
        for index, figure in enumerate(figures[:-1])
    ]


def now() -> str:
    """The moment, UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
