"""Every strategy the rules allow for one layer on a number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from math import prod

from parplan.cluster import Cluster
from parplan.errors import RuleError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import unit_of
from parplan.lowering.holdings import slices
from parplan.plan import SAVED, STATES, Strategy
from parplan.planner.search_space.rules import divisors, r1_batch, r5_axis

__all__ = [
    "batch_units", "cluster_blocks", "data_parallel", "device_blocks", "offers_uneven", "refusals", "spreads",
    "strategies",
]  # fmt: skip

# Up to so many devices blocks have every size; on more, sizes that divide their number, and powers of two.
EVERY_SIZE = 16
# Where devices differ, the first so many of each kind are combined in every way, up to this number of combinations.
MOST_COMBINATIONS = 64


def device_blocks(count: int, everywhere: bool = False) -> Iterator[tuple[int, ...]]:
    """Blocks of neighbouring devices: the first 1, 2, ... `count`; with `everywhere` aligned ones too.

    On many devices (EVERY_SIZE) sizes are those that divide `count`, and powers of two.

    >>> list(device_blocks(2, everywhere=True))
    [(0,), (1,), (0, 1)]
    """
    for size in range(1, count + 1):
        if count > EVERY_SIZE and count % size and size & (size - 1):
            continue
        starts = range(0, count - size + 1, size) if everywhere else (0,)
        for start in starts:
            yield tuple(range(start, start + size))


def data_parallel(graph: LayerGraph, devices: tuple[int, ...], state: str, saved: str) -> dict[str, Strategy]:
    """Strategies of a plan with a replica of every layer on each device; those that need all samples are on the first.

    Args:
        state: of layers with parameters that can lie in slices.
        saved: of layers that can run forward again.
    """
    units, found = unit_of(graph), dict[str, Strategy]()
    for name, layer in graph.layers.items():
        places = devices if layer.batch is not None or layer.constant else devices[:1]
        one = Strategy(len(places), 1, None, places, state=state, saved=saved if name in units else SAVED[0])
        found[name] = one if slices(graph, layer, one) else replace(one, state=STATES[0])
    return found


def cluster_blocks(cluster: Cluster, everywhere: bool = False) -> tuple[tuple[int, ...], ...]:
    """Blocks of devices a layer may be placed on, in a fixed order.

    Equal devices: those of `device_blocks`. Several kinds: the same of each kind alone, then the first so many of each
    kind together; where those are too many, whole kinds together, in the end all. All devices are always among them.
    """
    if not cluster.mixed:
        return tuple(device_blocks(cluster.count, everywhere))
    kinds = [group.members for group in cluster.groups]
    alone = [tuple(own[i] for i in block) for own in kinds for block in device_blocks(len(own), everywhere)]
    sizes: list[Sequence[int]] = [range(len(own) + 1) for own in kinds]
    if prod(map(len, sizes)) > MOST_COMBINATIONS:
        whole = 2 ** len(kinds) > MOST_COMBINATIONS
        sizes = [(len(own),) if whole else (0, len(own)) for own in kinds]
    chosen = [[own[:size] for own, size in zip(kinds, counts, strict=True)] for counts in product(*sizes)]
    together = (tuple(sorted(chain.from_iterable(parts))) for parts in chosen)
    return tuple(dict.fromkeys((*alone, *(block for block in together if block))))


def offers_uneven(batch: int | None, cluster: Cluster) -> bool:
    """Whether the devices, or those of one kind, do not divide the batch, and some replicas would have unequal parts.

    Only then plans may have such parts: where the devices divide the batch, equal parts on all of them serve as well.
    """
    counts = (cluster.count, *(len(group.members) for group in cluster.groups))
    if batch is None or not any(batch % count for count in counts):
        return False
    return any(batch % replicas for replicas in range(2, min(batch, cluster.count) + 1))


def spreads(block: Sequence[int], axes: Sequence[str]) -> Iterator[Strategy]:
    """Every way to spread a layer with these axes over exactly these devices, legal or not."""
    for replicas in divisors(len(block)):
        shards = len(block) // replicas
        named: Sequence[str | None] = axes if shards > 1 and axes else [None]
        yield from (Strategy(replicas, shards, axis, tuple(block)) for axis in named)


def strategies(
    layer: Layer, batch: int, devices: int | Iterable[Sequence[int]], uneven: bool = False
) -> tuple[Strategy, ...]:
    """All legal (replicas, shards, axis, devices) of `layer`, in a fixed order.

    Args:
        devices: the blocks of devices to choose from (see `cluster_blocks`), or how many equal devices: then the first
            ones, as another block of the same size costs the same.
        uneven: with parts of the batch that differ by one sample, too.
    """
    found, units = [], {axis.name: axis.units for axis in layer.axes}
    for block in device_blocks(devices) if isinstance(devices, int) else devices:
        for one in spreads(block, list(units)):
            with suppress(RuleError):
                r1_batch(layer.name, batch, batch_units(layer, batch), one.replicas, uneven=uneven)
                r5_axis(layer.name, one.axis, units, one.shards)
                found.append(one)
    return tuple(found)


def refusals(layer: Layer, batch: int, devices: int) -> tuple[str, ...]:
    """The rules that leave out ways to use all devices for `layer`, each message once."""
    found: dict[str, None] = {}
    units = {axis.name: axis.units for axis in layer.axes}
    for one in spreads(range(devices), list(units)):
        try:
            r1_batch(layer.name, batch, batch_units(layer, batch), one.replicas, devices)
            r5_axis(layer.name, one.axis, units, one.shards, devices)
        except RuleError as error:
            found[str(error)] = None
    return tuple(found)


def batch_units(layer: Layer, batch: int) -> int | None:
    """The number that replicas must divide; None when samples cannot be split. Without samples, the batch itself."""
    if layer.constant:
        return batch
    return layer.batch.units if layer.batch is not None else None
