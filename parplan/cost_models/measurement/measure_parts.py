"""Measures the parts of layers that a planner could use and puts them into a profile.

Parts that do the same work at the same local sizes are one part, whatever the layer, the strategy or the devices, and
are measured once. They are swept through in the order of the model (in_context_timing.py), as many distinct parts at a
time as fit the device's memory, and stored after each sweep, so that an interruption loses one sweep at most and a
second call goes on where the first one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.local_devices import device_memory_bytes
from parplan.cost_models.measurement.in_context_timing import ProcessGroup, time_in_context
from parplan.cost_models.measurement.runnable_parts import LayerPart, part_entry, part_signature
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.sampling import StoppingRule
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer

__all__ = ["Outcome", "measure_parts"]

# Parts are only run where their tensors take up to this share of the device's memory.
ROOM = 0.6
# The most parts in one sweep: what an interruption may lose.
MOST_PARTS = 64


@dataclass(frozen=True)
class Outcome:
    """Counts of distinct parts measured, known before and out of time, and the reasons of those that failed."""

    measured: int
    known: int
    left: int
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """A distinct part, by one of the layers that have it."""

    signature: str
    part: LocalLayer
    nbytes: int


def measure_parts(
    graph: LayerGraph,
    costs: CostModel,
    parts: Iterable[LocalLayer],
    device: torch.device,
    profile: SessionProfile,
    *,
    stop: StoppingRule | None = None,
    time_cap_s: float = 60.0,
    ranks: ProcessGroup | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    again: bool = False,
    sharing: int = 1,
) -> Outcome:
    """Measure those distinct `parts` that `profile` does not have, for up to `time_cap_s`.

    Args:
        costs: for the memory that parts take.
        stop: when to stop timing one part.
        ranks: the processes that measure the same at the same time.
        on_progress: told (done, total) before the first sweep and after each.
        again: measure also what the profile has.
        sharing: how many that measure at once share the device's memory.
    """
    ranks, started = ranks or ProcessGroup(), perf_counter()
    jobs: dict[str, _Job] = {}
    for part in parts:
        signature = part_signature(graph, part)
        if signature not in jobs:
            memory = costs.memory(part.layer, part.strategy)
            state_bytes = memory.weights_bytes + memory.gradients_bytes
            nbytes = state_bytes + memory.saved_bytes + 2 * memory.transient_bytes
            jobs[signature] = _Job(signature, part, nbytes)
    todo = [job for job in jobs.values() if again or profile.get(job.signature) is None]
    failed: list[str] = []
    measured = done = 0
    room_bytes = ROOM * device_memory_bytes(device) / sharing
    for sweep in _sweeps(graph, todo, room_bytes):
        if on_progress is not None:
            on_progress(done, len(todo))
        if ranks.any(perf_counter() - started >= time_cap_s):
            return Outcome(measured, len(jobs) - len(todo), len(todo) - done, tuple(failed))
        ready: list[tuple[_Job, LayerPart]] = []
        for job in sweep:
            reason, runnable = "", None
            if job.nbytes > room_bytes:
                takes = f"to measure its part takes {job.nbytes / 2**20:.0f} MiB"
                reason = f"{takes}, {room_bytes / 2**20:.0f} MiB may be used"
            else:
                try:
                    runnable = LayerPart.of(graph, job.part, device)
                    runnable.code(*runnable.fresh_inputs())
                except (RuntimeError, IndexError, ValueError, TypeError) as error:  # whatever an op says of the inputs
                    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            # A part that one process cannot run none runs, or they would fall out of step.
            if ranks.any(bool(reason)) or runnable is None:
                failed.append(f"{job.part.layer.name}: {reason or 'another process could not run it'}")
            else:
                ready.append((job, runnable))
        found = time_in_context([runnable for _, runnable in ready], device, stop, ranks) if ready else []
        for (job, _), measurement in zip(ready, found, strict=True):
            profile.put(part_entry(graph, job.part, measurement))
        measured, done = measured + len(found), done + len(sweep)
    if on_progress is not None:
        on_progress(len(todo), len(todo))
    return Outcome(measured, len(jobs) - len(todo), 0, tuple(failed))


def _sweeps(graph: LayerGraph, jobs: Sequence[_Job], room_bytes: float) -> list[list[_Job]]:
    """The jobs in sweeps: each takes one part of every layer that still has one, in forward order, while they fit."""
    waiting: dict[str, list[_Job]] = {name: [] for name in graph.layers}
    for job in jobs:
        waiting[job.part.layer.name].append(job)
    sweeps: list[list[_Job]] = []
    while any(waiting.values()):
        sweep: list[_Job] = []
        for own in waiting.values():
            left_bytes = room_bytes - sum(job.nbytes for job in sweep)
            if own and (not sweep or (len(sweep) < MOST_PARTS and own[0].nbytes <= left_bytes)):
                sweep.append(own.pop(0))
        sweeps.append(sweep)
    return sweeps
