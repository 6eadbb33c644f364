"""Which sections are worth placing side by side: what a step could gain at most, so that nothing is tried in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parplan.planner.formulate import Formulation
from parplan.planner.problem import evaluate
from parplan.planner.sections import Branch, Section

__all__ = ["LEAST", "WORTH_IT", "Worth", "worthwhile"]

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
        own = [float(node.ahead[k] + node.back[k]) for node, k in zip(problem.nodes, choice, strict=True)]
        tails = [float(node.tail[k]) for node, k in zip(problem.nodes, choice, strict=True)]
        exposed = found.exposed / sum(tails) if sum(tails) > 0 else 0.0
        for edge in problem.edges:
            pair = choice[edge.source], choice[edge.target]
            own[edge.target] += float(edge.ahead[pair] + edge.back[pair])
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
