"""Costs from a profile: measured parts as they are, other parts interpolated or estimated from them.

A part that was measured costs what it took, corrected for what steps take beside their parts (`Correction`), scaled by
the reference kernel's time now where that is known. Parts that were not:

- Between measured parts of the same ops at a smaller and a larger size, the ratio of measured to estimated time is
  interpolated, and the figure is marked INTERPOLATED, with half the distance of the two ratios as its doubt.
- Outside of what was measured nothing is extrapolated silently: the roofline's estimate times the ratio of the nearest
  part of the same ops, or, for ops never measured, of the median of all parts that are products (or are not), marked
  ESTIMATED with a doubt to match.
- With nothing measured at all it is the roofline.

Strategies on m devices are priced from what was measured with m devices at work, as devices of one machine share what
there is of memory and power; and at what the slowest of m takes, given how runs spread, as the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from statistics import NormalDist, median

from parplan.cluster import Cluster
from parplan.cost_models.communication.measured_links import BESIDE, MeasuredLinks
from parplan.cost_models.costs import AdaptedCosts, LayerCost, Source, StepCost
from parplan.cost_models.measurement.optimizer_updates import UpdateTimes
from parplan.cost_models.measurement.runnable_parts import part_entry
from parplan.cost_models.profile.records import PartEntry, SessionProfile, scale_to_now
from parplan.cost_models.roofline import DOUBT, RooflineCosts, part_key, part_of
from parplan.cost_models.sampling import Measurement
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Strategy

__all__ = [
    "AGREEMENT",
    "BATCH_NORM",
    "CORRECTION",
    "OVERHEAD",
    "Correction",
    "MeasuredCosts",
    "batch_norm_s",
    "correction",
    "overhead_s",
    "profiled_costs",
    "step_cost",
]

# Families of entries that are no part of a layer: see profiler/runtime_costs.py.
OVERHEAD, AGREEMENT, CORRECTION, BATCH_NORM = (
    f"runtime {word}" for word in ("overhead", "agreement", "correction", "batch norm")
)

# Never surer than this of a figure that was not measured at its own sizes.
LEAST_DOUBT = 0.05
# A spread beyond this says that something else ran while a part was measured, not how devices differ.
MOST_SPREAD = 0.2


@dataclass(frozen=True)
class _Point:
    """A measured part beside its estimate: how far it is from a device that reaches its peaks.

    Sizes are compared by `size_s`, which knows no least time of a kernel; `gradients` says which tensors need one.
    """

    size_s: float
    gradients: tuple[bool, ...]
    forward: float
    backward: float
    spread: float


@dataclass(frozen=True)
class _Ratio:
    """Measured over ideal seconds for a part that was not measured."""

    forward: float
    backward: float
    source: Source
    doubt: float


@dataclass(frozen=True)
class Correction:
    """Correction of the sum of layer parts to a step.

    Where steps take longer than their parts, by about the same for every layer (its data and code have to be found
    again), each layer gets `per_layer_s` more; where they take less (work of neighbours overlaps), all are scaled.
    """

    per_layer_s: float = 0.0
    factor: float = 1.0

    def apply(self, cost: LayerCost) -> LayerCost:
        """A layer's cost in a step; two thirds of what it gets are for the backward, if it has one."""
        added_s = self.per_layer_s if cost.forward_s + cost.backward_s > 0 else 0.0
        share = 1 / 3 if cost.backward_s > 0 else 1.0
        forward_s = self.factor * cost.forward_s + share * added_s
        return replace(cost, forward_s=forward_s, backward_s=self.factor * cost.backward_s + (1 - share) * added_s)


class MeasuredCosts(AdaptedCosts):
    """Measured layer times over a roofline's memory (a CostModel).

    Args:
        fallback: costs of the same graph; transfers and reductions are its own (give it measured links).
        profiles: where measurements are, by the number of devices that were at work.
        kind: the kind of device that was measured; layers with a part on another kind cost what `fallback` says.
        step: what is said of whole steps.
        reference_s: what the reference kernel takes now; 0 leaves times as they were measured.
    """

    def __init__(
        self,
        fallback: RooflineCosts,
        profiles: Mapping[int, SessionProfile],
        kind: str,
        step: StepCost | None = None,
        reference_s: float = 0.0,
    ) -> None:
        super().__init__(fallback)
        self._fallback = fallback
        self._profiles = dict(sorted(profiles.items()))
        self._numbers = {d for group in fallback.cluster.groups if group.device.kind == kind for d in group.members}
        self._step = step or fallback.step
        self._scale = partial(scale_to_now, reference_s=reference_s)
        self._costs: dict[Hashable, LayerCost] = {}
        self._points: dict[tuple[int, str], list[_Point]] = {}
        self._medians: dict[tuple[int, bool], _Ratio | None] = {}
        self._corrections = {busy: correction(p, reference_s) for busy, p in self._profiles.items()}
        self._updates = {
            busy: UpdateTimes(profile, fallback.optimizer, self._scale) for busy, profile in self._profiles.items()
        }

    @property
    def step(self) -> StepCost:
        """Costs of whole steps."""
        calling_s = self._updates[max(self._updates)].calling_s if self._updates else 0.0
        return replace(self._step, overhead_s=self._step.overhead_s + calling_s)

    def layer(self, layer: Layer, strategy: Strategy, passes: int = 1) -> LayerCost:
        """Seconds of the slowest device's part of `layer` in one pass."""
        if not self._profiles or not self._numbers.issuperset(strategy.devices):
            return self._fallback.layer(layer, strategy, passes)
        # The measured number of devices at work that is closest: the next larger, else the largest.
        busy = next((busy for busy in self._profiles if busy >= len(strategy.devices)), max(self._profiles))
        key = (part_key(layer, strategy, passes), busy)
        if key in self._costs:
            return self._costs[key]
        graph, estimate = self._fallback.graph, self._fallback.layer(layer, strategy, passes)
        update_s = self._update_s(layer, strategy, busy, estimate)
        entry = part_entry(graph, part_of(graph, layer, strategy, passes), Measurement(0.0, 0.0, 0.0, 0))
        stored = self._profiles[busy].get(entry.signature)
        if stored is not None:
            known = stored.measurement
            scale, devices = self._scale(known), len(strategy.devices)
            if devices > 1:  # what the slowest takes over what one does (Blom's order statistic)
                scale *= 1 + min(known.spread, MOST_SPREAD) * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
            source = Source.SHIPPED if stored.origin else Source.MEASURED
            cost = LayerCost(known.forward_s * scale, known.backward_s * scale, source, known.spread, update_s)
        elif (ratio := self._ratio(entry, busy)) is not None:
            ideal_s = max(self._size_s(entry), self._fallback.ideal_seconds(0.0, 0.0))
            backward_s = ideal_s * ratio.backward if estimate.backward_s > 0 else 0.0
            cost = LayerCost(ideal_s * ratio.forward, backward_s, ratio.source, ratio.doubt, update_s)
        else:
            return replace(estimate, update_s=update_s)
        return self._costs.setdefault(key, self._corrections[busy].apply(cost))

    def _update_s(self, layer: Layer, strategy: Strategy, busy: int, estimate: LayerCost) -> float:
        """The update of the parameters the device holds, each counted by the first layer that uses it."""
        times, fallback = self._updates[busy], self._fallback
        sizes = fallback.memory_model.trained_bytes(part_of(fallback.graph, layer, strategy)) if times else []
        return times.seconds(sizes) if any(sizes) else estimate.update_s

    def _ratio(self, entry: PartEntry, busy: int) -> _Ratio | None:
        """Measured over ideal seconds of a part that was not measured; None where nothing like it was."""
        size_s = self._size_s(entry)
        family = (busy, entry.family)
        if family not in self._points:
            found = [self._point(other) for other in self._profiles[busy].family(entry.family)]
            self._points[family] = [point for point in found if point is not None]
        points = self._points[family]
        # A backward that gives more gradients, or fewer, is another one: not what to interpolate with.
        alike = [point for point in points if point.gradients == entry.gradients]
        below = max((p for p in alike if p.size_s <= size_s), key=lambda p: p.size_s, default=None)
        above = min((p for p in alike if p.size_s >= size_s), key=lambda p: p.size_s, default=None)
        if below is not None and above is not None:
            doubt = max(LEAST_DOUBT, below.spread)
            if above.size_s <= below.size_s:
                return _Ratio(below.forward, below.backward, Source.INTERPOLATED, doubt)
            share = log(size_s / below.size_s) / log(above.size_s / below.size_s)
            forward = exp((1 - share) * log(below.forward) + share * log(above.forward))
            backward = (1 - share) * below.backward + share * above.backward
            doubt = max(doubt, abs(log(above.forward / below.forward)) / 2, above.spread)
            return _Ratio(forward, backward, Source.INTERPOLATED, doubt)
        if points:
            nearest = min(alike or points, key=lambda p: abs(log(size_s / p.size_s)))
            distance = abs(log(size_s / nearest.size_s))
            doubt = min(DOUBT, max(2 * LEAST_DOUBT, nearest.spread) * (1 + distance))
            return _Ratio(nearest.forward, nearest.backward, Source.ESTIMATED, doubt)
        key = (busy, entry.flops > 0)
        if key in self._medians:
            return self._medians[key]
        # The median of all measured parts that are products (or are not).
        parts = [e for e in self._profiles[busy].all() if not e.family.startswith(("update ", "runtime "))]
        others = [other for other in parts if (other.flops > 0) == key[1] and other.nbytes]
        points = [point for other in others if (point := self._point(other)) is not None]
        middle_ratio: _Ratio | None = None
        if points:
            middle = median(point.forward for point in points)
            scatter = 1.4826 * median(abs(log(point.forward / middle)) for point in points)
            doubt = max(DOUBT / 2, min(DOUBT, scatter))
            middle_ratio = _Ratio(middle, median(point.backward for point in points), Source.ESTIMATED, doubt)
        return self._medians.setdefault(key, middle_ratio)

    def _point(self, entry: PartEntry) -> _Point | None:
        measured, size_s = entry.measurement, self._size_s(entry)
        if measured.forward_s <= 0:
            return None
        scale, ideal_s = self._scale(measured), max(size_s, self._fallback.ideal_seconds(0.0, 0.0))
        forward, backward = measured.forward_s * scale / ideal_s, measured.backward_s * scale / ideal_s
        return _Point(size_s, entry.gradients, forward, backward, measured.spread)

    def _size_s(self, entry: PartEntry) -> float:
        # Views move nothing: all of them are of one size.
        return self._fallback.peak_seconds(entry.flops, max(1.0, entry.nbytes))


def step_cost(
    profile: SessionProfile, roofline: RooflineCosts, links: MeasuredLinks | None, reference_s: float = 0.0
) -> StepCost:
    """Costs of whole steps and of communication from a profile; the roofline's where it lacks them."""
    found, devices = roofline.step, roofline.cluster.count
    if links is not None:
        found = replace(found, spread=links.spread, links=Source.MEASURED)
        alone, beside = links.curve("all-reduce", devices), links.curve(BESIDE, devices)
        if alone is not None and beside is not None and devices > 1:
            taken_s, under_way_s = (float(curve.seconds(roofline.message_bytes)) for curve in (beside, alone))
            found = replace(found, overlap=1 - taken_s / under_way_s if under_way_s > 0 else 1.0, late=0.0)
    agreement = profile.get(AGREEMENT)
    runtime_s = overhead_s(profile, reference_s)(len(roofline.graph.parameters))
    if agreement is not None:
        runtime_s += agreement.measurement.forward_s * scale_to_now(agreement.measurement, reference_s)
    return replace(found, overhead_s=runtime_s, batch_norm_s=batch_norm_s(profile, reference_s))


def overhead_s(profile: SessionProfile, reference_s: float = 0.0) -> Callable[[int], float]:
    """The runtime's own seconds in a step by the number of parameters: a line through what was measured, else 0."""
    found = [(entry.nbytes, entry.measurement) for entry in profile.family(OVERHEAD)]
    points = sorted((parameters, own.forward_s * scale_to_now(own, reference_s)) for parameters, own in found)
    if not points:
        return lambda parameters: 0.0
    (low, low_s), (high, high_s) = points[0], points[-1]
    slope = max(0.0, high_s - low_s) / (high - low) if high > low else 0.0
    return lambda parameters: max(0.0, low_s + (parameters - low) * slope)


def correction(profile: SessionProfile, reference_s: float = 0.0) -> Correction:
    """The correction of sums of parts to steps, from a profile; none where that was not measured."""
    found = [(e.measurement, e.nbytes) for e in profile.family(CORRECTION)]
    if not found:
        return Correction()
    # Of these the forward time is the whole step, the backward time the sum of the parts, the bytes their number.
    left_s = median((m.forward_s - m.backward_s) / layers * scale_to_now(m, reference_s) for m, layers in found)
    factor = median(m.forward_s / m.backward_s for m, _ in found)
    return Correction(left_s, 1.0) if left_s > 0 else Correction(0.0, factor)


def batch_norm_s(profile: SessionProfile, reference_s: float = 0.0) -> float:
    """Seconds that a batch norm over replicas takes more in a step than its part and its messages: processes wait for
    each other, and autograd nodes end and begin around each message. 0 where that was not measured."""
    # Of these the forward time is the whole step, the backward time the predicted one, the bytes the batch norms.
    found = [(entry.measurement, entry.nbytes) for entry in profile.family(BATCH_NORM)]
    each_s = [(own.forward_s - own.backward_s) / number * scale_to_now(own, reference_s) for own, number in found]
    return max(0.0, *each_s) if each_s else 0.0


def profiled_costs(
    graph: LayerGraph,
    cluster: Cluster,
    profiles: Mapping[int, SessionProfile],
    *,
    backend: str,
    precision: str = "fp32",
    optimizer: str = "adam",
    micro_batches: int = 1,
    reference_s: float = 0.0,
) -> MeasuredCosts:
    """Layers, communication, updates and the runtime's own time from `profiles`, what they lack from the roofline.

    Args:
        profiles: of the cluster's first kind of device, by the number of those that were at work; at least one.
        backend: whose communication counts: "gloo", "nccl" or "local".
        reference_s: what the reference kernel takes now; 0 leaves times as they were measured.
    """
    entries = [entry for profile in profiles.values() for entry in profile.links(backend)]
    links = MeasuredLinks(entries, reference_s) if entries else None
    roofline = RooflineCosts(graph, cluster, precision, optimizer, links, micro_batches)
    # Overhead was measured with all devices at work.
    step = step_cost(profiles[max(profiles)], roofline, links, reference_s)
    return MeasuredCosts(roofline, profiles, cluster.groups[0].device.kind, step, reference_s)
