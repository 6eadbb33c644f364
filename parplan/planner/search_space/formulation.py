"""From layers, strategies and costs to the abstract problem: one node per layer, one edge per pair.

Memory is counted at the moments of a step (cost_models.costs.Moments). Outputs are delivered as inputs came, by a last
node that is not a layer.

A value that several layers read in one layout is moved there once (lowering/placement.py). Costs of pairs can say so of
like readers (`like_readers`: query, key and value; gate and up): the first pays for the value's way to it, each other
for its way on from there, nothing where it wants the value as the first does. Where the maker has one strategy, the
others pay for the way from the maker, so a given plan is priced exactly. Readers that are not alike pay each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, LayerCost, LayerMemory
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec
from parplan.layout import Grid, Layout
from parplan.plan import Plan, Strategy
from parplan.planner.solver.problem import Edge, FloatArray, Linear, Node, Problem, Usage

__all__ = [
    "Formulation",
    "Option",
    "arrival_layout",
    "batch_norm_sync_s",
    "delivery_layout",
    "extended",
    "formulate",
    "like_readers",
]  # fmt: skip

DELIVERY = "(delivery)"

LikeReaders = Mapping[str, Mapping[str, str]]
"""Per value, the layers that read it as an earlier layer of their kind does, and the first such layer."""


@dataclass(frozen=True)
class Option:
    """A strategy of one layer with its costs on each of its devices.

    `batch_norm_sync_s` is one way of exchanging batch statistics, `compute_interference_s` the part of `reduce_s` that
    holds up the backward pass beside it and `post_update_s` the part that comes after the update (see StepCost),
    `arrival_s` the time of bringing the user's inputs.
    """

    strategy: Strategy
    cost: LayerCost
    batch_norm_sync_s: float
    memory: LayerMemory
    reduce_s: float
    compute_interference_s: float = 0.0
    arrival_s: float = 0.0
    post_update_s: float = 0.0

    @property
    def memory_bytes(self) -> int:
        """Bytes that the layer adds at the moment when most is live."""
        return self.memory.resident_bytes + self.memory.saved_bytes


@dataclass(frozen=True, eq=False)
class Formulation:
    """The abstract problem and what its numbers stand for.

    `options[i][k]` is strategy k of layer i; `names[i]` its layer, the delivery last.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]

    def choice(self, strategies: Mapping[str, Strategy]) -> tuple[int, ...]:
        """The choice that stands for these strategies (the delivery has one)."""
        known = [[option.strategy for option in options] for options in self.options]
        picked = [own.index(strategies[name]) for name, own in zip(self.names, known, strict=False)]
        return (*picked, *[0] * (len(self.problem.nodes) - len(picked)))

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategies that a choice stands for, by layer."""
        return {n: own[k].strategy for n, own, k in zip(self.names, self.options, choice, strict=False)}


def formulate(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    candidates: Mapping[str, Sequence[Strategy]],
    *,
    strict: bool = False,
    share: bool = True,
    on_layer: Callable[[int, int], None] | None = None,
) -> Formulation:
    """Build the problem.

    Args:
        candidates: legal strategies per layer.
        share: price a value that like readers take in one layout once; false where they may lie on disjoint devices.
        strict: forbid what R2 to R4 forbid, instead of pricing the transfer.
        on_layer: told (done, total) while costs are computed.
    """
    names = tuple(graph.layers)
    like = like_readers(graph) if share else {}
    options = []
    for done, name in enumerate(names):
        options.append(
            tuple(_option(graph, cluster, costs, like, graph.layers[name], strategy) for strategy in candidates[name])
        )
        if on_layer is not None:
            on_layer(done + 1, len(names))
    nodes = [_node(name, own, cluster.count) for name, own in zip(names, options, strict=True)]
    nodes.append(Node(DELIVERY, np.array([costs.step.overhead_s]), np.zeros(1), np.zeros(1)))
    edges = _edges(graph, cluster, costs, like, names, options)
    problem = Problem(
        nodes=tuple(nodes),
        edges=tuple(_r4(edge, graph, names, options) if strict else edge for edge in edges),
        limits=tuple(float(device.memory_bytes) for device in cluster.devices),
        linear=tuple(_strict_rules(graph, names, options)) if strict else (),
        resource_names=_device_names(cluster),
    )
    return Formulation(problem, (*names, DELIVERY), tuple(options))


def _device_names(cluster: Cluster) -> tuple[str, ...]:
    """Words for the devices' memories; the kind where there are several."""
    kinds = [f" ({device.kind})" if cluster.mixed else "" for device in cluster.devices]
    return tuple(f"device {number}{kind}" for number, kind in enumerate(kinds))


def _option(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, like: LikeReaders, layer: Layer, strategy: Strategy
) -> Option:
    statistics = batch_norm_sync_s(layer, strategy, costs, graph)
    cost, memory = costs.layer(layer, strategy), costs.memory(layer, strategy)
    reduce_s = costs.reduction(layer, strategy)
    post_update_s = costs.step.late * reduce_s
    compute_interference_s = (1 - costs.step.overlap) * (reduce_s - post_update_s)
    # Bringing it what it takes of the user's inputs from where they are: each device has its own samples.
    arrivals = (
        costs.transfer(graph.values[v], arrival_layout(graph, cluster.count, v), layer.layout(v, strategy))
        for v in layer.inputs
        if v in graph.user_inputs and layer.name not in like.get(v, {})
    )
    arrival_s = sum(moved.forward_s + moved.backward_s for moved in arrivals)
    return Option(strategy, cost, statistics, memory, reduce_s, compute_interference_s, arrival_s, post_update_s)


def like_readers(graph: LayerGraph) -> LikeReaders:
    """Which layers of one kind read the same value, such as query, key and value."""
    first: dict[tuple[str, str], str] = {}
    found: dict[str, dict[str, str]] = {}
    for name, layer in graph.layers.items():
        for value in dict.fromkeys(layer.inputs):
            leader = first.setdefault((value, layer.kind), name)
            if leader != name and (value in graph.producer or value in graph.user_inputs):
                found.setdefault(value, {})[name] = leader
    return found


def arrival_layout(graph: LayerGraph, devices: int, value: str) -> Layout:
    """Where a user input is before the step: samples spread over all devices, anything else on each of them."""
    dim = graph.batch_dims.get(value)
    return Layout(Grid(tuple(range(devices)), devices, 1), dim if devices > 1 else None)


def batch_norm_sync_s(layer: Layer, strategy: Strategy, costs: CostModel, graph: LayerGraph) -> float:
    """One way of exchanging batch statistics, where replicas do: count, mean and squared deviations per channel."""
    if not layer.mixes_batch or strategy.replicas == 1:
        return 0.0
    name = next(node.all_input_nodes[0].name for node in layer.nodes if op_name(node) == "batch_norm")
    value = graph.values[name]
    spec = TensorSpec((strategy.replicas, 3, value.shape[1]), value.dtype, requires_grad=True)
    cut = layer.layout(name, strategy).shard_dim
    shard_dim = None if cut is None else 2
    moved = costs.transfer(spec, Layout(strategy.grid, 0, shard_dim), Layout(strategy.grid, None, shard_dim))
    return moved.forward_s


def _node(name: str, options: Sequence[Option], devices: int) -> Node:
    # The update comes after everything else, and what of the sums is late after that: nothing overlaps with them, as
    # nothing does with the forward.
    forward = [
        o.arrival_s + o.cost.forward_s + o.batch_norm_sync_s + o.cost.update_s + o.post_update_s for o in options
    ]
    backward = [option.cost.backward_s + option.batch_norm_sync_s + option.compute_interference_s for option in options]
    return Node(
        name=name,
        forward_s=np.array(forward),
        backward_s=np.array(backward),
        reduction_s=np.array(
            [max(0.0, option.reduce_s - option.post_update_s - option.compute_interference_s) for option in options]
        ),
        usages=tuple(usage for device in range(devices) for usage in _usages(options, device)),
    )


def _usages(options: Sequence[Option], device: int) -> list[Usage]:
    """One for every interval in which some strategy holds something on `device`."""
    here = [option.memory.held if device in option.strategy.devices else () for option in options]
    amounts: dict[tuple[int, int], FloatArray] = {}
    for index, held in enumerate(here):
        for one in held:
            amounts.setdefault((one.start, one.end), np.zeros(len(options)))[index] = one.nbytes
    return [Usage(device, start, end, nbytes) for (start, end), nbytes in sorted(amounts.items())]


def _edges(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    like: LikeReaders,
    names: Sequence[str],
    options: Sequence[Sequence[Option]],
) -> list[Edge]:
    position = {name: index for index, name in enumerate(names)}
    edges = {}
    for source, target, values in graph.digraph.edges(data="values"):
        a, b = position[source], position[target]
        own = [value for value in values if target not in like.get(value, {})]
        given = [[_layout(graph, source, value, o.strategy) for o in options[a]] for value in own]
        wanted = [[_layout(graph, target, value, o.strategy) for o in options[b]] for value in own]
        edges[a, b] = _edge(graph, costs, (a, b), own, (len(options[a]), len(options[b])), given, wanted)
    for value, leaders in like.items():
        for target, source in leaders.items():
            a, b = position[source], position[target]
            forward, backward = _on_from(
                graph, cluster, costs, leaders, value, target, dict(zip(names, options, strict=False))
            )
            known = edges.get((a, b), Edge(a, b, np.zeros_like(forward), np.zeros_like(backward)))
            edges[a, b] = Edge(a, b, known.forward_s + forward, known.backward_s + backward)
    delivered = [
        value for value in dict.fromkeys(graph.user_outputs) if isinstance(value, str) and value in graph.producer
    ]
    by_layer: dict[str, list[str]] = {}
    for value in delivered:
        by_layer.setdefault(graph.producer[value], []).append(value)
    for source, values in by_layer.items():
        a, b = position[source], len(names)
        given = [[_layout(graph, source, value, o.strategy) for o in options[a]] for value in values]
        ends = [[delivery_layout(graph, cluster.count, value)] for value in values]
        edges[a, b] = _edge(graph, costs, (a, b), values, (len(options[a]), 1), given, ends)
    return list(edges.values())


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
    wanted = {name: [_layout(graph, name, value, option.strategy) for option in options[name]] for name in alike}
    if maker is None:
        homes = {arrival_layout(graph, cluster.count, value)}
    else:
        homes = {_layout(graph, maker, value, option.strategy) for option in options[maker]}
    given = [*homes] * len(wanted[first]) if len(homes) == 1 else wanted[first]
    moved = costs.transfer_matrix(graph.values[value], given, wanted[target])
    decided = {wanted[name][0] for name in alike[1 : alike.index(target)] if len(set(wanted[name])) == 1}
    there = np.array([[layout == own or layout in decided for layout in wanted[target]] for own in wanted[first]])
    return np.where(there, 0.0, moved.forward_s), np.where(there, 0.0, moved.backward_s)


def _layout(graph: LayerGraph, layer: str, value: str, strategy: Strategy) -> Layout:
    return graph.layers[layer].layout(value, strategy)


def delivery_layout(graph: LayerGraph, devices: int, value: str) -> Layout:
    """Where a result goes: samples back to where they came from, spread over all devices."""
    dim = graph.batch_dims.get(value)
    if dim is None:
        return Layout(Grid((0,), 1, 1), None)
    return Layout(Grid(tuple(range(devices)), devices, 1), dim if devices > 1 else None)


def _edge(
    graph: LayerGraph,
    costs: CostModel,
    ends: tuple[int, int],
    values: Sequence[str],
    sizes: tuple[int, int],
    sources: Sequence[Sequence[Layout]],
    targets: Sequence[Sequence[Layout]],
) -> Edge:
    forward = backward = np.zeros(sizes)
    for value, given, wanted in zip(values, sources, targets, strict=True):
        moved = costs.transfer_matrix(graph.values[value], given, wanted)
        forward, backward = forward + moved.forward_s, backward + moved.backward_s
    return Edge(ends[0], ends[1], forward, backward)


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


def _r4(edge: Edge, graph: LayerGraph, names: Sequence[str], options: Sequence[Sequence[Option]]) -> Edge:
    """R4: pairs of replica counts that do not divide are forbidden (not before the delivery, nor of like readers)."""
    if edge.target >= len(options) or not graph.digraph.has_edge(names[edge.source], names[edge.target]):
        return edge
    ends = [np.array([o.strategy.replicas for o in options[index]]) for index in (edge.source, edge.target)]
    broken = ends[0][:, None] % ends[1][None, :] != 0
    return Edge(edge.source, edge.target, np.where(broken, np.inf, edge.forward_s), edge.backward_s)


def extended(
    formulation: Formulation, plan: Plan, graph: LayerGraph, cluster: Cluster, costs: CostModel
) -> Formulation:
    """The formulation with the plan's strategies among the others."""
    candidates = {
        name: list(dict.fromkeys([*(option.strategy for option in own), plan.layers[name]]))
        for name, own in zip(formulation.names, formulation.options, strict=False)
    }
    return formulate(graph, cluster, costs, candidates)
