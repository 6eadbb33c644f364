"""Measured peak memory of a training step, which the planner's prediction is checked against.

On the CPU torch keeps no peak, but its profiler records every allocation and every release, with bytes, also those of
threads that run the backward pass. Their running sum is exact and repeatable. On CUDA the caching allocator keeps the
peak itself.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parplan.runtime.sharded_state.sharded_tensor import local_tensor

__all__ = ["StepPeak", "held_bytes", "step_peak"]


@dataclass(frozen=True)
class StepPeak:
    """Most bytes of tensors alive at one moment of a step, on one device.

    Args:
        held_bytes: alive before the step: state, inputs, memory kept between steps.
        rise_bytes: by how much the step exceeded that.
    """

    held_bytes: int
    rise_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak."""
        return self.held_bytes + self.rise_bytes


def step_peak(step: Callable[[], object], held: Iterable[Tensor], device: torch.device | None = None) -> StepPeak:
    """The peak of the tensors on one device while `step` runs.

    In one process with several logical CPU devices this is the sum of all of them, and with several accelerators that
    of the one asked for.

    Args:
        step: runs one training step, or several; its result is dropped.
        held: tensors that are alive before it (parameters, buffers, gradients, optimizer state, the batch), each
            memory counted once.
        device: the CPU by default, or an accelerator.
    """
    place = device if device is not None else torch.device("cpu")
    before = held_bytes(held, place)
    if place.type != "cpu":
        accelerator = torch.accelerator
        accelerator.synchronize(place)
        accelerator.reset_peak_memory_stats(place)
        allocated = accelerator.memory_allocated(place)
        step()
        accelerator.synchronize(place)
        return StepPeak(before, max(0, accelerator.max_memory_allocated(place) - allocated))
    gc.collect()  # garbage of before, collected within the step, would count as memory that the step released
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]) for event in events if event.get("name") == "[memory]"]
    alive = most = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        if change["Device Type"] == 0:
            alive += int(change["Bytes"])
            most = max(most, alive)
    return StepPeak(before, most)


def held_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the distinct memories of `tensors` that are on `device`; of sharded ones this process's blocks."""
    own = [local_tensor(tensor) for tensor in tensors]
    here = [t for t in own if t.device == device or device.type == t.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in here}.values())
