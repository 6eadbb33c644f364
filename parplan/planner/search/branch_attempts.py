"""Plans whose branches are bound to groups of devices, tried one after another: what a search for towers is made of.

The layers of bound branches are solved again with their candidates restricted to their groups' devices, which is cheap:
the others have one candidate each. What comes out is judged by `step_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic as now_s

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.search.branches import Branch
from parplan.planner.search.context import fits
from parplan.planner.search.device_groups import Group, blocks_of
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.simulation.simulator import Layers
from parplan.planner.solver.local_search import descend, first_choice
from parplan.planner.solver.problem import Problem
from parplan.planner.solver.relaxation import relax

__all__ = ["NEAR", "Attempts", "Ground", "Known", "Layers", "StepTime"]

StepTime = Callable[[Plan], float]
"""The predicted seconds of a step of a plan."""

NEAR = 1.2
"""Attempts up to this much slower than the best plan are worth going on with."""

EFFORT, LEAST = 6000, 12
"""Layers of all plans that are tried before improving, and the fewest plans: so what is found does not depend on how
fast a machine is, unless its time ends first."""


@dataclass(frozen=True, eq=False)
class Ground:
    """The model, the devices and their costs, and the clock that plans are judged by."""

    graph: LayerGraph
    cluster: Cluster
    costs: CostModel
    step_s: StepTime


@dataclass(frozen=True)
class Known:
    """A plan's layers with the step they take, and the groups that branches are bound to."""

    layers: Layers
    step_s: float
    groups: Mapping[str, Group]


class Attempts:
    """Tries plans and remembers them: the best so far and the time left.

    Args:
        start: the best plan without branches at the same time; attempts run in one pass.
        time_limit_s: for all attempts together, a stop for slow machines.
    """

    def __init__(self, ground: Ground, start: Plan, time_limit_s: float) -> None:
        self.graph, self.cluster, self.costs = ground.graph, ground.cluster, ground.costs
        self.step_s = ground.step_s
        self.start = replace(start, scheme=Scheme.GATHER)
        self.without_s = ground.step_s(start)
        self.began = now_s()
        self.deadline = self.began + time_limit_s
        self.tried = 0
        self.works: dict[int, float] = {}
        self.choices: dict[tuple[str, Group], tuple[Strategy, ...]] = {}
        self.seen: dict[tuple[Strategy, ...], float] = {}
        self.attempts: list[Known] = []
        self.blocks = cluster_blocks(ground.cluster, everywhere=True)
        self.every: dict[str, tuple[Strategy, ...]] = {}
        self.most_tried = max(LEAST, EFFORT // max(1, len(ground.graph.layers)))
        self.best = Known(start.layers, self.price(start.layers), {})

    def spent(self) -> bool:
        """Whether the search has to end."""
        return self.out_of_time() or self.tried >= self.most_tried

    def out_of_time(self) -> bool:
        """Whether there is no time left, whatever was tried."""
        return now_s() > self.deadline

    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return now_s() - self.began

    def price(self, layers: Layers) -> float:
        """The step of a plan with these layers."""
        key = tuple(layers[name] for name in self.graph.layers)
        if key not in self.seen:
            self.tried += 1
            self.seen[key] = self.step_s(replace(self.start, layers=dict(layers)))
        return self.seen[key]

    def fits(self, layers: Layers) -> bool:
        """Whether every device's memory suffices."""
        return fits(self.graph, self.cluster, self.costs, layers)

    def work_of(self, branch: Branch) -> float:
        """Seconds of a branch on the first device."""
        return sum(self.work(name) for name in branch)

    def work(self, name: str, device: int = 0) -> float:
        """Seconds of a layer on one device."""
        cost = self.costs.layer(self.graph.layers[name], Strategy(devices=(device,)))
        return cost.forward_s + cost.backward_s

    def unit_s(self, device: int) -> float:
        """Seconds of all layers on one device, which tells kinds of devices apart."""
        kind = next(group.members[0] for group in self.cluster.groups if device in group.members)
        if kind not in self.works:
            self.works[kind] = sum(self.work(name, kind) for name in self.graph.layers) or 1.0
        return self.works[kind]

    def anywhere(self, name: str) -> tuple[Strategy, ...]:
        """All strategies of a layer, on any block of devices."""
        if name not in self.every:
            self.every[name] = strategies(self.graph.layers[name], self.graph.batch or 1, self.blocks)
        return self.every[name]

    def attempt(self, groups: Mapping[str, Group], free: bool = False, known: Known | None = None) -> Known | None:
        """The best plan whose bound layers stay in their groups; the others are as in `known`, or `free`."""
        layers = (known or self.best).layers
        candidates = {name: self.candidates(name, groups, free, layers) for name in self.graph.layers}
        formulation = formulate(self.graph, self.cluster, self.costs, candidates, share=False)
        found: Known | None = None
        for choice in _choices(formulation.problem, self.deadline):
            layers = formulation.strategies(choice)
            step_s = self.price(layers)
            # Whether a plan fits takes long to say, and slow ones are not taken anyway.
            better = found is None or step_s < found.step_s
            if better and (step_s > NEAR * self.best.step_s or self.fits(layers)):
                found = Known(layers, step_s, groups)
        self.attempts += [found] if found is not None else []
        return found

    def candidates(self, name: str, groups: Mapping[str, Group], free: bool, layers: Layers) -> tuple[Strategy, ...]:
        """What a layer may choose from."""
        if name in groups:
            return self.within(name, groups[name])
        own = layers[name]
        if not free:
            return (own,)
        every = strategies(self.graph.layers[name], self.graph.batch or 1, cluster_blocks(self.cluster))
        return every if own in every else (*every, own)

    def within(self, name: str, group: Group) -> tuple[Strategy, ...]:
        """A layer's strategies on the devices of a group."""
        if (name, group) not in self.choices:
            blocks = blocks_of(self.cluster, group)
            self.choices[name, group] = strategies(self.graph.layers[name], self.graph.batch or 1, blocks)
        return self.choices[name, group]


def _choices(problem: Problem, deadline: float) -> list[list[int]]:
    """Good choices of a problem: gradient sums free (as if hidden) and in full, each improved one node at a time."""
    found: list[list[int]] = []
    for weight in (0.0, 1.0):
        nodes = tuple(replace(node, forward_s=node.forward_s + weight * node.reduction_s) for node in problem.nodes)
        relaxed = relax(replace(problem, nodes=nodes), [])
        first = relaxed.at(relaxed.start()).choice if relaxed is not None else first_choice(problem)
        choice = descend(problem, first, deadline)
        if choice not in found:
            found.append(choice)
    return found
