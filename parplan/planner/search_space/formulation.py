"""From layers, strategies and costs to the abstract problem: one node per layer, one edge per pair.

Memory is counted at the moments of a step (cost_models.costs.Moments). Outputs are delivered as inputs came, by a last
node that is not a layer.

Repeated blocks (graph/repeated.py) are planned alike where that is asked for: nodes for the first, the last and one
block between, which counts as often as it stands for others, and edges by which copies have one option.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, Held, Moments
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import Fold, group_of
from parplan.lowering.stages import Stage
from parplan.plan import STATES, Strategy
from parplan.planner.search_space.any_block import folded
from parplan.planner.search_space.edges import TransferReuse, edge_parts, equal, reuses, ties
from parplan.planner.search_space.options import Option, arrival_s, node_parts, priced_option
from parplan.planner.search_space.shape import ONE_PASS, Choice, Placement, Shape, choices, role_rows
from parplan.planner.search_space.step_time.assembled import assembled
from parplan.planner.search_space.step_time.parts import EdgeParts, NodeParts, StepParts
from parplan.planner.solver.problem import Edge, FloatArray, Linear, Node, Problem, Usage

__all__ = ["Formulation", "InfeasibleShape", "formulate", "reassembled"]

DELIVERY = "(delivery)"


class InfeasibleShape(Exception):
    """A shape of plan in which the layer named has no option."""


@dataclass(frozen=True, eq=False)
class Formulation:
    """The abstract problem and what its numbers stand for.

    `options[i][k]` is option k of layer i; `names[i]` its layer, the delivery last; `parts` the seconds of the step
    that the problem's costs and maxima were made of; `fold` the repeated blocks that are planned alike; `reused` the
    nodes that say whose transfer of a value is reused, which follow from the options of the layers.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    parts: StepParts
    fold: Fold | None = None
    reused: tuple[TransferReuse, ...] = ()

    @cached_property
    def layers(self) -> dict[str, int]:
        """The place of every layer of the model, or of the one that stands for it."""
        place = {name: index for index, name in enumerate(self.names[: len(self.options)])}
        return place if self.fold is None else {name: place[kept] for name, kept in self.fold.kept.items()}

    def times(self, index: int) -> int:
        """Layers that one of the nodes stands for."""
        return 1 if self.fold is None else self.fold.times.get(self.names[index], 1)

    @property
    def shape(self) -> Shape:
        """The shape of plan that it is for."""
        return self.parts.shape

    @cached_property
    def layout_changes(self) -> tuple[Edge, ...]:
        """Edges between layers that hand on a value: per pair of options, how many layers take it in another layout."""
        count, arrangements = len(self.options), [[one.strategy.arrangement for one in own] for own in self.options]
        readers = {one.node: one.reader for one in self.reused}
        # Where a transfer counts in another block than its reader's (passes), the reader is the one that takes it.
        ends = (
            (e.source, e.target if e.target < count or e.reader is None else readers.get(e.target, e.reader))
            for e in self.parts.edges
        )
        return tuple(
            Edge(source, target, np.where(equal(arrangements[source], arrangements[target]), 0.0, self.times(target)))
            for source, target in dict.fromkeys(ends)
            if target < count
        )

    def choice(self, strategies: Mapping[str, Strategy], roles: Mapping[str, Stage] | None = None) -> tuple[int, ...]:
        """The choice that stands for these strategies, in these roles if given (the delivery has one).

        Raises:
            ValueError: a strategy, or its role, is not among the options.
        """
        known = [[(one.strategy, one.role if roles else None) for one in own] for own in self.options]
        picked = [
            own.index((strategies[name], roles[name] if roles else None))
            for name, own in zip(self.names, known, strict=False)
        ]
        return tuple(self.followed((*picked, *[0] * (len(self.problem.nodes) - len(picked)))))

    def followed(self, choice: Sequence[Any]) -> list[Any]:
        """The choice, or several at once where nodes have arrays, with those nodes that follow from layers' options."""
        result = list(choice)
        for reuse in self.reused:
            result[reuse.node] = reuse.option(choice)
        return result

    def device_peaks(self, choice: Sequence[int], devices: int) -> tuple[int, ...]:
        """Peak bytes of every device by what layers hold, without transfers."""
        changes: list[dict[int, float]] = [{} for _ in range(devices)]
        for own, k in zip(self.options, choice, strict=False):
            for held in own[k].memory.held:
                for device in own[k].strategy.devices:
                    for moment, nbytes in ((held.start, held.nbytes), (held.end, -held.nbytes)):
                        changes[device][moment] = changes[device].get(moment, 0.0) + nbytes
        return tuple(int(np.cumsum([0.0, *(one[t] for t in sorted(one))]).max()) for one in changes)

    def keys(self, possible: Sequence[frozenset[int]]) -> dict[str, frozenset[tuple[object, ...]]]:
        """The keys of some strategies of every node, by the name of its layer."""
        named = zip(self.names, self.options, possible, strict=False)
        return {name: frozenset(own[k].strategy.key for k in kept) for name, own, kept in named}

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategies that a choice stands for, by layer."""
        return {name: self.options[index][choice[index]].strategy for name, index in self.layers.items()}


def formulate(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    candidates: Mapping[str, Sequence[Strategy]],
    *,
    shape: Shape = ONE_PASS,
    far_s: float = 0.0,
    strict: bool = False,
    fold: Fold | None = None,
    state_by_group: bool = False,
    on_layer: Callable[[int, int], None] | None = None,
    look: Callable[[], None] = lambda: None,
) -> Formulation:
    """Build the problem of one shape of plan.

    Args:
        candidates: legal strategies per layer.
        shape: scheme, passes, and devices that are followed one by one.
        far_s: seconds that no step worth considering takes, where devices are followed or weights gathered again.
        strict: forbid what R2 to R4 and R7 forbid, instead of pricing the transfer; without a fold.
        fold: repeated blocks to plan alike; layers for which others stand need no candidates.
        state_by_group: the layers of a gather group have one state, those with a choice of states.
        on_layer: told (done, total) while costs are computed.
        look: called before the costs of every layer and every edge; may raise an error that ends it.

    Raises:
        InfeasibleShape: some layer has no option in a plan of this shape.
    """
    kept = fold.kept if fold is not None else {name: name for name in graph.layers}
    names = tuple(dict.fromkeys(kept.values()))
    shape = replace(shape, homes=_homes_of(kept, shape), inside=frozenset(kept[name] for name in shape.inside))
    chosen = [_choices(graph, graph.layers[name], candidates[name], shape, strict) for name in names]
    place = {name: index for index, name in enumerate(names)}
    reused = reuses(graph, cluster, names, chosen, shape, strict, fold)
    options = _options(graph, cluster, costs, names, chosen, reused, shape, on_layer, look)
    layers = {name: place[other] for name, other in kept.items()}
    edges = edge_parts(graph, cluster, costs, reused, names, layers, options, shape, strict, fold, look)
    own_parts = [node_parts(own, shape) for own in options]
    own_parts += [NodeParts.alone(np.array([costs.step.overhead_s]), len(shape.lanes))]
    times = {place[name]: count for name, count in (fold.times if fold is not None else {}).items()}
    if fold is not None:
        own_parts, options = _counted_often(fold, graph, place, own_parts, options)
    phases = [[[place[name] for name in branch] for branch, _ in phase[0]] for phase in shape.homes]
    if not shape.average:
        edges += _placements(own_parts, phases, options, shape)
    own_parts += [_reuse_parts(graph, cluster, costs, names, own_parts, options, shape, one) for one in reused.values()]
    if shape.average:
        inside = frozenset(place[name] for name in shape.inside)
        own_parts, edges, least = folded(own_parts, edges, _forms(options, reused.values()), cluster.count, inside)
        options = [tuple(own[k] for k in some) for own, some in zip(options, least, strict=False)]
    edges += ties(graph, fold, layers, place, options, state_by_group)
    edges += _reuse_ties(fold, graph, place, reused, own_parts, shape) if fold is not None else []
    _check_far(far_s, own_parts)
    count, groups, several = len(names) + 1, _groups(graph, names), costs.step.micro_batches
    parts = StepParts(own_parts, edges, shape, costs.step.hidden, phases, far_s, count, times, groups, several)
    # The devices that are followed hold at least as much as any other of their kind.
    lanes = () if shape.average else shape.lanes
    node_s, edge_s, maxima = assembled(parts)
    placed = len(node_s) - len(names) - 1 - len(reused)
    others = [DELIVERY, *["(placement)"] * placed, *["(transfer reused)"] * len(reused)]
    usages = [tuple(one for number, lane in enumerate(lanes) for one in _usages(own, lane, number)) for own in options]
    usages += [()] * len(others)
    problem = Problem(
        nodes=tuple(map(Node, (*names, *others), node_s, usages)),
        edges=tuple(Edge(part.source, part.target, seconds) for part, seconds in zip(edges, edge_s, strict=True)),
        limits=tuple(float(cluster.devices[lane].memory_bytes) for lane in lanes),
        linear=(
            *role_rows(graph, names, layers, options, shape),
            *(_strict_rules(graph, names, options) if strict else _gathered_together(fold, graph, place, own_parts)),
        ),
        resource_names=tuple(
            f"device {lane}{f' ({cluster.devices[lane].kind})' if cluster.mixed else ''}" for lane in lanes
        ),
        maxima=maxima,
    )
    return Formulation(
        problem, (*names, DELIVERY), tuple(options), parts, fold, () if shape.average else tuple(reused.values())
    )


def _groups(graph: LayerGraph, names: Sequence[str]) -> list[list[int]]:
    """The nodes of each gather group, in forward order."""
    return [list(own) for _, own in groupby(range(len(names)), lambda v: group_of(graph)[names[v]])]


def _check_far(far_s: float, nodes: Sequence[NodeParts]) -> None:
    """Refuse a problem whose T would have every option wait for what only those of gathered state wait for."""
    if not far_s and any(0 < own.regathers.mean() < 1 for own in nodes):
        raise ValueError("far_s is 0, and some options of a layer gather weights again: give seconds of a long step")


def _choices(
    graph: LayerGraph, layer: Layer, candidates: Sequence[Strategy], shape: Shape, strict: bool
) -> tuple[Choice, ...]:
    """The choices of a layer.

    Raises:
        InfeasibleShape: it has none.
    """
    own = choices(graph, layer, candidates, shape)
    own = tuple(one for one in own if not (strict and layer.is_loss and one.strategy.shards > 1))  # R7
    if not own:
        raise InfeasibleShape(layer.name)
    return own


def _options(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    names: Sequence[str],
    chosen: Sequence[Sequence[Choice]],
    reused: Collection[tuple[int, str]],
    shape: Shape,
    on_layer: Callable[[int, int], None] | None,
    look: Callable[[], None],
) -> list[tuple[Option, ...]]:
    """The choices of every layer with their costs; what may be brought for an earlier layer is not in a layer's own."""
    options: list[tuple[Option, ...]] = []
    for v, (name, own) in enumerate(zip(names, chosen, strict=True)):
        look()
        layer = graph.layers[name]
        arriving = [value for value in layer.inputs if value in graph.user_inputs and (v, value) not in reused]
        options.append(tuple(priced_option(graph, cluster, costs, arriving, layer, one, shape) for one in own))
        if on_layer:
            on_layer(len(options), len(names))
    return options


def _reuse_parts(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    names: Sequence[str],
    nodes: Sequence[NodeParts],
    options: Sequence[Sequence[Option]],
    shape: Shape,
    reuse: TransferReuse,
) -> NodeParts:
    """Seconds of a node that says whose transfer is reused: the arrival of a user's input."""
    seconds, inside = np.zeros(len(reuse.group)), np.zeros(len(reuse.group), dtype=bool)
    if reuse.value in graph.user_inputs:
        layer, own = graph.layers[names[reuse.reader]], options[reuse.reader]
        seconds = np.array([arrival_s(graph, cluster, costs, reuse.value, layer, one, shape) for one in own])
        inside = np.array([one.role is Stage.PASSES for one in own])
    return reuse.parts(nodes[reuse.reader], seconds, inside)


def _forms(options: Sequence[Sequence[Option]], reused: Collection[TransferReuse]) -> list[list[tuple[Hashable, int]]]:
    """Of every option of every node, all that does not depend on where its devices are, and their number."""
    layers: list[list[tuple[Hashable, int]]] = [
        [(one.strategy.key, len(one.strategy.devices)) for one in own] for own in options
    ]
    layers.append([((), 0)])  # the delivery
    for reuse in reused:
        forms = [layers[reuse.reader][k] for k in reuse.standing]
        layers.append([((key, int(source)), count) for (key, count), source in zip(forms, reuse.source, strict=True)])
    return layers


def _homes_of(kept: Mapping[str, str], shape: Shape) -> tuple[tuple[Placement, ...], ...]:
    """Placements of the phases, each phase once for all blocks between the first and the last."""
    homes = (
        tuple(tuple((tuple(dict.fromkeys(kept[v] for v in branch)), block) for branch, block in one) for one in phase)
        for phase in shape.homes
    )
    return tuple(dict.fromkeys(homes))


def _counted_often(
    fold: Fold,
    graph: LayerGraph,
    place: Mapping[str, int],
    nodes: Sequence[NodeParts],
    options: Sequence[tuple[Option, ...]],
) -> tuple[list[NodeParts], list[tuple[Option, ...]]]:
    """Parts and options in which layers that stand for several take their seconds and bytes so often."""
    nodes, options = list(nodes), list(options)
    spans = {}
    when = Moments(len(graph.layers))
    for own in fold.blocks:
        first, last = own.begin + own.period, own.end - own.period
        ranges = (
            range(when.forward(first), when.forward(last)),
            range(when.backward(last - 1), when.backward(first - 1)),
            range(when.update(first), when.update(last)),
        )
        spans.update(dict.fromkeys(range(first, first + own.period), ranges))
    order = {name: number for number, name in enumerate(graph.layers)}
    for name, times in fold.times.items():
        v, ranges = place[name], spans[order[name]]
        nodes[v] = nodes[v].scaled(times)

        def later(moment: int, ranges: Sequence[range] = ranges) -> int:
            """The moment, or the end of the blocks between; memory is most at the first or last block."""
            return next((one.stop for one in ranges if moment in one), moment)

        def often(own: Option, one: Held, ranges: Sequence[range] = ranges, times: int = times) -> Held:
            """As all blocks hold it; weights on their way from slices since the block before are there once."""
            coming = one.estimated and own.strategy.state != STATES[0]
            if coming and any(one.start < inside.start < one.end <= inside.stop for inside in ranges):
                return one
            return replace(one, start=later(one.start), end=later(one.end), nbytes=times * one.nbytes)

        held = [[often(one, h) for h in one.memory.held] for one in options[v]]
        options[v] = tuple(
            replace(one, memory=replace(one.memory, held=tuple(h for h in parts if h.start < h.end)))
            for one, parts in zip(options[v], held, strict=True)
        )
    return nodes, options


def _gathered_together(
    fold: Fold | None, graph: LayerGraph, place: Mapping[str, int], nodes: Sequence[NodeParts]
) -> list[Linear]:
    """Rows by which all layers of a repeated block gather weights again, or none: T of many blocks is exact for those.

    In a mixture the sums of one block are beside some layers of the next one, and T counts the layers one by one.
    """
    rows, names = [], list(graph.layers)
    for own in fold.blocks if fold is not None else ():
        inside = [place[name] for name in names[own.begin : own.begin + own.period]]
        for one, other in pairwise(v for v in inside if nodes[v].regathers.any()):
            name = f"{names[own.begin]} and the layers behind it gather weights again, or none of them does"
            rows.append(Linear(name, {one: nodes[one].regathers, other: -nodes[other].regathers}, 0.0, 0.0))
    return rows


def _reuse_ties(
    fold: Fold,
    graph: LayerGraph,
    place: Mapping[str, int],
    reused: Mapping[tuple[int, str], TransferReuse],
    nodes: Sequence[NodeParts],
    shape: Shape,
) -> list[EdgeParts]:
    """Edges by which transfers that layers alike reuse are one decision: each follows from layers that are tied."""
    group = {place[name]: number for number, alike in enumerate(fold.alike) for name in alike}
    ties = []
    for one, other in (pair for alike in fold.alike for pair in pairwise(alike[1:] if shape.passes > 1 else alike)):
        for values in dict.fromkeys(zip(graph.layers[one].inputs, graph.layers[other].inputs, strict=True)):
            own, again = (reused.get((place[name], value)) for name, value in zip((one, other), values, strict=True))
            if own is not None and again is not None and own.follows_like(again, group):
                same = np.where(np.eye(len(nodes[own.node].once_s)), 0.0, np.inf)
                zero = np.zeros_like(same)
                ties.append(EdgeParts(own.node, again.node, same, (zero, zero)))
    return ties


def _placements(
    nodes: list[NodeParts], phases: Sequence[Sequence[Sequence[int]]], options: Sequence[Sequence[Option]], shape: Shape
) -> list[EdgeParts]:
    """A decision for the placement of every phase, last of `nodes`, and edges that make its layers follow it."""
    edges = []
    for branches, placements in zip(phases, shape.homes, strict=True):
        known: list[int | None] = [*(() if shape.placed else (None,)), *range(len(placements))]
        lanes: list[list[int]] = [list(range(len(shape.lanes)))]
        for number, placement in enumerate(placements):
            loads = np.zeros(len(shape.lanes))
            for branch, (_, block) in zip(branches, placement, strict=True):
                for v in branch:
                    both = zip(options[v], nodes[v].once_s + nodes[v].backward_s, strict=True)
                    seconds = min((float(own_s) for one, own_s in both if one.placement == number), default=0.0)
                    loads += [seconds * (lane in block) for lane in shape.lanes]
            # The first lane of every block before the others, which have no more to do.
            first = {shape.lanes.index(min(set(block) & set(shape.lanes))) for _, block in placement}
            lanes.append(sorted(lanes[0], key=lambda lane: (lane not in first, -loads[lane])))
        for v in (v for branch in branches for v in branch):
            agree = [[0.0 if one.placement == other else np.inf for other in known] for one in options[v]]
            none = np.zeros((len(options[v]), len(known)))
            edges.append(EdgeParts(v, len(nodes), np.array(agree), (none, none)))
            serial = np.array([one.placement is None for one in options[v]])
            order = [lanes[0 if one.placement is None else one.placement + 1] for one in options[v]]
            nodes[v] = replace(nodes[v], beside=np.where(serial, 1.0, nodes[v].lanes), order=np.array(order).T)
        nodes.append(NodeParts.alone(np.zeros(len(known)), len(shape.lanes)))
    return edges


def reassembled(formulation: Formulation, parts: StepParts) -> Problem:
    """The problem with other seconds, and everything else as it is."""
    node_s, edge_s, maxima = assembled(parts)
    known = formulation.problem
    nodes = tuple(replace(node, cost_s=seconds) for node, seconds in zip(known.nodes, node_s, strict=True))
    edges = tuple(Edge(part.source, part.target, seconds) for part, seconds in zip(parts.edges, edge_s, strict=True))
    return replace(known, nodes=nodes, edges=edges, maxima=maxima)


def _usages(options: Sequence[Option], device: int, resource: int) -> list[Usage]:
    """One for every interval in which some strategy holds something on `device`, whose memory is `resource`."""
    here = [option.memory.held if device in option.strategy.devices else () for option in options]
    amounts: dict[tuple[int, int, bool], FloatArray] = {}
    for index, held in enumerate(here):
        for one in held:
            amounts.setdefault((one.start, one.end, one.estimated), np.zeros(len(options)))[index] = one.nbytes
    return [Usage(resource, start, end, nbytes, about) for (start, end, about), nbytes in sorted(amounts.items())]


def _strict_rules(graph: LayerGraph, names: Sequence[str], options: Sequence[Sequence[Option]]) -> list[Linear]:
    """R2 and R3 as equalities of replica counts between neighbours of one layer."""
    position = {name: index for index, name in enumerate(names)}
    counts = {n: np.array([float(o.strategy.replicas) for o in options[position[n]]]) for n in names}
    rows = []
    for name in names:
        if graph.layers[name].constant:
            continue
        for rule, near in (("R2", graph.digraph.predecessors(name)), ("R3", graph.digraph.successors(name))):
            group = [other for other in near if not graph.layers[other].constant]
            for one, other in pairwise(group):
                terms = {position[one]: counts[one], position[other]: -counts[other]}
                rows.append(Linear(f"{rule} at {name}: {one} and {other} need equal replicas", terms, 0.0, 0.0))
    return rows
