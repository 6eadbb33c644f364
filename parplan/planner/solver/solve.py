"""Solve a planning problem and keep the proof: reductions, the priced relaxation, then search for what is left."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from parplan.planner.solver.cpsat import Progress, resolution, search
from parplan.planner.solver.elimination import followed
from parplan.planner.solver.infeasible import explain, overfull
from parplan.planner.solver.limits import broken_rows, count_terms, some_rows
from parplan.planner.solver.local_search import BRIEF, descend, first_choice, leanest_choice, settle
from parplan.planner.solver.master import Master
from parplan.planner.solver.problem import (
    FloatArray,
    Infeasibility,
    Problem,
    Reduced,
    Solution,
    Status,
    evaluate,
    restrict,
)
from parplan.planner.solver.reductions.presolve import drop_forbidden, possible, presolve
from parplan.planner.solver.relaxation import Priced, Prices, Relaxation, climb, relax
from parplan.planner.solver.rows import least, without_rows
from parplan.planner.solver.wide.search import improve

__all__ = ["GAP", "solve"]

GAP = 1e-6
"""Relative gap below which a solution is called OPTIMAL."""

CUT = 1e-9
"""A choice has to be better than the best one by this (relative) to be looked for, where nothing else is asked for."""

ROUNDS, PRICE_ROUNDS, STEPS = 3, 8, 60
WORKERS = 4
"""Threads of the search: the same on any machine, as they decide which of equal choices is found."""
MASTER_GAP, MASTER_STEPS = 1e-3, 100
"""Relative gap above which the best prices are looked for by cutting planes, and in how many steps at most."""
LATE = 0.02
"""Share of the time limit that settling ties takes at most after the limit."""
REFUTE, REFUTE_FAR, CLOSE = 2.0, 0.1, 0.96
"""Deterministic time of the search that only refutes, as its problem bounds another one, and of one whose bound is
below the last part of the cutoff: small problems end in it, large ones hardly ever come closer."""
FAR, NEAR = 0.9, 0.99
"""Parts of the cutoff below which bounds of prices and messages, and choices, are too far to go on with refuting."""
NEAR_S = 0.1
"""Seconds before the time limit from which on it has ended something."""
FIRST = 10 * BRIEF
"""Looks at a node that local search takes at most for a first choice."""
SHARE = 0.3
"""Share of the time limit that local search may take where a graph is too wide for elimination."""
PRICED_TERMS, SEARCHED_TERMS = 10_000, 50_000
"""Terms in memory rows above which rows are added only as choices break them, in pricing and in search."""
SEARCHED_CELLS = 300_000
"""Pairs of strategies on all edges above which prices climb until the deadline: too many for integer search."""
EXPLAIN_S = 5.0
LISTED, TRIED = 1e12, 200
"""Combinations of strategies up to which all choices below the cutoff are listed, and how many of them are tried: the
search would branch long on maxima of nearly equal rows."""


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    workers: int | None = None,
    hint: Sequence[int] | None = None,
    cutoff: float = np.inf,
    on_progress: Progress | None = None,
    refute: bool = False,
    better: float = CUT,
) -> Solution:
    """The best choice with its proof.

    Deterministic for a given number of workers unless the time limit cuts the search off. Ctrl-C ends it with
    KeyboardInterrupt.

    Args:
        workers: threads of the search; WORKERS if None, however many cores there are.
        hint: a choice to start from, used if it is feasible.
        cutoff: seconds that a choice has to stay below; INFEASIBLE then says that none does, by more than GAP.
        on_progress: called with (objective, bound) in seconds whenever one improves, sometimes from another thread.
        refute: only find out whether a choice stays below the cutoff: one that clearly does ends the search, with the
            bound so far, and so does a fixed effort.
        better: a choice has to be better than the best one by this (relative) to be looked for.
    """
    run = _Run(problem, time_limit_s, workers or WORKERS, cutoff, on_progress)
    run.refute, run.better = refute, better
    if hint is not None:
        run.offer(hint)
    reduced = presolve(problem, run.deadline, brief=math.isfinite(run.objective))
    return run.solution(feasible=reduced is not None and run.finish(reduced))


class _Run:
    """The best choice and bound so far, and the time left."""

    def __init__(
        self, problem: Problem, time_limit_s: float, workers: int, cutoff: float, on_progress: Progress | None
    ) -> None:
        self.problem, self.workers, self.on_progress = problem, workers, on_progress
        self.began = time.monotonic()
        self.limit_s, self.deadline = time_limit_s, self.began + time_limit_s
        self.whole = resolution(problem, 1.0).error == 0
        self.choice: list[int] | None = None
        self.refute = self.limited = False
        self.better = CUT
        self.worth = cutoff
        self.possible: tuple[frozenset[int], ...] | None = None
        self.mean: list[tuple[float, Sequence[int]]] = []
        self.objective, self.bound, self.cut = cutoff, least(problem), np.inf
        self.below = np.isfinite(cutoff)
        self.told = np.inf, self.bound

    def offer(self, choice: Sequence[int]) -> bool:
        """Take a choice if it is feasible and the best; whether it was taken."""
        found = evaluate(self.problem, choice)
        better = found.feasible and found.objective < self.objective
        if better:
            self.choice, self.objective = [int(k) for k in choice], found.objective
            self.deadline = -np.inf if self.refute and self.objective < NEAR * self.worth else self.deadline
            self.report(self.objective, self.bound)
        return better

    def raise_bound(self, bound: float) -> None:
        """Take a lower bound; where all costs are whole, so is T. What was cut off bounds it, too."""
        bound = min(bound, self.cut)
        bound = math.ceil(bound - 1e-3) if self.whole and np.isfinite(bound) else bound
        if bound > self.bound:
            self.bound = min(bound, self.objective)
            self.report(self.objective, self.bound)

    def report(self, objective: float, bound: float) -> None:
        """Tell the listener, with what a search running now has found."""
        better = min(objective, self.told[0]), max(bound, self.told[1])
        if self.on_progress is not None and better != self.told:
            self.told = better
            self.on_progress(better[0], min(better))

    def cutoff(self) -> float:
        """Seconds that a better choice has to stay below."""
        return self.objective - 0.5 if self.whole else self.objective - self.better * abs(self.objective)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def given_up(self) -> bool:
        """End a refutation whose bound is far from the cutoff; whether the run is over."""
        if self.refute and self.bound < FAR * self.objective:
            self.deadline = -np.inf
        return self.deadline == -np.inf

    def finish(self, reduced: Reduced) -> bool:
        """Everything after the reductions; False if it proves that no choice is feasible."""
        if self.left() <= 0:
            if self.choice is None:
                self.offer(reduced.lift(first_choice(reduced.problem)))
            return True
        rest = self.tighten(reduced, brief=math.isfinite(self.objective))
        if rest is not None and self.choice is None and not self.below:
            until = time.monotonic() + SHARE * self.left()
            if overfull(rest.problem, until, partial(self.improve, rest)):  # prices on the limits alone prove it
                return False
            rest = self.tighten(rest) if np.isfinite(self.objective) else rest
        return (rest is not None and self.search(rest)) or self.choice is not None

    def improve(self, reduced: Reduced, choice: Sequence[int]) -> None:
        """Offer what local search makes of a choice."""
        self.offer(reduced.lift(descend(reduced.problem, choice, self.deadline, BRIEF)))

    def tighten(self, reduced: Reduced, brief: bool = False) -> Reduced | None:
        """Price, cut off what cannot beat the best choice, reduce, again while that helps; None if nothing is left.

        Args:
            brief: before the reductions that take long. A problem that cannot beat the cutoff is refuted without them,
                and of others less is left to reduce.
        """
        while True:
            before = sum(reduced.problem.sizes)
            after = self.price(reduced, brief)
            if after is None:
                self.raise_bound(self.cut)
                return None
            helped = brief or (after is not reduced and sum(after.problem.sizes) <= 0.8 * before)
            if not helped or self.left() < 0:
                return after
            reduced, brief = after, False

    def price(self, reduced: Reduced, brief: bool = False) -> Reduced | None:
        """The climb of the relaxation and the cut it allows; again with the limits its best choice breaks.

        Args:
            brief: before the reductions that take long: what is left has had them.
        """
        rows, prices, relaxation = some_rows(reduced.problem, PRICED_TERMS), None, None
        met: list[list[int]] = []
        for _ in range(PRICE_ROUNDS):
            relaxation = relax(reduced.problem, rows, relaxation)
            if relaxation is None:
                return reduced.then(self.presolved) if brief else self.price_wide(reduced)
            best = self.climb(reduced, relaxation, prices, met)
            self.raise_bound(best.value - 1e-12 * abs(best.value))
            if not np.isfinite(best.value):
                return None  # forbidden pairs leave no choice
            more = broken_rows(reduced.problem, best.choice, rows)
            if not more or self.left() < 0:
                break
            rows += more
            prices = replace(best.prices, limits=np.append(best.prices.limits, np.zeros(len(more))))
        assert relaxation is not None
        marginals = relaxation.marginals(best.prices)
        if self.refute and brief and self.possible is None:  # before anything is cut off at a better choice
            keep = [values < self.worth for values in marginals]
            self.possible = possible(reduced, keep) if all(map(np.any, keep)) else None
        if np.isfinite(self.objective) and best.value < self.cutoff() and (decisions := followed(reduced.problem)):
            self.cut = min(self.cut, self.cutoff())
            keep = [values < self.cutoff() for values in marginals]
            rest = reduced.then(lambda problem: restrict(problem, keep)) if all(map(np.any, keep)) else None
            smaller = rest and rest.then(drop_forbidden)
            if smaller is None or sum(smaller.problem.sizes) <= 0.8 * sum(reduced.problem.sizes):
                return smaller and self.price(smaller, brief)
            if not self.branch(reduced, relaxation, best, met, decisions):
                return reduced.then(self.presolved) if brief else reduced
            self.cut = min(self.cut, self.cutoff())
            return None
        return self.cut_off(reduced, marginals, best.prices.rows) if np.isfinite(self.objective) else reduced

    def price_wide(self, reduced: Reduced) -> Reduced | None:
        """Messages instead of elimination, where its tables are too large; the cut that they allow."""

        def offer(choice: Sequence[int]) -> float:
            self.offer(reduced.lift(choice))
            return self.cutoff()

        cells = sum(edge.cost_s.size for edge in reduced.problem.edges)
        rounds = 1 if self.refute else ROUNDS if cells <= SEARCHED_CELLS else np.inf
        known = reduced.problem, offer, self.raise_bound, rounds, self.deadline, self.cutoff()
        marginals, hurried = improve(*known)
        self.limited |= hurried
        if self.given_up():
            return reduced
        return self.cut_off(reduced, marginals) if np.isfinite(self.objective) and self.left() > 0 else reduced

    def cut_off(
        self, reduced: Reduced, marginals: Sequence[FloatArray], counted: FloatArray | None = None
    ) -> Reduced | None:
        """Without strategies that no better choice uses; None if nothing is left.

        Args:
            counted: multiplicities of rows at the best prices. A refutation leaves out the rows of weighted maxima that
                have none, which bounds T from below: lanes without a part in the bound.
        """
        self.cut = min(self.cut, self.cutoff())
        keep = [values < self.cutoff() for values in marginals]
        if not all(mask.any() for mask in keep):
            return None
        smaller = reduced.then(lambda problem: restrict(problem, keep))
        if self.refute and counted is not None and smaller is not None:
            smaller = replace(smaller, problem=without_rows(smaller.problem, counted))
        return smaller and smaller.then(self.presolved)

    def presolved(self, problem: Problem) -> Reduced | None:
        """All reductions that the time allows."""
        return presolve(problem, self.deadline)

    def climb(self, reduced: Reduced, relaxation: Relaxation, start: Prices | None, met: list[list[int]]) -> Priced:
        """The best prices found; every choice on the way is offered and added to `met`, the best one also improved."""

        def seen(point: Priced) -> float:
            if point.objective < self.objective:
                self.offer(reduced.lift(point.choice))
            met.append(point.choice)
            return self.objective if np.isfinite(self.objective) else 1.1 * abs(point.value)

        self.mean = []  # choices of this problem only: one with fewer strategies numbers them otherwise
        start = start or relaxation.start()
        if start.portions is not None:
            best = climb(relaxation, start, self.objective, STEPS, seen, self.deadline)
        else:
            best = relaxation.at(start)
            seen(best)
        if self.cutoff() > best.value and self.left() > 0:
            self.improve(reduced, best.choice)
        if (
            self.objective - best.value > MASTER_GAP * abs(self.objective)
            and np.isfinite(best.value)
            and relaxation.table.owner
        ):
            target = self.objective if np.isfinite(self.objective) else 1.1 * abs(best.value)
            master = Master(relaxation, abs(target) or 1.0)
            for choice in met:
                master.cut(choice)

            fastest = best.objective

            def improved(point: Priced) -> float:
                nonlocal fastest
                if point.objective < fastest and self.left() > 0:
                    fastest = point.objective
                    self.improve(reduced, point.choice)
                return seen(point)

            found = master.climb(best, target, MASTER_STEPS, improved, self.deadline)
            self.mean = master.mean()
            if found is not best:
                best = found
                self.improve(reduced, best.choice)
        return best

    def branch(
        self, reduced: Reduced, relaxation: Relaxation, start: Priced, met: list[list[int]], decisions: Sequence[int]
    ) -> bool:
        """Best-first branch and bound over nodes that their neighbours follow: with those fixed, bounds are close.

        False where it is not done in time.
        """
        problem, count = reduced.problem, 0
        waiting: list[tuple[float, int, dict[int, int], Priced]] = [(start.value, 0, {}, start)]
        while waiting and waiting[0][0] < self.cutoff() and self.left() > 0.05:
            self.raise_bound(waiting[0][0])
            bound, _, fixed, best = heapq.heappop(waiting)
            masks = [np.isin(np.arange(own.size), fixed.get(v, range(own.size))) for v, own in enumerate(problem.nodes)]
            free = [v for v in decisions if v not in fixed]
            if not free:
                part = restrict(problem, masks)
                found = solve(part.problem, self.left(), self.workers, cutoff=self.cutoff())
                if found.choice is not None:
                    self.offer(reduced.lift(part.lift(found.choice)))
                if found.status in (Status.FEASIBLE, Status.UNKNOWN):
                    self.raise_bound(min([found.bound, *(one[0] for one in waiting)]))
                    return False
                continue
            costs = (np.where(mask, own.cost_s, np.inf) for mask, own in zip(masks, problem.nodes, strict=True))
            nodes = tuple(replace(own, cost_s=cost) for own, cost in zip(problem.nodes, costs, strict=True))
            inside = replace(relaxation, problem=replace(problem, nodes=nodes))
            if fixed:
                known = [one for one in met if all(one[v] == k for v, k in fixed.items())]
                best = self.climb(reduced, inside, replace(best.prices, portions=None), known)
            # The decision on which the choices that the bound is a mean of agree the least.
            shares = {u: np.zeros(problem.nodes[u].size) for u in free}
            for share, one in self.mean:
                for u in free:
                    shares[u][one[u]] += share
            v = min(free, key=lambda u: float(shares[u].max()))
            marginals = inside.marginals(best.prices)[v]
            for k in np.flatnonzero(marginals < self.cutoff()).tolist():
                count += 1
                heapq.heappush(waiting, (max(bound, float(marginals[k])), count, {**fixed, v: k}, best))
        self.raise_bound(min([self.cutoff(), *(one[0] for one in waiting)]))
        return not waiting or waiting[0][0] >= self.cutoff()

    def search(self, reduced: Reduced) -> bool:
        """Integer search over what is left, with limits added as choices break them; False if nothing is left."""
        if self.left() <= 0.05 or self.given_up():
            return True
        small = np.isfinite(self.objective) and np.prod(reduced.problem.sizes, dtype=float) <= LISTED
        if small and (listed := self.listed(reduced)) is not None:
            return listed
        hint = None if np.isfinite(self.objective) else self.local(reduced, SHARE * self.left())
        rows = some_rows(reduced.problem, SEARCHED_TERMS)
        partial = count_terms(reduced.problem) > SEARCHED_TERMS

        def report(objective: float, bound: float) -> None:
            self.report(np.inf if partial else objective, min(bound, self.cut))

        while self.left() > 0.05:
            cutoff = self.cutoff() if np.isfinite(self.objective) and hint is None else np.inf
            self.cut = min(self.cut, cutoff)
            guess = abs(self.objective)
            if not np.isfinite(guess):
                guess = (
                    self.bound if self.bound > 0 else float(sum(n.cost_s.max() for n in reduced.problem.nodes)) or 1.0
                )
            effort = REFUTE if self.bound >= CLOSE * self.objective else REFUTE_FAR
            workers, effort = (1, effort) if self.refute else (self.workers, np.inf)
            found = search(reduced.problem, rows, self.deadline, workers, guess, cutoff, hint, report, effort)
            if found.choice is not None:
                self.offer(reduced.lift(found.choice))
            self.raise_bound(found.bound)
            if found.choice is None:
                return found.status is not Status.INFEASIBLE
            more = broken_rows(reduced.problem, found.choice, rows)
            if not more:
                break
            rows += more
        return True

    def listed(self, reduced: Reduced) -> bool | None:
        """Try all choices below the cutoff, the fastest first; False if there is none, None if they are too many."""
        relaxation = relax(reduced.problem, some_rows(reduced.problem, PRICED_TERMS))
        if relaxation is None:
            return None
        best, cutoff = self.climb(reduced, relaxation, None, []), self.cutoff()
        found = relaxation.below(best.prices, cutoff) if np.isfinite(best.value) else None
        if found is None or self.left() <= 0:
            return None
        self.cut = min(self.cut, cutoff)
        for choice, seconds in islice(zip(*found, strict=True), TRIED):
            if self.offer(reduced.lift(choice.tolist())):
                self.raise_bound(float(seconds))
                return True
        if len(found[1]) > TRIED:
            return None
        self.raise_bound(self.cut)
        return self.choice is not None

    def local(self, reduced: Reduced, seconds: float) -> list[int]:
        """A choice to start the search from, also offered as it is."""
        until = time.monotonic() + seconds
        choice = descend(reduced.problem, first_choice(reduced.problem), until, FIRST)
        if not self.offer(reduced.lift(choice)) and self.choice is None:
            choice = descend(reduced.problem, leanest_choice(reduced.problem), until, FIRST)
            self.offer(reduced.lift(choice))
        self.limited |= time.monotonic() > until
        return choice

    def solution(self, feasible: bool) -> Solution:
        """Result of the run; INFEASIBLE with its cause."""
        limited = self.limited or (np.isfinite(self.deadline) and self.left() < NEAR_S)
        if self.choice is None:
            feasible = feasible and not (self.below and self.objective - self.bound <= GAP * abs(self.objective))
            status = Status.UNKNOWN if feasible else Status.INFEASIBLE
            cause: Infeasibility | None = (
                None if feasible or self.below else explain(self.problem, EXPLAIN_S, self.workers)
            )
            seconds = time.monotonic() - self.began
            return Solution(status, None, np.inf, self.bound, np.inf, seconds, cause, limited, self.possible)
        if self.left() > 0:
            choice = settle(self.problem, self.choice, self.deadline + LATE * self.limit_s)
            final = evaluate(self.problem, choice)
            if final.feasible and final.objective <= self.objective + 1e-12 * abs(self.objective):
                self.choice, self.objective = choice, final.objective
        bound = min(self.bound, self.objective)
        gap = (self.objective - bound) / (abs(self.objective) or 1e-300) if self.objective > bound else 0.0
        status = Status.OPTIMAL if gap <= GAP else Status.FEASIBLE
        seconds = time.monotonic() - self.began
        return Solution(
            status, tuple(self.choice), self.objective, bound, gap, seconds, limited=limited, possible=self.possible
        )
