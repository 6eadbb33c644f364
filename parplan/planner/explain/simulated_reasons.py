"""The reason for every layer's strategy in a plan with passes or concurrent branches, by simulated steps.

The objective's prices are of plans in one pass and would mislead. So plans with another strategy for one layer are
simulated, those first that the objective likes best: several for layers behind the boundary, then one for those in
front, within a fixed effort.
"""

from __future__ import annotations

from collections.abc import Collection

from parplan.planner.explain.reasons import against, alternatives, followed, only_way, time_text
from parplan.planner.explain.what_if import Change, WhatIf
from parplan.planner.search.context import Case
from parplan.planner.search.refine import behind, feasible, with_layer
from parplan.planner.search.schemes import under
from parplan.planner.search.select import Taken, choice_of
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.simulation.simulator import Effort

__all__ = ["simulated_reasons"]

BEHIND, IN_FRONT = 4, 1
"""How many other strategies of a layer behind the boundary, and in front of it, are simulated."""

NOT_SIMULATED = "its other ways were not simulated"
NO_OTHER = "no other way that was tried is legal here and fits"


def simulated_reasons(
    case: Case, taken: Taken, pinned: Pinned, effort: Effort, known: Collection[str]
) -> dict[str, str]:
    """A reason per layer, but for layers with a `known` one; those behind the boundary first, then those with weights.

    Args:
        effort: for all simulations together.
    """
    formulation, plan, layers = taken.formulation, taken.plan, case.graph.layers
    choice, now = choice_of(formulation, plan), case.player.simulated(plan)
    what_if = WhatIf(formulation.problem, choice)
    index_of = {name: index for index, name in enumerate(formulation.names)}

    def simulated(index: int, strategy: int) -> Change | None:
        """The change of the step by another strategy; None where it is not legal, does not fit, or effort is spent."""
        other_choice = (*choice[:index], strategy, *choice[index + 1 :])
        other = under(with_layer(plan, formulation, other_choice), case.graph, plan.scheme)
        found = case.within(other, effort) if other is not None else None
        if other is None or found is None:
            return None
        change = Change(
            strategy,
            found.compute_s - now.compute_s,
            found.transfer_s - now.transfer_s,
            found.exposed_s - now.exposed_s,
        )
        return change if change.total_s > 0 or feasible(case, formulation, other_choice, other) else None

    def reason(name: str, most: int) -> str:
        index = index_of[name]
        options = formulation.options[index]
        ways = alternatives(what_if, index, options, options[choice[index]])
        if not ways:
            return only_way(layers[name])
        changes = [change for way in ways[:most] if (change := simulated(index, way.strategy)) is not None]
        source = followed(case.graph, plan, name)
        if not changes:
            unknown = f"follows {source}" if source else NOT_SIMULATED
            return unknown if case.spent(effort) else NO_OTHER
        best = min(changes, key=lambda change: (change.total_s, change.strategy))
        if source and best.total_s > 0 and len(changes) == len(ways):
            return f"follows {source}; any other way costs {time_text(best.total_s)}"
        text = against(options[best.strategy].strategy.describe(), best)
        if best.total_s >= -5e-8:
            return text
        if case.request.plan is not None:
            return f"{text}; the plan is as given"
        return f"{text}; it is pinned" if name in pinned.allowed else f"{text}; it was not among the plans tried"

    first = behind(case, plan)
    others = [name for name in layers if name not in first]
    names = [*first, *sorted(others, key=lambda name: not layers[name].parameters)]
    return {name: reason(name, BEHIND if name in first else IN_FRONT) for name in names if name not in known}
