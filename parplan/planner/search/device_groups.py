"""Which branches go to which devices: disjoint groups of devices, and branches spread evenly over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice, pairwise, product
from math import isqrt

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Strategy
from parplan.planner.search.branches import Branch, apart
from parplan.planner.search_space.shape import Placement
from parplan.planner.search_space.strategies import device_blocks

__all__ = ["FEW_BRANCHES", "Group", "balance", "groupings", "placed", "placements"]

Group = tuple[int, ...]
"""Devices, ascending."""

MOST_GROUPINGS = 24
"""Ways to cut the devices into so many groups above which only even and proportional ones are tried."""

FEW_BRANCHES = 3
"""Branches up to which all ways to give them to groups are tried; more are spread evenly."""

FORMULATED_BYTES = 2 << 30
"""Memory that the placements of a phase may take: a U-Net with eleven branches on two devices took 23 GB of 24."""

FEW_DEVICES = 4
"""Up to so many devices of several kinds are grouped in every way."""


def groupings(
    cluster: Cluster, devices: Sequence[int], count: int, works: Sequence[float]
) -> Iterator[tuple[Group, ...]]:
    """Ways to cut `devices` into `count` disjoint groups, each once.

    Equal devices are cut into runs of neighbours: of sizes proportional to `works` (seconds, spread over the groups)
    and of equal sizes first, then of all sizes where there are few ways. A few devices of several kinds are cut in
    every way, many into runs of one kind after the other.
    """
    kinds = [[number for number in devices if number in group.members] for group in cluster.groups]
    kinds = [own for own in kinds if own]
    if len(kinds) > 1 and len(devices) <= FEW_DEVICES:
        yield from _partitions(tuple(devices), count)
        return
    ordered = [number for own in kinds for number in own]
    for sizes in _sizes(len(ordered), count, works):
        ends = [sum(sizes[:index]) for index in range(count + 1)]
        yield tuple(tuple(sorted(ordered[begin:end])) for begin, end in pairwise(ends))


def _sizes(total: int, count: int, works: Sequence[float]) -> list[tuple[int, ...]]:
    loads = [0.0] * count
    for work in sorted(works, reverse=True):
        loads[loads.index(min(loads))] += work
    likely = (_proportional(total, loads), _proportional(total, loads[::-1]), _proportional(total, [1.0] * count))
    cuts = islice(combinations(range(1, total), count - 1), MOST_GROUPINGS + 1)
    every = [tuple(b - a for a, b in pairwise((0, *own, total))) for own in cuts]  # each from 1 on
    return list(dict.fromkeys((*likely, *(every if len(every) <= MOST_GROUPINGS else ()))))


def _proportional(total: int, loads: Sequence[float]) -> tuple[int, ...]:
    """Numbers from 1 on that add up to `total`, in proportion to `loads`: each further one where it is needed most."""
    sizes = [1] * len(loads)
    for _ in range(total - len(loads)):
        sizes[max(range(len(loads)), key=lambda index: loads[index] / sizes[index])] += 1
    return tuple(sizes)


def _partitions(devices: Group, count: int) -> Iterator[tuple[Group, ...]]:
    """All ways to put each device into one of `count` groups, none empty, the groups in every order."""
    for places in product(range(count), repeat=len(devices)):
        given = list(zip(devices, places[::-1], strict=True))  # the first device changes its group most often
        groups = tuple(tuple(device for device, place in given if place == group) for group in range(count))
        if all(groups):
            yield groups


def balance(works: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """The group of every branch: the longest first, each to where it would be done soonest.

    Args:
        works: seconds that each branch takes on one device.
        speeds: of the groups, relative to that device.

    >>> balance([2.0, 3.0, 1.0], [1.0, 1.0])
    (1, 0, 1)
    """
    loads = [0.0] * len(speeds)
    chosen = [0] * len(works)
    for index in sorted(range(len(works)), key=lambda index: -works[index]):
        done = [load + works[index] / speed for load, speed in zip(loads, speeds, strict=True)]
        chosen[index] = done.index(min(done))
        loads[chosen[index]] = min(done)
    return tuple(chosen)


def placed(
    phase: Sequence[Branch], graph: LayerGraph, cluster: Cluster, costs: CostModel, every: bool
) -> tuple[Placement, ...]:
    """All placements of a phase; none where the tables of its edges would take more than `FORMULATED_BYTES`.

    An edge has some four tables of numbers with eight bytes for each pair of options, and a layer some four options for
    each placement.
    """
    layers = sum(map(len, phase))
    most = isqrt(FORMULATED_BYTES // (layers * 4 * 8 * 4**2))
    found = tuple(islice(placements(phase, graph, cluster, costs, every), most + 1))
    return found if len(found) <= most else ()


def placements(
    phase: Sequence[Branch], graph: LayerGraph, cluster: Cluster, costs: CostModel, every: bool
) -> Iterator[tuple[tuple[Branch, Group], ...]]:
    """Branches of a phase spread over disjoint groups of devices: a group for each branch.

    Args:
        every: all ways to give the branches aligned blocks, equal or disjoint ones, where a few branches' first and
            last ones may have all devices of the others; otherwise groups that make up all devices, or the first so
            many, a number that divides theirs or is a power of two.
    """
    alone = [Strategy(devices=(group.members[0],)) for group in cluster.groups]

    def work_s(branch: Branch, on: Strategy) -> float:
        own = [costs.layer(graph.layers[name], on) for name in branch]
        return sum(cost.forward_s + cost.backward_s for cost in own)

    works = [work_s(branch, alone[0]) for branch in phase]
    every_s = [sum(work_s(branch, one) for branch in phase) for one in alone]
    fastest = [sum(works) / own_s if own_s > 0 else 1.0 for own_s in every_s]  # of branches that only pass on
    speed = {device: fast for group, fast in zip(cluster.groups, fastest, strict=True) for device in group.members}
    seen = set()
    if every:
        blocks = list(device_blocks(cluster.count, everywhere=True))
        for own in product(blocks, repeat=len(phase)):
            disjoint = sum(map(len, set(own))) == len(set(chain(*own)))
            if apart(own) and (disjoint or len(phase) <= FEW_BRANCHES):  # of more there would be too many
                yield tuple(zip(phase, own, strict=True))
        return
    # Blocks of all devices, or where they are equal of the first so many, a number that divides or a power of two.
    some = [n for n in range(2, cluster.count) if not cluster.mixed and (cluster.count % n == 0 or not n & (n - 1))]
    for size, count in product((cluster.count, *some), range(2, min(len(phase), cluster.count) + 1)):
        for groups in groupings(cluster, range(size), count, works) if count <= size else ():
            spread = [sum(speed[d] for d in group) for group in groups]
            if len(phase) <= FEW_BRANCHES:
                ways = [one for one in product(range(count), repeat=len(phase)) if len(set(one)) == count]
            else:
                ways = [balance(works, spread)]
            placed_ways = [tuple((branch, groups[g]) for branch, g in zip(phase, way, strict=True)) for way in ways]
            fresh = [placed for placed in placed_ways if placed not in seen]
            seen.update(fresh)
            yield from fresh
