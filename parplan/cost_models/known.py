"""The best costs there are for one model on one cluster: from the user's store, a shipped profile, or estimates.

A profile is used only where the devices it was measured on are the devices planned for. What is kept but was measured
under other conditions is said, never used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.measured import profiled_costs
from parplan.cost_models.measurement.conditions import here, switches
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import Profile, SessionProfile
from parplan.cost_models.profile.shipped import WithShipped, shipped, shipped_strangers, with_shipped
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph

__all__ = ["Known", "known_costs"]

# A device this much faster or slower than when it was measured is worth a warning.
DRIFT = 0.1


@dataclass(frozen=True)
class Known:
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
) -> Known:
    """Costs of `graph` on `cluster`.

    Args:
        device: a device of the cluster that is here; None when none is (then only shipped profiles count).
        store: default: the user's own, for reading.

    Raises:
        ProfileError: the store is damaged.
    """
    if device is None:
        return _elsewhere(graph, cluster, precision, optimizer)
    if refusal := _of_another_precision(device, precision):
        return Known(RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer), (refusal,))
    kept = store if store is not None else ProfileStore(read_only=True)
    profiles: dict[int, Profile] = {}
    for busy in range(1, cluster.count + 1):
        conditions = here(device, busy)
        # Read once: a plan asks for thousands of parts.
        own = WithShipped(SessionProfile(), kept.groups(conditions))
        profile = with_shipped(own, conditions)
        if profile.all() or profile.links(_backend(device)):
            profiles[busy] = profile
    if not profiles:
        conditions = here(device, cluster.count)
        notes = (*kept.strangers(conditions), *shipped_strangers(conditions))
        return Known(RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer), notes)
    now_s = Reference(device).seconds(9)
    costs = profiled_costs(
        graph,
        cluster,
        profiles,
        kind=cluster.groups[0].device.kind,
        backend=_backend(device),
        precision=precision,
        optimizer=optimizer,
        reference_s=now_s if device.type == "cpu" else 0.0,
    )
    return Known(costs, (_summary(profiles, device), *_fewer(profiles, cluster), *_drift(profiles, now_s)))


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"


def _summary(profiles: dict[int, Profile], device: torch.device) -> str:
    parts = sum(len(profile.all()) for profile in profiles.values())
    last = max((entry.measurement.when for profile in profiles.values() for entry in profile.all()), default="")
    day = f", the last on {last[:10]}" if last else ""
    missing = "" if any(profile.links(_backend(device)) for profile in profiles.values()) else "; links were not"
    return f"Costs from the profile of {here(device, max(profiles)).describe()}: {parts} parts measured{day}{missing}."


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
    then = sorted(
        entry.measurement.reference_s
        for profile in profiles.values()
        for entry in profile.all()
        if entry.measurement.reference_s > 0
    )
    if not then:
        return ()
    ratio = now_s / then[len(then) // 2]
    if abs(ratio - 1) <= DRIFT:
        return ()
    word = "slower" if ratio > 1 else "faster"
    return (f"The reference kernel is {max(ratio, 1 / ratio):.2f} x {word} now than when the profile was measured.",)


def _elsewhere(graph: LayerGraph, cluster: Cluster, precision: str, optimizer: str) -> Known:
    """The shipped profile of this kind of device made with the newest torch, which the note names; else estimates."""
    kind = cluster.groups[0].device.kind
    # Measured with torch's own switches, so in fp32, and with one device at work.
    usable = [g.conditions for g in shipped() if g.conditions == replace(g.conditions, device=kind, busy=1, flags="")]
    if not usable or cluster.mixed or precision != "fp32":
        return Known(RooflineCosts(graph, cluster, precision=precision, optimizer=optimizer))
    newest = max(usable, key=lambda conditions: [int(digits) for digits in re.findall(r"\d+", conditions.torch)])
    profiles = {1: with_shipped(SessionProfile(), newest)}
    costs = profiled_costs(
        graph, cluster, profiles, kind=kind, backend="none", precision=precision, optimizer=optimizer
    )
    return Known(costs, (f"Costs from the shipped profile of {newest.describe()}.",))
