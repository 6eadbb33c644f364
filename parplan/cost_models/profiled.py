"""The costs of one model on the devices that were profiled, put together from what is known of them."""

from __future__ import annotations

from collections.abc import Mapping

from parplan.cluster import Cluster
from parplan.cost_models.links import MeasuredLinks
from parplan.cost_models.measured import MeasuredCosts, step_cost
from parplan.cost_models.profile import Profile
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph

__all__ = ["profiled_costs"]


def profiled_costs(
    graph: LayerGraph,
    cluster: Cluster,
    profiles: Mapping[int, Profile],
    *,
    kind: str,
    backend: str,
    precision: str = "fp32",
    optimizer: str = "adam",
    reference_s: float = 0.0,
) -> MeasuredCosts:
    """Layers, communication, updates and the runtime's own time from `profiles`, what they lack from the roofline.

    Args:
        profiles: by the number of devices that were at work; at least one.
        kind: the kind of device they are of.
        backend: whose communication counts: "gloo", "nccl" or "local".
        reference_s: what the reference kernel takes now; 0 leaves times as they were measured.
    """
    entries = [entry for profile in profiles.values() for entry in profile.links(backend)]
    links = MeasuredLinks(entries, reference_s) if entries else None
    roofline = RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer, links=links)
    # Overhead was measured with all devices at work.
    fullest = max(profiles)
    step = step_cost(profiles[fullest], roofline, links, reference_s)
    return MeasuredCosts(roofline, profiles, kind, step, reference_s)
