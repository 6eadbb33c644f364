"""Errors of allocations that fail within a step, with the plan's predicted peak, the measured one and the limit.

torch says how many bytes it could not allocate. What to do about it depends on the plan: how much it was predicted to
need on that device, and in how many micro-batches it would need less.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from parplan.errors import ParplanError, RuntimeFailure
from parplan.fields import size_text
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.runtime.transport.base import Transport

if sys.platform != "win32":
    import resource

__all__ = ["OutOfMemory", "StepMemory", "is_out_of_memory"]

_CPU_TEXT = "DefaultCPUAllocator: can't allocate memory"  # all that torch's error on the CPU is known by
_ROOM = 0.9  # of a peak that did not fit, what another plan may need at most to be likely to
_MORE_MICRO_BATCHES = (2, 4, 8)  # times those of the plan


class _Predicted(Protocol):
    """The prediction of a step: the peak bytes of every logical device, none where they are not known."""

    @property
    def memory_bytes(self) -> Sequence[int]: ...


class OutOfMemory(RuntimeFailure, torch.OutOfMemoryError):
    """An allocation that failed within a step of a compiled model; also a `torch.OutOfMemoryError`.

    Attributes:
        predicted_bytes: peak of the device that the plan was predicted to have; None where nothing predicts it.
        peak_bytes: most that the device has held so far; on the CPU, the process.
        limit_bytes: memory of the device, on the CPU of the process or the machine.
    """

    def __init__(self, message: str, predicted_bytes: int | None, peak_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.predicted_bytes, self.peak_bytes, self.limit_bytes = predicted_bytes, peak_bytes, limit_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch is that of an allocation: one of its own class, or the CPU's, which has none."""
    if isinstance(error, ParplanError):
        return False  # said already
    return isinstance(error, torch.OutOfMemoryError) or _CPU_TEXT in str(error)


@dataclass(frozen=True)
class StepMemory:
    """The figures of one step's memory that an error of an allocation is told with.

    Args:
        graph, plan: that the step runs; None before there are any.
        samples: that this process brought; None where inputs have none.
        transport: which devices there are.
        predict: predicts a step of a plan; None where nothing does.
    """

    graph: LayerGraph | None
    plan: Plan | None
    samples: int | None
    transport: Transport
    predict: Callable[[LayerGraph, Plan], _Predicted] | None

    def explained(self, error: RuntimeError) -> OutOfMemory:
        """The error that says more in place of torch's, of an allocation that failed."""
        device = self._device(error)
        place = self.transport.physical(device)
        peak, limit = _measured_peak(place), _limit(place)
        predicted = self._predicted(self.plan)
        here = None if predicted is None else predicted[device]
        where = f"rank {self.transport.rank}" if self.transport.processes > 1 else f"device {device} ({place})"
        planned = "nothing predicts its peak" if here is None else f"the plan's predicted peak is {size_text(here)}"
        if here is not None and self._planned_samples is not None:
            planned += f" for {self._planned_samples} samples"
        brought = "" if self.samples is None else f"with {self.samples} samples on this process "
        holder = "this process" if place.type == "cpu" else "the device"
        return OutOfMemory(
            f"{where}: {error}\n  The step {brought}does not fit in memory: {planned}, {holder} has held up to "
            f"{size_text(peak)}, and the limit is {size_text(limit)}; {self._remedy(here, min(limit, here or limit))}",
            here,
            peak,
            limit,
        )

    @property
    def _planned_samples(self) -> int | None:
        """Samples of all processes that the prediction is for."""
        return None if self.graph is None else self.graph.batch

    def _device(self, error: RuntimeError) -> int:
        """The logical device that had no memory, as far as torch's text says it; else the first of this process."""
        owned, text = self.transport.owned, str(error)
        return next((device for device in owned if f"GPU {self.transport.physical(device).index} " in text), owned[0])

    def _predicted(self, plan: Plan | None) -> Sequence[int] | None:
        """Peaks of all devices by a plan; None where nothing gives them."""
        if self.predict is None or self.graph is None or plan is None:
            return None
        try:
            return self.predict(self.graph, plan).memory_bytes or None
        except Exception:  # too little memory to predict any, or a plan that cannot be: the error itself counts
            return None

    def _remedy(self, predicted: int | None, room: int) -> str:
        """A plan that would fit, in more micro-batches, or how to ask for one."""
        if (self.samples or 0) * self.transport.processes > (self._planned_samples or sys.maxsize):
            return "compile with as many samples as the example (memory is planned for them), or bring fewer"
        wanted, found = int(_ROOM * room), list[str]()
        devices = self.plan.devices if self.plan is not None else self.transport.processes
        if self.plan is not None and predicted is not None:
            for times in _MORE_MICRO_BATCHES:
                count = times * self.plan.micro_batches
                peaks = self._predicted(replace(self.plan, micro_batches=count))
                if peaks is not None and max(peaks) <= wanted:
                    found.append(
                        f"in {count} micro-batches the same plan is predicted to need {size_text(max(peaks))} "
                        f"(parplan.compile(..., micro_batches={count}), with train_step or loss=)"
                    )
                    break
        found.append(
            f"plan for less: parplan.analyze(model, inputs, gpus={devices}, memory_bytes={wanted}).plan is a plan to "
            "compile with"
        )
        return ", or ".join([*found, "bring fewer samples"])


def _measured_peak(place: torch.device) -> int:
    """Most bytes so far: of tensors on an accelerator; on the CPU of the whole process."""
    if place.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(place))
    if sys.platform == "win32":
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _limit(place: torch.device) -> int:
    """Bytes of an accelerator; on the CPU those of the process's limit, where it has one, else of the machine."""
    if place.type != "cpu":
        return int(torch.accelerator.get_memory_info(place)[1])
    if sys.platform == "win32":
        return 0
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    return machine if own == resource.RLIM_INFINITY else min(own, machine)
