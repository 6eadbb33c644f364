"""Every plan of a small model, with a bound of its simulated step below which most need not be simulated.

The bound is of the simulation, not of the objective T: forward and backward, which nothing overlaps, take no device
less than its own layers and transfers, and no path through the model less than its layers and transfers one after
another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod

import numpy as np

from benchmarks.proof_cases import Problem
from parplan.errors import PlanError
from parplan.lowering.stages import keeps_apart, stages
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search.branches import sections
from parplan.planner.search.context import formulated, shape_of
from parplan.planner.search_space.options import arrival_layout
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.search_space.verifier import check
from parplan.planner.simulation.timeline import simulate
from parplan.planner.solver.problem import FloatArray, objective

__all__ = ["CLASSES", "EveryPlan", "branch_plans", "class_of", "is_legal", "objective_s", "simulated_s", "words"]

CLASSES = ("one pass, first devices", "one pass, any blocks", "branches at the same time", "interleave", "broadcast")
TRIES = 100

Moved = Mapping[tuple[int, int], tuple[FloatArray, FloatArray]]
"""Seconds forward and backward of what moves between two layers, by their places, per pair of strategies."""


def class_of(plan: Plan, problem: Problem) -> str:
    """The class of a plan, one of CLASSES."""
    if stages(problem.graph, plan.layers, plan.scheme).passes > 1:
        return plan.scheme.value
    if shape_of(plan, problem.graph, problem.cluster).homes:
        return CLASSES[2]
    return CLASSES[any(own.devices[0] > 0 for own in plan.layers.values())]


def simulated_s(plan: Plan, problem: Problem) -> float:
    """Seconds of a plan's simulated step, on the cluster that the planner prices it on."""
    cluster = problem.request.priced_on(problem.cluster, plan)
    return simulate(problem.graph, cluster, problem.costs, plan).step_s


def objective_s(plan: Plan, problem: Problem) -> float:
    """T of a plan, on the cluster that the planner prices it on."""
    cluster = problem.request.priced_on(problem.cluster, plan)
    formulation, choice = formulated(plan, problem.graph, cluster, problem.costs)
    return objective(formulation.problem, choice)


def is_legal(plan: Plan, problem: Problem) -> bool:
    """Whether a plan keeps all rules, and runs layers in passes if its scheme is one of passes."""
    try:
        check(plan, problem.graph)
        return plan.scheme is Scheme.GATHER or stages(problem.graph, plan.layers, plan.scheme).passes > 1
    except PlanError:
        return False


def branch_plans(problem: Problem, draw: random.Random) -> Iterator[Plan]:
    """Plans in which branches of one phase lie on disjoint blocks, other layers anywhere; none of a model without."""
    graph, blocks = problem.graph, cluster_blocks(problem.cluster, everywhere=True)
    phases = [phase for section in sections(graph) for phase in section.phases if len(phase) > 1]
    for _ in range(TRIES if phases else 0):
        phase = draw.choice(phases)
        homes = [draw.choice(blocks) for _ in phase]
        if any(a != b and set(a) & set(b) for a, b in combinations(homes, 2)) or len(set(homes)) == 1:
            continue
        place = {name: (block,) for branch, block in zip(phase, homes, strict=True) for name in branch}
        known = {
            name: strategies(layer, graph.batch or 1, place.get(name, blocks)) for name, layer in graph.layers.items()
        }
        if all(known.values()):
            layers = {name: draw.choice(own) for name, own in known.items()}
            plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, problem.cluster.count, layers)
            if is_legal(plan, problem):
                yield plan


def words(plan: Plan) -> str:
    """Replicas x shards on devices of every layer, in a line."""
    return " ".join(
        f"{name}={one.replicas}x{one.shards}{f':{one.axis}' if one.axis else ''}@{','.join(map(str, one.devices))}"
        for name, one in plan.layers.items()
    )


@dataclass(frozen=True, eq=False)
class EveryPlan:
    """All plans of a model in one pass and in interleaved passes, layers on any aligned blocks of devices."""

    problem: Problem

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of devices that layers may have."""
        return tuple(cluster_blocks(self.problem.cluster, everywhere=True))

    @cached_property
    def strategies(self) -> dict[str, tuple[Strategy, ...]]:
        """Strategies by layer."""
        graph = self.problem.graph
        return {name: strategies(layer, graph.batch or 1, self.blocks) for name, layer in graph.layers.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of strategies."""
        return tuple(map(len, self.strategies.values()))

    @property
    def count(self) -> int:
        """Choices of strategies."""
        return prod(self.sizes)

    def plan(self, index: int, scheme: Scheme) -> Plan:
        """The plan of a choice."""
        graph, picked = self.problem.graph, np.unravel_index(index, self.sizes)
        layers = {name: own[int(k)] for (name, own), k in zip(self.strategies.items(), picked, strict=True)}
        return Plan(graph.model, graph.fingerprint, graph.batch or 1, self.problem.cluster.count, layers, scheme=scheme)

    def below(self, step_s: float, scheme: Scheme, limit: int, draw: random.Random) -> tuple[list[int], bool]:
        """Choices whose bound is below a step, the least bound first, and whether they are all.

        Above the limit they are not: half of it are those with the least bounds, half are drawn from the others.
        """
        bounds = (self.bounds_s(1) if scheme is Scheme.GATHER else self._bounds_in_passes_s()).reshape(-1)
        found = np.flatnonzero(bounds < step_s)
        found = found[np.argsort(bounds[found], kind="stable")]
        if len(found) <= limit:
            return found.tolist(), True
        rest = draw.sample(range(limit // 2, len(found)), limit - limit // 2)
        return [*found[: limit // 2].tolist(), *found[sorted(rest)].tolist()], False

    def _bounds_in_passes_s(self) -> FloatArray:
        """Bounds of plans in interleaved passes; inf where replica counts allow none."""
        found = np.full(self.sizes, np.inf)
        counts = [
            self._spread(v, np.array([float(one.replicas) for one in own]))
            for v, (name, own) in enumerate(self.strategies.items())
            if keeps_apart(self.problem.graph.layers[name])
        ]
        if not counts:
            return found
        most, least = counts[0], counts[0]
        for one in counts[1:]:
            most, least = np.maximum(most, one), np.minimum(least, one)
        passes = np.broadcast_to(np.where(most % least == 0, most / least, 1.0), self.sizes)
        for number in range(2, self.problem.cluster.count + 1):
            if (passes == number).any():
                found = np.where(passes == number, self.bounds_s(number), found)
        return found

    def bounds_s(self, passes: int) -> FloatArray:
        """Seconds that the simulated steps of plans with so many passes take at least, one for each choice.

        Transfers are left out where there are passes: they may go on beside compute.
        """
        seconds = [self._layer_s(name, passes) for name in self.strategies]
        moved = self._moved() if passes == 1 else {}
        total: FloatArray = np.full(self.sizes, self.problem.costs.step.overhead_s)
        for back in (0, 1):
            phase = self._busiest_s([one[back] + back * one[2] for one in seconds], moved, back)
            if passes == 1:
                phase = np.maximum(phase, self._longest_path_s([one[back] for one in seconds], moved, back))
            total = total + phase
        return total + self._arrivals_s() if passes == 1 else total

    def _layer_s(self, name: str, passes: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Forward, backward and update of a layer per strategy; run whole or in parts, whichever is less."""
        costs, layer, own = self.problem.costs, self.problem.graph.layers[name], self.strategies[name]
        runs = [(count, [costs.layer(layer, one, count) for one in own]) for count in {1, passes}]
        forward = np.min([[count * cost.forward_s for cost in each] for count, each in runs], axis=0)
        backward = np.min([[count * cost.backward_s for cost in each] for count, each in runs], axis=0)
        update = np.min([[cost.update_s for cost in each] for _, each in runs], axis=0)
        sums, late = np.array([costs.reduction(layer, one) for one in own]), costs.step.late
        return forward, backward + (1 - costs.step.overlap) * (1 - late) * sums, update + late * sums

    def _busiest_s(self, seconds: list[FloatArray], moved: Moved, back: int) -> FloatArray:
        """Seconds of the device with the most to do: its layers, and the transfers that it has a part in."""
        most: FloatArray = np.zeros(self.sizes)
        for device in range(self.problem.cluster.count):
            uses = [np.array([float(device in one.devices) for one in own]) for own in self.strategies.values()]
            busy: FloatArray = np.zeros(self.sizes)
            for v, own_s in enumerate(seconds):
                busy = busy + self._spread(v, uses[v] * own_s)
            for (a, b), each in moved.items():
                busy = busy + self._spread_pair(a, b, np.maximum.outer(uses[a], uses[b]) * each[back])
            most = np.maximum(most, busy)
        return most

    def _longest_path_s(self, seconds: list[FloatArray], moved: Moved, back: int) -> FloatArray:
        """Seconds of the longest path through the model."""
        graph = self.problem.graph
        place = {name: v for v, name in enumerate(graph.layers)}
        near = graph.digraph.successors if back else graph.digraph.predecessors
        done: dict[int, FloatArray] = {}
        longest: FloatArray = np.zeros(self.sizes)
        for name in reversed(list(graph.layers)) if back else graph.layers:
            v = place[name]
            begin: FloatArray = np.zeros((1,) * len(self.sizes))
            for u in map(place.__getitem__, near(name)):
                ends = (v, u) if back else (u, v)
                way = self._spread_pair(*ends, moved[ends][back]) if ends in moved else 0.0
                begin = np.maximum(begin, done[u] + way)
            done[v] = begin + self._spread(v, seconds[v])
            longest = np.maximum(longest, done[v])
        return longest

    def _moved(self) -> Moved:
        """Transfers of values that one layer reads: of others the program may make one for several."""
        graph, costs = self.problem.graph, self.problem.costs
        place = {name: v for v, name in enumerate(graph.layers)}
        readers = Counter(value for layer in graph.layers.values() for value in set(layer.inputs))
        found: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        for source, target, values in graph.digraph.edges(data="values"):
            for value in (one for one in values if readers[one] == 1 and one not in graph.user_outputs):
                given, wanted = (
                    [graph.layers[name].layout(value, own) for own in self.strategies[name]]
                    for name in (source, target)
                )
                matrix, ends = costs.transfer_matrix(graph.values[value], given, wanted), (place[source], place[target])
                before = found.get(ends, (0.0, 0.0))
                found[ends] = before[0] + matrix.forward_s, before[1] + matrix.backward_s
        return found

    def _arrivals_s(self) -> FloatArray:
        """Seconds in which the user's inputs arrive, which hold all devices: of each its nearest reader counts."""
        problem, graph, total = self.problem, self.problem.graph, np.zeros(self.sizes)
        if not problem.request.started_ranks:  # a plan on one device has them there
            return total
        for value in map(str, graph.user_inputs):
            least: FloatArray = np.full((1,) * len(self.sizes), np.inf)
            for v, (name, own) in enumerate(self.strategies.items()):
                if value in graph.layers[name].inputs:
                    wanted = [graph.layers[name].layout(value, one) for one in own]
                    given = [arrival_layout(graph, problem.cluster, value)]
                    matrix = problem.costs.transfer_matrix(graph.values[value], given, wanted)
                    least = np.minimum(least, self._spread(v, matrix.forward_s[0]))
            total = total + np.where(np.isfinite(least), least, 0.0)
        return total

    def _spread(self, v: int, values: FloatArray) -> FloatArray:
        """A layer's seconds by strategy, to be added to those of others."""
        return values.reshape([-1 if v == other else 1 for other in range(len(self.sizes))])

    def _spread_pair(self, a: int, b: int, values: FloatArray) -> FloatArray:
        """The same of two layers, of which `a` comes first."""
        return values.reshape([self.sizes[v] if v in (a, b) else 1 for v in range(len(self.sizes))])
