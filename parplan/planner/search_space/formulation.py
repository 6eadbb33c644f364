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
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.communication.schemes import hops
from parplan.cost_models.costs import CostModel, LayerCost, LayerMemory, TransferMatrix
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec
from parplan.layout import Grid, Layout
from parplan.lowering.stages import Stage, Stages
from parplan.plan import Scheme, Strategy
from parplan.planner.search_space.any_block import folded
from parplan.planner.search_space.shape import ONE_PASS, Choice, Shape, choices, role_allowed, role_rows
from parplan.planner.search_space.step_time import EdgeParts, NodeParts, StepParts, assembled
from parplan.planner.solver.problem import Edge, FloatArray, Linear, Node, Problem, Usage

__all__ = [
    "Formulation",
    "InfeasibleShape",
    "Option",
    "arrival_layout",
    "batch_norm_sync_s",
    "delivery_layout",
    "formulate",
    "like_readers",
    "reassembled",
    "without_boundaries",
]  # fmt: skip

DELIVERY = "(delivery)"

LikeReaders = Mapping[str, Mapping[str, str]]
"""Per value, the layers that read it as an earlier layer of their kind does, and the first such layer."""


class InfeasibleShape(Exception):
    """A shape of plan in which the layer named has no option."""


@dataclass(frozen=True)
class Option:
    """A strategy of one layer, in a role, with its costs on each of its devices.

    `cost` is of one pass for a layer in passes. `batch_norm_sync_s` is one way of exchanging batch statistics,
    `compute_interference_s` the part of `reduce_s` that holds up the backward pass beside it and `post_update_s` the
    part that comes after the update (see StepCost), `arrival_s` the time of bringing the user's inputs (of one pass).
    """

    strategy: Strategy
    cost: LayerCost
    batch_norm_sync_s: float
    memory: LayerMemory
    reduce_s: float
    compute_interference_s: float = 0.0
    arrival_s: float = 0.0
    post_update_s: float = 0.0
    role: Stage = Stage.BEFORE
    placement: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes that the layer adds at the moment when most is live."""
        return self.memory.resident_bytes + self.memory.saved_bytes

    @property
    def overlappable_s(self) -> float:
        """The part of the gradient sum that runs beside the backward."""
        return max(0.0, self.reduce_s - self.post_update_s - self.compute_interference_s)


@dataclass(frozen=True, eq=False)
class Formulation:
    """The abstract problem and what its numbers stand for.

    `options[i][k]` is option k of layer i; `names[i]` its layer, the delivery last; `parts` the seconds of the step
    that the problem's costs and maxima were made of.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    parts: StepParts

    @property
    def shape(self) -> Shape:
        """The shape of plan that it is for."""
        return self.parts.shape

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
        return (*picked, *[0] * (len(self.problem.nodes) - len(picked)))

    def device_peaks(self, choice: Sequence[int], devices: int) -> tuple[int, ...]:
        """Peak bytes of every device by what layers hold, without transfers."""
        changes: list[dict[int, float]] = [{} for _ in range(devices)]
        for own, k in zip(self.options, choice, strict=False):
            for held in own[k].memory.held:
                for device in own[k].strategy.devices:
                    for moment, nbytes in ((held.start, held.nbytes), (held.end, -held.nbytes)):
                        changes[device][moment] = changes[device].get(moment, 0.0) + nbytes
        return tuple(int(np.cumsum([0.0, *(one[t] for t in sorted(one))]).max()) for one in changes)

    def strategies(self, choice: Sequence[int]) -> dict[str, Strategy]:
        """The strategies that a choice stands for, by layer."""
        return {n: own[k].strategy for n, own, k in zip(self.names, self.options, choice, strict=False)}


def formulate(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    candidates: Mapping[str, Sequence[Strategy]],
    *,
    shape: Shape = ONE_PASS,
    far_s: float = 0.0,
    strict: bool = False,
    on_layer: Callable[[int, int], None] | None = None,
) -> Formulation:
    """Build the problem of one shape of plan.

    Args:
        candidates: legal strategies per layer.
        shape: scheme, passes, and devices that are followed one by one.
        far_s: seconds that no step worth considering takes, where devices are followed (step_time.StepParts).
        strict: forbid what R2 to R4 forbid, instead of pricing the transfer.
        on_layer: told (done, total) while costs are computed.

    Raises:
        InfeasibleShape: some layer has no option in a plan of this shape.
    """
    names = tuple(graph.layers)
    like = _shared_readers(graph, shape)
    options = []
    for done, name in enumerate(names):
        layer = graph.layers[name]
        own = choices(graph, layer, candidates[name], shape)
        if not own:
            raise InfeasibleShape(name)
        options.append(tuple(_option(graph, cluster, costs, like, layer, one, shape) for one in own))
        if on_layer is not None:
            on_layer(done + 1, len(names))
    edges = _edges(graph, cluster, costs, like, names, options, shape)
    if strict:
        edges = [_r4(edge, graph, names, options) for edge in edges]
    hidden = min(1.0, max(0.0, costs.step.overlap))
    delivery = np.zeros(1)
    own_parts = [_node_parts(own, shape) for own in options]
    own_parts.append(
        NodeParts(
            np.array([costs.step.overhead_s]), delivery, delivery, delivery, delivery, delivery, delivery, delivery,
            np.zeros((len(shape.lanes), 1)),
        )
    )  # fmt: skip
    place = {name: index for index, name in enumerate(names)}
    phases = [[[place[name] for name in branch] for branch, _ in phase[0]] for phase in shape.homes]
    for number, phase in enumerate(() if shape.average else shape.homes):
        # The placement of a phase is a decision of its own, which all its layers follow.
        known: list[int | None] = [*(() if shape.placed else (None,)), *range(len(phase))]
        zero = np.zeros(len(known))
        deciding = len(names) + 1 + number
        own_parts.append(
            NodeParts(zero, zero, zero, zero, zero, zero, zero, zero, np.zeros((len(shape.lanes), len(known))))
        )
        for v in (v for branch in phases[number] for v in branch):
            agree = [[0.0 if one.placement == other else np.inf for other in known] for one in options[v]]
            none = np.zeros((len(options[v]), len(known)))
            edges.append(EdgeParts(v, deciding, np.array(agree), (none, none)))
            serial = np.array([one.placement is None for one in options[v]])
            own_parts[v] = replace(own_parts[v], beside=np.where(serial, 1.0, own_parts[v].lanes))
    if shape.average:
        strategies = [[option.strategy for option in own] for own in options]
        inside = frozenset(place[name] for name in shape.inside)
        own_parts, edges, kept = folded(own_parts, edges, strategies, cluster.count, inside)
        options = [tuple(own[k] for k in some) for own, some in zip(options, kept, strict=True)]
    parts = StepParts(own_parts, edges, shape, hidden, phases, far_s, len(names) + 1)
    # The devices that are followed hold at least as much as any other of their kind.
    lanes = () if shape.average else shape.lanes
    node_s, edge_s, maxima = assembled(parts)
    nodes = [
        Node(
            name,
            seconds,
            tuple(usage for place in range(len(lanes)) for usage in _usages(own, lanes[place], place)),
        )
        for name, own, seconds in zip(names, options, node_s, strict=False)
    ]
    problem = Problem(
        nodes=(
            *nodes,
            *(Node(DELIVERY if v == len(names) else "(placement)", node_s[v]) for v in range(len(names), len(node_s))),
        ),
        edges=tuple(Edge(part.source, part.target, seconds) for part, seconds in zip(edges, edge_s, strict=True)),
        limits=tuple(float(cluster.devices[lane].memory_bytes) for lane in lanes),
        linear=(
            *role_rows(graph, names, [[Choice(o.strategy, o.role) for o in own] for own in options], shape),
            *(_strict_rules(graph, names, options) if strict else ()),
        ),
        resource_names=tuple(_device_name(cluster, lane) for lane in lanes),
        maxima=maxima,
    )
    return Formulation(problem, (*names, DELIVERY), tuple(options), parts)


def reassembled(formulation: Formulation, parts: StepParts) -> Problem:
    """The problem with other seconds, and everything else as it is."""
    node_s, edge_s, maxima = assembled(parts)
    known = formulation.problem
    nodes = tuple(replace(node, cost_s=seconds) for node, seconds in zip(known.nodes, node_s, strict=True))
    edges = tuple(Edge(part.source, part.target, seconds) for part, seconds in zip(parts.edges, edge_s, strict=True))
    return replace(known, nodes=nodes, edges=edges, maxima=maxima)


def without_boundaries(formulation: Formulation) -> Problem:
    """The problem in one pass with free transfers wherever replicas change, of inputs and of results.

    No plan in passes takes less, as passes hide such transfers at best, and small parts are no faster in all.
    """
    parts, delivery = formulation.parts, len(formulation.options)
    counts = [np.array([option.strategy.replicas for option in own]) for own in formulation.options]
    edges = []
    for edge in parts.edges:
        same = np.zeros((len(edge.allowed), 1)) if edge.target == delivery else None
        kept = counts[edge.source][:, None] == counts[edge.target][None, :] if same is None else same
        edges.append(replace(edge, once=(kept * edge.once[0], kept * edge.once[1])))
    nodes = [replace(own, arrival_s=np.zeros_like(own.arrival_s)) for own in parts.nodes]
    return reassembled(formulation, replace(parts, nodes=nodes, edges=edges))


def _device_name(cluster: Cluster, number: int) -> str:
    """Words for a device's memory; with its kind where there are several."""
    return f"device {number}{f' ({cluster.devices[number].kind})' if cluster.mixed else ''}"


def _option(
    graph: LayerGraph, cluster: Cluster, costs: CostModel, like: LikeReaders, layer: Layer, own: Choice, shape: Shape
) -> Option:
    strategy, inside = own.strategy, own.role is Stage.PASSES
    statistics = batch_norm_sync_s(layer, strategy, costs, graph)
    cost = costs.layer(layer, strategy, shape.passes if inside else 1)
    reduce_s = costs.reduction(layer, strategy)
    post_update_s = costs.step.late * reduce_s
    compute_interference_s = (1 - costs.step.overlap) * (reduce_s - post_update_s)
    # Bringing it what it takes of the user's inputs from where they are: each device has its own samples.
    arrivals = (
        costs.transfer(
            _of_pass(graph, v, shape) if inside else graph.values[v],
            arrival_layout(graph, cluster.count, v),
            layer.layout(v, strategy),
        )
        for v in layer.inputs
        if v in graph.user_inputs and layer.name not in like.get(v, {})
    )
    arrival_s = sum(moved.forward_s + moved.backward_s for moved in arrivals)
    memory = costs.memory(layer, strategy)
    return Option(
        strategy,
        cost,
        statistics,
        memory,
        reduce_s,
        compute_interference_s,
        arrival_s,
        post_update_s,
        own.role,
        own.placement,
    )


def _of_pass(graph: LayerGraph, value: str, shape: Shape) -> TensorSpec:
    """A value as one pass has it; whole where it has no samples."""
    spec, dim = graph.values[value], graph.batch_dims.get(value)
    if dim is None or shape.passes == 1:
        return spec
    size = -(-spec.shape[dim] // shape.passes)
    return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))


def _node_parts(options: Sequence[Option], shape: Shape) -> NodeParts:
    used = [[float(lane in one.strategy.devices) for one in options] for lane in shape.lanes]
    inside = np.array([float(one.role is Stage.PASSES) for one in options])
    once = 1 - inside
    forward = np.array([one.cost.forward_s + one.batch_norm_sync_s for one in options])
    backward = np.array([one.cost.backward_s + one.batch_norm_sync_s for one in options])
    interference = np.array([one.compute_interference_s for one in options])
    arrival = np.array([one.arrival_s for one in options])
    return NodeParts(
        once_s=once * forward,
        arrival_s=once * arrival,
        backward_s=once * backward + interference,
        pass_forward_s=inside * forward,
        pass_backward_s=inside * backward,
        samples_in_s=inside * arrival,
        sum_s=np.array([one.overlappable_s for one in options]),
        update_s=np.array([one.cost.update_s + one.post_update_s for one in options]),
        lanes=np.array(used),
    )


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


def _shared_readers(graph: LayerGraph, shape: Shape) -> LikeReaders:
    """The like readers of a shape: in one pass, and not in branches that may run at the same time."""
    if shape.passes > 1:
        return {}
    apart = {name for phase in shape.homes for branch, _ in phase[0] for name in branch}
    known = {
        value: {name: leader for name, leader in own.items() if not {name, leader} <= apart}
        for value, own in like_readers(graph).items()
    }
    return {value: own for value, own in known.items() if own}


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


def _usages(options: Sequence[Option], device: int, resource: int) -> list[Usage]:
    """One for every interval in which some strategy holds something on `device`, whose memory is `resource`."""
    here = [option.memory.held if device in option.strategy.devices else () for option in options]
    amounts: dict[tuple[int, int], FloatArray] = {}
    for index, held in enumerate(here):
        for one in held:
            amounts.setdefault((one.start, one.end), np.zeros(len(options)))[index] = one.nbytes
    return [Usage(resource, start, end, nbytes) for (start, end), nbytes in sorted(amounts.items())]


def _edges(
    graph: LayerGraph,
    cluster: Cluster,
    costs: CostModel,
    like: LikeReaders,
    names: Sequence[str],
    options: Sequence[Sequence[Option]],
    shape: Shape,
) -> list[EdgeParts]:
    position = {name: index for index, name in enumerate(names)}
    found: dict[tuple[int, int], EdgeParts] = {}
    for source, target, values in graph.digraph.edges(data="values"):
        a, b = position[source], position[target]
        own = {value for value in values if target not in like.get(value, {})}
        wanted = {value: [graph.layers[target].layout(value, o.strategy) for o in options[b]] for value in own}
        roles = [option.role for option in options[b]]
        found[a, b] = _edge(graph, costs, (a, b), wanted, roles, source, options[a], shape)
    for value, leaders in like.items():
        by_name = dict(zip(names, options, strict=False))
        for target, source in leaders.items():
            a, b = position[source], position[target]
            forward, backward = _on_from(graph, cluster, costs, leaders, value, target, by_name)
            known = found.get((a, b))
            once = (forward, backward) if known is None else (known.once[0] + forward, known.once[1] + backward)
            found[a, b] = EdgeParts(a, b, np.zeros_like(forward) if known is None else known.allowed, once)
    delivered: dict[str, list[str]] = {}
    for result in dict.fromkeys(graph.user_outputs):
        if isinstance(result, str) and result in graph.producer:
            delivered.setdefault(graph.producer[result], []).append(result)
    for maker, results in delivered.items():
        a, b = position[maker], len(names)
        ends = {value: [delivery_layout(graph, cluster.count, value)] for value in results}
        found[a, b] = _edge(graph, costs, (a, b), ends, [Stage.AFTER], maker, options[a], shape)
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
    """Seconds of the values on one edge, by how each pair of roles moves them (planner/simulation/step_work.py)."""
    given_in = np.array([option.role is Stage.PASSES for option in options])[:, None]
    wanted_in = np.array([role is Stage.PASSES for role in roles])[None, :]
    pairs = [[0.0 if role_allowed(one.role, other) else np.inf for other in roles] for one in options]
    allowed = np.array(pairs, dtype=np.float64)
    zero = np.zeros(allowed.shape)
    once, within, inwards, outwards = [zero, zero], [zero, zero], [zero, zero], [zero, zero]
    for value, layouts in wanted.items():
        given = [graph.layers[source].layout(value, option.strategy) for option in options]
        moved = costs.transfer_matrix(graph.values[value], given, layouts)
        single = ~(given_in | wanted_in) | ((~given_in & wanted_in) if value not in graph.batch_dims else False)
        kinds = [(once, single, moved)]
        if shape.passes > 1:
            part = pass_matrix(graph, costs, value, given, layouts, shape)
            kinds += [
                (within, given_in & wanted_in, costs.transfer_matrix(_of_pass(graph, value, shape), given, layouts)),
                (inwards, ~given_in & wanted_in & ~single, part),
                (outwards, given_in & ~wanted_in, part),
            ]
        for total, where, cost in kinds:
            total[0] = total[0] + np.where(where, cost.forward_s, 0.0)
            total[1] = total[1] + np.where(where, cost.backward_s, 0.0)
    several = [(one[0], one[1]) if one[0].any() or one[1].any() else None for one in (within, inwards, outwards)]
    return EdgeParts(*ends, allowed, (once[0], once[1]), *several)


def pass_matrix(
    graph: LayerGraph,
    costs: CostModel,
    value: str,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Shape,
) -> TransferMatrix:
    """Seconds of one pass's samples over the boundary of the passes, the mean over the passes."""
    spec = _of_pass(graph, value, shape)
    if shape.scheme is not Scheme.BROADCAST:
        return costs.transfer_matrix(spec, sources, targets)
    when = Stages(shape.passes, shape.max_replicas, shape.min_replicas, {})
    dim = graph.batch_dims.get(value)
    forward, backward = np.zeros((len(sources), len(targets))), np.zeros((len(sources), len(targets)))
    for a, given in enumerate(sources):
        for b, wanted in enumerate(targets):
            for number in range(shape.passes):
                for hop in hops(shape.scheme, when, given, wanted, number, dim):
                    cost = costs.transfer(spec, hop.source, hop.target)
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


def _r4(edge: EdgeParts, graph: LayerGraph, names: Sequence[str], options: Sequence[Sequence[Option]]) -> EdgeParts:
    """R4: pairs of replica counts that do not divide are forbidden (not before the delivery, nor of like readers)."""
    if edge.target >= len(options) or not graph.digraph.has_edge(names[edge.source], names[edge.target]):
        return edge
    ends = [np.array([o.strategy.replicas for o in options[index]]) for index in (edge.source, edge.target)]
    broken = ends[0][:, None] % ends[1][None, :] != 0
    return replace(edge, allowed=np.where(broken, np.inf, edge.allowed))
