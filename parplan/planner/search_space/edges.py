"""Transfers between layers, per pair of options: the edges of the problem, by how roles move the values on them.

A value that like readers (query, key and value; gate and up) take in one layout is moved there once
(lowering/placement.py): the first of them pays for the value's way to it, each other for its way on from there, nothing
where it wants the value as the first does. Where the maker has one strategy, the others pay for the way from the maker,
so a given plan is priced exactly. Readers that are not alike pay each, and so do those in branches at the same time;
where plans with and without such branches are bounded, like readers have options for both (`Choice.pays`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.communication.schemes import broadcast_stops
from parplan.cost_models.costs import CostModel, TransferMatrix
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import Fold
from parplan.layout import Layout
from parplan.lowering.stages import Stage, keeps_apart
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Scheme
from parplan.planner.search_space.options import LikeReaders, Option, arrival_layout, of_pass
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.step_time import EdgeParts
from parplan.planner.solver.problem import FloatArray

__all__ = ["delivery_layout", "edge_parts", "equal"]


def edge_parts(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    like: LikeReaders,
    names: Sequence[str],
    position: Mapping[str, int],
    options: Sequence[Sequence[Option]],
    shape: Shape,
    fold: Fold | None = None,
    look: Callable[[], None] = lambda: None,
) -> list[EdgeParts]:
    """Transfers between the layers that are nodes, each as often as they stand for others.

    Args:
        names: of the nodes.
        position: the node of every layer, or of the one that stands for it.
        look: called before every edge.
    """
    found: dict[tuple[int, int, int | None], EdgeParts] = {}

    def add(edge: EdgeParts) -> None:
        known = found.get((edge.source, edge.target, edge.backward_of))
        found[edge.source, edge.target, edge.backward_of] = edge if known is None else known.added(edge)

    nodes = frozenset(names)
    by_name = {name: options[index] for name, index in position.items()}
    for source, target, values in graph.digraph.edges(data="values"):
        if target not in nodes:
            continue
        look()
        a, b = position[source], position[target]
        own = [value for value in values if target not in like.get(value, {})]
        times = 1 if fold is None else fold.times.get(target, 1)
        parts: list[tuple[int, int, list[str], int, int | None]] = [(a, b, own, times, None)]
        if fold is not None and shape.in_roles and times > 1 and source in fold.first_block:
            # What begins the passes may be in the first block. The blocks behind the second take from one like
            # themselves: as the last one does, but in the backward of their own.
            middle, last = position[fold.first_block[source]], position[fold.last[target]]
            handed = [value for value in own if value not in graph.layers[fold.last[target]].inputs]
            common = [value for value in own if value not in handed]
            parts = [(a, b, common, times, None), (a, b, handed, 1, None), (middle, last, handed, times - 1, b)]
        for one, other, values, often, back in parts:
            wanted = {v: [graph.layers[target].layout(v, o.strategy) for o in options[other]] for v in values}
            roles = [option.role for option in options[other]]
            edge = _edge(graph, costs, (one, other), wanted, roles, source, options[one], shape)
            if shape.any_passes:
                barred = _barred(graph, source, target, options[one], options[other])
                edge = replace(edge, allowed=np.where(barred, np.inf, edge.allowed))
            add(replace(edge.scaled(often), backward_of=back))
    for value, every in like.items():
        leaders = {target: source for target, source in every.items() if target in nodes}
        for target, source in leaders.items():
            once = _on_from(graph, cluster, costs, leaders, value, target, by_name)
            times = 1 if fold is None else fold.times.get(target, 1)
            pays = np.array([option.pays for option in by_name[target]])
            add(EdgeParts(position[source], position[target], np.zeros_like(once[0]), once).scaled(times * ~pays))
            if pays.any() and value in graph.producer:
                maker = graph.producer[value]
                wanted = {value: [graph.layers[target].layout(value, option.strategy) for option in by_name[target]]}
                ends, roles = (position[maker], position[target]), [option.role for option in by_name[target]]
                add(_edge(graph, costs, ends, wanted, roles, maker, by_name[maker], shape).scaled(times * pays))
    delivered: dict[str, list[str]] = {}
    for result in dict.fromkeys(graph.user_outputs):
        if isinstance(result, str) and result in graph.producer:
            delivered.setdefault(graph.producer[result], []).append(result)
    for maker, results in delivered.items():
        a, b = position[maker], len(names)
        wanted = {value: [delivery_layout(graph, cluster, value)] for value in results}
        add(_edge(graph, costs, (a, b), wanted, [Stage.AFTER], maker, options[a], shape))
    return list(found.values())


def _edge(
    graph: LayerGraph,
    costs: CostModel,
    ends: tuple[int, int],
    wanted: Mapping[str, Sequence[Layout]],
    roles: Sequence[Stage],
    source: str,
    options: Sequence[Option],
    shape: Shape,
) -> EdgeParts:
    """Seconds of the values on one edge, by how each pair of roles moves them (lowering/placement.py)."""
    given_in = np.array([option.role is Stage.PASSES for option in options])[:, None]
    wanted_in = np.array([role is Stage.PASSES for role in roles])[None, :]
    order = list(Stage)  # no layer feeds one in an earlier role
    given_at, wanted_at = ([order.index(role) for role in own] for own in ([o.role for o in options], roles))
    allowed = np.where(np.greater.outer(given_at, wanted_at), np.inf, 0.0)
    zero = np.zeros(allowed.shape)
    once, within, inwards, outwards = [zero, zero], [zero, zero], [zero, zero], [zero, zero]
    for value, layouts in wanted.items():
        given = [graph.layers[source].layout(value, option.strategy) for option in options]
        moved = costs.transfer_matrix(graph.values[value], given, layouts)
        single = ~(given_in | wanted_in) | ((~given_in & wanted_in) if value not in graph.batch_dims else False)
        kinds = [(once, single | (given_in == wanted_in) if shape.passes == 1 else single, moved)]
        if shape.passes > 1:
            part = pass_matrix(graph, costs, value, given, layouts, shape)
            kinds += [
                (within, given_in & wanted_in, costs.transfer_matrix(of_pass(graph, value, shape), given, layouts)),
                (inwards, ~given_in & wanted_in & ~single, part),
                (outwards, given_in & ~wanted_in, part),
            ]
        for total, where, cost in kinds:
            total[0] = total[0] + np.where(where, cost.forward_s, 0.0)
            total[1] = total[1] + np.where(where, cost.backward_s, 0.0)
    several = [(one[0], one[1]) if one[0].any() or one[1].any() else None for one in (within, inwards, outwards)]
    return EdgeParts(*ends, allowed, (once[0], once[1]), several[0], several[1], several[2])


def _barred(
    graph: LayerGraph, source: str, target: str, given: Sequence[Option], wanted: Sequence[Option]
) -> NDArray[np.bool_]:
    """Pairs of options of which lowering/stages.py makes no passes of any replica counts.

    Layers before the passes have one replica count, the most of all. A layer runs in passes because it has fewer, or is
    fed from there; behind them because it is fed from behind them, or needs all samples and is fed from the passes.
    """
    given_role, wanted_role = (np.array([one.role.name for one in own]) for own in (given, wanted))
    before, inside = (given_role == "BEFORE")[:, None], (given_role == "PASSES")[:, None]
    replicas, fewer = (np.array([one.strategy.replicas for one in own]) for own in (given, wanted))
    because = np.array([one.because == source for one in wanted])
    apart = keeps_apart(graph.layers[target])
    barred: NDArray[np.bool_] = ((wanted_role == "PASSES") & because) & before & ~(replicas[:, None] > fewer)
    barred |= ((wanted_role == "AFTER") & because) & (before | (inside & apart))
    if apart and keeps_apart(graph.layers[source]):
        barred |= before & (wanted_role == "BEFORE") & (replicas[:, None] != fewer)
        barred |= before & (wanted_role == "PASSES") & (replicas[:, None] < fewer)
    return barred


def pass_matrix(
    graph: LayerGraph,
    costs: CostModel,
    value: str,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Shape,
) -> TransferMatrix:
    """Seconds of one pass's samples over the boundary of the passes, the mean over the passes."""
    spec = of_pass(graph, value, shape)
    if shape.scheme is not Scheme.BROADCAST:
        return costs.transfer_matrix(spec, sources, targets)
    dim = graph.batch_dims.get(value)
    forward, backward = np.zeros((len(sources), len(targets))), np.zeros((len(sources), len(targets)))
    for a, given in enumerate(sources):
        for b, wanted in enumerate(targets):
            for number in range(shape.passes):
                stops = broadcast_stops(shape.passes, shape.max_replicas, given, wanted, number, dim)
                for hop in pairwise(stops):
                    cost = costs.transfer(spec, *hop)
                    forward[a, b] += cost.forward_s / shape.passes
                    backward[a, b] += cost.backward_s / shape.passes
    return TransferMatrix(forward, backward)


def _on_from(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    leaders: Mapping[str, str],
    value: str,
    target: str,
    options: Mapping[str, Sequence[Option]],
) -> tuple[FloatArray, FloatArray]:
    """Seconds, forward and back, to bring `value` to `target` when the first of its like readers has it."""
    maker, first = graph.producer.get(value), leaders[target]
    alike = [first, *(name for name, leader in leaders.items() if leader == first)]
    wanted = {name: [graph.layers[name].layout(value, own.strategy) for own in options[name]] for name in alike}
    if maker is None:
        homes = {arrival_layout(graph, cluster, value)}
    else:
        homes = {graph.layers[maker].layout(value, option.strategy) for option in options[maker]}
    given = [*homes] * len(wanted[first]) if len(homes) == 1 else wanted[first]
    moved = costs.transfer_matrix(graph.values[value], given, wanted[target])
    decided = {wanted[name][0] for name in alike[1 : alike.index(target)] if len(set(wanted[name])) == 1}
    there = equal(wanted[first], wanted[target]) | np.array([layout in decided for layout in wanted[target]])
    return np.where(there, 0.0, moved.forward_s), np.where(there, 0.0, moved.backward_s)


def equal(one: Sequence[Hashable], other: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Which of one sequence are equal to which of another, shape (one, other)."""
    numbers: dict[Hashable, int] = {}
    first, second = (np.array([numbers.setdefault(item, len(numbers)) for item in own]) for own in (one, other))
    same: NDArray[np.bool_] = np.equal.outer(first, second)
    return same


def delivery_layout(graph: LayerGraph, cluster: Cluster, value: str) -> Layout:
    """Where a result goes: to the home device of one process, else samples back to where they came from, anything else
    to every device."""
    return StepSetting.on(cluster, graph.batch or 1).delivery(graph.batch_dims.get(value))
