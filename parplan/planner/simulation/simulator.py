"""Memoised step simulation with a deterministic budget (tasks simulated, not seconds), so that results are
reproducible across machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.simulation.timeline import Kind, Timeline, simulate

__all__ = ["EFFORT", "Effort", "Layers", "SimulatedStep", "StepSimulator"]

EFFORT = 60_000
"""Tasks that a search by simulated steps may simulate (step_tasks.Part): 50 steps of AlexNet in 8 passes."""

# Plans have to be faster by more than this, relative, to be taken instead.
WORTH_IT = 1e-6

Layers = Mapping[str, Strategy]


@dataclass(frozen=True)
class SimulatedStep:
    """Breakdown of a simulated step on the device that is done last: compute (updates included), transfers and sums."""

    step_s: float
    compute_s: float
    transfer_s: float
    exposed_s: float
    parts: int


INFEASIBLE = SimulatedStep(inf, inf, 0.0, 0.0, 1)
"""The step of a plan whose scheme is not possible."""


class Effort:
    """Budget of tasks that may still be simulated."""

    def __init__(self, parts: int = EFFORT) -> None:
        self.left = parts


class StepSimulator:
    """Memoised simulated steps of plans."""

    def __init__(self, graph: LayerGraph, cluster: Cluster, costs: CostModel) -> None:
        self.graph, self.cluster, self.costs = graph, cluster, costs
        self._known: dict[tuple[object, ...], SimulatedStep] = {}

    def timeline(self, plan: Plan) -> Timeline:
        """The step in full.

        Raises:
            PlanError: the plan's scheme asks for passes that cannot be.
        """
        return simulate(self.graph, self.cluster, self.costs, plan)

    def simulated(self, plan: Plan) -> SimulatedStep:
        """The simulated step, kept for the next call; infinite where the plan's scheme is not possible."""
        key = (plan.scheme, *plan.layers.values())
        if key in self._known:
            return self._known[key]
        try:
            timeline = self.timeline(plan)
        except PlanError:
            return self._known.setdefault(key, INFEASIBLE)
        step_s, spent = timeline.step_s, timeline.critical
        moved_s, summed_s = spent.total_s(Kind.TRANSFER), spent.total_s(Kind.REDUCTION)
        found = SimulatedStep(step_s, step_s - moved_s - summed_s, moved_s, summed_s, len(timeline.parts))
        return self._known.setdefault(key, found)

    def within(self, plan: Plan, effort: Effort) -> SimulatedStep | None:
        """The simulated step, None where no effort is left for it; each costs as much effort again, known or not.

        So the result of a search does not depend on earlier ones.
        """
        if effort.left <= 0:
            return None
        found = self.simulated(plan)
        effort.left -= found.parts
        return found

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step; infinite where the plan's scheme is not possible."""
        return self.simulated(plan).step_s

    def fastest(self, plans: Iterable[Plan | None]) -> Plan | None:
        """The fastest of these plans, the first of equal ones; None where there is none."""
        found, least_s = None, inf
        for plan in plans:
            step_s = self.step_s(plan) if plan is not None else inf
            if step_s < least_s * (1 - WORTH_IT) or (found is None and plan is not None):
                found, least_s = plan, step_s
        return found
