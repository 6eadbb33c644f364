"""Memoised simulated steps of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.simulation.timeline import Timeline, simulate

__all__ = ["Layers", "StepSimulator"]

# Plans have to be faster by more than this, relative, to be taken instead.
WORTH_IT = 1e-6

Layers = Mapping[str, Strategy]


class StepSimulator:
    """Memoised simulated steps of plans.

    Args:
        predicted: seconds of a step in place of simulated ones.
    """

    def __init__(
        self, graph: LayerGraph, cluster: Cluster, costs: CostModel, predicted: Callable[[Plan], float] | None = None
    ) -> None:
        self.graph, self.cluster, self.costs, self.predicted = graph, cluster, costs, predicted
        self._known: dict[tuple[object, ...], float] = {}

    def timeline(self, plan: Plan) -> Timeline:
        """The step in full.

        Raises:
            PlanError: the plan's scheme asks for passes that cannot be.
        """
        return simulate(self.graph, self.cluster, self.costs, plan)

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step, kept for the next call.

        Raises:
            PlanError: the plan's scheme asks for passes that cannot be.
        """
        key = (plan.scheme, *plan.layers.values())
        if key not in self._known:
            self._known[key] = self.predicted(plan) if self.predicted else self.timeline(plan).step_s
        return self._known[key]

    def fastest(self, plans: Iterable[Plan | None]) -> Plan | None:
        """The fastest of these plans, the first of equal ones; None where there is none."""
        found, least_s = None, inf
        for plan in plans:
            step_s = self.step_s(plan) if plan is not None else inf
            if step_s < least_s * (1 - WORTH_IT) or (found is None and plan is not None):
                found, least_s = plan, step_s
        return found
