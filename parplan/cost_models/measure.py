"""Costs measured on the device at hand, and what becomes of the layers that were not.

Parts that do the same work at the same local sizes share one entry, whatever the layer, the strategy or the devices. A
part without an entry costs what the roofline says times what measured parts of its kind cost over their roofline, and
is marked INTERPOLATED; with nothing measured at all it stays ESTIMATED.

What it takes to call a piece at all (Python, the autograd engine) is measured once, on a piece that does nothing, and
taken off every entry, as a whole step pays it once. Even so a sum of layer times overstates a step by
10 to 30 % (what runs back to back overlaps and shares caches). `correct` takes one measured step of the whole model on
one device and scales all layer times by measured over summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from parplan.cost_models.costs import LayerCost, LayerMemory, Source, TransferCost, TransferMatrix
from parplan.cost_models.here import device_memory_bytes
from parplan.cost_models.profile import Profile, SessionProfile
from parplan.cost_models.roofline import PartKey, RooflineCosts, part_key, part_of
from parplan.cost_models.sampling import Effort, Measurement, sample
from parplan.cost_models.trials import empty_trial, layer_trial, part_signature, step_trial
from parplan.errors import ParplanError
from parplan.graph.layer_graph import Layer, TensorSpec
from parplan.layout import Layout
from parplan.plan import Strategy

__all__ = ["MeasuredCosts", "Outcome", "Progress", "Request"]

Progress = Callable[[int, int], None]

# A part is only run where its tensors take up to this share of the device's memory.
ROOM = 0.6


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
class _Ratio:
    """Measured over estimated seconds."""

    forward: float
    backward: float


@dataclass(frozen=True)
class _Job:
    signature: str
    request: Request
    estimate_s: float


class MeasuredCosts:
    """Measured layer times over a roofline's transfers and memory (a CostModel).

    Args:
        fallback: costs of the same graph, for what is not measured.
        device: where to measure.
        profile: where to keep measurements; by default for this process only.
        effort: how long to measure one part.
    """

    def __init__(
        self,
        fallback: RooflineCosts,
        device: torch.device,
        profile: Profile | None = None,
        effort: Effort | None = None,
    ) -> None:
        self._fallback = fallback
        self._device = device
        self._profile = profile if profile is not None else SessionProfile()
        self._effort = effort or Effort()
        self._signatures: dict[PartKey, str] = {}
        self._ratios: dict[str, list[_Ratio]] = {}
        self._counted: set[str] = set()
        self._calling: Measurement | None = None
        self.correction = 1.0

    def layer(self, layer: Layer, strategy: Strategy) -> LayerCost:
        """Seconds of the slowest device's part of `layer`: measured, else interpolated; corrected for the step."""
        cost = self._uncorrected(layer, strategy)
        forward_s, backward_s = self.correction * cost.forward_s, self.correction * cost.backward_s
        return replace(cost, forward_s=forward_s, backward_s=backward_s)

    def memory(self, layer: Layer, strategy: Strategy) -> LayerMemory:
        """Bytes on each device of `layer` (not measured)."""
        return self._fallback.memory(layer, strategy)

    def transfer(self, value: TensorSpec, source: Layout, target: Layout) -> TransferCost:
        """Cost of changing `value` from one layout to another (not measured)."""
        return self._fallback.transfer(value, source, target)

    def transfer_matrix(
        self, value: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> TransferMatrix:
        """Times of `transfer` for all pairs of layouts at once."""
        return self._fallback.transfer_matrix(value, sources, targets)

    def reduction(self, layer: Layer, strategy: Strategy) -> float:
        """Seconds to sum the weight gradients of `layer` (not measured)."""
        return self._fallback.reduction(layer, strategy)

    def measure(
        self, requests: Iterable[Request], time_cap_s: float = 60.0, on_progress: Progress | None = None
    ) -> Outcome:
        """Measure the distinct parts of `requests`, the most expensive (by estimate) first, for up to `time_cap_s`.

        `on_progress(done, total)` is called before the first part and after each.
        """
        jobs = self._jobs(requests)
        known = [job for job in jobs if self._profile.get(job.signature) is not None]
        todo = [job for job in jobs if self._profile.get(job.signature) is None]
        failed: list[str] = []
        started = perf_counter()
        for job in known:
            self._learn(job)
        for done, job in enumerate(todo):
            if on_progress is not None:
                on_progress(done, len(todo))
            if perf_counter() - started >= time_cap_s:
                return Outcome(done - len(failed), len(known), len(todo) - done, tuple(failed))
            failed += self._run(job)
        if on_progress is not None:
            on_progress(len(todo), len(todo))
        return Outcome(len(todo) - len(failed), len(known), 0, tuple(failed))

    def measure_step(self, effort: Effort | None = None) -> Measurement:
        """A whole forward and backward of the model on the device, all layers in one piece of code.

        Raises:
            ParplanError: the step does not fit the device.
        """
        graph = self._fallback.graph
        memories = [self.memory(layer, Strategy()) for layer in graph.layers.values()]
        needed = sum(m.weights_bytes + m.gradients_bytes + m.saved_bytes for m in memories)
        needed += 2 * max(memory.transient_bytes for memory in memories)
        if needed > self._room_bytes():
            raise ParplanError(
                f"{graph.model}: to measure a step takes {_sizes(needed, self._room_bytes())}; lower --batch"
            )
        parts = [part_of(graph, layer, Strategy()) for layer in graph.layers.values()]
        return sample(step_trial(graph, parts, self._device), self._device, effort or self._effort)

    def correct(self, whole_step_s: float) -> float:
        """Scale all layer times so that on one device they add up to `whole_step_s`; returns the factor."""
        costs = [self._uncorrected(layer, Strategy()) for layer in self._fallback.graph.layers.values()]
        self.correction = whole_step_s / sum(cost.forward_s + cost.backward_s for cost in costs)
        return self.correction

    def _uncorrected(self, layer: Layer, strategy: Strategy) -> LayerCost:
        entry = self._profile.get(self._signature(layer, strategy))
        if entry is not None:
            return LayerCost(entry.forward_s, entry.backward_s, Source.MEASURED, entry.spread)
        estimate = self._fallback.layer(layer, strategy)
        ratios = self._ratios.get(layer.kind) or [ratio for each in self._ratios.values() for ratio in each]
        if not ratios:
            return estimate
        forward_s = estimate.forward_s * median(ratio.forward for ratio in ratios)
        backward_s = estimate.backward_s * median(ratio.backward for ratio in ratios)
        return LayerCost(forward_s, backward_s, Source.INTERPOLATED, _spread(ratios))

    def _signature(self, layer: Layer, strategy: Strategy) -> str:
        key = part_key(layer, strategy)
        if key not in self._signatures:
            graph = self._fallback.graph
            self._signatures[key] = part_signature(graph, part_of(graph, layer, strategy))
        return self._signatures[key]

    def _jobs(self, requests: Iterable[Request]) -> list[_Job]:
        jobs: dict[str, _Job] = {}
        for request in requests:
            signature = self._signature(request.layer, request.strategy)
            if signature not in jobs:
                cost = self._fallback.layer(request.layer, request.strategy)
                jobs[signature] = _Job(signature, request, cost.forward_s + cost.backward_s)
        return sorted(jobs.values(), key=lambda job: -job.estimate_s)

    def _run(self, job: _Job) -> list[str]:
        """Measure one part and keep the result; why not, when it cannot be run."""
        layer, strategy = job.request.layer, job.request.strategy
        memory, room = self.memory(layer, strategy), self._room_bytes()
        needed = memory.weights_bytes + memory.gradients_bytes + memory.saved_bytes + 2 * memory.transient_bytes
        if needed > room:
            return [f"{layer.name}: to measure its part takes {_sizes(needed, room)}"]
        try:
            trial = layer_trial(self._fallback.graph, part_of(self._fallback.graph, layer, strategy), self._device)
            measurement = self._less_calling(sample(trial, self._device, self._effort))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # whatever an op says of random inputs
            return [f"{layer.name}: {type(error).__name__}: {error}"]
        self._profile.put(job.signature, measurement)
        self._learn(job)
        return []

    def _less_calling(self, measured: Measurement) -> Measurement:
        """A part's own time, without what calling it takes."""
        if self._calling is None:
            self._calling = sample(empty_trial(self._device), self._device, Effort(cap_s=0.1, least_runs=100))
        forward_s = max(0.0, measured.forward_s - self._calling.forward_s)
        backward_s = max(0.0, measured.backward_s - self._calling.backward_s) if measured.backward_s else 0.0
        return replace(measured, forward_s=forward_s, backward_s=backward_s)

    def _room_bytes(self) -> float:
        return ROOM * device_memory_bytes(self._device)

    def _learn(self, job: _Job) -> None:
        """Remember how far the roofline was off, once per part."""
        entry = self._profile.get(job.signature)
        if entry is None or job.signature in self._counted:
            return
        self._counted.add(job.signature)
        estimate = self._fallback.layer(job.request.layer, job.request.strategy)
        if estimate.forward_s > 0:
            forward = entry.forward_s / estimate.forward_s
            backward = entry.backward_s / estimate.backward_s if estimate.backward_s > 0 else forward
            self._ratios.setdefault(job.request.layer.kind, []).append(_Ratio(forward, backward))


def _sizes(needed_bytes: float, room_bytes: float) -> str:
    return f"{needed_bytes / 2**20:.0f} MiB, {room_bytes / 2**20:.0f} MiB may be used"


def _spread(ratios: Sequence[_Ratio]) -> float:
    """How far measured parts lie from their median ratio, relative; 1.0 when a single one says nothing of it."""
    if len(ratios) < 2:
        return 1.0
    middle = median(ratio.forward for ratio in ratios)
    return 1.4826 * median(abs(ratio.forward - middle) for ratio in ratios) / middle
