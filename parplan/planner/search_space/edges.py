"""Transfers between layers, per pair of options: the edges of the problem, by how roles move the values on them.

A value that several layers take in one layout is moved there once: where one of them may reuse the transfer of another,
the seconds are on the edge to the node that says so (transfer_reuse.py), and count at the layer that reads.
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
from parplan.planner.search_space.options import Option, of_pass
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.step_time import EdgeParts
from parplan.planner.search_space.transfer_reuse import TransferReuse

__all__ = ["delivered", "delivery_layout", "edge_parts", "equal"]


def edge_parts(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    reused: Mapping[tuple[int, str], TransferReuse],
    names: Sequence[str],
    position: Mapping[str, int],
    options: Sequence[Sequence[Option]],
    shape: Shape,
    strict: bool = False,
    fold: Fold | None = None,
    look: Callable[[], None] = lambda: None,
) -> list[EdgeParts]:
    """Transfers between the layers that are nodes, each as often as they stand for others.

    Args:
        reused: nodes that say whose transfer of a value is reused, by reader and value.
        names: of the nodes.
        position: the node of every layer, or of the one that stands for it.
        strict: R4: pairs of replica counts that do not divide are forbidden.
        look: called before every edge.
    """
    found: dict[tuple[int, int, int | None], EdgeParts] = {}

    def add(value: str, maker: str, given: int, reader: int, times: int, counted_at: int | None = None) -> None:
        """The edge of a value from a node to a reader, the delivery behind the last layer, so many times."""
        reuse, source = reused.get((reader, value)), options[given]
        layer = graph.layers[names[reader]] if reader < len(names) else None
        if layer is None:
            layouts, roles, target = [delivery_layout(graph, cluster, value)], [Stage.AFTER], None
        else:
            target = [options[reader][k] for k in reuse.standing] if reuse is not None else options[reader]
            layouts = [layer.layout(value, option.strategy) for option in target]
            roles = [option.role for option in target]
        if reuse is not None and layer is None:
            layouts, roles = layouts * len(reuse.source), roles * len(reuse.source)
        ends = given, reader if reuse is None else reuse.node
        edge = _edge(graph, costs, ends, {value: layouts}, roles, maker, source, shape)
        if layer is not None and target is not None and (shape.any_passes or strict):
            barred = _barred(graph, maker, layer.name, source, target) if shape.any_passes else False
            r4 = _indivisible(source, target) if strict else False
            edge = replace(edge, allowed=np.where(barred | r4, np.inf, edge.allowed))
        at = counted_at if counted_at is not None else None if reuse is None else reader
        edge = replace(edge.scaled(times if reuse is None else times * reuse.moved), reader=at)
        known = found.get((edge.source, edge.target, at))
        found[edge.source, edge.target, at] = edge if known is None else known.added(edge)

    nodes = frozenset(names)
    for maker, target, values in graph.digraph.edges(data="values"):
        if target not in nodes:
            continue
        look()
        a, b = position[maker], position[target]
        for value in values:
            times = 1 if fold is None else fold.times.get(target, 1)
            if fold is None or times == 1:
                add(value, maker, a, b, 1)
                continue
            last = graph.layers[fold.last[target]]
            if value in last.inputs:  # all copies read the same value
                add(value, maker, a, b, 1)
            elif shape.in_roles and maker in fold.first_block:
                # What begins the passes may be in the first block. The blocks behind the second take from one like
                # themselves: as the last one does, but in the backward of their own.
                add(value, maker, a, b, 1)
                handed = last.inputs[graph.layers[target].inputs.index(value)]
                add(
                    handed, graph.producer[handed], position[fold.first_block[maker]], position[last.name], times - 1, b
                )
            else:
                add(value, maker, a, b, times)
    for result in delivered(graph):
        add(result, graph.producer[result], position[graph.producer[result]], len(names), 1)
    return [*found.values(), *(edge for reuse in reused.values() for edge in reuse.edges())]


def delivered(graph: LayerGraph) -> list[str]:
    """Results that layers make, each once."""
    results = (value for value in dict.fromkeys(graph.user_outputs) if isinstance(value, str))
    return [value for value in results if value in graph.producer]


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


def _indivisible(given: Sequence[Option], wanted: Sequence[Option]) -> NDArray[np.bool_]:
    """Pairs of replica counts that R4 forbids."""
    ends = [np.array([option.strategy.replicas for option in own]) for own in (given, wanted)]
    broken: NDArray[np.bool_] = ends[0][:, None] % ends[1][None, :] != 0
    return broken


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
