"""Improves a plan on the clock: other strategies for the layers behind a boundary of passes, while that is faster.

The solver knows plans in one pass, so what it gives for passes is a start. Here one layer at a time, alone or with the
layers without weights that follow it, tries the strategies that the objective likes best where boundaries are hidden,
and what the clock says is faster is kept. The effort is counted, not timed: the same plan comes out on any machine.

`hidden` is the relaxation in which passes hide most of a transfer from many replicas to few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parplan.lowering.stages import Stage, stages
from parplan.plan import Plan
from parplan.planner.search.context import Case, fits, plain
from parplan.planner.search.schemes import needs_clock, under, updates_lost
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.simulation.simulator import Effort
from parplan.planner.solver.problem import Edge, Problem, evaluate, objective

__all__ = ["behind", "feasible", "hidden_boundaries", "polished", "with_layer"]


def hidden_boundaries(formulation: Formulation) -> Problem | None:
    """The problem where samples that go from many replicas to few cost their first pass only; None if nothing changes.

    What is optimal here is a plan to try: the rest may turn out not to be hidden.
    """
    counts = [np.array([option.strategy.replicas for option in own]) for own in formulation.options]
    edges = tuple(_hidden(edge, counts) for edge in formulation.problem.edges)
    if all(one is other for one, other in zip(edges, formulation.problem.edges, strict=True)):
        return None
    return replace(formulation.problem, edges=edges)


def _hidden(edge: Edge, counts: Sequence[NDArray[np.int64]]) -> Edge:
    if edge.target >= len(counts):
        return edge
    many, few = counts[edge.source][:, None], counts[edge.target][None, :]
    share = np.where((many > few) & (many % few == 0), few / many, 1.0)
    if (share == 1).all() or not (np.isfinite(edge.forward_s) & (edge.forward_s > 0) & (share < 1)).any():
        return edge
    return Edge(edge.source, edge.target, share * edge.forward_s, share * edge.backward_s)


TRIES = 6
"""Changes of one layer that are played through, the most promising first."""

ROUNDS = 4
BETTER = 1e-6

Choice = tuple[int, ...]


def polished(case: Case, formulation: Formulation, plan: Plan, pinned: Pinned, effort: Effort) -> Plan:
    """The plan with layers changed as long as that is faster, fits, keeps the pins and the rules.

    A plan whose layers all run once, one after another, is left as it is: the objective is exact there.
    """
    if not needs_clock(plan, case.graph):
        return plan
    return _Polish(case, formulation, pinned, effort).run(plan)


def behind(case: Case, plan: Plan) -> list[str]:
    """The layers behind the boundary, where there are passes; else all. Those with weights come first."""
    of = stages(case.graph, plan.layers, plan.scheme).of
    names = [name for name, stage in of.items() if stage is not Stage.BEFORE] or list(of)
    return sorted(names, key=lambda name: not case.graph.layers[name].parameters)


def with_layer(plan: Plan, formulation: Formulation, choice: Choice) -> Plan:
    """The plan as another choice has it; update periods stay."""
    chosen = formulation.strategies(choice)
    layers = {name: replace(own, update_period=plan.layers[name].update_period) for name, own in chosen.items()}
    return replace(plan, layers=layers)


def feasible(case: Case, formulation: Formulation, choice: Choice, plan: Plan) -> bool:
    """Whether a choice, which is this plan, keeps the rules asked for and fits with its transfers."""
    return evaluate(formulation.problem, choice).feasible and fits(case.graph, case.cluster, case.costs, plain(plan))


@dataclass(frozen=True)
class _Known:
    plan: Plan
    choice: Choice
    step_s: float


class _Polish:
    def __init__(self, case: Case, formulation: Formulation, pinned: Pinned, effort: Effort) -> None:
        self.case, self.formulation, self.pinned, self.effort = case, formulation, pinned, effort
        self.hidden = hidden_boundaries(formulation) or formulation.problem
        self.index = {name: index for index, name in enumerate(formulation.names)}
        self.edges = {(edge.source, edge.target): edge for edge in formulation.problem.edges}

    def run(self, plan: Plan) -> Plan:
        """Rounds over all layers until none helps or the effort is spent."""
        known = _Known(plan, self.formulation.choice(plain(plan)), self.case.player.step_s(plan))
        for _ in range(ROUNDS):
            before = known.step_s
            for name in behind(self.case, known.plan):
                if self.case.spent(self.effort):  # ranking a layer's changes takes time, too
                    return known.plan
                known = self.layer(known, name)
            if known.step_s >= before * (1 - BETTER):
                break
        return known.plan

    def layer(self, known: _Known, name: str) -> _Known:
        """The best of one layer's changes."""
        best = known
        for choice in self.changes(known.choice, name):
            plan = under(with_layer(known.plan, self.formulation, choice), self.case.graph, known.plan.scheme)
            if plan is None or updates_lost(plan, self.case.graph, self.pinned):
                continue
            played = self.case.within(plan, self.effort)
            if played is None:
                break
            if played.step_s < best.step_s * (1 - BETTER) and feasible(self.case, self.formulation, choice, plan):
                best = _Known(plan, choice, played.step_s)
        return best

    def changes(self, choice: Choice, name: str) -> list[Choice]:
        """Other strategies of a layer, of it and its followers, or of these alone, the most promising first."""
        index = self.index[name]
        followers = list(self.followers(index))
        found: dict[Choice, float] = {}
        for k in self.allowed(index):
            alone = (*choice[:index], k, *choice[index + 1 :])
            for one in (alone, self.followed(alone, index, followers)):
                found.setdefault(one, objective(self.hidden, one))
        found.pop(choice, None)
        return sorted((one for one in found if found[one] < float("inf")), key=lambda one: found[one])[:TRIES]

    def allowed(self, index: int) -> Sequence[int]:
        """Strategies that the rules asked for and the pins leave a layer."""
        only = self.pinned.allowed.get(self.formulation.names[index])
        options, node = self.formulation.options[index], self.formulation.problem.nodes[index]
        return [k for k, o in enumerate(options) if node.allowed[k] and (only is None or o.strategy in only)]

    def followers(self, index: int) -> Iterator[int]:
        """Layers without weights that read what this one makes, what the first such makes, and so on."""
        graph, last = self.case.graph, index
        for (source, target), _ in sorted(self.edges.items(), key=lambda pair: pair[0]):
            if source == last and graph.digraph.has_edge(*map(self.formulation.names.__getitem__, (source, target))):
                if graph.layers[self.formulation.names[target]].parameters:
                    return
                yield target
                last = target

    def followed(self, choice: Choice, index: int, followers: Sequence[int]) -> Choice:
        """The choice with followers spread as the layer in front of each, where they can be."""
        found, front = list(choice), index
        for one in followers:
            shape, moved = self.shape(front, found[front]), self.moved_s(front, found[front], one)
            same = [k for k in self.allowed(one) if self.shape(one, k) == shape]
            found[one] = min(same, key=moved.__getitem__, default=found[one])
            front = one
        return tuple(found)

    def moved_s(self, front: int, k: int, target: int) -> list[float]:
        """Seconds to bring what `front` makes to each strategy of a layer that reads it."""
        edge = self.edges[front, target]
        return [float(value) for value in edge.forward_s[k] + edge.backward_s[k]]

    def shape(self, index: int, k: int) -> tuple[int, int, tuple[int, ...]]:
        """How a layer is spread, whichever axis is cut."""
        own = self.formulation.options[index][k].strategy
        return own.replicas, own.shards, own.devices
