"""Losses per replica: `scalars="per_replica"` gives one number per replica, as `nn.DataParallel` does.

A loss inside a model contracts the batch, so it runs once, on gathered samples. Here the layers that lead to nothing
but numbers are given replicas instead, each with its own samples, and every number becomes a vector with one entry for
each. Under torchrun every process is a replica, and its number is its own, as with `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from parplan.errors import PlanError
from parplan.graph.layer_graph import Axis, Layer, LayerGraph
from parplan.graph.sites import why_whole
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy

__all__ = ["Spread", "spread"]

HINT = 'compile with scalars="whole"'


@dataclass(frozen=True)
class Spread:
    """How the layers of one step are spread.

    Args:
        layers: as captured, or with a batch axis where they run once per replica.
        strategies: per layer.
        numbers: values that have one entry per replica -> how many replicas.
    """

    layers: Mapping[str, Layer]
    strategies: Mapping[str, Strategy]
    numbers: Mapping[str, int]


def spread(graph: LayerGraph, strategies: Mapping[str, Strategy], step_setting: StepSetting) -> Spread:
    """Layers and strategies as planned, or with losses per replica where `step_setting` asks for it.

    Raises:
        PlanError: a number that the model returns cannot be computed from a replica's own samples.
    """
    wanted = [v for v in graph.results if graph.values[v].shape == ()]
    if not step_setting.per_replica or not wanted:
        return Spread(graph.layers, strategies, {})
    trailing = _trailing(graph, frozenset(wanted))
    for value in wanted:
        if graph.producer.get(value) not in trailing:
            raise PlanError(
                f"{graph.label(value)}: other layers read this number too, so it cannot differ by replica; {HINT}"
            )
    if graph.fixed_batch:
        raise PlanError(
            f"{graph.label(wanted[0])}: the model's code depends on the number of samples (x.shape[0]), so a replica "
            f"cannot run it on its own samples; use mean() instead of dividing by the batch, or {HINT}"
        )
    strategy = _strategy(graph, strategies, trailing, step_setting)
    numbers = {v for n in trailing for v in graph.layers[n].outputs if v not in graph.batch_dims}
    layers = {n: _with_batch(graph, layer, numbers) if n in trailing else layer for n, layer in graph.layers.items()}
    chosen = {**strategies, **dict.fromkeys(trailing, strategy)}
    return Spread(layers, chosen, dict.fromkeys(numbers, strategy.replicas))


def _trailing(graph: LayerGraph, wanted: frozenset[str]) -> frozenset[str]:
    """Layers that do not keep samples apart and lead to nothing but the wanted numbers."""
    others = set(graph.results) - wanted
    others |= set(graph.buffer_updates.values())
    found: set[str] = set()
    for name, layer in reversed(list(graph.layers.items())):
        readers = {reader for value in layer.outputs for reader in graph.consumers(value)}
        plain = not layer.constant or not wanted.isdisjoint(layer.outputs)
        # Where only its backward mixes samples (a tensor hook) it is no part of a loss, which each replica may have.
        hooked = bool(why_whole(layer.nodes)) and graph.batch_dims.keys() >= set(layer.outputs)
        if layer.batch is None and plain and not hooked and readers <= found and others.isdisjoint(layer.outputs):
            found.add(name)
    return frozenset(found)


def _strategy(
    graph: LayerGraph, strategies: Mapping[str, Strategy], trailing: frozenset[str], step_setting: StepSetting
) -> Strategy:
    """Every process, or the replicas of the layer that feeds the losses and has most: the first shard of each."""
    if step_setting.ranks > 1:
        return Strategy(step_setting.ranks, 1, None, tuple(range(step_setting.ranks)))
    feeding, behind = list[str](), list(trailing)
    while behind:
        makers = graph.makers(graph.layers[behind.pop()])
        # Where a loss of each sample is computed says nothing about where the samples are.
        inside = [maker for maker in makers if graph.layers[maker].kind in ("loss", "reduce")]
        behind += [maker for maker in inside if maker not in trailing]
        feeding += [maker for maker in makers if maker not in trailing and maker not in inside]
    most = max((strategies[name] for name in feeding), key=lambda strategy: strategy.replicas, default=Strategy())
    # A replica without samples has no loss to give.
    count = max(1, min(most.replicas, step_setting.batch))
    return Strategy(count, 1, None, most.grid.column(0)[:count])


def _with_batch(graph: LayerGraph, layer: Layer, numbers: Set[str]) -> Layer:
    """The layer with a batch axis: samples of what it reads are cut, its numbers are one per replica."""
    shaped = [value for value in layer.outputs if value in numbers and graph.values[value].shape]
    if shaped:
        raise PlanError(
            f"{graph.label(shaped[0])}, of shape {graph.values[shaped[0]].shape}, has no samples and is no number, so "
            f"replicas cannot have one each; {HINT}"
        )
    values = (*layer.inputs, *layer.outputs)
    cut = {value: graph.batch_dims[value] for value in values if value in graph.batch_dims}
    return replace(layer, batch=Axis("batch", 1, cut | {value: 0 for value in values if value in numbers}))
