"""The reason for a layer's strategy: its alternatives with their prices, and in one line the cost of the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from parplan.graph.axes.table import unknown_ops
from parplan.graph.kinds import is_batch_reduction
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.sites import is_repeatable, why_whole
from parplan.plan import Plan
from parplan.planner.decision import Alternative, LayerReport
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.step_time.parts import edge_totals, node_totals
from parplan.planner.search_space.strategies import refusals, strategies
from parplan.planner.solver.problem import evaluate, objectives_at

__all__ = ["NO_DIFFERENCE", "against", "alternatives", "followed", "only_way", "time_text", "with_reasons"]

PLACES_TRIED = 8
"""A faster strategy that has no room is tried on so many blocks of devices."""
NO_DIFFERENCE = 5e-8
"""Seconds of a step that are printed as no difference."""
NO_OTHER_WAY = "the rules leave no other way on these devices"
NOT_APART = "other ways were compared with equal blocks alike"


def with_reasons(
    layers: Sequence[LayerReport], graph: LayerGraph, formulation: Formulation, choice: Sequence[int], plan: Plan
) -> tuple[LayerReport, ...]:
    """The layers with their alternatives by the objective, and the best one as the reason of those that have none."""
    place, passes = formulation.layers, formulation.parts.shape.passes
    groups = formulation.fold.alike if formulation.fold is not None else ()
    alike = {place[name]: tuple(place[one] for one in group) for group in groups for name in group}

    def reason(name: str, found: Sequence[Alternative]) -> str:
        if not found:
            why = only_way(graph.layers[name])
            blocks = [tuple(range(plan.devices))]
            if (
                formulation.fold is not None
                and why == NO_OTHER_WAY
                and len(strategies(graph.layers[name], plan.micro_batch, blocks)) > 1
            ):
                return NOT_APART
            return f"no other split of it is legal in {passes} passes" if passes > 1 and why == NO_OTHER_WAY else why
        best = next((one for one in found if one.fits), None)
        if best is None:
            return "every other way needs more memory than there is"
        source = followed(graph, plan, name)
        if source and best.total_s > 0:
            return f"follows {source}; any other way costs {time_text(best.total_s)}"
        return against(best)

    explained, listed_of = [], dict[int, tuple[Alternative, ...]]()
    for layer in layers:
        index = place[layer.name]
        if index not in listed_of:
            own = formulation.options[index][choice[index]].strategy.describe()
            nodes, found, too_large = alike.get(index, (index,)), dict[str, Alternative](), Counter[str]()
            for k, other in alternatives(formulation, choice, nodes).items():
                words = other.strategy.describe()  # of those that read alike the best
                if words != own and words not in found and too_large[words] < PLACES_TRIED:
                    changed = formulation.followed([k if v in nodes else known for v, known in enumerate(choice)])
                    fits = other.total_s >= 0 or evaluate(formulation.problem, changed).feasible
                    found.setdefault(words if fits else f"{words}, too large", replace(other, fits=fits))
                    too_large[words] += not fits
            listed_of[index] = tuple(found.values())
        listed = listed_of[index]
        refused = refusals(graph.layers[layer.name], plan.micro_batch, plan.devices)
        why = layer.why or reason(layer.name, listed)
        explained.append(replace(layer, why=why, alternatives=listed, refused=refused))
    return tuple(explained)


def alternatives(formulation: Formulation, choice: Sequence[int], nodes: Sequence[int]) -> Mapping[int, Alternative]:
    """Every other allowed option of a layer with the change of the step, the best first, all others as chosen.

    What is neither compute nor moved is exposed.

    Args:
        nodes: a layer, or copies of one in repeated blocks, which have one option.
    """
    parts, first = formulation.parts, nodes[0]
    if len(formulation.options[first]) == 1:
        return {}
    every = np.arange(len(formulation.options[first]))
    changed = formulation.followed([every if v in nodes else k for v, k in enumerate(choice)])
    varied = {v for v, own in enumerate(changed) if isinstance(own, np.ndarray)}
    total_s = objectives_at(formulation.problem, changed)
    compute_s = sum((node_totals(parts, node)[every] for node in nodes), np.zeros(len(every)))
    moved_s = sum((node_totals(parts, node)[changed[node]] for node in varied.difference(nodes)), np.zeros(len(every)))
    for edge in parts.edges:
        if edge.source in varied or edge.target in varied:
            moved_s = moved_s + edge_totals(parts, edge)[changed[edge.source], changed[edge.target]]
    now, together = choice[first], sum(map(formulation.times, nodes))
    changes = np.array([seconds - seconds[now] for seconds in (compute_s, moved_s, total_s)]).T.tolist()
    found = {
        k: Alternative(option.strategy, compute, moved, total - compute - moved, layers=together)
        for k, (option, (compute, moved, total)) in enumerate(zip(formulation.options[first], changes, strict=True))
        if k != now and np.isfinite(total)
    }
    return dict(sorted(found.items(), key=lambda one: (one[1].total_s, one[0])))


def followed(graph: LayerGraph, plan: Plan, name: str) -> str | None:
    """The layer whose layout a layer without weights takes over unchanged."""
    layer = graph.layers[name]
    source = next(iter(graph.makers(layer)), None)
    if layer.parameters or source is None:
        return None
    return source if plan.layers[name].arrangement == plan.layers[source].arrangement else None


def only_way(layer: Layer) -> str:
    """The reason for a layer that has no other strategy."""
    if any(map(is_batch_reduction, layer.nodes)):
        return "it adds up one number per sample, so one device is enough"
    whole = layer.batch is None and not layer.constant and not layer.axes
    if whole and (why := why_whole(layer.nodes)):
        return f"{why}, so it runs whole"
    if whole and not is_repeatable(layer.nodes):
        return "its backward needs the whole gradient, so it runs once, on one device"
    if whole and (unknown := unknown_ops(layer.nodes)):
        return f"parplan does not know how {' and '.join(unknown)} treats samples, so it runs whole"
    if whole:
        return "its samples depend on each other and it has no axis to cut"
    return NO_OTHER_WAY


def against(change: Alternative) -> str:
    """The cost of another strategy, and the part of the step that most of it is in."""
    other = change.strategy.describe()
    if abs(change.total_s) < NO_DIFFERENCE:
        return f"{other}: no slower, no faster"
    parts = {
        "slower compute": change.compute_s,
        "activations to move": change.transfer_s,
        "gradients to wait for": change.exposed_s,
    }
    if change.total_s < 0:
        words = ("less compute", "less to move", "less to wait for")
        parts = {word: -seconds for word, seconds in zip(words, parts.values(), strict=True)}
    cause = max(parts, key=lambda text: parts[text])
    return f"{other}: {time_text(change.total_s)}, {cause}"


def time_text(seconds: float) -> str:
    """Seconds with a sign, in a unit that suits them."""
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:+.2f} s"
    return f"{seconds * 1e3:+.2f} ms" if size >= 1e-4 else f"{seconds * 1e6:+.1f} µs"
