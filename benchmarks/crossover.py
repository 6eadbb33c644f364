"""At which batch AlexNet's fully-connected layers go from sharded to replicated.

Shards exchange activations, so their traffic grows with the batch; replicas exchange weight gradients, which do not.
On links so slow that nothing else counts, K devices with b images each break even where the bytes are equal:

    2 (K-1)/K x weights  =  (K-1) x b x (2 x pool5 + 4 x hidden)        weights 58.6 M, pool5 9,216, hidden 4,096

so at b = 3,368/K. Elsewhere compute that hides the reduction moves it down, and shards that hold less to update move it
up. Here both plans are priced by the planner's own model, whole step against whole step, with layers behind the
boundary run once on the gathered batch; the batch where they cost the same is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from benchmarks.scaled_costs import ScaledCosts
from examples.alexnet import build
from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.resized import at_batch
from parplan.plan import Plan, Strategy
from parplan.planner.decide import predict

__all__ = ["Line", "analytic", "crossover", "data_plan", "graph_of", "hybrid_plan"]

LEAST, MOST = 1, 2**15
CLOSE = 1.002  # bisection stops when its ends are this close


def graph_of(batch: int) -> LayerGraph:
    """AlexNet at a batch; captured once at a small one, because a capture makes room for its inputs."""
    return at_batch(_captured(), batch)


@lru_cache(maxsize=1)
def _captured() -> LayerGraph:
    return capture(build(), (torch.zeros(8, 3, 224, 224),))


def data_plan(graph: LayerGraph, devices: int) -> Plan:
    """Every layer replicated."""
    return _plan(graph, devices, lambda layer: Strategy(devices, devices=tuple(range(devices))))


def hybrid_plan(graph: LayerGraph, devices: int) -> Plan:
    """Layers replicated up to pool5, cut over all devices by out-features from fc6 on."""
    behind = [*graph.layers][[*graph.layers].index("fc6") :]

    def strategy(layer: Layer) -> Strategy:
        everywhere = tuple(range(devices))
        if layer.name not in behind:
            return Strategy(devices, devices=everywhere)
        axis = "out-features" if layer.kind == "linear" else "features"
        return Strategy(1, devices, axis, everywhere)

    return _plan(graph, devices, strategy)


def _plan(graph: LayerGraph, devices: int, strategy: Callable[[Layer], Strategy]) -> Plan:
    if devices == 1:
        layers = {name: Strategy() for name in graph.layers}
    else:
        layers = {name: strategy(layer) for name, layer in graph.layers.items()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, layers)


def analytic(devices: int) -> float:
    """Images per device at which both plans move the same bytes, from the layers' sizes."""
    graph = graph_of(2)
    weights = sum(graph.values[p].elements for n in ("fc6", "fc7", "fc8") for p in graph.layers[n].parameters)
    pool5, hidden, again = (graph.values[graph.layers[n].inputs[0]].elements // 2 for n in ("fc6", "fc7", "fc8"))
    return 2 * weights / devices / (2 * pool5 + 2 * hidden + 2 * again)


@dataclass(frozen=True)
class Line:
    """Machines on which the crossover is sought.

    Args:
        name: what the table calls them.
        cluster: of so many devices.
        precision: of float32 products.
        overlap: share of reductions hidden; None is the cost model's own.
        factor: on layer times.
    """

    name: str
    cluster: Callable[[int], Cluster]
    precision: str = "fp32"
    overlap: float | None = None
    factor: float = 1.0


def crossover(line: Line, devices: int) -> int | None:
    """Least images per device from which replicas are the faster; None where shards still are at 32,768."""
    low, high = float(LEAST), float(MOST)
    if _sharded_s_more(line, devices, MOST) < 0:
        return None
    while high / low > CLOSE and high - low > 1:
        middle = (low * high) ** 0.5
        if _sharded_s_more(line, devices, round(middle)) < 0:
            low = middle
        else:
            high = middle
    return round(high)


def _sharded_s_more(line: Line, devices: int, batch: int) -> float:
    """Seconds that a step with sharded fully-connected layers takes more than one with replicated ones."""
    graph, cluster = graph_of(batch * devices), line.cluster(devices)
    roofline = RooflineCosts(graph, cluster, precision=line.precision, optimizer="momentum")
    costs: CostModel = ScaledCosts(roofline, line.factor, line.overlap)
    sharded, replicated = (predict(graph, cluster, costs, plan(graph, devices)) for plan in (hybrid_plan, data_plan))
    return sharded.step_s - replicated.step_s
