"""Transfers between layers, per pair of options: the edges of the problem, by how roles move the values on them.

A value is moved once per layout, however many layers read it (lowering/placement.py). The first reader pays for its
transfer. For every later one that may want the value in the same layout as an earlier one, the problem has one more
node: an option of it is what the reader wants, with the first reader before that wants the same, whose transfer is
reused, or none. The readers' options fix it:

    maker - node             seconds of the transfer, counted at the reader; 0 where another one is reused
    reader - node            the option is what the reader wants
    earlier reader - node    it wants the same where its transfer is reused, something else where a later one's or none

Where a value's readers have many combinations of options, the node looks only at the reader before, and at those
without a choice: T may then count a transfer twice, but all combinations would be one table. Of a given plan, each
layer of which wants one layout, it looks at all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster
from parplan.cost_models.communication.schemes import broadcast_stops
from parplan.cost_models.costs import CostModel, TransferMatrix
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import Fold, gather_groups, units
from parplan.layout import Layout
from parplan.lowering.stages import Stage
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Scheme
from parplan.planner.search_space.options import Option
from parplan.planner.search_space.shape import Choice, Shape
from parplan.planner.search_space.step_time.parts import EdgeParts, NodeParts
from parplan.planner.solver.problem import FloatArray

__all__ = ["TransferReuse", "delivered", "delivery_layout", "edge_parts", "equal", "reuses", "ties"]

MOST_COMBINATIONS = 4096
"""Combinations of the options of a value's readers up to which each may reuse the transfer of any earlier one: with
queries, keys and values of 22 options each, tables of the elimination had a million entries."""

Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Read:
    """A value that a node reads.

    Args:
        value: its name.
        reader: the node.
        wants: per option, the layout and whether one pass's samples: both have to be equal for a transfer to be reused.
        groups: per option, what else its role in the plan depends on.
        first: the node of the reader's copy in the first of equal blocks, if it has one.
    """

    value: str
    reader: int
    wants: Sequence[tuple[Layout, bool]]
    groups: Sequence[Hashable]
    first: int | None = None


@dataclass(frozen=True, eq=False)
class TransferReuse:
    """The node that says, for a later reader of a value, whose transfer is reused.

    Args:
        node: its place.
        earlier: readers whose transfers may be reused, in order.
        wanted: per option of each of them and of the reader, a number for what is wanted.
        group: per option of the reader, a number for what it wants and needs besides.
        standing: per option of the node, the reader's option that stands for it.
        source: per option of the node, the place in `earlier` of the reader whose transfer is reused; behind the last
            where the value is moved.
    """

    node: int
    value: str
    reader: int
    earlier: tuple[int, ...]
    wanted: tuple[Ints, ...]
    group: Ints
    standing: Ints
    source: Ints

    @property
    def moved(self) -> FloatArray:
        """1 for every option in which the value is moved, else 0."""
        return np.where(self.source == len(self.earlier), 1.0, 0.0)

    def option(self, choice: Sequence[int | Ints]) -> int | Ints:
        """The option that follows from the readers' options; of several choices at once where some are arrays."""
        own, source = self.wanted[-1][choice[self.reader]], np.array(len(self.earlier))
        for place in range(len(self.earlier) - 1, -1, -1):
            source = np.where(self.wanted[place][choice[self.earlier[place]]] == own, place, source)
        table = np.full((self.group.max() + 1, len(self.earlier) + 1), -1)
        table[self.group[self.standing], self.source] = np.arange(len(self.source))
        found: Ints = table[self.group[choice[self.reader]], source]
        return found if found.ndim else int(found)

    def follows_like(self, other: TransferReuse, group: Mapping[int, int]) -> bool:
        """Whether both follow in the same way from readers of which each is in the other's group.

        Args:
            group: of nodes that have one option.
        """
        readers = [[group.get(v, -1 - v) for v in (*one.earlier, one.reader)] for one in (self, other)]
        own, again = ([*one.wanted, one.group, one.standing, one.source] for one in (self, other))
        return readers[0] == readers[1] and all(map(np.array_equal, own, again))

    def edges(self) -> Iterator[EdgeParts]:
        """Edges that fix it by the options of the reader and of the earlier ones."""
        own = self.wanted[-1][self.standing]
        allowed = {self.reader: np.equal.outer(self.group, self.group[self.standing])}
        for place, (other, wanted) in enumerate(zip(self.earlier, self.wanted, strict=False)):
            same = np.equal.outer(wanted, own)
            allowed[other] = np.where(self.source == place, same, (self.source < place) | ~same)
        for other, pairs in allowed.items():
            zero = np.zeros(pairs.shape)
            yield EdgeParts(other, self.node, np.where(pairs, 0.0, np.inf), (zero, zero))

    def parts(self, reader: NodeParts, arrival_s: FloatArray, in_passes: NDArray[np.bool_]) -> NodeParts:
        """Its seconds: of a value that the user brings its arrival, per option of the reader."""
        own, inside = NodeParts.alone(np.zeros(len(self.standing)), len(reader.lanes)), in_passes[self.standing]
        seconds = self.moved * arrival_s[self.standing]
        return replace(
            own,
            arrival_s=np.where(inside, 0.0, seconds),
            samples_in_s=np.where(inside, seconds, 0.0),
            lanes=reader.lanes[:, self.standing],
            beside=None if reader.beside is None else reader.beside[:, self.standing],
            order=None if reader.order is None else reader.order[:, self.standing],
        )


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
            many = 1 if reuse is None else len(reuse.source)
            layouts, roles, target = [delivery_layout(graph, cluster, value)] * many, [Stage.AFTER] * many, None
        else:
            target = [options[reader][k] for k in reuse.standing] if reuse is not None else options[reader]
            layouts = [layer.layout(value, option.strategy) for option in target]
            roles = [option.role for option in target]
        ends = given, reader if reuse is None else reuse.node
        edge = _edge(graph, costs, ends, value, layouts, roles, maker, source, shape)
        if layer is not None and target is not None and strict:
            edge = replace(edge, allowed=np.where(_indivisible(source, target), np.inf, edge.allowed))
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
            elif shape.passes > 1 and maker in fold.first_block:
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
    return [value for value in dict.fromkeys(graph.results) if value in graph.producer]


def _edge(
    graph: LayerGraph,
    costs: CostModel,
    ends: tuple[int, int],
    value: str,
    layouts: Sequence[Layout],
    roles: Sequence[Stage],
    source: str,
    options: Sequence[Option],
    shape: Shape,
) -> EdgeParts:
    """Seconds of a value on one edge, by how each pair of roles moves it (lowering/placement.py).

    Args:
        layouts, roles: per option of the reader, in which it wants the value.
        source: the layer that makes it, of these options.
    """
    given_in = np.array([option.role is Stage.PASSES for option in options])[:, None]
    wanted_in = np.array([role is Stage.PASSES for role in roles])[None, :]
    order = list(Stage)  # no layer feeds one in an earlier role
    given_at, wanted_at = ([order.index(role) for role in own] for own in ([o.role for o in options], roles))
    allowed = np.where(np.greater.outer(given_at, wanted_at), np.inf, 0.0)
    given = [graph.layers[source].layout(value, option.strategy) for option in options]

    def seconds(where: NDArray[np.bool_], cost: TransferMatrix) -> tuple[FloatArray, FloatArray]:
        return np.where(where, cost.forward_s, 0.0), np.where(where, cost.backward_s, 0.0)

    moved = costs.transfer_matrix(graph.values[value], given, layouts)
    single = ~(given_in | wanted_in) | ((~given_in & wanted_in) if value not in graph.batch_dims else False)
    if shape.passes == 1:
        return EdgeParts(*ends, allowed, seconds(single | (given_in == wanted_in), moved))
    part = pass_matrix(graph, costs, value, given, layouts, shape)
    within = seconds(given_in & wanted_in, costs.transfer_matrix(graph.of_pass(value, shape.passes), given, layouts))
    crossing = seconds(~given_in & wanted_in & ~single, part), seconds(given_in & ~wanted_in, part)
    several = [one if one[0].any() or one[1].any() else None for one in (within, *crossing)]
    return EdgeParts(*ends, allowed, seconds(single, moved), several[0], several[1], several[2])


def pass_matrix(
    graph: LayerGraph,
    costs: CostModel,
    value: str,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Shape,
) -> TransferMatrix:
    """Seconds of one pass's samples over the boundary of the passes, the mean over the passes."""
    spec = graph.of_pass(value, shape.passes)
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


def reuses(
    graph: LayerGraph,
    cluster: Cluster,
    names: Sequence[str],
    chosen: Sequence[Sequence[Choice]],
    shape: Shape,
    strict: bool = False,
    fold: Fold | None = None,
) -> dict[tuple[int, str], TransferReuse]:
    """The nodes for all reads that may reuse a transfer, by reader and value: behind the layers, the delivery and the
    placements of branches.

    Args:
        names: of the layers that are nodes.
        chosen: their options.
        strict: replica counts have to divide.
    """
    begin = len(names) + 1 + (0 if shape.average else len(shape.homes))
    by_value: dict[str, list[Read]] = {}
    for read in _reads(graph, cluster, names, chosen, shape, strict, fold) if cluster.count > 1 else ():
        by_value.setdefault(read.value, []).append(read)
    found: dict[tuple[int, str], TransferReuse] = {}
    for value, readers in by_value.items():
        for place, read in enumerate(readers):
            some = _looked_at(readers, place)
            if any(set(read.wants) & set(other.wants) for other in some):
                found[read.reader, value] = _reuse(read, some, begin + len(found))
    return found


def _looked_at(readers: Sequence[Read], place: int) -> list[Read]:
    """The readers before one whose transfers it may reuse."""
    before, own = readers[:place], readers[place]
    if prod(len(one.wants) for one in readers) <= MOST_COMBINATIONS:
        return list(before)
    return [
        other for other in before
        if other is before[-1] or other.reader == own.first or len({layout for layout, _ in other.wants}) == 1
    ]  # fmt: skip


def _reuse(read: Read, earlier: Sequence[Read], node: int) -> TransferReuse:
    numbers: dict[Hashable, int] = {}
    wanted = [np.array([numbers.setdefault(one, len(numbers)) for one in own.wants]) for own in (*earlier, read)]
    groups: dict[Hashable, int] = {}
    group = np.array([groups.setdefault(one, len(groups)) for one in zip(read.wants, read.groups, strict=True)])
    options: list[tuple[int, int]] = []
    for first in (int(np.flatnonzero(group == number)[0]) for number in range(len(groups))):
        own = wanted[-1][first]
        for place, one in enumerate(wanted[:-1]):
            if (one == own).any():
                options.append((first, place))
            if (one == own).all():
                break
        else:
            options.append((first, len(earlier)))
    standing, source = np.array(options).T
    used = sorted(set(source.tolist()) - {len(earlier)})
    others, kept = tuple(earlier[place].reader for place in used), tuple(wanted[place] for place in (*used, -1))
    return TransferReuse(
        node, read.value, read.reader, others, kept, group, standing, np.searchsorted([*used, len(earlier)], source)
    )


def _reads(
    graph: LayerGraph,
    cluster: Cluster,
    names: Sequence[str],
    chosen: Sequence[Sequence[Choice]],
    shape: Shape,
    strict: bool,
    fold: Fold | None,
) -> Iterator[Read]:
    """Every read of a value that may have to be moved, the delivery's last."""
    place = {name: v for v, name in enumerate(names)}
    for v, (name, own) in enumerate(zip(names, chosen, strict=True)):
        layer, first = graph.layers[name], fold.first.get(name, name) if fold is not None else name
        groups = [(o.role, o.placement, o.strategy.replicas if strict else 0) for o in own]
        for value in dict.fromkeys(layer.inputs):
            if value in graph.producer or value in graph.user_inputs:
                wants = [(layer.layout(value, one.strategy), one.role is Stage.PASSES) for one in own]
                yield Read(value, v, wants, groups, place[first] if first != name else None)
    for value in delivered(graph):
        yield Read(value, len(names), [(delivery_layout(graph, cluster, value), False)], [None])


def ties(
    graph: LayerGraph,
    fold: Fold | None,
    layers: Mapping[str, int],
    place: Mapping[str, int],
    options: Sequence[Sequence[Option]],
    state_by_group: bool,
) -> list[EdgeParts]:
    """Edges by which layers decide alike.

    Copies of a layer in repeated blocks have the same strategy, all but those of the first block in the same role: what
    begins the passes may be in the first block. The layers of a unit are all replayed or all kept, where any may be
    either: of a part of them little is dropped. Where it is asked for, those of a gather group that have a choice of
    states have one.
    """
    found = []
    for alike in fold.alike if fold is not None else ():
        for first, (one, other) in zip((True, False), pairwise(place[name] for name in alike), strict=True):
            known, again = (
                [(o.strategy, o.placement, None if first else o.role) for o in options[v]] for v in (one, other)
            )
            found.append(_tie(one, other, known, again))
    saved = [[own.strategy.saved for own in known] for known in options]
    for unit in units(graph):
        members = dict.fromkeys(layers[name] for name in unit)
        for one, other in pairwise(members):
            if len({*saved[one]}) + len({*saved[other]}) > 2:
                found.append(_tie(one, other, saved[one], saved[other]))
    states = [[own.strategy.state for own in known] for known in options]
    for group in gather_groups(graph) if state_by_group else ():
        some = dict.fromkeys(layers[name] for name in group if len({*states[layers[name]]}) > 1)
        found += [_tie(one, other, states[one], states[other]) for one, other in pairwise(some)]
    return found


def _tie(one: int, other: int, known: Sequence[Hashable], again: Sequence[Hashable]) -> EdgeParts:
    """An edge that allows equal decisions of two nodes alone, and takes no time."""
    same = np.where(equal(known, again), 0.0, np.inf)
    zero = np.zeros_like(same)
    return EdgeParts(one, other, same, (zero, zero))
