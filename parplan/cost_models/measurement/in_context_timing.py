"""Times layer parts in context: all forwards in model order, then all backwards in reverse, as a step does.

A part timed alone, over and over, finds its weights in the cache and its memory at hand, and comes out up to a fifth
faster than in a step. In context, caches and allocator are in the state of a real step: each forward is on inputs that
were written just before (as the layer before would have), each backward on gradients written just before, everything is
freed where a step frees it, and weight gradients are kept until the end.

The time to call a part at all (Python, the autograd engine) is measured in the same sweep on a part that does nothing,
and taken off every part: a step pays it once, and the runtime's own time is a figure of its own.

CUDA events are recorded around each part and read after the sweep: nothing waits inside the timed region. On a CPU one
thread is used, as by a logical CPU device at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import sqrt
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.measurement.runnable_parts import LayerPart
from parplan.cost_models.sampling import Measurement, StoppingRule, one_thread, spread_of

__all__ = ["ProcessGroup", "now", "reference_now", "time_in_context"]


class ProcessGroup:
    """Processes that measure the same at the same time, so that every device is as busy as when a plan runs.

    By itself this process alone; profiler/ranks.py has several.

    Attributes:
        count: how many processes.
        member: whether this process is one of them.
        lead: whether this process does what only one does.
    """

    count, member, lead = 1, True, True

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.mean([0.0])

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is set."""
        return bool(self.max(float(flag)))

    def mean(self, figures: Sequence[float]) -> list[float]:
        """Each figure's mean over all processes."""
        return list(figures)

    def max(self, figure: float) -> float:
        """The largest figure of all processes."""
        return figure


def reference_now(reference: Reference, ranks: ProcessGroup, runs: int = 1) -> float:
    """Seconds of the reference kernel on one process while the others wait; the same on all.

    How much devices that work at once take from each other is a matter of what they do, not of the machine's speed.
    """
    ranks.barrier()
    return ranks.max(reference.seconds(runs) if ranks.lead else 0.0)


def now() -> str:
    """The moment, UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class _Stopwatch:
    """Marks moments without waiting for the device; `between` reads two marks once the device is done."""

    device: torch.device

    def mark(self) -> Any:
        if self.device.type == "cpu":
            return perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self.device.type != "cpu" else float(end - start)


@dataclass
class _Figures:
    """Seconds of every run of one part so far."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """Spread of the runs around their median, relative."""
        totals = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        return spread_of(totals, median(totals))

    @property
    def error(self) -> float:
        """Relative standard error of the median."""
        return 1.25 * self.spread / sqrt(len(self.forward))


def time_in_context(
    parts: Sequence[LayerPart],
    device: torch.device,
    stop: StoppingRule | None = None,
    ranks: ProcessGroup | None = None,
) -> list[Measurement]:
    """Sweep through `parts`, in forward order, until every median is known well enough; their own times, in order.

    Goes on until all standard errors are below `stop.error`, or `stop.cap_s` seconds per part are spent.

    Raises:
        whatever a part's code raises on its inputs.
    """
    stop, ranks, stopwatch = stop or StoppingRule(), ranks or ProcessGroup(), _Stopwatch(device)
    everything = [*parts, LayerPart.idle(device)]
    figures = [_Figures() for _ in everything]
    reference, references = Reference(device), []
    cap_s = stop.cap_s * len(parts)
    with one_thread(device):
        ranks.barrier()
        started = perf_counter()
        _sweep(everything, stopwatch)  # the first is a warm-up: code is compiled, memory found
        while True:
            references.append(reference_now(reference, ranks))
            for figure, (forward_s, backward_s) in zip(figures, _sweep(everything, stopwatch), strict=True):
                figure.forward.append(forward_s)
                figure.backward.append(backward_s)
            spent_s, runs = perf_counter() - started, len(references)
            enough = runs >= stop.least_runs and all(figure.error <= stop.error for figure in figures[:-1])
            if not ranks.any(not (enough or runs >= stop.most_runs or spent_s >= cap_s)):
                break
    means = [second for figure in figures for second in (fmean(figure.forward), fmean(figure.backward))]
    *own, calling_forward_s, calling_backward_s, reference_s = ranks.mean([*means, median(references)])
    when = now()
    return [
        Measurement(
            forward_s=max(0.0, forward_s - calling_forward_s),
            backward_s=max(0.0, backward_s - calling_backward_s),
            spread=figure.spread,
            runs=len(figure.forward),
            reference_s=reference_s,
            when=when,
        )
        for figure, forward_s, backward_s in zip(figures[:-1], own[::2], own[1::2], strict=True)
    ]


def _sweep(parts: Sequence[LayerPart], stopwatch: _Stopwatch) -> list[tuple[float, float]]:
    """Seconds forward and backward of each part, in one sweep."""
    marks: list[list[Any]] = [[] for _ in parts]
    forwards: list[tuple[list[Tensor], list[Any]]] = []  # inputs and results; emptied by the backward
    for part, own in zip(parts, marks, strict=True):
        inputs = part.fresh_inputs()
        own.append(stopwatch.mark())
        results = part.code(*inputs)
        own.append(stopwatch.mark())
        forwards.append((inputs, list(results)))
        del inputs, results
    gradients: list[list[Tensor | None]] = []
    for part, own in zip(reversed(parts), reversed(marks), strict=True):
        inputs, results = forwards.pop()
        ends = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        arriving = [torch.ones_like(end) for end in ends]
        moving = sum(tensor.requires_grad for tensor in inputs[: part.arriving])
        own.append(stopwatch.mark())
        gradients.append([])
        if ends and leaves:
            gradients[-1] += torch.autograd.grad(ends, leaves, arriving, allow_unused=True)[moving:]
        # Inputs are freed before the time is read, weight gradients after all backwards.
        for used in (results, inputs, ends, leaves, arriving):
            used.clear()
        own.append(stopwatch.mark())
    for weight_gradients, own in zip(gradients, reversed(marks), strict=True):
        own.append(stopwatch.mark())
        weight_gradients.clear()
        own.append(stopwatch.mark())
    if stopwatch.device.type != "cpu":
        torch.accelerator.synchronize(stopwatch.device)
    between = stopwatch.between
    return [(between(m[0], m[1]), between(m[2], m[3]) + between(m[4], m[5])) for m in marks]
