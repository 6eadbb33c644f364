"""Anytime search for problems too wide for elimination: a bound, choices, and what no better choice uses.

Every limit at every moment has a price. Prices rise and fall with the share of the limit that the choice made from the
messages exceeds (multiplicative weights; Plotkin, Shmoys and Tardos 1995), in ever smaller steps, while messages pass:
both climb together to a bound. Choices on the way are repaired and descended. A maximum is replaced by the mean
of the selections of rows that were critical at the best choices, which bounds it from below.

Effort is counted in passes: the same anywhere, unless the deadline ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from parplan.planner.solver.problem import FloatArray, Problem
from parplan.planner.solver.rows import row_table
from parplan.planner.solver.wide.arrays import Arrays, Ints
from parplan.planner.solver.wide.assignment import Assignment
from parplan.planner.solver.wide.messages import Messages

__all__ = ["improve"]

WARM, FIRST, GROWTH = 20, 300, 1.5
"""Passes without prices at most, passes of the first climb, and the factor from one climb to the next."""
SLOW = 1e-3
"""Rise of the bound in a pass, relative, from which on passes without prices end where a smaller problem is next."""
STEPS = (0.5, 0.15)
"""Logarithm of the largest change of a price per pass, at the start of the first climb and of later ones."""
LAST_STEP = 0.02
SMOOTHING = 0.5
"""Share of earlier passes in the excess that moves prices."""
EVERY = 10
"""Passes from one repaired choice to the next."""
HURRY = 0.6
"""Share of the time left that the first climb may take: fewer passes where the deadline would cut them off."""

Offer = Callable[[Sequence[int]], float]


def improve(
    problem: Problem,
    offer: Offer,
    raise_bound: Callable[[float], None],
    rounds: float,
    deadline: float,
    cutoff: float = np.inf,
) -> tuple[list[FloatArray], bool]:
    """Climb and search for `rounds` rounds, or until a proof, or until `time.monotonic()` passes `deadline`.

    Ends sooner where less than half of the strategies can be in a better choice: the rest is a smaller problem.

    Args:
        problem: presolved; no strategy is forbidden.
        offer: takes every choice that is worth evaluating; returns the cutoff: seconds that a choice has to stay below.
        raise_bound: told of lower bounds on T.
        cutoff: seconds that a choice has to stay below.

    Returns:
        Per node and strategy, a lower bound on T of every choice that uses it; and whether passes were left out because
        of the deadline.
    """
    search = _Search(problem, offer, deadline, cutoff)
    done, more = 0, True
    while more and done < rounds and search.open and not search.halved:
        more = search.climb(done)
        raise_bound(search.bound)
        done += 1
    return np.split(search.marginals, search.arrays.start[1:-1]), search.hurried


class _Search:
    """Prices, messages, and the best choice and bound so far."""

    def __init__(self, problem: Problem, offer: Offer, deadline: float, cutoff: float) -> None:
        self.problem, self.offer, self.deadline = problem, offer, deadline
        self.table = row_table(problem)
        self.multiplicity, self.constant = np.zeros(len(self.table.constant)), 0.0
        self.arrays = Arrays(problem)
        self.messages = Messages(self.arrays)
        self.choice: Ints | None = None
        self.cost, self.cutoff, self.bound = np.inf, cutoff, -np.inf
        self.marginals = np.full(len(self.arrays.cost), -np.inf)
        self.prices = np.zeros(len(self.arrays.memory.capacity))
        self.floor, self.hurried = 0.0, False

    @property
    def open(self) -> bool:
        """Whether time is left and nothing is proven."""
        return time.monotonic() < self.deadline and self.bound < self.cutoff

    @property
    def halved(self) -> bool:
        """Whether less than half of the strategies can be in a better choice."""
        return bool(2 * np.count_nonzero(self.marginals < self.cutoff) < len(self.marginals))

    def climb(self, number: int) -> bool:
        """Messages under prices that move in ever smaller steps, with a choice made every few passes.

        It ends when nothing moves: choices keep all limits, and the bound rises no more.

        Returns:
            Whether another climb may find more: not where prices stand still and maxima have their rows.
        """
        self.linearise(number)
        a, memory = self.arrays, self.arrays.memory
        passes = int(FIRST * GROWTH**number)
        if number == 0:
            began = time.monotonic()
            for _ in range(WARM):
                before = self.bound
                self.sweep(a.cost)
                if not self.open or (self.halved and self.bound - before <= SLOW * abs(self.bound)):
                    return False
            scale = max(self.bound, 1e-3 * abs(a.total(self.messages.decode(a.cost))), 1e-300)
            scale /= np.maximum(memory.capacity, 1.0).sum() or 1.0
            self.prices, self.floor = np.full_like(self.prices, 1e-3 * scale), 1e-6 * scale
            each = 2 * (time.monotonic() - began) / WARM
            possible = max(HURRY * (self.deadline - began) / each, WARM)
            passes, self.hurried = int(min(passes, possible)), possible < passes
        smooth, before = None, self.bound
        for number_of_pass in range(passes):
            step = STEPS[min(number, 1)] * (LAST_STEP / STEPS[min(number, 1)]) ** (number_of_pass / passes)
            held = memory.priced(self.prices, len(a.cost))
            self.sweep(a.cost + held)
            choice = self.messages.decode(a.cost + held)
            excess = memory.loads(choice) - memory.capacity
            if number_of_pass % EVERY == EVERY - 1:
                self.finish(choice, held)
                if self.halved:
                    return False
                if smooth is not None and (smooth <= 0).all() and self.bound <= before:
                    return number == 0 and bool(self.table.tops)
                before = self.bound
            if not self.open:
                break
            smooth = excess if smooth is None else SMOOTHING * smooth + (1 - SMOOTHING) * excess
            moved = self.prices * np.exp(step * np.clip(smooth / memory.limit, -1.0, 1.0))
            self.prices = np.maximum(moved, self.floor)
        return True

    def linearise(self, number: int) -> None:
        """Replace maxima by the mean of the selections of rows that are critical at the best choices so far."""
        if not self.table.tops:
            return
        choice = self.choice
        if choice is None:
            choice = np.array([int(node.cost_s.argmin()) for node in self.problem.nodes])
        critical = self.table.critical(self.table.seconds(choice.tolist())).sum(axis=0)
        self.multiplicity += (critical - self.multiplicity) / (number + 1)
        self.constant = float(self.multiplicity @ self.table.constant)
        values = self.messages.values
        self.arrays = Arrays(self.problem, self.table, self.multiplicity)
        self.messages = Messages(self.arrays)
        self.messages.values = values
        self.cost = np.inf if self.choice is None else self.arrays.total(self.choice)

    def sweep(self, costs: FloatArray) -> None:
        """A pass there and back, for the bound and the marginals."""
        found = self.messages.sweep(costs)
        offset = self.constant - float(self.prices @ self.arrays.memory.capacity)
        # Sums of many terms of this size may be off by rounding.
        offset -= 1e-9 * (abs(found.bound) + abs(offset))
        self.bound = max(self.bound, found.bound + offset)
        self.marginals = np.maximum(self.marginals, found.marginals + offset)

    def finish(self, choice: Ints, held: FloatArray) -> None:
        """Repair and descend a choice; the best one is offered."""
        assignment = Assignment(self.arrays, choice)
        if not assignment.repair(held, self.deadline):
            return
        assignment.descend(self.deadline)
        cost = self.arrays.total(assignment.choice)
        if cost < self.cost or self.table.tops:
            self.cutoff = self.offer(assignment.choice.tolist())
        if cost < self.cost:
            self.choice, self.cost = assignment.choice, cost
