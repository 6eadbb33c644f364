"""Seconds and bytes of a model's repeated block, and of what is before and behind it, on one tensor group.

A tensor group is the devices that work on the same micro-batch of a stage. The layers' strategies on it come from the
solver, and their seconds and bytes are those of any plan: a model of many blocks is captured, solved and priced as one
of a few, and blocks are counted from there on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import inf, prod

import numpy as np

from parplan.cost_models.costs import CostModel, Moments
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.local import local_shape
from parplan.graph.repeated import Blocks, fold, group_of, repeated_blocks, unit_of
from parplan.layout import IntArray
from parplan.plan import SAVED, Plan, Strategy
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.rules import divisors
from parplan.planner.search_space.strategies import strategies
from parplan.planner.simulation.priced_program import lowered, priced
from parplan.planner.solver.solve import solve

__all__ = ["Part", "Parts", "Unit", "between", "blocks_of", "group_strategies", "parts"]

SOLVE_S = 30.0
"""Seconds for the strategies of one group; those of a block take about one."""


@dataclass(frozen=True)
class Unit:
    """Layers of a part that are replayed together.

    Args:
        replay_s: their forward again, before their backward.
        freed: bytes that are not kept from forward to backward then.
        transient: bytes beside all that is kept while they go back, replayed.
    """

    replay_s: float
    freed: float
    transient: float


@dataclass(frozen=True, eq=False)  # a key of what is worked out of it, although it holds dictionaries
class Part:
    """A run of layers, on each device of a tensor group, for one micro-batch.

    Args:
        forward_s, backward_s: with transfers inside the group.
        parameters: trained numbers on a device, by how many devices of the group have the same ones.
        saved: bytes kept from forward to backward.
        transient: the most bytes at a time beside those kept, weights, gradients and optimizer state.
        units: that can be replayed.
        matrices: how many trained ones there are, as `parameters`.
        transfers_s: those of forward and backward that are transfers.
        groups: its gather groups (graph.repeated.gather_groups), and of those the layers with matrices; of both only
            seconds, parameters and matrices are known.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    parameters: Mapping[int, float] = field(default_factory=dict)
    saved: float = 0.0
    transient: float = 0.0
    units: tuple[Unit, ...] = ()
    matrices: Mapping[int, int] = field(default_factory=dict)
    transfers_s: float = 0.0
    groups: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Parts:
    """A model as what is before its blocks, one block, and what is behind them.

    Args:
        boundary: bytes on a device of what a block hands on.
        layers: the strategies.
        tied: parameters of the prologue that the epilogue has too, as in `Part`.
        again: every block is replayed whole.
    """

    prologue: Part
    block: Part
    epilogue: Part
    boundary: float
    layers: Mapping[str, Strategy]
    tied: Mapping[int, float] = field(default_factory=dict)
    again: bool = False

    @cached_property
    def last(self) -> Part:
        """The epilogue on devices of its own: parameters that it shares with the prologue are there too."""

        def with_tied(part: Part) -> Part:
            numbers, matrices = dict(part.parameters), dict(part.matrices)
            for copies, tied in self.tied.items():
                numbers[copies] = numbers.get(copies, 0.0) + tied
                matrices[copies] = matrices.get(copies, 0) + 1
            return replace(part, parameters=numbers, matrices=matrices)

        own = self.epilogue
        return replace(with_tied(own), groups=(*own.groups[:-1], *map(with_tied, own.groups[-1:])))

    @property
    def replayed(self) -> Parts:
        """With every block replayed whole, transfers included: nothing is kept of it but what it is made from."""
        more = self.block.saved - self.boundary
        block = replace(
            self.block,
            backward_s=self.block.backward_s + self.block.forward_s,
            saved=self.boundary,
            transient=self.block.transient + more,
            units=(),
        )
        return replace(self, block=block, again=True)


def blocks_of(graph: LayerGraph) -> Blocks:
    """The one run of repeated blocks of a model.

    Raises:
        PlanError: it has none, or several.
    """
    found = repeated_blocks(graph)
    most = max(found, key=lambda own: own.period * own.copies, default=None)
    if most is None or most.period * most.copies * 2 < len(graph.layers):
        raise PlanError(f"{graph.model}: no run of at least three equal blocks makes up most of its layers")
    return most


def group_strategies(costs: RooflineCosts, cut: bool = False) -> Mapping[str, Strategy]:
    """The fastest strategies of all layers on all devices of a tensor group.

    Args:
        costs: of the graph at the size of a micro-batch, on the group.
        cut: every matrix that can be cut is, so that no device has more of the weights than its share.

    Raises:
        PlanError: none were found.
    """
    graph, cluster, every = costs.graph, costs.cluster, tuple(range(costs.cluster.count))
    options: dict[str, Sequence[Strategy]] = {}
    for name, layer in graph.layers.items():
        blocks = [every[:size] for size in reversed(divisors(cluster.count))]
        own = next(filter(None, (strategies(layer, graph.batch or 1, [block]) for block in blocks)), ())
        if cut and (matrices := [p for p in layer.parameters if len(graph.values[p].shape) > 1]):
            least = min(_numbers(graph, layer, one, matrices) for one in own)
            own = tuple(one for one in own if _numbers(graph, layer, one, matrices) == least)
        options[name] = own
    formulation = formulate(graph, cluster, costs, options, fold=fold(graph))  # the first device has what each has
    problem = formulation.problem
    found = solve(replace(problem, limits=(inf,) * len(problem.limits)), SOLVE_S)
    if found.choice is None:
        raise PlanError(f"{graph.model}: no strategies of {cluster.count} devices were found in {SOLVE_S:.0f} s")
    return formulation.strategies(found.choice)


def parts(costs: RooflineCosts, layers: Mapping[str, Strategy], whole: bool = False) -> Parts:
    """The parts of a model whose layers have these strategies on a tensor group.

    Args:
        costs: as for `group_strategies`.
        whole: layers without weights that are cut along the sequence run whole on every device instead (tensor
            parallelism without sequence parallelism).
    """
    graph, cluster = costs.graph, costs.cluster
    names, blocks = list(graph.layers), blocks_of(graph)
    batch = graph.batch or 1
    plan = Plan(graph.model, graph.fingerprint, batch, cluster.count, dict(layers))
    work = priced(graph, lowered(graph, plan, cluster), costs)
    forward_s, backward_s = ({name: getattr(own.cost, key) for name, own in work.layers.items()} for key in _WAYS)
    transfers_s = dict.fromkeys(names, 0.0)
    for name, move in work.moves_to_layers(graph):
        forward_s[name] += move.forward_s
        backward_s[name] += move.backward_s
        transfers_s[name] += move.forward_s + move.backward_s
    memory = _Memory(graph, costs, layers)
    repeated = {name for name in names if whole and _repeats(graph, graph.layers[name], layers[name])}
    more_saved = dict.fromkeys(names, 0.0)
    for name in repeated:  # as on one device
        alone = costs.layer(graph.layers[name], Strategy())
        forward_s[name] += alone.forward_s - work.layers[name].cost.forward_s
        backward_s[name] += alone.backward_s - work.layers[name].cost.backward_s
        more_saved[name] = (cluster.count - 1) * memory.saved[name]
    unit = unit_of(graph)

    def timed(own: Sequence[str]) -> Part:
        numbers, matrices = _trained(graph, layers, own)
        forward, backward = sum(forward_s[name] for name in own), sum(backward_s[name] for name in own)
        return Part(forward, backward, numbers, matrices=matrices)

    def matrices_of(own: Sequence[str]) -> tuple[Part, ...]:
        return tuple(one for one in (timed([name]) for name in own) if any(one.matrices.values()))

    def part(own: Sequence[str]) -> Part:
        found = []
        for number in dict.fromkeys(unit[name] for name in own if name in unit):
            mine = [name for name in own if unit.get(name) == number]
            replay_s = sum(work.layers[name].cost.forward_s for name in mine if costs.runs_again(graph.layers[name]))
            freed = sum(memory.saved[name] - memory.kept[name] for name in mine)
            freed += sum(more_saved[name] for name in mine if memory.kept[name] < memory.saved[name])
            transient = memory.transient(mine, replayed=True)
            found.append(Unit(replay_s, freed, transient + sum(more_saved[name] for name in mine)))
        groups = (list(run) for _, run in groupby(own, group_of(graph).__getitem__))
        return replace(
            timed(own),
            saved=sum(memory.saved[name] + more_saved[name] for name in own),
            transient=memory.transient(own),
            units=tuple(found),
            transfers_s=sum(transfers_s[name] for name in own),
            groups=tuple(replace(timed(own), groups=matrices_of(own)) for own in groups),
        )

    second = blocks.begin + blocks.period
    block = part(names[second : second + blocks.period])
    first, last = (part(names[at : at + blocks.period]) for at in (blocks.begin, blocks.end - blocks.period))
    prologue, epilogue = part(names[: blocks.begin]), part(names[blocks.end :])
    # What the first and the last block take beside others comes from their neighbours.
    prologue, epilogue = (
        replace(
            own,
            forward_s=own.forward_s + end.forward_s - block.forward_s,
            backward_s=own.backward_s + end.backward_s - block.backward_s,
            saved=own.saved + end.saved - block.saved,
        )
        for own, end in ((prologue, first), (epilogue, last))
    )
    handed = names[second + blocks.period - 1]
    strategy = layers[handed]
    share = 1 if handed in repeated else len(strategy.devices)
    value = graph.values[graph.layers[handed].outputs[-1]]
    tied, _ = _trained(graph, layers, names[blocks.end :], first=False)
    return Parts(prologue, block, epilogue, value.nbytes / share, layers, tied)


_WAYS = ("forward_s", "backward_s")


def _trained(
    graph: LayerGraph, strategies: Mapping[str, Strategy], own: Sequence[str], first: bool = True
) -> tuple[dict[int, float], dict[int, int]]:
    """Numbers, and matrices, of some layers, by the devices of the group that have the same ones.

    Args:
        first: those that these layers are the first to use; else those that others are.
    """
    numbers, matrices = defaultdict[int, float](float), defaultdict[int, int](int)
    for name in own:
        layer = graph.layers[name]
        for parameter in layer.parameters:
            value = graph.values[parameter]
            if (graph.users[parameter][0] == name) == first and value.requires_grad:
                copies = _copies(layer, strategies[name], parameter)
                numbers[copies] += _numbers(graph, layer, strategies[name], [parameter])
                matrices[copies] += len(value.shape) > 1
    return dict(numbers), dict(matrices)


def between(one: Parts, other: Parts, share: float) -> Parts:
    """Parts at a number of samples between those of two others: `share` of the way from one to the other."""

    def way(a: object, b: object, name: str) -> float:
        known: tuple[float, float] = getattr(a, name), getattr(b, name)
        return (1 - share) * known[0] + share * known[1]

    def mixed(a: Part, b: Part) -> Part:
        units = tuple(
            Unit(**{name: way(u, v, name) for name in ("replay_s", "freed", "transient")})
            for u, v in zip(a.units, b.units, strict=True)
        )
        forward_s, backward_s, saved, transient = (way(a, b, name) for name in (*_WAYS, "saved", "transient"))
        return replace(
            a, forward_s=forward_s, backward_s=backward_s, saved=saved, transient=transient, units=units,
            transfers_s=way(a, b, "transfers_s"), groups=tuple(map(mixed, a.groups, b.groups)),
        )  # fmt: skip

    prologue, block, epilogue = (
        mixed(getattr(one, name), getattr(other, name)) for name in ("prologue", "block", "epilogue")
    )
    return replace(one, prologue=prologue, block=block, epilogue=epilogue, boundary=way(one, other, "boundary"))


def _numbers(graph: LayerGraph, layer: Layer, strategy: Strategy, parameters: Iterable[str]) -> int:
    """How many numbers of some parameters a device has."""
    own = part_of(graph, layer, strategy)
    return sum(prod(local_shape(graph, own, name)) for name in parameters)


def _copies(layer: Layer, strategy: Strategy, parameter: str) -> int:
    """How many devices have the same part of a parameter."""
    axis = layer.axis(strategy.axis) if strategy.shards > 1 else None
    if axis is None or parameter not in axis.dims:
        return len(strategy.devices)
    return strategy.replicas * axis.sharers(parameter, strategy.shards)


def _repeats(graph: LayerGraph, layer: Layer, strategy: Strategy) -> bool:
    """Whether a layer without matrices is cut along what no product cuts."""
    matrices = any(len(graph.values[name].shape) > 1 for name in layer.parameters)
    return not matrices and strategy.shards > 1 and strategy.axis == "sequence"


class _Memory:
    """Bytes by layer and moment of a plan on the first device of its group, from parplan's own curve of a step.

    Attributes:
        saved, kept: bytes of each layer from forward to backward: of plans that keep everything, and that replay all
            units.
    """

    def __init__(self, graph: LayerGraph, costs: CostModel, layers: Mapping[str, Strategy]) -> None:
        self._names, self._moments = list(graph.layers), Moments(len(graph.layers))
        unit = unit_of(graph)
        again = {name: replace(own, saved=SAVED[-1]) if name in unit else own for name, own in layers.items()}
        self._gradients = np.array(
            [costs.memory(graph.layers[name], layers[name]).gradients_bytes for name in self._names]
        )
        self._once, self._again = self._of(costs, layers), self._of(costs, again)
        self.saved, self.kept = self._once[0], self._again[0]

    def _of(
        self, costs: CostModel, layers: Mapping[str, Strategy]
    ) -> tuple[Mapping[str, float], Mapping[str, float], IntArray]:
        points = 0, self._moments.loss, self._moments.backward(0)
        begin, loss, passed = costs.memory_by_layer(layers, points, 0)
        curve = costs.memory_over_step(layers)
        assert curve is not None  # a graph's
        saved = {name: float(loss[name] - begin[name]) for name in self._names}
        left = {
            name: max(0.0, float(passed[name] - begin[name] - self._gradients[place]))
            for place, name in enumerate(self._names)
        }
        return saved, left, curve[:, 0] - curve[0, 0]

    def transient(self, own: Sequence[str], replayed: bool = False) -> float:
        """The most bytes at a time while some layers run, beside those kept, and gradients and copies of layers behind.

        What layers behind hold on to (copies that were moved to them) is part of what they kept.
        """
        saved, left, curve = self._again if replayed else self._once
        kept, copies, most = np.array(list(saved.values())), np.array(list(left.values())), 0.0
        for place in (self._names.index(name) for name in own):
            forward, back = self._moments.forward(place), self._moments.backward(place)
            before, behind = kept[: place + 1].sum(), (self._gradients + copies)[place + 1 :].sum()
            most = max(most, curve[forward : forward + 2].max() - before)
            most = max(most, curve[back - 1 : back + 1].max() - before - behind)
        return float(most)
