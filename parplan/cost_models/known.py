"""Selects the costs of one model on one cluster: from the user's profile store, else the roofline's estimates.

A profile is used only where the devices it was measured on are the devices planned for. Measurements made under other
conditions are mentioned in a note and never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high

import torch

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.measured import profiled_costs
from parplan.cost_models.measurement.conditions import current_conditions, switches
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.profile.store import Profile, ProfileStore
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph

__all__ = ["KnownCosts", "known_costs"]

# A device this much faster or slower than when it was measured is worth a warning.
DRIFT = 0.1


@dataclass(frozen=True)
class KnownCosts:
    """Costs, and what the reader must know about them."""

    costs: CostModel
    notes: tuple[str, ...] = ()


def known_costs(
    graph: LayerGraph,
    cluster: Cluster,
    *,
    device: torch.device | None = None,
    precision: str = "fp32",
    optimizer: str = "adam",
    store: ProfileStore | None = None,
) -> KnownCosts:
    """Costs of `graph` on `cluster`.

    Args:
        device: a device of the cluster that is here; None when none is: then all costs are estimates.
        store: default: the user's own, for reading.

    Raises:
        ProfileError: the store is damaged.
    """
    roofline = RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer)
    if device is None:
        return KnownCosts(roofline)
    if refusal := _of_another_precision(device, precision):
        return KnownCosts(roofline, (refusal,))
    stored = store if store is not None else ProfileStore(read_only=True)
    profiles: dict[int, Profile] = {}
    backend = "gloo" if device.type == "cpu" else "nccl"
    for busy in range(1, cluster.count + 1):
        # Read once: a plan asks for thousands of parts.
        for group in stored.groups(current_conditions(device, busy)):
            profile = SessionProfile(group)
            if profile.all() or profile.links(backend):
                profiles[busy] = profile
    if not profiles:
        return KnownCosts(roofline, tuple(stored.mismatches(current_conditions(device, cluster.count))))
    now_s = Reference(device).seconds(9)
    costs = profiled_costs(
        graph,
        cluster,
        profiles,
        kind=cluster.groups[0].device.kind,
        backend=backend,
        precision=precision,
        optimizer=optimizer,
        reference_s=now_s if device.type == "cpu" else 0.0,
    )
    return KnownCosts(
        costs, (_summary(profiles, device, backend), *_fewer(profiles, cluster), *_drift(profiles, now_s))
    )


def _summary(profiles: dict[int, Profile], device: torch.device, backend: str) -> str:
    moments = [entry.measurement.when for profile in profiles.values() for entry in profile.all()]
    last = max(moments, default="")
    day = f", the last on {last[:10]}" if last else ""
    missing = "" if any(profile.links(backend) for profile in profiles.values()) else "; links were not"
    conditions = current_conditions(device, max(profiles)).describe()
    return f"Costs from the profile of {conditions}: {len(moments)} parts measured{day}{missing}."


def _of_another_precision(device: torch.device, precision: str) -> str:
    """Why nothing measured under torch's settings can stand for `precision`; nothing when it can.

    What was measured is of the captured types, computed as the settings say: never autocast.
    """
    if precision == "fp32" or any(precision in words and "matmul" in words for words in switches(device)):
        return ""
    how = "under autocast" if precision in ("fp16", "bf16") else "with other settings of torch"
    return f"Estimates: nothing was measured in {precision}, which is computed {how}."


def _fewer(profiles: dict[int, Profile], cluster: Cluster) -> tuple[str, ...]:
    """Whether fewer devices were at work than are planned for."""
    most = max(profiles)
    if most >= cluster.count:
        return ()
    return (
        f"Measured with {most} device{'s' if most > 1 else ''} at work, planned for {cluster.count}: "
        f"`parplan profile TARGET --devices {cluster.count}` measures those.",
    )


def _drift(profiles: dict[int, Profile], now_s: float) -> tuple[str, ...]:
    """Whether the device runs at another speed than when it was measured."""
    known = (entry.measurement.reference_s for profile in profiles.values() for entry in profile.all())
    then = [seconds for seconds in known if seconds > 0]
    if not then:
        return ()
    ratio = now_s / median_high(then)
    if abs(ratio - 1) <= DRIFT:
        return ()
    word = "slower" if ratio > 1 else "faster"
    return (f"The reference kernel is {max(ratio, 1 / ratio):.2f} x {word} now than when the profile was measured.",)
