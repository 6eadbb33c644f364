"""Branches that a plan runs at the same time: tracks of layers on disjoint devices, the time they save, the words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import ConcurrentBranches, DeviceTrack, LayerReport, Phase
from parplan.planner.explain.reasons import time_text
from parplan.planner.search.branches import Branch, sections
from parplan.planner.search.simpler import Found

__all__ = ["concurrent_branches", "with_concurrency"]


def concurrent_branches(
    graph: LayerGraph, plan: Plan, layers: Iterable[LayerReport], found: Found
) -> ConcurrentBranches | None:
    """The branches that run at the same time under `plan`; None where none do and none were tried.

    Args:
        layers: the plan's layers, for times.
        found: the search for plans.
    """
    seconds = {layer.name: layer.forward_s + layer.backward_s for layer in layers}
    devices = {name: strategy.devices for name, strategy in plan.layers.items()}
    every = [_phase(phase, devices, seconds) for section in sections(graph) for phase in section.phases]
    phases = tuple(phase for phase in every if len(phase.tracks) > 1)
    return ConcurrentBranches(phases, found.without_s, found.tried) if phases or found.without_s is not None else None


def _phase(phase: Sequence[Branch], devices: dict[str, tuple[int, ...]], seconds: dict[str, float]) -> Phase:
    """Branches on disjoint devices; those that share a device are on one track."""
    tracks: list[DeviceTrack] = []
    for branch in phase:
        used = {device for name in branch for device in devices[name]}
        shared = [track for track in tracks if used & set(track.devices)]
        layers = (*(name for track in shared for name in track.layers), *branch)
        used.update(device for track in shared for device in track.devices)
        compute_s = sum(track.compute_s for track in shared) + sum(seconds[name] for name in branch)
        tracks = [track for track in tracks if track not in shared]
        tracks.append(DeviceTrack(layers, tuple(sorted(used)), compute_s))
    tracks.sort(key=lambda track: track.devices)
    longest = max(track.compute_s for track in tracks)
    return Phase(tuple(tracks), sum(track.compute_s for track in tracks) - longest)


def with_concurrency(layers: Sequence[LayerReport], found: ConcurrentBranches | None) -> tuple[LayerReport, ...]:
    """The layers, with concurrency as the reason for those that run at the same time as others."""
    words: dict[str, str] = {}
    for phase in found.phases if found is not None else ():
        for track in phase.tracks:
            others = " and ".join(other.describe() for other in phase.tracks if other is not track)
            words.update(dict.fromkeys(track.layers, f"beside {others}: {time_text(-phase.saved_s)}"))
    return tuple(replace(layer, why=words.get(layer.name, layer.why)) for layer in layers)
