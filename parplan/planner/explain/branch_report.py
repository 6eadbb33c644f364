"""What a plan's branches do at the same time: tracks of layers on disjoint devices, what that saves, and the words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Beside, LayerFacts, Phase, Track
from parplan.planner.explain.reasons import time_text
from parplan.planner.search.branch_search import Towers
from parplan.planner.search.branches import Branch, beside

__all__ = ["along", "notes_on", "side_by_side"]


def side_by_side(
    graph: LayerGraph, plan: Plan, layers: Iterable[LayerFacts], found: Towers | None = None
) -> Beside | None:
    """What runs at the same time under `plan`; None where nothing does and nothing was tried.

    Args:
        layers: the plan's facts, for times.
        found: what the search ended with, if there was one.
    """
    seconds = {facts.name: facts.forward_s + facts.backward_s for facts in layers}
    devices = {name: strategy.devices for name, strategy in plan.layers.items()}
    every = [_phase(phase, devices, seconds) for section in beside(graph, devices) for phase in section.phases]
    phases = tuple(phase for phase in every if len(phase.tracks) > 1)
    if found is None:
        return Beside(phases) if phases else None
    return Beside(phases, found.without_s, found.tried)


def _phase(phase: Sequence[Branch], devices: dict[str, tuple[int, ...]], seconds: dict[str, float]) -> Phase:
    """Branches that share a device are on one track."""
    tracks: list[Track] = []
    for branch in phase:
        track = Track(branch, tuple(sorted({d for name in branch for d in devices[name]})), _total(branch, seconds))
        shared = [one for one in tracks if set(one.devices) & set(track.devices)]
        tracks = [one for one in tracks if one not in shared]
        tracks.append(_joined([*shared, track]))
    tracks.sort(key=lambda track: track.devices)
    longest = max(track.compute_s for track in tracks)
    return Phase(tuple(tracks), sum(track.compute_s for track in tracks) - longest)


def _joined(tracks: Sequence[Track]) -> Track:
    layers = tuple(name for track in tracks for name in track.layers)
    devices = tuple(sorted({number for track in tracks for number in track.devices}))
    return Track(layers, devices, sum(track.compute_s for track in tracks))


def _total(branch: Branch, seconds: dict[str, float]) -> float:
    return sum(seconds[name] for name in branch)


def along(layers: Sequence[LayerFacts], found: Beside | None) -> tuple[LayerFacts, ...]:
    """The layers' facts, with what they run beside as the reason where they run beside something."""
    words: dict[str, str] = {}
    for phase in found.phases if found is not None else ():
        for track in phase.tracks:
            others = " and ".join(other.describe() for other in phase.tracks if other is not track)
            words.update(dict.fromkeys(track.layers, f"beside {others}: {time_text(-phase.saved_s)}"))
    return tuple(replace(facts, why=words.get(facts.name, facts.why)) for facts in layers)


def notes_on(found: Towers | None) -> tuple[str, ...]:
    """What to say of a search that was cut off."""
    if found is None or not found.left:
        return ()
    where = f"Branches at the same time: {found.left} of the places where the model branches were not tried"
    if found.timed_out:
        return (f"{where} in {found.seconds:.0f} s; a longer --time-limit may find a faster plan.",)
    return (f"{where}, after {found.tried} plans for the others.",)
