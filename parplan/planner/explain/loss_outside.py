"""The price of a loss outside of the plan: its results are handed out, and their gradients taken back."""

from __future__ import annotations

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import LossOutside, Prediction
from parplan.planner.search_space.edges import delivered, delivery_layout

__all__ = ["loss_outside"]

# Nothing is said where less than this share of the step is to be gained.
LEAST_SHARE = 0.01


def loss_outside(
    plan: Plan, graph: LayerGraph, cluster: Cluster, costs: CostModel, step: Prediction
) -> LossOutside | None:
    """What handing out the results takes; None where next to nothing, or where the model has its loss inside."""
    results = delivered(graph)
    wanted = {value: graph.values[value] for value in results if graph.values[value].requires_grad}
    inside = any(spec.shape == () for spec in wanted.values())
    # A layer profile has no module that a loss could be added to.
    profiled = any(not graph.layers[graph.producer[value]].nodes for value in wanted)
    if not graph.training or not wanted or inside or profiled:
        return None
    seconds = 0.0
    for value, spec in wanted.items():
        name = graph.producer[value]
        given = graph.layers[name].layout(value, plan.layers[name])
        moved = costs.transfer(spec, given, delivery_layout(graph, cluster, value))
        seconds += moved.forward_s + moved.backward_s
    share = seconds / step.step_s
    nbytes = sum(spec.nbytes for spec in wanted.values())
    return LossOutside(tuple(wanted), nbytes, seconds, share) if share >= LEAST_SHARE else None
