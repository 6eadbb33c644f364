"""Why each layer of a plan in passes, or side by side, is placed as it is: its other ways on the plan's own clock.

The objective's prices are of plans in one pass and would mislead. So other strategies are played through, everything
else as it is, those that the objective likes best: several for layers behind the boundary, then one for those in
front, as far as a fixed effort goes.
"""

from __future__ import annotations

from collections.abc import Collection

from parplan.planner.explain.layer_facts import followed
from parplan.planner.explain.reasons import against, only_way, time_text
from parplan.planner.explain.what_if import Change, WhatIf
from parplan.planner.search.context import Case
from parplan.planner.search.refine import behind, feasible, with_layer
from parplan.planner.search.schemes import under
from parplan.planner.search.select import Taken, choice_of
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.simulation.simulator import Effort, SimulatedStep

__all__ = ["reasons_on_the_clock"]

BEHIND, IN_FRONT = 4, 1
NOT_PLAYED = "its other ways were not played through"
NO_OTHER = "no other way that was tried is legal here and fits"


def reasons_on_the_clock(
    case: Case, taken: Taken, pinned: Pinned, effort: Effort, said: Collection[str]
) -> dict[str, str]:
    """A reason per layer; none for the layers of which something else is `said` already."""
    return _Reasons(case, taken, pinned, effort).all(said)


class _Reasons:
    def __init__(self, case: Case, taken: Taken, pinned: Pinned, effort: Effort) -> None:
        self.case, self.taken, self.pinned, self.effort = case, taken, pinned, effort
        self.choice = choice_of(taken.formulation, taken.plan)
        self.now = case.player.simulated(taken.plan)
        self.what_if = WhatIf(taken.formulation.problem, self.choice)
        self.index = {name: index for index, name in enumerate(taken.formulation.names)}

    def all(self, said: Collection[str]) -> dict[str, str]:
        """Layers behind the boundary first, and of either those with weights."""
        layers, first = self.case.graph.layers, behind(self.case, self.taken.plan)
        others = [name for name in layers if name not in first]
        names = [*first, *sorted(others, key=lambda name: not layers[name].parameters)]
        return {name: self.reason(name, BEHIND if name in first else IN_FRONT) for name in names if name not in said}

    def reason(self, name: str, most: int) -> str:
        """One layer's, from so many of its other ways at most."""
        layer, index = self.case.graph.layers[name], self.index[name]
        options = self.taken.formulation.options[index]
        own = options[self.choice[index]].strategy.describe()
        ways = [one for one in self.what_if.changes(index) if options[one.strategy].strategy.describe() != own]
        if not ways:
            return only_way(layer)
        played = [change for one in ways[:most] if (change := self.played(index, one.strategy)) is not None]
        source = followed(self.case.graph, self.taken.plan, name)
        if not played:
            not_played = f"follows {source}" if source else NOT_PLAYED
            return not_played if self.case.spent(self.effort) else NO_OTHER
        best = min(played, key=lambda change: (change.total_s, change.strategy))
        if source and best.total_s > 0 and len(played) == len(ways):
            return f"follows {source}; any other way costs {time_text(best.total_s)}"
        text = against(options[best.strategy].strategy.describe(), best)
        return f"{text}{self.taken_anyway(name)}" if best.total_s < -5e-8 else text

    def taken_anyway(self, name: str) -> str:
        """Why a faster way is not the plan's."""
        if self.case.request.plan is not None:
            return "; the plan is as given"
        return "; it is pinned" if name in self.pinned.allowed else "; it was not among the plans tried"

    def played(self, index: int, strategy: int) -> Change | None:
        """What another strategy does to the step; None where it is not legal, does not fit, or no effort is left."""
        choice = (*self.choice[:index], strategy, *self.choice[index + 1 :])
        formulation, plan = self.taken.formulation, self.taken.plan
        other = under(with_layer(plan, formulation, choice), self.case.graph, plan.scheme)
        found = self.case.within(other, self.effort) if other is not None else None
        if other is None or found is None:
            return None
        change = _change(strategy, self.now, found)
        return change if change.total_s > 0 or feasible(self.case, formulation, choice, other) else None


def _change(strategy: int, now: SimulatedStep, other: SimulatedStep) -> Change:
    compute_s = other.compute_s - now.compute_s
    return Change(strategy, compute_s, other.transfer_s - now.transfer_s, other.exposed_s - now.exposed_s)
