"""Planning under pins: the problem without what they forbid, update periods, and what every pin costs.

The costs of all candidates are computed once; each question (all pins, one left out, none) is the same problem with
other strategies forbidden.

Pins that say the same are priced together: a layer file pins every layer, and people ask for the price of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parplan.cluster import Cluster
from parplan.errors import InfeasiblePlan, PinError
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import Fold, unit_of
from parplan.lowering.holdings import slices
from parplan.pins import Pin
from parplan.plan import SAVED, STATES, Strategy
from parplan.planner.decision import PinPrice, Pins
from parplan.planner.search_space.any_block import Within
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.infeasible_message import why_not
from parplan.planner.search_space.pin_constraints import Pinned, named, pinned, pinned_blocks
from parplan.planner.search_space.strategies import strategies
from parplan.planner.solver.problem import Problem, Solution

__all__ = [
    "MANY",
    "Answer",
    "PinGroup",
    "Questions",
    "candidates",
    "grouped",
    "masked",
    "no_plan",
    "pin_questions",
    "prices",
]

MANY = 8
"""More pins than this are priced together where they come from one place and spread layers alike."""


@dataclass(frozen=True)
class PinGroup:
    """Pins that are priced together: one, or those of one origin that ask for as many replicas and shards."""

    pins: tuple[Pin, ...]

    def describe(self) -> str:
        """The pin, or what all of them say: `replicas:1 shards:1 gpu:0/1/2/3`."""
        if len(self.pins) == 1:
            return self.pins[0].describe()
        every = [dict(word.split(":", 1) for word in pin.words.split()) for pin in self.pins]
        said = {word: list(dict.fromkeys(own[word] for own in every if word in own)) for one in every for word in one}
        return " ".join(f"{word}:{'/'.join(values)}" for word, values in said.items())

    @property
    def origin(self) -> str:
        """Where they were given; of several, without the place in the file."""
        return self.pins[0].origin if len(self.pins) == 1 else _place(self.pins[0])


def grouped(pins: Sequence[Pin]) -> tuple[PinGroup, ...]:
    """Every pin by itself, or where there are many those of one origin that spread layers alike together."""
    if len(pins) <= MANY:
        return tuple(PinGroup((pin,)) for pin in pins)
    found: dict[Pin, list[Pin]] = {}
    for pin in pins:
        alike = replace(pin, pattern="", devices=None, update_period=None, origin=_place(pin))
        found.setdefault(alike, []).append(pin)
    return tuple(PinGroup(tuple(own)) for own in found.values())


def _place(pin: Pin) -> str:
    return pin.origin.partition(" [")[0]


Solve = Callable[[Problem], Solution]


@dataclass(frozen=True)
class Answer:
    """The step of the fastest plan found, None for no plan, and whether the solver vouches for it."""

    step_s: float | None
    proven: bool

    def or_better(self, other: Answer) -> Answer:
        """This one, or another one that answers the same question better."""
        worse = self.step_s is None or (other.step_s is not None and other.step_s < self.step_s)
        return replace(self, step_s=other.step_s) if worse else self


@dataclass(frozen=True)
class Questions:
    """All that a report on pins has to ask.

    Args:
        whole: under all pins.
        parts: the others without each group.
        refused: groups without which the others cannot be kept, and why.
    """

    whole: Pinned
    groups: tuple[PinGroup, ...]
    parts: Mapping[PinGroup, Pinned]
    refused: Mapping[PinGroup, str]


def pin_questions(pins: Sequence[Pin], graph: LayerGraph, cluster: Cluster, strict: bool = False) -> Questions:
    """Check the pins, together and without each (or each group of many).

    Raises:
        PinError: they cannot be kept (see `pinned`).
    """
    whole = pinned(pins, graph, cluster, strict)
    groups, parts, refused = grouped(pins), dict[PinGroup, Pinned](), dict[PinGroup, str]()
    for group in groups:
        left = [pin for pin in pins if not any(pin is one for one in group.pins)]
        try:
            parts[group] = pinned(left, graph, cluster, strict)
        except PinError as error:
            refused[group] = str(error)
    return Questions(whole, groups, parts, refused)


def candidates(
    questions: Questions,
    graph: LayerGraph,
    cluster: Cluster,
    everywhere: bool,
    uneven: bool = False,
    fold: Fold | None = None,
    states: Collection[str] = STATES[:1],
    saved: Collection[str] = SAVED[:1],
    widest: bool = False,
) -> dict[str, Sequence[Strategy]]:
    """Every strategy that some question allows, per layer, each once; with a fold, of layers that stand for others.

    Args:
        states: of which others than "replicated" count where they change anything; else only where they are pinned.
        saved: of which "replay" counts for layers of units; else only in those of which a layer is pinned so.
        widest: on as many devices as can share a layer, or on one, where no pin says others.
    """
    blocks = pinned_blocks(cluster, questions.whole.pins, everywhere)
    batch = graph.batch or 1
    names = graph.layers if fold is None else dict.fromkeys(fold.kept.values())
    first = {} if fold is None else fold.first
    free: dict[str, Sequence[Strategy]] = {}
    for name in names:
        leader = first.get(name, name)
        known = free.get(leader)
        free[name] = strategies(graph.layers[name], batch, blocks, uneven=uneven) if known is None else known
        most = max(len(one.devices) for one in free[name])
        free[name] = tuple(one for one in free[name] if not widest or len(one.devices) in (1, most))
    every, units = [questions.whole, *questions.parts.values()], unit_of(graph)
    pinned_units = {units[name] for pins in every for name, pin in pins.layers.items() if pin.saved == "replay"}
    found: dict[str, Sequence[Strategy]] = {}
    for name, own in free.items():
        layer, said = graph.layers[name], [pins for pins in every if name in pins.allowed]
        again = name in units and ("replay" in saved or units[name] in pinned_units)
        keeps = SAVED if again else SAVED[:1]
        known = [replace(one, state=state, saved=kept) for state in states for kept in keeps for one in own]
        known += [one for pins in said for one in pins.allowed[name]]
        pinned_state = any(pins.layers[name].state is not None for pins in said)
        found[name] = tuple(
            one for one in dict.fromkeys(known)
            if one.saved in keeps
            and (one.state == "replicated" or pinned_state or (one.state in states and slices(graph, layer, one)))
        )  # fmt: skip
    return found


def masked(formulation: Formulation, pins: Pinned, within: Within = None) -> Problem:
    """The problem without strategies that these pins, or a bound, leave out.

    Args:
        within: keys of strategies that a bound leaves.
    """
    nodes = list(formulation.problem.nodes)
    for index, (name, options) in enumerate(zip(formulation.names, formulation.options, strict=False)):
        if name in pins.allowed or within is not None:
            own = set(pins.allowed[name]) if name in pins.allowed else {option.strategy for option in options}
            worth = within[name] if within is not None else {option.strategy.key for option in options}
            keep = [option.strategy in own and option.strategy.key in worth for option in options]
            nodes[index] = replace(nodes[index], cost_s=np.where(keep, nodes[index].cost_s, np.inf))
    return replace(formulation.problem, nodes=tuple(nodes))


def no_plan(formulation: Formulation, questions: Questions, solution: Solution, solve: Solve) -> InfeasiblePlan:
    """The error for pins that are legal one by one while no plan keeps them together."""
    pins = questions.whole.pins
    periods = sorted(set(questions.whole.periods.values()))
    listed = ", ".join(map(str, periods))
    no_passes = f"no plan has a number of passes that is divisible by the update period {listed} (R8)"
    why = why_not(formulation, solution) if solution.infeasibility or not questions.whole.periods else no_passes
    if solve(masked(formulation, Pinned((), {}, {}))).choice is None:
        return InfeasiblePlan(why_not(formulation, solution))
    parts = questions.parts.items()
    enough = [group for group, left in parts if solve(masked(formulation, left)).choice is not None]
    together = "together " if len(pins) > 1 else ""
    hint = f"leave out {' or '.join(named(group.pins) for group in enough)}" if enough else "loosen several of them"
    return InfeasiblePlan(f"each pin is legal, but no plan keeps {together}{named(pins)}: {why}\n  {hint}")


def prices(questions: Questions, found: Answer, ask: Callable[[Pinned], Answer]) -> Pins:
    """Prices of the pins: each with the others kept, and all of them against the free optimum.

    Args:
        found: the step with all pins.
        ask: the step of the fastest plan under other pins.
    """
    free = ask(Pinned((), {}, {}))
    without = {group: ask(left) for group, left in questions.parts.items()}

    def price(group: PinGroup, left: Answer) -> PinPrice:
        return PinPrice(
            pin=group.describe(),
            origin=group.origin,
            layers=sum(any(pin.matches(name) for pin in group.pins) for name in questions.whole.layers),
            step_s=found.step_s or 0.0,
            without_s=left.step_s,
            proven=found.proven and left.proven,
            why_not=questions.refused.get(group, "no plan is left") if left.step_s is None else "",
            patterns=tuple(pin.pattern for pin in group.pins),
        )

    return Pins(
        step_s=found.step_s or 0.0,
        free_s=free.step_s,
        proven=found.proven and free.proven,
        each=tuple(price(group, without.get(group, Answer(None, False))) for group in questions.groups),
    )
