"""Measures the parts of layers that a planner could use and keeps them in a profile.

Parts that do the same work at the same local sizes are one part, whatever the layer, the strategy or the devices, and
are measured once. They are swept through in the order of the model (sweeps.py), as many distinct parts at a time as fit
the device's memory, and kept after each sweep, so that an interruption loses one sweep at most and a second call goes
on where the first one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from parplan.cost_models.costs import CostModel, LayerMemory
from parplan.cost_models.devices.local_devices import device_memory_bytes
from parplan.cost_models.measurement.runnable_parts import Piece, part_entry, part_signature
from parplan.cost_models.measurement.sweeps import Alone, Company, sweep_all
from parplan.cost_models.profile.records import Profile
from parplan.cost_models.roofline import part_of
from parplan.cost_models.sampling import Effort
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.local import LocalLayer
from parplan.plan import Strategy

__all__ = ["Outcome", "Progress", "Request", "measure_parts"]

Progress = Callable[[int, int], None]

# Parts are only run where their tensors take up to this share of the device's memory.
ROOM = 0.6
# The most parts in one sweep: what an interruption may lose.
MOST_PARTS = 64


@dataclass(frozen=True)
class Request:
    """A layer and a strategy whose cost is wanted."""

    layer: Layer
    strategy: Strategy


@dataclass(frozen=True)
class Outcome:
    """What a round of measuring came to: distinct parts measured, known before, out of time, and failed (with why)."""

    measured: int
    known: int
    left: int
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Job:
    """A distinct part, by one of the layers that have it."""

    signature: str
    layer: str
    part: LocalLayer
    nbytes: int


def measure_parts(
    graph: LayerGraph,
    costs: CostModel,
    requests: Iterable[Request],
    device: torch.device,
    profile: Profile,
    *,
    effort: Effort | None = None,
    time_cap_s: float = 60.0,
    company: Company | None = None,
    on_progress: Progress | None = None,
    again: bool = False,
    sharing: int = 1,
) -> Outcome:
    """Measure the distinct parts of `requests` that `profile` does not have, for up to `time_cap_s`.

    Args:
        costs: for the memory that parts take.
        company: other processes that measure the same at the same time.
        on_progress: told (done, total) before the first sweep and after each.
        again: measure also what the profile has.
        sharing: how many that measure at once share the device's memory.
    """
    company, started = company or Alone(), perf_counter()
    jobs = _jobs(graph, costs, requests)
    todo = [job for job in jobs if again or profile.get(job.signature) is None]
    failed: list[str] = []
    measured = done = 0
    room_bytes = ROOM * device_memory_bytes(device) / sharing
    for sweep in _sweeps(graph, todo, room_bytes):
        if on_progress is not None:
            on_progress(done, len(todo))
        if company.agree(perf_counter() - started >= time_cap_s):
            return Outcome(measured, len(jobs) - len(todo), len(todo) - done, tuple(failed))
        fitting = [job for job in sweep if job.nbytes <= room_bytes]
        failed += [f"{job.layer}: {_too_large(job, room_bytes)}" for job in sweep if job.nbytes > room_bytes]
        pieces, broken = _prepared(graph, fitting, device, company)
        failed += broken
        found = sweep_all([piece for _, piece in pieces], device, effort, company) if pieces else []
        for (job, piece), measurement in zip(pieces, found, strict=True):
            known = replace(measurement, saved_bytes=piece.saved_bytes(), peak_bytes=piece.peak_bytes())
            profile.put(part_entry(graph, job.part, known))
        measured, done = measured + len(found), done + len(sweep)
    if on_progress is not None:
        on_progress(len(todo), len(todo))
    return Outcome(measured, len(jobs) - len(todo), 0, tuple(failed))


def _jobs(graph: LayerGraph, costs: CostModel, requests: Iterable[Request]) -> list[_Job]:
    jobs: dict[str, _Job] = {}
    for request in requests:
        part = part_of(graph, request.layer, request.strategy)
        signature = part_signature(graph, part)
        if signature not in jobs:
            nbytes = _nbytes(costs.memory(request.layer, request.strategy))
            jobs[signature] = _Job(signature, request.layer.name, part, nbytes)
    return list(jobs.values())


def _nbytes(memory: LayerMemory) -> int:
    return memory.weights_bytes + memory.gradients_bytes + memory.saved_bytes + 2 * memory.transient_bytes


def _sweeps(graph: LayerGraph, jobs: Sequence[_Job], room_bytes: float) -> list[list[_Job]]:
    """The jobs in sweeps: each takes one part of every layer that still has one, in forward order, while they fit."""
    waiting: dict[str, list[_Job]] = {name: [] for name in graph.layers}
    for job in jobs:
        waiting[job.layer].append(job)
    sweeps: list[list[_Job]] = []
    while any(waiting.values()):
        sweep: list[_Job] = []
        for own in waiting.values():
            if own and (not sweep or _fits(sweep, own[0], room_bytes)):
                sweep.append(own.pop(0))
        sweeps.append(sweep)
    return sweeps


def _fits(sweep: Sequence[_Job], job: _Job, room_bytes: float) -> bool:
    return len(sweep) < MOST_PARTS and sum(other.nbytes for other in sweep) + job.nbytes <= room_bytes


def _prepared(
    graph: LayerGraph, jobs: Sequence[_Job], device: torch.device, company: Company
) -> tuple[list[tuple[_Job, Piece]], list[str]]:
    """The parts that run on random inputs for all of `company`, and why others do not."""
    ready: list[tuple[_Job, Piece]] = []
    broken: list[str] = []
    for job in jobs:
        reason, piece = "", None
        try:
            piece = Piece.of(graph, job.part, device)
            piece.run(piece.fresh_inputs())
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # whatever an op says of random inputs
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        # What one of them cannot run none does, or they would fall out of step.
        if company.agree(bool(reason)) or piece is None:
            broken.append(f"{job.layer}: {reason or 'another process could not run it'}")
        else:
            ready.append((job, piece))
    return ready, broken


def _too_large(job: _Job, room_bytes: float) -> str:
    return f"to measure its part takes {job.nbytes / 2**20:.0f} MiB, {room_bytes / 2**20:.0f} MiB may be used"
