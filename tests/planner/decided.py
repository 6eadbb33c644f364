"""Decisions by roofline costs, each made once however many tests read it."""

from __future__ import annotations

from dataclasses import replace

from parplan.cluster import Cluster
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph
from parplan.planner.decide import PlanRequest, decide
from parplan.planner.decision import Decision

__all__ = ["decided"]

_DECIDED: dict[tuple[LayerGraph, str, str], Decision] = {}


def decided(graph: LayerGraph, cluster: Cluster, request: PlanRequest | None = None) -> Decision:
    """The decision on a graph; the same object for the same graph, an equal cluster and an equal request."""
    request = request or PlanRequest()
    key = graph, repr(cluster), repr(replace(request, started=0.0))
    if key not in _DECIDED:
        _DECIDED[key] = decide(graph, cluster, RooflineCosts(graph, cluster, optimizer=request.optimizer), request)
    return _DECIDED[key]
