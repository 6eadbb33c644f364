"""Profiles with made-up figures: what pricing is tested with, as no test may depend on how fast a machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parplan.cluster import Cluster
from parplan.cost_models.costs import StepCost
from parplan.cost_models.measured import MeasuredCosts
from parplan.cost_models.measurement.runnable_parts import part_entry
from parplan.cost_models.profile.records import PartEntry, SessionProfile
from parplan.cost_models.roofline import RooflineCosts
from parplan.cost_models.sampling import Measurement
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer
from parplan.profiler.session import parts_by_devices

__all__ = ["all_parts", "made_up_costs", "made_up_profile"]

Figures = Callable[[PartEntry], Measurement]


def all_parts(graph: LayerGraph, cluster: Cluster) -> list[LocalLayer]:
    """The parts of every layer under every strategy that a planner could use."""
    return [part for own in parts_by_devices(graph, cluster).values() for part in own]


def drawn(entry: PartEntry) -> Measurement:
    """Figures that depend on the signature only, between 1 and 2 ms forward and twice that back."""
    share = sum(map(ord, entry.signature)) % 97 / 97
    return Measurement((1 + share) * 1e-3, (2 + share) * 1e-3, 0.01 + share / 10, 7)


def made_up_profile(graph: LayerGraph, parts: Iterable[LocalLayer], figures: Figures = drawn) -> SessionProfile:
    """A profile that has these `parts`."""
    profile = SessionProfile()
    for part in parts:
        profile.put(part_entry(graph, part, figures(part_entry(graph, part, Measurement(0.0, 0.0, 0.0, 0)))))
    return profile


def made_up_costs(
    graph: LayerGraph, cluster: Cluster, step: StepCost | None = None, profile: SessionProfile | None = None
) -> MeasuredCosts:
    """Costs from a made-up profile of everything, or from `profile`."""
    if profile is None:
        profile = made_up_profile(graph, all_parts(graph, cluster))
    kind = cluster.groups[0].device.kind
    return MeasuredCosts(RooflineCosts(graph, cluster), {cluster.count: profile}, kind, step)
