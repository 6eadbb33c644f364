"""The plans every example is verified under: pure, hybrid, towers, and the solver's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.decide import PlanRequest, decide

__all__ = ["PLANS", "plan_by"]


def _replicas(layer: Layer, devices: Sequence[int], batch: int) -> Strategy:
    """As many replicas as the layer's samples allow, up to one a device."""
    if layer.batch is None and not layer.constant:
        return Strategy(devices=(devices[0],))
    count = max(n for n in range(1, len(devices) + 1) if batch % n == 0)
    return Strategy(replicas=count, devices=tuple(devices[:count]))


def _shards(layer: Layer, devices: Sequence[int], axes: Sequence[str] = ()) -> Strategy:
    """As many shards as its first suitable axis allows; `axes` narrows the choice by name."""
    best = Strategy(devices=(devices[0],))
    for axis in layer.axes:
        if not axes or axis.name in axes:
            count = max(n for n in range(1, len(devices) + 1) if axis.units % n == 0)
            if count > best.shards:
                best = Strategy(1, count, axis.name, tuple(devices[:count]))
    return best


def _data(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    return _replicas(layer, range(devices), graph.batch or 1)


def _model(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    return _shards(layer, range(devices))


def _contracted(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """Shards that give terms of sums where the layer has such an axis."""
    return _shards(layer, range(devices), [axis.name for axis in layer.axes if axis.partial])


def _hybrid(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """cuda-convnet2's: replicas up to the first fully-connected layer, shards of it from there on."""
    names = list(graph.layers)
    first = next((names.index(n) for n, known in graph.layers.items() if known.kind == "linear"), len(names))
    if names.index(layer.name) < first:
        return _data(graph, layer, devices)
    return _shards(layer, range(devices), ("out-features", "features"))


def _mixed(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """Replicas x shards where both fit, on devices in reverse order."""
    order = tuple(reversed(range(devices)))
    if devices % 2 or layer.batch is None or (graph.batch or 1) % 2:
        return _shards(layer, order)
    axis = next((axis for axis in layer.axes if axis.units % (devices // 2) == 0), None)
    if axis is None or devices == 2:
        return _replicas(layer, order, graph.batch or 1)
    return Strategy(2, devices // 2, axis.name, order)


def _towers(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """Layers called ...a on the first half of the devices, ...b on the rest, the others in turn."""
    half = max(1, devices // 2)
    own = {"a": range(half), "b": range(half, devices)}.get(layer.name[-1])
    if own is None:
        return Strategy(devices=(list(graph.layers).index(layer.name) % devices,))
    return _replicas(layer, own, graph.batch or 1)


def _solved(graph: LayerGraph, devices: int) -> Plan:
    """On slow links, so that the solver has something to weigh."""
    cluster = cluster_preset("k20", devices, "10gbe")
    return decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest()).plan


PLANS: dict[str, Callable[[LayerGraph, Layer, int], Strategy] | None] = {
    "data parallel": _data,
    "model parallel": _model,
    "sums": _contracted,
    "hybrid": _hybrid,
    "mixed": _mixed,
    "towers": _towers,
    "solver": None,
}


def plan_by(name: str, devices: int, graph: LayerGraph) -> Plan:
    """The plan called `name` in PLANS for `graph` on `devices` devices."""
    choose = PLANS[name]
    if choose is None:
        return _solved(graph, devices)
    layers = {layer.name: choose(graph, layer, devices) for layer in graph.layers.values()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, layers)
