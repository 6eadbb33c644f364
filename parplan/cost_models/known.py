"""Selects the costs of one model on one cluster: from the user's profile store, else the roofline's estimates.

A profile is used only where the devices it was measured on are the devices planned for. Measurements made under other
conditions are mentioned in a note and never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

import torch

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.measured import profiled_costs
from parplan.cost_models.measurement.conditions import current_conditions, switches
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import Conditions, EntryGroup, SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts
from parplan.fields import counted
from parplan.graph.layer_graph import LayerGraph

__all__ = ["KnownCosts", "known_costs", "mismatches"]

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
    as_profiled: bool = False,
    micro_batches: int = 1,
    store: ProfileStore | None = None,
) -> KnownCosts:
    """Costs of `graph` on `cluster`.

    Args:
        device: a device of the cluster that is here; None when none is: then all costs are estimates.
        micro_batches: of a step, if the graph is at the size of one of them.
        as_profiled: at the median speed that the device had while it was measured, whatever it has now.
        store: default: the user's own, for reading.

    Raises:
        ProfileError: the store is damaged.
    """
    given: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "micro_batches": micro_batches}
    roofline = RooflineCosts(graph, cluster, **given)
    if device is None:
        return KnownCosts(roofline)
    # What was measured is of the captured types, computed as torch's settings say: never autocast.
    if precision != "fp32" and not any(precision in words and "matmul" in words for words in switches(device)):
        how = "under autocast" if precision in ("fp16", "bf16") else "with other settings of torch"
        return KnownCosts(roofline, (f"Estimates: nothing was measured in {precision}, which is computed {how}.",))
    stored = store if store is not None else ProfileStore(read_only=True)
    profiles: dict[int, SessionProfile] = {}
    backend = "gloo" if device.type == "cpu" else "nccl"
    for busy in range(1, cluster.count + 1):
        profile = stored.under(current_conditions(device, busy))
        if profile.all() or profile.links(backend):
            profiles[busy] = profile
    if not profiles:
        return KnownCosts(roofline, tuple(mismatches(stored.groups(), current_conditions(device, cluster.count))))
    measured, busiest = [entry.measurement for profile in profiles.values() for entry in profile.all()], max(profiles)
    then = [measurement.reference_s for measurement in measured if measurement.reference_s > 0]
    then_s = median_high(then) if then else 0.0
    now_s = then_s if as_profiled else Reference(device).seconds(9)
    reference_s = now_s if device.type == "cpu" else 0.0
    costs = profiled_costs(graph, cluster, profiles, backend=backend, reference_s=reference_s, **given)
    last = max((measurement.when for measurement in measured), default="")
    day = f", the last on {last[:10]}" if last else ""
    missing = "" if any(profile.links(backend) for profile in profiles.values()) else "; links were not"
    conditions = current_conditions(device, busiest).describe()
    notes = [f"Costs from the profile of {conditions}: {counted(len(measured), 'part')} measured{day}{missing}."]
    if busiest < cluster.count:
        notes.append(
            f"Measured with {counted(busiest, 'device')} at work, planned for {cluster.count}: "
            f"`parplan profile TARGET --devices {cluster.count}` measures those."
        )
    if as_profiled:
        notes.append("Times are those of the profile (--as-profiled): how fast the device is now is left out.")
    ratio = now_s / then_s if then else 1.0
    if abs(ratio - 1) > DRIFT:
        speed = f"{max(ratio, 1 / ratio):.2f} x {'slower' if ratio > 1 else 'faster'}"
        notes.append(f"The reference kernel is {speed} now than when the profile was measured.")
    return KnownCosts(costs, tuple(notes))


def mismatches(stored: Sequence[EntryGroup], conditions: Conditions) -> list[str]:
    """Notes on stored measurements that are ignored because device, torch, CUDA or flags differ from `conditions`.

    Those of the same device one by one, `212 parts of this device were measured with torch 2.11.0, here is 2.13.0:
    stale, not used; run parplan profile again`; other devices are only named, and only where this one is missing.
    """
    same_device = [group for group in stored if group.conditions.device == conditions.device]
    others = sorted({group.conditions.device for group in stored} - {conditions.device})
    if others and not same_device:
        return [f"only profiles of other devices ({', '.join(others)}) are here, none of {conditions.device}"]
    return [_note(group, conditions) for group in same_device if group.conditions != conditions]


def _note(group: EntryGroup, now: Conditions) -> str:
    then, usual = group.conditions, "torch's default switches"
    pairs = (
        (then.torch, now.torch, f"with torch {then.torch}, here is {now.torch}"),
        (then.cuda, now.cuda, f"with {f'cuda {then.cuda}' if then.cuda else 'no cuda'}, here is {now.cuda or 'none'}"),
        (
            then.busy,
            now.busy,
            f"with {counted(then.busy, 'device')} at once, here {'is' if now.busy == 1 else 'are'} {now.busy}",
        ),
        (then.flags, now.flags, f"with {then.flags or usual}, here with {now.flags or usual}"),
    )
    differences = "; ".join(words for old, new, words in pairs if old != new)
    stale = replace(then, torch=now.torch, cuda=now.cuda) != then
    verdict = "stale, not used; run parplan profile again" if stale else "not used; run parplan profile as you run now"
    were = "was" if len(group.entries) == 1 else "were"
    return f"{group.describe()} of this device {were} measured {differences}: {verdict}"
