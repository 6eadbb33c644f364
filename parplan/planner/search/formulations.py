"""The problems of a case, every shape of plan formulated once with all strategies that some question allows; bounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from parplan.cost_models.costs import Moments, charges
from parplan.pins import Pin
from parplan.plan import Strategy
from parplan.planner.search.context import Case, far_s, followed, plain
from parplan.planner.search_space.any_block import Within
from parplan.planner.search_space.formulation import Formulation, InfeasibleShape, formulate
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import Questions, candidates, masked
from parplan.planner.search_space.shape import Shape
from parplan.planner.solver.problem import Status
from parplan.planner.solver.solve import solve

__all__ = ["Bound", "Formulations", "OutOfTime"]

FREE = Pinned((), {}, {})


class OutOfTime(Exception):
    """The time limit ended the formulation of a shape."""


@dataclass(frozen=True)
class Bound:
    """The bound of all plans that one shape stands for.

    Args:
        asked_s: seconds that a plan had to stay below when it was sought.
        least_s: none takes less.
        within: keys of strategies that a plan below `asked_s` may have; all if None.
    """

    asked_s: float = inf
    least_s: float = 0.0
    within: Within = None


class Formulations:
    """The shapes of one case, each formulated once for all questions about pins.

    Attributes:
        postponed: whether the last search left layers on any block for later.
        bound_s: T of no plan that fits is less, of those that it did not.
    """

    def __init__(self, case: Case, asked: Questions) -> None:
        self.case, self.asked = case, asked
        self.costs_s = self.bound_s = 0.0
        self.postponed = False
        known = self._candidates(False, case.uneven)
        given = [own.devices for own in case.request.plan.layers.values()] if case.request.plan is not None else []
        blocks = (one.devices for own in known.values() for one in own)
        self.lanes = followed(case.cluster, (*blocks, *given))
        self._formulations: dict[tuple[Shape, float, tuple[Pin, ...]], Formulation | None] = {}

    def one_pass(self) -> Formulation:
        """The problem of plans in one pass on the first devices."""
        found = self.formulation(Shape(lanes=self.lanes, uneven=self.case.uneven))
        assert found is not None  # every layer has a strategy: whole, on one device
        return found

    def least_s(self) -> float:
        """T of no plan that fits is less, by the last search."""
        return min(self.bound_s, self.least_work_s()) if self.postponed else self.bound_s

    def least_work_s(self) -> float:
        """Seconds that no plan takes less than: the least work of every layer, shared by all devices."""
        case, total = self.case, 0.0
        given = case.request.plan.layers if case.request.plan is not None else {}
        for name, options in candidates(self.asked, case.graph, case.cluster, False, case.uneven, case.fold).items():
            work = list[float]()
            for own in (*options, *([given[name]] if name in given else [])):
                cost = charges(case.costs, case.graph.layers[name], own)
                work.append(len(own.devices) * (cost.forward_s + cost.backward_s))
            total += min(work) * (case.fold.times.get(name, 1) if case.fold is not None else 1)
        return case.costs.step.micro_batches * total / case.cluster.count

    def lacking_bytes(self, alike: bool = False) -> float:
        """Bytes beyond all devices' memory at some moment of the step, where every layer takes as few as it may then.

        Where it is positive, no plan of any shape fits: layers take as much on other devices as on the first ones.

        Args:
            alike: of plans in which copies of a repeated layer are on the same devices, each of which has room for all.
        """
        formulation, memories = self.one_pass(), self.case.cluster.memory_bytes
        least = np.zeros(Moments(len(self.case.graph.layers)).end)
        for index, options in enumerate(formulation.options):
            fit = [own for own in options if not alike or own.memory.most_bytes <= max(memories)]
            each = np.full((max(1, len(fit)), len(least)), 0.0 if fit else inf)
            for k, own in enumerate(fit):
                count, held = len(own.strategy.devices), [one for one in own.memory.held if not one.estimated]
                for one in held:
                    each[k, one.start : one.end] += count * one.nbytes
                if not held:  # costs that know no moments
                    each[k] += formulation.times(index) * count * own.memory.resident_bytes
            least += each.min(axis=0)
        return float(least.max()) - sum(memories)

    def formulation(
        self, shape: Shape, beyond_s: float = 0.0, pinned: Pinned = FREE, in_time: bool = False
    ) -> Formulation | None:
        """The problem of a shape with the strategies that some pins allow; None where a layer has none.

        Args:
            beyond_s: seconds that no step worth considering takes, where devices are followed.
            in_time: not after the time limit.

        Raises:
            OutOfTime: the limit is over before it is done.
        """
        key = (shape, beyond_s, pinned.pins)
        if key not in self._formulations:
            begin = time.perf_counter()
            found = self._formulated(shape, beyond_s, pinned, in_time)
            self.costs_s += time.perf_counter() - begin
            if shape.passes > 1 and not self.case.request.pins:
                return found  # asked for once; many devices have many such shapes, too large to keep
            self._formulations[key] = found
            if len(self._formulations) == 1:  # layers may have been measured
                self.case.deadline.extend(time.perf_counter() - begin)
        return self._formulations[key]

    def bound(self, shape: Shape, cutoff_s: float, pinned: Pinned, part: float) -> Bound | None:
        """The bound of plans that a shape stands for, sought only as far as it takes to say that none is faster.

        None where the time limit is over first.

        Args:
            cutoff_s: seconds that a plan has to stay below.
            part: of the time left.
        """
        deadline = self.case.deadline
        if deadline.over():
            return None
        try:
            formulation = self.formulation(shape, cutoff_s, pinned, in_time=True)
        except OutOfTime:
            return None
        if formulation is None:
            return Bound(cutoff_s, inf)
        problem = masked(formulation, pinned)
        found = deadline.watched(solve(problem, deadline.part_s(part), cutoff=cutoff_s, refute=True))
        within = None if found.possible is None else formulation.keys(found.possible)
        return Bound(cutoff_s, cutoff_s if found.status is Status.INFEASIBLE else found.bound, within)

    def _candidates(self, anywhere: bool, uneven: bool) -> dict[str, Sequence[Strategy]]:
        case = self.case
        return candidates(
            self.asked, case.graph, case.cluster, anywhere, uneven, case.fold, case.states, case.saved, case.widest
        )

    def _formulated(self, shape: Shape, beyond_s: float, pinned: Pinned, in_time: bool) -> Formulation | None:
        case = self.case

        def look() -> None:
            if in_time and case.deadline.over():
                raise OutOfTime

        if not self._formulations:
            case.phase("costs")
        options = self._candidates(shape.anywhere, shape.uneven)
        for name in options.keys() & pinned.allowed.keys():  # in the states that are searched, or pinned
            own = set(pinned.allowed[name])
            options[name] = tuple(one for one in options[name] if one in own)
        given = plain(case.request.plan) if case.request.plan is not None else {}
        for name, strategy in given.items():
            options[name] = tuple(dict.fromkeys((*options[name], strategy)))
        on_layer = case.progress.advance if case.progress is not None and not self._formulations else None
        strict = case.request.rules == "strict"
        if not beyond_s:
            beyond_s = far_s(case.graph, case.cluster, case.costs, options, case.fold, shape)
        try:
            return formulate(
                case.graph, case.cluster, case.costs, options, shape=shape, far_s=beyond_s, strict=strict,
                fold=case.fold, on_layer=on_layer, look=look,
            )  # fmt: skip
        except InfeasibleShape:
            return None
