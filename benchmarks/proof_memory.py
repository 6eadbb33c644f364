"""Every plan of a small model that lacks memory: states, recomputation and micro-batches, beside blocks of devices.

Whether a plan fits is what its lowered program holds, and its seconds are those of its simulated step: neither is what
the search adds up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from benchmarks.proof_cases import Problem, drawn
from benchmarks.proof_plans import EveryPlan, is_legal, simulated_s
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import CaptureError, PlanError
from parplan.graph.repeated import unit_of, units
from parplan.graph.resized import at_batch
from parplan.lowering.holdings import slices
from parplan.lowering.micro_batches import equal_size
from parplan.plan import SAVED, STATES, Plan, Scheme, Strategy
from parplan.planner.decide import decide
from parplan.planner.decision import Decision, PricedGraph
from parplan.planner.search_space.rules import divisors
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.problem import FloatArray

__all__ = ["EveryWay", "Tight", "tight"]


@dataclass(frozen=True, eq=False)
class Tight:
    """A problem whose devices have too little memory for the plan that is fastest with enough.

    Args:
        whole: in one micro-batch, with the memory there is.
        fastest_bytes: what the fastest plan takes at most on a device.
    """

    whole: Problem
    fastest_bytes: int

    @property
    def limit_bytes(self) -> int:
        """Bytes of each device."""
        return self.whole.cluster.devices[0].memory_bytes

    def sized(self, count: int) -> Problem:
        """The problem of one of so many micro-batches.

        Raises:
            CaptureError, PlanError: there is none.
        """
        own = self.whole
        if count == 1:
            return own
        graph = at_batch(own.graph, equal_size(own.graph, count))
        costs = RooflineCosts(graph, own.cluster, optimizer=own.request.optimizer, micro_batches=count)
        return replace(own, graph=graph, costs=costs)

    @cached_property
    def counts(self) -> dict[int, Problem]:
        """The problems of all numbers of micro-batches that there may be."""
        found = {}
        for count in divisors(self.whole.graph.batch or 1):
            try:
                found[count] = self.sized(count)
            except (CaptureError, PlanError):
                break
        return found

    def decided(self) -> Decision:
        """What the planner decides.

        Raises:
            InfeasiblePlan: no plan fits, or none was found.
        """
        own = self.whole

        def micro_batched(count: int) -> PricedGraph:
            sized = self.sized(count)
            return PricedGraph(sized.graph, sized.costs)

        return decide(own.graph, own.cluster, own.costs, own.request, None, micro_batched)


def tight(kind: str, seed: int, devices: int) -> Tight:
    """The problem of a seed with less memory than its fastest plan takes, and hardly less than replicas in slices take
    in as many micro-batches as there may be, all replayed."""
    problem, draw = drawn(kind, seed, devices), random.Random(f"{kind} {seed} memory")
    request = replace(problem.request, started_ranks=True)
    fastest = decide(problem.graph, problem.cluster, problem.costs, request)
    most, least = max(fastest.prediction.memory_bytes), list[int]()
    for own in Tight(replace(problem, request=request), most).counts.values():
        every = tuple(range(own.cluster.count))
        with suppress(PlanError):
            layers = data_parallel(own.graph, every, STATES[-1], SAVED[-1])
            check(
                Plan(own.graph.model, own.graph.fingerprint, own.graph.batch or 1, own.cluster.count, layers), own.graph
            )
            least.append(max(own.costs.peaks(layers) or [most]))
    low = 0.95 * min([*least, most])
    cluster = problem.cluster.with_memory(int(draw.uniform(low, most)))
    costs = RooflineCosts(problem.graph, cluster, optimizer=request.optimizer)
    return Tight(replace(problem, cluster=cluster, costs=costs, request=request), most)


@dataclass(frozen=True, eq=False)
class EveryWay(EveryPlan):
    """All plans of a model in so many micro-batches, layers in any state on any aligned blocks, units replayed or not.

    Args:
        micro_batches: of which the problem is one.
    """

    micro_batches: int

    @cached_property
    def strategies(self) -> dict[str, tuple[Strategy, ...]]:
        """Strategies by layer."""
        graph, again, found = self.problem.graph, unit_of(self.problem.graph), dict[str, tuple[Strategy, ...]]()
        for name, known in super().strategies.items():
            ways = [
                replace(one, state=state, saved=saved)
                for one, state, saved in product(known, STATES, SAVED if name in again else SAVED[:1])
            ]
            layer = graph.layers[name]
            found[name] = tuple(one for one in ways if one.state == STATES[0] or slices(graph, layer, one))
        return found

    def plan(self, index: int, scheme: Scheme = Scheme.GATHER) -> Plan:
        """The plan of a choice."""
        own, several = super().plan(index, scheme), self.micro_batches
        return replace(own, batch=several * own.batch, micro_batches=several)

    def least_s(self) -> FloatArray:
        """Seconds that the simulated steps of all plans take at least: those of the device with the most to do."""
        if self.micro_batches == 1:
            return self.bounds_s(1)
        seconds = [self._layer_s(name, 1) for name in self.strategies]
        often = [self.micro_batches * forward for forward, _, _ in seconds]
        costs, layers = self.problem.costs, self.problem.graph.layers
        for v, (name, own) in enumerate(self.strategies.items()):
            back = np.array([costs.layer(layers[name], one, 1).backward_s for one in own])
            often[v] = often[v] + (self.micro_batches - 1) * back + seconds[v][1] + seconds[v][2]
        return costs.step.overhead_s + self._busiest_s(often, {}, 0)

    def faster(self, step_s: float, limit: int) -> Iterator[tuple[Plan, float]]:
        """The legal plans whose bound is below a step and that fit, of the first so many by their bounds, each with
        its simulated step."""
        problem, bounds = self.problem, self.least_s().reshape(-1)
        found = np.flatnonzero(bounds < step_s)
        for index in found[np.argsort(bounds[found], kind="stable")][:limit].tolist():
            plan = self.plan(index)
            if not self._whole_units(plan.layers) or not is_legal(plan, problem):
                continue
            peaks = problem.costs.peaks(plan.layers)
            if peaks is None or problem.cluster.has_room(peaks):
                yield plan, simulated_s(plan, problem)

    def _whole_units(self, layers: Mapping[str, Strategy]) -> bool:
        """Whether the layers of each unit are all replayed, or none."""
        return all(len({layers[name].saved for name in unit}) == 1 for unit in units(self.problem.graph))
