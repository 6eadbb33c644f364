"""Searches plans whose branches run at the same time on disjoint devices, from the best plan without.

The solver's objective adds layers up as if one ran after another, so it never sees what branches gain side by side.
Here a plan is judged by `step_s`, a predicted step in which every device has its own clock. For every section with
branches (branches.py) the devices are cut into disjoint groups and the branches spread over them (device_groups.py);
the section's layers are then solved again with their candidates restricted to their groups' devices. What is best by
`step_s` is improved by moving one branch, then one layer at a time. Heavy sections come first, and equal ones (the
blocks of a deep network) are decided together. Nothing is proven here; a plan without branches costs nothing.

Which sections are worth placing side by side: what a step could gain at most, so that nothing is tried in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from parplan.plan import Plan, Strategy
from parplan.planner.search.branch_attempts import NEAR, Attempts, Ground, Known, Layers
from parplan.planner.search.branches import Branch, Section, beside, sections
from parplan.planner.search.device_groups import Group, Share, balance, groupings
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.solver.problem import evaluate

__all__ = ["LEAST", "SHARE", "WORTH_IT", "Ground", "Towers", "Worth", "search", "worthwhile"]

WORTH_IT = 0.01
"""Branches run at the same time only where that is faster by more than this, relative."""

LEAST = 0.005
"""Share of the step that a section (or all equal ones together) must be able to gain."""


@dataclass(frozen=True)
class Worth:
    """Equal sections, and the seconds they could gain at most."""

    sections: tuple[Section, ...]
    gain_s: float


def worthwhile(
    sections: Sequence[Section], formulation: Formulation, choice: Sequence[int], devices: int
) -> tuple[Worth, ...]:
    """Sections that could gain enough, those that could gain most first; none where all of them together could not.

    Args:
        choice: the best plan without.
        devices: how many there are.
    """
    times = _Times(formulation, choice, devices)
    alike: dict[tuple[object, ...], list[Section]] = {}
    for section in sections:
        alike.setdefault(times.signature(section), []).append(section)
    worth = [Worth(tuple(own), sum(times.gain_s(one) for one in own)) for own in alike.values()]
    found = [one for one in worth if one.gain_s > LEAST * times.step_s]
    if sum(one.gain_s for one in found) <= WORTH_IT * times.step_s:
        return ()
    return tuple(sorted(found, key=lambda one: -one.gain_s))


class _Times:
    """Seconds per layer: as chosen, and at best."""

    def __init__(self, formulation: Formulation, choice: Sequence[int], devices: int) -> None:
        problem = formulation.problem
        found = evaluate(problem, choice)
        self.step_s = found.objective
        own = [float(node.forward_s[k] + node.backward_s[k]) for node, k in zip(problem.nodes, choice, strict=True)]
        tails = [float(node.reduction_s[k]) for node, k in zip(problem.nodes, choice, strict=True)]
        exposed = found.exposed_s / sum(tails) if sum(tails) > 0 else 0.0
        for edge in problem.edges:
            pair = choice[edge.source], choice[edge.target]
            own[edge.target] += float(edge.forward_s[pair] + edge.backward_s[pair])
        names = formulation.names
        self.now: Mapping[str, float] = {
            name: t + exposed * tail for name, t, tail in zip(names, own, tails, strict=True)
        }
        self.least: dict[str, float] = {}
        self.share: dict[str, float] = {}
        for name, options in zip(names, formulation.options, strict=False):
            compute = np.array([o.cost.forward_s + o.cost.backward_s for o in options])
            counts = np.array([len(o.strategy.devices) for o in options])
            self.least[name] = float(compute.min())
            self.share[name] = float((compute * counts).min()) / devices
        self.kinds = {name: round(float(self.least[name]), 12) for name in self.least}

    def gain_s(self, section: Section) -> float:
        """Now, less what its heaviest branch takes at best, or all of them spread perfectly over all devices."""
        now = sum(self.now[name] for name in section.layers)
        at_best = sum(max(self._total(self.least, branch) for branch in phase) for phase in section.phases)
        return now - max(at_best, self._total(self.share, section.layers))

    def signature(self, section: Section) -> tuple[object, ...]:
        """Equal for sections that look alike."""
        phases = [[[self.kinds[name] for name in branch] for branch in phase] for phase in section.phases]
        return (repr(phases), repr([round(self.now[name], 12) for name in section.layers]), bool(section.inside))

    @staticmethod
    def _total(seconds: Mapping[str, float], branch: Branch) -> float:
        return sum(seconds[name] for name in branch)


SHARE = 0.9
"""Share of the time left that the search may take; what it tries is counted, so nearly all end long before."""

BETTER = 1e-4
HOPELESS = 3
"""Where so many attempts, the most promising first, come no nearer than that, a section is given up."""

SMALL = 60
"""Models whose layers have so many strategies in all at most are searched more thoroughly (see `_Thorough`)."""

MOST_GROUPS = 4

FREED = 3
"""Of so many of the best placements of a section, the layers outside of it are solved for again."""


@dataclass(frozen=True)
class _Thorough:
    """How much is improved: so many of the best attempts, those up to `near` times the best plan, so many tries."""

    starts: int
    near: float
    tries: int
    whole: bool


FULLY, BRIEFLY = _Thorough(3, 1.2, 600, True), _Thorough(1, 1.03, 60, False)


@dataclass(frozen=True)
class Towers:
    """What the search ended with.

    Args:
        plan: the best plan found with branches at the same time; None where none is worth it.
        step_s: its predicted step, or that of the plan it started from.
        without_s: the step of the plan it started from, by the same clock.
        tried: plans whose steps were predicted.
        left: sections (equal ones counted once) that the effort, or the time, did not suffice for.
        seconds: what the search took.
        timed_out: it was the time.
    """

    plan: Plan | None
    step_s: float
    without_s: float
    tried: int = 0
    left: int = 0
    seconds: float = 0.0
    timed_out: bool = False


def search(
    ground: Ground, start: Plan, formulation: Formulation, time_limit_s: float, effort: float = 1.0
) -> Towers | None:
    """The best plan with branches at the same time, if it is faster than `start`; None where nothing is to be tried.

    Args:
        start: the best plan without, one of `formulation`'s; what is found runs in one pass.
        formulation: prices of all layers' strategies.
        effort: part of the usual number of tries.
    """
    found = sections(ground.graph) if ground.cluster.count > 1 else ()
    choice = formulation.choice(start.layers) if found else ()
    worth = worthwhile(found, formulation, choice, ground.cluster.count) if found else ()
    if not worth:
        return None
    usual = FULLY if sum(map(len, formulation.options)) <= SMALL else BRIEFLY
    searching = _Search(ground, start, time_limit_s, found, usual)
    searching.most_tried = int(effort * searching.most_tried)
    return searching.run(worth, effort)


class _Search(Attempts):
    """Sections one after another, then improvements of what came out."""

    def __init__(
        self, ground: Ground, start: Plan, time_limit_s: float, found: Sequence[Section], effort: _Thorough
    ) -> None:
        super().__init__(ground, start, time_limit_s)
        self.sections, self.effort = found, effort

    def run(self, worth: Sequence[Worth], effort: float = 1.0) -> Towers:
        """Try every section, then improve what came out."""
        without, left = self.best, len(worth)
        self.without_s = min(self.without_s, without.step_s)
        for one in worth:
            if self.spent():
                break
            found = self.section(one.sections)
            left -= 1
            if found is not None and found.step_s < self.best.step_s * (1 - BETTER):
                self.best = found
        self.most_tried = self.tried + int(effort * self.effort.tries)
        for start in self.starts(without):
            self.best = min(self.best, self.improve(start), key=lambda one: one.step_s)
        return self.outcome(left)

    def starts(self, without: Known) -> list[Known]:
        """What to improve: the best attempts, and for a small model also the plan without."""
        every = sorted([self.best, *self.attempts], key=lambda one: one.step_s)
        distinct = list({tuple(one.layers.values()): one for one in reversed(every)}.values())[::-1]
        near = [one for one in distinct if one.groups and one.step_s < self.effort.near * self.best.step_s]
        return [*near[: self.effort.starts], *([without] if self.effort.whole else [])]

    def outcome(self, left: int) -> Towers:
        """The best plan, if its branches do run at the same time and that is worth it."""
        best = self.best
        devices = {name: strategy.devices for name, strategy in best.layers.items()}
        worth = best.step_s < (1 - WORTH_IT) * self.without_s and bool(beside(self.graph, devices))
        plan = replace(self.start, layers=dict(best.layers)) if worth else None
        step_s = best.step_s if worth else self.without_s
        seconds = self.elapsed_s()
        return Towers(plan, step_s, self.without_s, self.tried, left, seconds, self.out_of_time())

    # -- one section, or several alike --

    def section(self, alike: Sequence[Section]) -> Known | None:
        """The best way found to place the branches of equal sections."""
        found: Known | None = None
        attempts: list[Known] = []
        devices = self.devices_of(alike[0])
        for count in range(2, min(alike[0].width, len(devices), MOST_GROUPS) + 1):
            for number, bound in enumerate(self.assignments(alike, devices, count)):
                hopeless = number >= HOPELESS and (found is None or found.step_s > NEAR * self.best.step_s)
                if hopeless or self.spent():
                    return found
                tried = self.attempt({**self.best.groups, **bound})
                attempts += [tried] if tried is not None else []
                if tried is not None and (found is None or tried.step_s < found.step_s):
                    found = tried
            if found is None or found.step_s > NEAR * self.best.step_s:
                return found
        for tried in sorted(attempts, key=lambda one: one.step_s)[:FREED]:
            freed = self.attempt(tried.groups, free=True) if not self.spent() else None
            if freed is not None and found is not None and freed.step_s < found.step_s:
                found = freed
        return found

    def assignments(self, alike: Sequence[Section], devices: Group, count: int) -> Iterator[dict[str, Group]]:
        """Groups of devices for the layers of all branches, in `count` groups."""
        works = max(([self.work_of(branch) for branch in phase] for phase in alike[0].phases), key=sum)
        seen = set()
        for groups in groupings(self.cluster, devices, count, works):
            for backwards in (False, True):
                bound: dict[str, Group] = {}
                for one in alike:
                    bound.update(self.spread(one, groups, backwards))
                key = tuple(bound.values())
                if key not in seen:
                    seen.add(key)
                    yield bound

    def devices_of(self, section: Section) -> Group:
        """All devices, or those of the branch that a section lies in."""
        bound = {self.best.groups.get(name) for name in section.inside} - {None}
        inner = {number for group in bound if group is not None for number in group}
        return tuple(sorted(inner)) if inner else tuple(range(self.cluster.count))

    def spread(self, section: Section, groups: Sequence[Group], backwards: bool) -> dict[str, Group]:
        """The group of every layer: branches evenly over the groups, phase by phase, near what they read."""
        bound: dict[str, Group] = {}
        speeds = [sum(1 / self.unit_s(number) for number in group) * self.unit_s(groups[0][0]) for group in groups]
        for phase in section.phases:
            shares = [Share(self.work_of(branch), self.inbound(branch, groups, bound)) for branch in phase]
            for branch, chosen in zip(phase, balance(shares, speeds, backwards), strict=True):
                bound.update(dict.fromkeys(branch, groups[chosen]))
        return bound

    def inbound(self, branch: Branch, groups: Sequence[Group], bound: Mapping[str, Group]) -> dict[int, float]:
        """Seconds that a branch's inputs from the phase before take to each group."""
        found = dict.fromkeys(range(len(groups)), 0.0)
        for name in branch:
            layer = self.graph.layers[name]
            for value in layer.inputs:
                made = bound.get(self.graph.producer.get(value, ""))
                for index, group in enumerate(groups):
                    if made is not None and made != group:
                        found[index] += self.moved_s(value, made[0], group[0])
        return found

    def moved_s(self, value: str, source: int, target: int) -> float:
        """Seconds to bring a value from one device to another, and its gradient back."""
        whole = [Strategy(devices=(number,)) for number in (source, target)]
        layer = self.graph.layers[self.graph.producer[value]]
        moved = self.costs.transfer(self.graph.values[value], *(layer.layout(value, own) for own in whole))
        return moved.forward_s + moved.backward_s

    # -- improving --

    def improve(self, known: Known) -> Known:
        """Move one branch, one layer, or (in a small model) two layers in a row, until nothing helps."""
        before = float("inf")
        while known.step_s < before * (1 - BETTER) and not self.spent():
            before = known.step_s
            known = self.move_layers(self.move_branches(known))
            if self.effort.whole and known.step_s >= before * (1 - BETTER):
                known = self.move_pairs(known)
        return known

    def move_branches(self, known: Known) -> Known:
        """Other groups for one branch at a time."""
        for branch in self.bound_branches(known):
            for block in self.blocks:
                if self.spent():
                    return known
                if block != known.groups[branch[0]]:
                    tried = self.attempt({**known.groups, **dict.fromkeys(branch, block)}, known=known)
                    known = tried if tried is not None and tried.step_s < known.step_s * (1 - BETTER) else known
        return known

    def bound_branches(self, known: Known) -> list[Branch]:
        """Branches whose layers are all bound to one group, the heaviest first."""
        branches = [branch for section in self.sections for phase in section.phases for branch in phase]
        whole = [b for b in branches if len({known.groups.get(name) for name in b}) == 1 and b[0] in known.groups]
        return sorted(whole, key=lambda branch: -self.work_of(branch))

    def move_layers(self, known: Known) -> Known:
        """Another strategy for one layer at a time, the heaviest first."""
        for name in sorted(self.graph.layers, key=lambda name: -self.work(name)):
            for strategy in self.anywhere(name):
                if self.spent():
                    return known
                known = self.moved(known, {name: strategy})
        return known

    def move_pairs(self, known: Known) -> Known:
        """Other strategies for a layer and one that reads it."""
        for source, target in self.graph.digraph.edges:
            for one, other in product(self.anywhere(source), self.anywhere(target)):
                if self.spent():
                    return known
                known = self.moved(known, {source: one, target: other})
        return known

    def moved(self, known: Known, change: Layers) -> Known:
        """The plan with other strategies for some layers, if that is faster and fits."""
        layers = {**known.layers, **change}
        step_s = self.price(layers)
        better = step_s < known.step_s * (1 - BETTER) and self.fits(layers)
        return replace(known, layers=layers, step_s=step_s) if better else known
