"""The search over shapes of plans: every shape's problem bounded or solved, the fastest plan kept with its proof.

A shape fixes scheme, passes and the devices that branches have for themselves (search_space/shape.py); inside, the
solver proves the best strategies. Each further shape has to beat the best step so far, so most are refuted by their
bound. OPTIMAL is said of the shapes that were solved or refuted (docs/objective.md).

    one pass                  layers on the first devices
    passes                    for every pair of replica counts that divide, interleaved, or under the scheme asked for
    any block of devices      first by a bound in which positions are folded away, with and without branches
    branches                  placements of every phase of branches on disjoint blocks, all in one problem
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from parplan.errors import InfeasiblePlan, PlanError
from parplan.lowering.stages import stages
from parplan.plan import SCHEDULES, Plan, Scheme
from parplan.planner.decision import ANY_BLOCK, BRANCHES, SOME_BRANCHES, STAGES, Proof, Simpler
from parplan.planner.search.baselines import choices_by_hand
from parplan.planner.search.branches import Branch, averaged, foldable, sections
from parplan.planner.search.context import EXACT, SIMULATED, fits, plain, shape_of
from parplan.planner.search.device_groups import FEW_BRANCHES, placed
from parplan.planner.search.fitting import ABOUT, fitting, in_replicas, lacking
from parplan.planner.search.formulations import Bound, Formulations, OutOfTime
from parplan.planner.search.schemes import no_updates, schemes_of, shapes, updates_lost
from parplan.planner.search.simpler import Candidate, Found, differences, simplest
from parplan.planner.search_space.formulation import Formulation
from parplan.planner.search_space.infeasible_message import why_not
from parplan.planner.search_space.pin_constraints import Pinned
from parplan.planner.search_space.pin_search import masked, no_plan
from parplan.planner.search_space.shape import Shape
from parplan.planner.search_space.verifier import check
from parplan.planner.solver.problem import Problem, Solution, Status, evaluate, objective
from parplan.planner.solver.solve import CUT, GAP, solve

__all__ = ["ANYWHERE", "NothingFaster", "ShapeSearch"]

MAIN, TIGHT, AGAIN, SHARE, SIMPLER, BESIDE = 0.5, 0.25, 0.5, 0.5, 0.2, 0.5
"""Parts of the time left for the first proof, for one of what memory is certainly taken where it is short, for each
solve after one whose plan did not fit, for other shapes, and for a simpler plan; and of these, for replicas alone."""

ANYWHERE = 8
"""Devices up to which layers may lie on any aligned block; on more, a plan lies on the first devices."""

EVERY_PLACEMENT = 2
"""Devices up to which branches are placed on all disjoint blocks; on more, on blocks that make up the first devices."""

BETTER = 1e-6
"""A plan has to be faster by more than this, relative."""


class NothingFaster(InfeasiblePlan):
    """No plan that fits takes less than was asked for."""


class ShapeSearch(Formulations):
    """The search over the shapes of one case."""

    def best(self, pinned: Pinned, part: float = 1.0, below_s: float = inf, left: Iterable[bool] = ()) -> Found:
        """The fastest plan that keeps some pins, or the given one, with the proof over all shapes.

        Args:
            part: of the time left.
            below_s: seconds that its step has to stay below.
            left: whether there are other ways to need less memory, which are tried first if nothing fits here.

        Raises:
            NothingFaster: none does.
            InfeasiblePlan: no plan fits; the text names the limit, or the pins.
            PinError, PlanError: the scheme asked for, or updates between passes, are not possible.
        """
        case = self.case
        case.phase("solve")
        run = _Run(self, pinned, part, below_s)
        schemes = schemes_of(case.request.scheme)
        run.attempts(shapes(case, self.asked, self.lanes, schemes, pinned))
        if case.uneven and case.request.plan is None:
            run.with_uneven_parts(Shape(lanes=self.lanes, uneven=True))
        anywhere = case.request.plan is None and Scheme.GATHER in schemes and case.cluster.count > 1
        later = any(left) if run.best is None else case.deadline.over()
        if anywhere and not pinned.periods and not later:
            run.any_block()
        self.postponed = anywhere and later and run.best is None
        self.bound_s = run.bound
        if later and run.best is None and run.unfit is None and not case.saves_memory:
            raise InfeasiblePlan("no plan fits with all state replicated and everything kept")
        return run.found()


class _Run:
    """One search: the best plan so far, and what the bound covers."""

    def __init__(self, search: ShapeSearch, pinned: Pinned, part: float, below_s: float = inf) -> None:
        self.search, self.case, self.pinned, self.part = search, search.case, pinned, part
        self.best: Candidate | None = None
        self.earlier: list[Candidate] = []
        self.begin, self.bound, self.tried = time.perf_counter(), inf, 0
        self.covered: list[str] = []
        self.without_s: float | None = None
        self.below_s = self.limit_s = below_s
        self.uneven = self.nothing_fits = self.left_out = False  # left_out: branches neither tried nor bounded
        self.unfit: tuple[float, Candidate] | None = None  # bytes it lacks
        self.first: tuple[Formulation, Solution] | None = None
        self.undecided: tuple[Formulation, Solution] | None = None
        self.bounds: dict[Shape, Bound] = {}

    @property
    def cutoff(self) -> float:
        """Seconds that another plan has to stay below."""
        return self.best.step_s * (1 - BETTER) if self.best is not None else self.limit_s

    def bounded(self, shape: Shape) -> Bound:
        """The bound of plans that a shape stands for; sought again where a faster plan was found since."""
        known = self.bounds.get(shape, Bound())
        if not self.refuted(known) and self.cutoff < known.asked_s:
            known = self.search.bound(shape, self.cutoff, self.pinned, SHARE * self.part) or known
        self.bounds[shape] = known
        return known

    def refuted(self, bound: Bound) -> bool:
        """Whether no plan under a bound is faster than the best one."""
        return bound.least_s >= self.cutoff

    def attempt(self, shape: Shape, bound: Bound | None = None) -> None:
        """Solve or refute a shape.

        Args:
            bound: of its plans, which are on any blocks: what takes longer than the best one, and strategies that no
                faster plan has, are left out.
        """
        least_s, within = (0.0, None) if bound is None else (bound.least_s, bound.within)
        beyond_s = self.cutoff if bound is not None and self.best is not None else 0.0
        try:
            formulation = self.search.formulation(shape, beyond_s, self.pinned, in_time=self.cutoff < inf)
        except OutOfTime:
            self.bound = min(self.bound, least_s)
            return
        if formulation is None:
            return
        usual = shape.passes == 1 and not shape.anywhere  # a shape that plans by hand have
        short = usual and self.case.saves_memory and self.case.request.plan is None  # of memory
        if short and self.best is None:
            by_hand = self.by_hand(formulation, nearest=False)  # first a plan that fits
            self.best = by_hand if by_hand is not None and by_hand.step_s < self.cutoff else None
        solution = self.solved(formulation, masked(formulation, self.pinned, within))
        self.first = self.first or (formulation, solution)
        known_none = solution.status is Status.INFEASIBLE and self.cutoff == inf
        self.nothing_fits |= known_none and shape.scheme is Scheme.GATHER
        if solution.status is Status.UNKNOWN and self.cutoff == inf:
            self.undecided = formulation, solution
            self.best = self.by_hand(formulation) if usual else None
        if solution.choice is not None and solution.objective < self.cutoff:
            fits = self.take(formulation, solution)
            if not fits and self.unfit is None:  # by costs that know no transfers
                self.lacks(inf, formulation, solution.choice)
        possible = short and solution.status is not Status.INFEASIBLE and self.case.request.rules != "strict"
        if possible and (1 - ABOUT) * self.cutoff > solution.bound and not self.case.deadline.over():
            apart = in_replicas(self.case, formulation)
            self.take(apart, self.solved(apart, apart.problem, BESIDE, ABOUT))
        if solution.status is Status.INFEASIBLE:  # refuted, or there is none
            least_s = self.best.step_s if self.best is not None else self.cutoff
        self.bound = min(self.bound, max(solution.bound, least_s))
        self.covered.append(shape.describe())

    def take(self, formulation: Formulation, solution: Solution) -> bool:
        """Whether a solution's plan fits; the best one and those before it are kept."""
        found = None
        if solution.choice is not None and solution.objective < self.cutoff:
            found = self.candidate(formulation, solution.choice, solution.objective)
        if found is None:
            return False
        known = [one for one in (self.best, found) if one is not None]
        self.best = min(known, key=lambda one: one.step_s)
        self.earlier += [one for one in known if one is not self.best]
        return True

    def attempts(self, shapes: Iterable[Shape]) -> None:
        """Solve or refute shapes. After the time limit those with passes are left out."""
        for shape in shapes:
            if shape.passes > 1 and self.cutoff < inf and self.case.deadline.over():
                self.bound = 0.0
                continue
            if shape.passes > 1 and self.nothing_fits:
                continue  # passes hold as much memory as one pass
            self.attempt(shape)

    def plan_of(self, formulation: Formulation, choice: Sequence[int]) -> Plan:
        """The plan that a choice stands for, with pinned update periods."""
        case, graph, periods, shape = self.case, self.case.graph, self.pinned.periods, formulation.shape
        chosen = formulation.strategies(choice)
        layers = {name: replace(own, update_period=periods.get(name)) for name, own in chosen.items()}
        scheme = shape.scheme if shape.passes > 1 else Scheme.GATHER
        count, rules = case.cluster.count, case.request.rules
        several = case.costs.step.micro_batches
        batch = several * (case.graph.batch or 1)
        return Plan(graph.model, graph.fingerprint, batch, count, layers, rules, scheme, several)

    def by_hand(self, formulation: Formulation, nearest: bool = True) -> Candidate | None:
        """The fastest plan by hand that fits and keeps the pins; where none fits, the `nearest` is kept as that."""
        case, problem = self.case, masked(formulation, self.pinned)
        free = replace(problem, limits=(inf,) * len(problem.limits))
        known = choices_by_hand(
            case.graph, case.cluster, formulation, self.plan_of(formulation, [0] * len(problem.nodes)),
            lambda restricted: case.deadline.watched(solve(restricted, case.deadline.part_s(SHARE))),
        )  # fmt: skip
        choices = [choice for choice in known if evaluate(free, choice).feasible]
        may_fit = [choice for choice in choices if evaluate(problem.relaxed, choice).feasible]
        # T is never above the step.
        may_fit = [choice for choice in may_fit if nearest or objective(problem, choice) < self.cutoff]
        found = [self.candidate(formulation, choice, objective(problem, choice)) for choice in may_fit]
        if nearest and not any(found):
            lack = [(max(lacking(case, formulation, choice) or [inf]), choice) for choice in choices]
            for nbytes, choice in sorted(lack)[: self.unfit is None]:
                self.lacks(nbytes, formulation, choice)
        return min(filter(None, found), key=lambda one: one.step_s, default=None)

    def solved(self, formulation: Formulation, problem: Problem, of_part: float = 1.0, better: float = CUT) -> Solution:
        """A solution of a shape's problem, one that fits with its transfers where it is to become a plan.

        Args:
            of_part: of the usual part of the time.
            better: as in `solve`.
        """
        case = self.case
        tell = case.progress.solver if case.progress is not None else None

        def once(problem: Problem, first: bool) -> Solution:
            part = AGAIN if not first else TIGHT if case.saves_memory else MAIN if self.best is None else SHARE
            limit_s = case.deadline.part_s(part * of_part * self.part)
            found = solve(problem, limit_s, cutoff=self.cutoff, on_progress=tell, better=better)
            return case.deadline.watched(found)

        if case.request.plan is not None:
            return once(problem, True)
        found, closest = fitting(case, formulation, problem, once)
        if closest is not None and (self.unfit is None or closest.lacking_bytes < self.unfit[0]):
            self.lacks(closest.lacking_bytes, formulation, closest.choice)
        return found

    def lacks(self, nbytes: float, formulation: Formulation, choice: Sequence[int]) -> None:
        """Keep a choice as the nearest to fitting."""
        plan = self.plan_of(formulation, choice)
        if not updates_lost(plan, self.case.graph, self.pinned):
            step_s = objective(formulation.problem, choice)
            self.unfit = nbytes, Candidate(step_s, step_s, plan, formulation, tuple(choice))

    def with_uneven_parts(self, shape: Shape) -> None:
        """Parts of the batch that differ by a sample, where that gains more than the tolerance."""
        even, bound, covered = self.best, self.bound, self.covered
        self.limit_s = even.step_s / (1 + self.case.request.tolerance) if even is not None else self.below_s
        self.best, self.bound, self.covered = None, inf, []
        self.attempt(shape)
        self.limit_s, self.uneven = self.below_s, self.best is not None
        if self.uneven:
            self.bound, self.covered = min(bound, self.bound), [*covered, *self.covered]
        else:
            self.best, self.bound, self.covered = even, bound, covered

    # ---- any block of devices, and branches at the same time ----

    def any_block(self) -> None:
        """Plans with layers on any block, and with branches at the same time, where the bound does not refute them."""
        case = self.case
        # There placements of branches are too many to formulate; equal blocks that are alike fill all devices alike.
        if case.cluster.count > SIMULATED or (case.saves_memory and case.fold is not None and self.cutoff < inf):
            return
        every, phases = tuple(range(case.cluster.count)), self.phases()
        anywhere = Shape(lanes=every, anywhere=True, uneven=self.uneven)
        both, alone = (replace(averaged(some), uneven=self.uneven) for some in (phases, ()))
        if len(every) > ANYWHERE:
            if self.best is None and self.search.lacking_bytes(alike=True) <= 0:
                self.attempt(anywhere)
            elif self.best is not None and phases:
                # On sizes of blocks that the first devices have, a guess on many devices.
                bound = self.bounded(replace(both, anywhere=False))
                if not self.refuted(bound):
                    self.branches(phases, Bound())
            return
        known = self.cutoff < inf and not case.cluster.mixed
        bound = self.bounded(both) if known else Bound()
        if self.refuted(bound) or (self.best is None and self.search.lacking_bytes() > 0):
            self.covered += [ANY_BLOCK, BRANCHES]
            return
        own = self.bounded(alone) if known else Bound()
        if self.refuted(own):
            self.covered.append(ANY_BLOCK)
        else:
            self.attempt(anywhere, own)
        self.branches(phases, bound)

    def phases(self) -> list[tuple[Branch, ...]]:
        """Phases of branches that could run at the same time, where layers are free to be moved."""
        request, fold = self.case.request, self.case.fold
        if request.rules == "strict" or self.pinned.layers:
            return []
        found = [phase for section in sections(self.case.graph) for phase in section.phases if len(phase) > 1]
        fit = found if fold is None else foldable(found, fold.kept)
        self.left_out = fit != found
        return fit

    def branches(self, phases: Sequence[tuple[Branch, ...]], bound: Bound) -> None:
        """Branches at the same time on disjoint blocks of the devices, or one after another, phase by phase.

        Args:
            bound: of these plans.
        """
        if not phases or self.best is None:
            self.covered.append(BRANCHES)
            return
        self.without_s = self.best.step_s
        cluster = self.case.cluster
        anywhere = cluster.count <= EVERY_PLACEMENT and not cluster.mixed
        members = [{name for branch in phase for name in branch} for phase in phases]
        outer = [v for v, own in enumerate(members) if not any(own & other for other in members[:v])]
        inner = [v for v, own in enumerate(members) if not any(own & other for other in members[v + 1 :])]
        # Phases inside branches of others are placed instead of those.
        for chosen in (outer,) if inner == outer else (outer, inner):
            if self.case.deadline.over():
                return
            some = [placed(phases[v], self.case.graph, cluster, self.case.costs, anywhere) for v in chosen]
            homes = [one for one in some if one]
            self.left_out = self.left_out or len(homes) < len(some)
            if not homes:
                continue
            first = {min(block) for known in homes for one in known for _, block in one}
            lanes = range(cluster.count) if anywhere else sorted({*self.search.lanes, *first})
            self.tried += sum(map(len, homes))
            shape = Shape(lanes=tuple(lanes), homes=tuple(homes), uneven=self.uneven, anywhere=anywhere)
            self.attempt(shape, bound)
        if inner != outer or max(map(len, phases)) > FEW_BRANCHES:
            self.covered = [one for one in self.covered if one not in (BRANCHES, SOME_BRANCHES)]

    # ---- the answer ----

    def found(self) -> Found:
        """The best plan, or a simpler one within the tolerance, and its proof.

        Raises:
            InfeasiblePlan, PinError, PlanError: there is none.
        """
        given, tolerance = self.case.request.plan, self.case.request.tolerance
        if given is not None:
            return self._given(given)
        if self.best is None and self.below_s < inf:
            raise NothingFaster(f"no plan that fits takes less than {self.below_s:.6g} s")
        if self.best is None and self.unfit is not None:
            self.best = self.unfit[1]  # the nearest to fitting, which `decide` refuses with its numbers
        if self.best is None:
            raise self._none()
        best = fastest = self.best
        if tolerance > 0 and fastest.changes > 0:
            limit_s = self.case.deadline.part_s(SIMPLER * self.part)
            best = simplest(
                (*self.earlier, fastest),
                (1 + tolerance) * fastest.step_s,
                lambda formulation: masked(formulation, self.pinned),
                lambda problem, hint, better: self.case.deadline.watched(
                    solve(problem, limit_s, hint=hint, better=better)
                ),
                self.candidate,
            )
        self.covered = [one for one in self.covered if not self.left_out or one not in (BRANCHES, SOME_BRANCHES)]
        fastest = min(best, fastest, key=lambda one: one.step_s)  # the search for a simpler one may find a faster one
        fewer = best.changes < fastest.changes
        best = best if fewer else fastest
        simpler = None
        if fewer:
            words = differences(fastest.plan, best.plan, self.case.graph)
            simpler = Simpler(fastest.step_s, fastest.changes, best.changes, differs=words)
        proof = self.proof(best, min(self.bound, fastest.objective_s), simpler)
        return Found(
            best.plan, best.formulation, best.choice, proof, self.tried, self.without_s, fastest.plan if fewer else None
        )  # fmt: skip

    def proof(self, best: Candidate, bound_s: float, simpler: Simpler | None = None) -> Proof:
        """The proof of a plan, of which what T says too much is part of the gap.

        Args:
            bound_s: T of no plan is less.
        """
        given, fold = self.case.request.plan is not None, self.case.fold
        bound_s = min(bound_s, best.step_s)
        exact_s = (1 + EXACT) * best.step_s
        if best.objective_s > exact_s:  # that of the plan alone may be less
            own_s = min(best.objective_s, self.case.objective_s(best.plan))
            bound_s -= own_s - best.step_s if own_s > exact_s else 0.0
        if best.plan.schedule != SCHEDULES[0]:  # T and its bound are of micro-batches one by one
            bound_s, self.covered = self.search.least_work_s(), [STAGES]
        gap = max(0.0, (best.step_s - bound_s) / best.step_s) if best.step_s > 0 else 0.0
        return Proof(
            (Status.OPTIMAL if gap <= GAP else Status.FEASIBLE).value, best.step_s, bound_s, gap,
            time.perf_counter() - self.begin, given, tuple(dict.fromkeys(self.covered)),
            self.case.uneven and not given and not self.uneven, simpler,
            fold.describe(self.case.graph) if fold is not None else "",
        )  # fmt: skip

    def candidate(self, formulation: Formulation, choice: Sequence[int], objective_s: float) -> Candidate | None:
        """A choice as a plan; None where it does not fit with its transfers, or loses updates between passes."""
        plan = self.plan_of(formulation, choice)
        case = self.case
        if updates_lost(plan, case.graph, self.pinned):
            return None
        if case.request.plan is None and not fits(case.graph, case.cluster, case.costs, plain(plan)):
            return None
        return Candidate(case.step_s(plan, objective_s), objective_s, plan, formulation, tuple(choice))

    def _given(self, plan: Plan) -> Found:
        case = self.case
        formulation = self.search.formulation(shape_of(plan, case.graph, case.cluster))
        assert formulation is not None  # it has the plan's own strategies
        choice = formulation.choice(plain(plan), stages(case.graph, plain(plan), plan.scheme).of)
        own_s, roomy = objective(formulation.problem, choice), fits(case.graph, case.cluster, case.costs, plain(plan))
        own = Candidate(case.step_s(plan, own_s), own_s, plan, formulation, choice)
        bound_s = self.bound if roomy else self.search.least_work_s()  # the bound is of plans that fit
        return Found(plan, formulation, choice, self.proof(own, min(bound_s, own_s)))

    def _none(self) -> Exception:
        """The error that says why there is no plan, or that a search of so many seconds did not find out."""
        case, asked, pinned = self.case, self.search.asked, self.pinned

        def again(problem: Problem) -> Solution:
            return solve(problem, case.deadline.part_s(AGAIN))

        if self.undecided is not None:
            seconds = time.perf_counter() - self.begin
            return InfeasiblePlan(why_not(self.undecided[0], replace(self.undecided[1], seconds=seconds)))
        formulation, solution = self.first or (self.search.one_pass(), None)
        if solution is None or solution.choice is None:
            formulation = self.search.one_pass()
            solution = again(masked(formulation, pinned).relaxed)
            if solution.choice is None and case.request.pins:
                return no_plan(formulation, asked, solution, again)
            if solution.choice is None:
                return InfeasiblePlan(why_not(formulation, solution))
        draft, schemes = self.plan_of(formulation, solution.choice), schemes_of(case.request.scheme)
        if updates_lost(replace(draft, scheme=Scheme.GATHER), case.graph, pinned):
            return no_updates(draft, case.graph, pinned, schemes)
        if set(pinned.periods.values()) - {1}:
            nothing = Solution(Status.INFEASIBLE, None, inf, inf, inf, 0.0)
            return no_plan(self.search.one_pass(), asked, nothing, again)
        try:
            check(replace(draft, scheme=schemes[0]), case.graph)
        except PlanError as error:
            return error
        return PlanError(f"{draft.model}: no plan was found that is legal with {schemes[0].value}")
