"""Simpler plans within a tolerance of the fastest: a plan by hand, or the one with the fewest changes of layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decision import Baseline, Proof
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.solver.problem import Problem, Solution, objective

__all__ = ["Candidate", "Found", "differences", "plan_by_hand", "simplest"]

LEAST_GAIN = 1e-4
"""Part of a step by which a simpler plan has to be better at the prices of its changes to be looked for."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan as a choice of its shape's problem: seconds of its step, and its T."""

    step_s: float
    objective_s: float
    plan: Plan
    formulation: Formulation
    choice: tuple[int, ...]

    @property
    def changes(self) -> int:
        """Edges between layers on which the layout changes."""
        edges = self.formulation.layout_changes
        return int(sum(edge.cost_s[self.choice[edge.source], self.choice[edge.target]] for edge in edges))


@dataclass(frozen=True)
class Found:
    """The fastest plan of all shapes with its proof.

    Args:
        formulation: the problem of the plan's shape; `choice` is the plan in it.
        tried: shapes with branches at the same time that were solved or refuted.
        without_s: T of the best plan in which no branches run at the same time; None where none were tried.
        fastest: the fastest plan, where `plan` is a simpler one.
    """

    plan: Plan
    formulation: Formulation
    choice: tuple[int, ...]
    proof: Proof
    tried: int = 0
    without_s: float | None = None
    fastest: Plan | None = None


def plan_by_hand(by_hand: Sequence[Baseline], fastest_s: float, tolerance: float) -> Baseline | None:
    """The simplest plan by hand within a tolerance of the fastest of all; None where there is none.

    Args:
        by_hand: the simplest first.
        fastest_s: seconds of the fastest plan that was found.
        tolerance: share of the fastest step.
    """
    known = [(one, one.whole_s) for one in by_hand if one.fits and one.whole_s is not None]
    least_s = min([fastest_s, *(step_s for _, step_s in known)])
    return next((one for one, step_s in known if step_s <= (1 + tolerance) * least_s), None)


def differences(plan: Plan, other: Plan, graph: LayerGraph) -> str:
    """Words for the strategies of `plan` where those of `other` differ, of layers with weights: `8 shards of wte`."""
    ways: dict[str, list[str]] = {}
    for name, own in plan.layers.items():
        if graph.layers[name].parameters and own != other.layers[name]:
            ways.setdefault(own.ways, []).append(name)
    if not ways:
        return ""

    def elements(names: Iterable[str]) -> int:
        return sum(graph.values[own].elements for name in names for own in graph.layers[name].parameters)

    way, names = max(ways.items(), key=lambda item: elements(item[1]))  # the weights are what is placed otherwise
    where = f"{names[0]} .. {names[-1]} ({len(names)} layers)" if len(names) > 2 else " and ".join(names)
    return f"{way} of {where}" if way != "one device" else f"{where} on one device"


def simplest(
    candidates: Sequence[Candidate],
    most_s: float,
    problem_of: Callable[[Formulation], Problem],
    solve: Callable[[Problem, Sequence[int], float], Solution],
    candidate_of: Callable[[Formulation, Sequence[int], float], Candidate | None],
) -> Candidate:
    """The candidate of at most `most_s` seconds with the fewest changes of layout; of equal ones the fastest.

    Each is solved again with a price on every change of layout, so that all it has cost what may be given up: its own
    choice is one of that problem's, so the solution takes at most `most_s`. Again, while changes become fewer.

    Args:
        problem_of: the problem of a formulation under the pins that are asked for.
        solve: a solution, from a choice to start with; what is better by less than a part of it is not looked for.
        candidate_of: a choice with its T as a candidate; None where it does not fit.
    """
    found = []
    for one in (candidate for candidate in candidates if candidate.step_s <= most_s):
        best = one
        while best.changes > 0:
            problem = problem_of(best.formulation)
            most_objective_s = best.objective_s + most_s - best.step_s
            price = (most_s - best.step_s) / best.changes
            priced = (replace(edge, cost_s=price * edge.cost_s) for edge in best.formulation.layout_changes)
            # One change less is looked for, not a proof: half its price decides.
            half = max(0.5 * price / best.objective_s, LEAST_GAIN)
            choice = solve(replace(problem, edges=(*problem.edges, *priced)), best.choice, half).choice
            own_s = objective(problem, choice) if choice is not None else np.inf
            good = choice is not None and own_s <= most_objective_s
            other = candidate_of(best.formulation, choice, own_s) if choice is not None and good else None
            if other is None or other.step_s > most_s or other.changes >= best.changes:
                break
            best = other
        found.append(best)
    return min(found, key=lambda one: (one.changes, one.step_s))
