"""Where a model has branches: parts of its layer graph that could run at the same time on different devices.

Layers in forward order fall into stretches between cut layers, which every path from the inputs to the results passes.
A stretch with several connected components is a section with so many branches: it lies between a fork (the cut layer
in front, a dominator) and a join (the one behind, a post-dominator). A stretch that hangs together has branches that
exchange values on the way, as the two towers of Krizhevsky 2012 do: it is cut into phases, each of branches that are
independent until the next exchange. Every branch of several layers is searched in the same way for sections inside it.

Layers that no sample reaches (positions, masks) belong to no branch: any device may compute them for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx

from parplan.graph.layer_graph import LayerGraph
from parplan.planner.search_space.shape import Placement, Shape

__all__ = ["Branch", "Section", "apart", "averaged", "foldable", "homes_of", "sections", "sections_of"]

Branch = tuple[str, ...]
"""Layers in forward order."""


@dataclass(frozen=True)
class Section:
    """Branches between a fork and a join.

    Args:
        fork: the layer in front that every path passes; None for the user's inputs.
        join: the layer behind that every path passes; None for the results.
        phases: one, or one after each exchange between the branches; each a number of independent branches.
        inside: the branch of another section that it lies in; empty for none.
    """

    fork: str | None
    join: str | None
    phases: tuple[tuple[Branch, ...], ...]
    inside: Branch = ()

    @property
    def layers(self) -> Branch:
        """All its layers, phase by phase."""
        return tuple(name for phase in self.phases for branch in phase for name in branch)

    @property
    def width(self) -> int:
        """The most branches of any phase."""
        return max(map(len, self.phases))


def sections(graph: LayerGraph) -> tuple[Section, ...]:
    """All sections of `graph` with two branches or more, outer ones before those inside them."""
    order = [name for name, layer in graph.layers.items() if not layer.constant]
    return sections_of(graph.digraph, order)


def sections_of(digraph: nx.DiGraph, order: Sequence[str]) -> tuple[Section, ...]:
    """The same of a directed graph whose nodes are given in an order that no edge points against.

    >>> diamond = nx.DiGraph([("in", "a"), ("in", "b"), ("a", "out"), ("b", "out")])
    >>> sections_of(diamond, ["in", "a", "b", "out"])[0].phases
    ((('a',), ('b',)),)
    """
    found: list[Section] = []
    waiting: list[_Stretch] = [_Stretch(tuple(order), None, None)]
    while waiting:
        whole = waiting.pop(0)
        for part in _stretches(digraph, whole):
            phases = _phases(digraph, part.layers)
            if max(map(len, phases)) > 1:
                found.append(Section(part.fork, part.join, phases, whole.layers if whole.inner else ()))
            branches = [branch for phase in phases for branch in phase if len(branch) > 1]
            waiting += [_Stretch(branch, part.fork, part.join, True) for branch in branches]
    return tuple(found)


@dataclass(frozen=True)
class _Stretch:
    """Layers in forward order, the cut layers before and after them, and whether they are a branch."""

    layers: Branch
    fork: str | None
    join: str | None
    inner: bool = False


def _stretches(digraph: nx.DiGraph, whole: _Stretch) -> Iterator[_Stretch]:
    """What lies between the cut layers."""
    begin, fork = 0, whole.fork
    for cut in (*_cuts(digraph, whole.layers), len(whole.layers)):
        join = whole.layers[cut] if cut < len(whole.layers) else whole.join
        if cut > begin:
            yield _Stretch(whole.layers[begin:cut], fork, join)
        begin, fork = cut + 1, join


def _cuts(digraph: nx.DiGraph, layers: Branch) -> list[int]:
    """Positions of the layers that every path from a first to a last layer passes: no edge leads over them."""
    place = {name: index for index, name in enumerate(layers)}
    firsts, lasts, furthest = [0], [len(layers) - 1], []
    for index, name in enumerate(layers):
        after = [place[near] for near in digraph.successors(name) if near in place]
        furthest.append(max(after, default=len(layers)))
        if not after:
            lasts.append(index)
        if not any(near in place for near in digraph.predecessors(name)):
            firsts.append(index)
    reach = [0, *accumulate(furthest, max)]
    return [index for index in range(max(firsts), min(lasts) + 1) if reach[index] <= index]


def _phases(digraph: nx.DiGraph, layers: Branch) -> tuple[tuple[Branch, ...], ...]:
    """The connected components; of layers that hang together the branches from one exchange to the next."""
    components = _components(digraph, layers)
    if len(components) > 1:
        return (components,)
    phases, rest = [], layers
    while rest:
        branches, rest = _until_they_meet(digraph, rest)
        phases.append(branches)
    return tuple(phases)


def _components(digraph: nx.DiGraph, layers: Branch) -> tuple[Branch, ...]:
    """Connected components in the order of their first layers."""
    place = {name: index for index, name in enumerate(layers)}
    found = nx.weakly_connected_components(digraph.subgraph(layers))
    own = [tuple(sorted(component, key=place.__getitem__)) for component in found]
    return tuple(sorted(own, key=lambda branch: place[branch[0]]))


def _until_they_meet(digraph: nx.DiGraph, layers: Branch) -> tuple[tuple[Branch, ...], Branch]:
    """A branch per first layer with all that depends on that one only; and what is left, which depends on several."""
    groups: dict[str, list[str]] = {}
    rest: list[str] = []
    inside = set(layers)
    for name in layers:
        near = [other for other in digraph.predecessors(name) if other in inside]
        own = {id(group): group for group in (groups.get(other) for other in near)}
        if len(own) > 1 or id(None) in own:
            rest.append(name)
        else:
            groups[name] = next((group for group in own.values() if group is not None), [])
            groups[name].append(name)
    distinct = {id(group): tuple(group) for group in groups.values()}
    return tuple(distinct.values()), tuple(rest)


def homes_of(graph: LayerGraph, devices: Mapping[str, Collection[int]]) -> tuple[Placement, ...]:
    """Phases whose branches each have one block of devices for all their layers, blocks that are apart: with blocks.

    Args:
        devices: of every layer.
    """
    found: list[Placement] = []
    for section in sections(graph):
        for phase in section.phases:
            blocks = [{tuple(devices[name]) for name in branch} for branch in phase]
            taken = {name for one in found for branch, _ in one for name in branch}
            free = not any(name in taken for branch in phase for name in branch)
            if all(len(own) == 1 for own in blocks) and apart([block for own in blocks for block in own]) and free:
                found.append(tuple((branch, block.pop()) for branch, block in zip(phase, blocks, strict=True)))
    return tuple(found)


def apart(blocks: Sequence[Sequence[int]]) -> bool:
    """Whether branches on these blocks, in program order, run beside each other: on equal or disjoint blocks.

    The first and the last ones may have all devices of the others: they run before and after those.

    >>> apart([(0,), (1,), (0, 1)]), apart([(0,), (0, 1), (1,)]), apart([(0,), (0, 1)])
    (True, False, False)
    """
    count = len({device for block in blocks for device in block})
    some = [place for place, block in enumerate(blocks) if len(block) < count]
    between = set(map(tuple, blocks[some[0] : some[-1] + 1])) if some else set()
    return len(between) > 1 and sum(map(len, between)) == len({device for block in between for device in block})


def foldable(phases: Sequence[tuple[Branch, ...]], kept: Mapping[str, str]) -> list[tuple[Branch, ...]]:
    """Phases that a plan with equal blocks alike can have.

    No layer stands for layers in two branches of one, or in two phases that have no layer in common and are not alike:
    keys and values of all blocks of a decoder are branches of one phase, as they read the encoder's result.

    Args:
        kept: by layer, the one that stands for it.
    """
    own = [tuple(tuple(dict.fromkeys(kept[name] for name in branch)) for branch in phase) for phase in phases]
    members = [frozenset(name for branch in phase for name in branch) for phase in phases]
    standing = [frozenset(name for branch in phase for name in branch) for phase in own]

    def fits(v: int) -> bool:
        pairs = (u for u, phase in enumerate(own) if phase != own[v] and not members[u] & members[v])
        return sum(map(len, own[v])) == len(standing[v]) and not any(standing[u] & standing[v] for u in pairs)

    return [phase for v, phase in enumerate(phases) if fits(v)]


def averaged(phases: Sequence[tuple[Branch, ...]]) -> Shape:
    """The shape that bounds all plans in one pass: layers on any blocks, branches of `phases` at the same time.

    Phases inside branches of others, which come after those, count by their shares of the devices.
    """
    outer: list[tuple[Branch, ...]] = []
    taken: set[str] = set()
    inside: set[str] = set()
    for phase in phases:
        members = {name for branch in phase for name in branch}
        outer += [] if members & taken else [phase]
        (inside if members & taken else taken).update(members)
    homes = tuple((tuple((branch, ()) for branch in phase),) for phase in outer)
    return Shape(average=True, homes=homes, inside=frozenset(inside), anywhere=True)
