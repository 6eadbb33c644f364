"""Micro-batches, state in slices and recomputation: where memory leaves no plan of the whole batch, or keeps it slow.

Plans with everything whole and kept come first. Where memory rules them out or slows them, layers may have every state
(replicated, sharded, gathered) and units of them may be replayed: one search over all these ways, in the whole batch
and then in micro-batches. More micro-batches hold fewer activations at a time and never compute faster, as each is a
smaller batch. So numbers that divide the batch are tried upwards, doubled, then those between, and no further than
memory makes a difference: until the best plan would be no faster with all the memory it wants.

Sharded state may be faster also where memory asks for nothing: every device updates its slice alone, and the second
half of a sum, the gathers, goes on beside the next forward. It is searched where the best plan itself would gain by it;
proofs say whether they cover it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from parplan.cost_models.memory.layer_memory import training_state_bytes
from parplan.errors import CaptureError, InfeasiblePlan, PinError, PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import fold, units
from parplan.lowering.micro_batches import equal_size
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.plan import SAVED, SCHEDULES, STATES
from parplan.planner import decision
from parplan.planner.decision import MESHES, SHARDED, STAGES, WIDEST, MicroBatchesTried, PricedGraph, Proof, Without
from parplan.planner.search.context import Case, formulated, gathered_together
from parplan.planner.search.fitting import held_up, in_slices
from parplan.planner.search.meshes import fastest_mesh
from parplan.planner.search.select import ANYWHERE, NothingFaster, ShapeSearch
from parplan.planner.search.simpler import Found
from parplan.planner.search.stages import Staged, fastest_in_stages, why_not
from parplan.planner.search_space.pin_search import Questions
from parplan.planner.search_space.rules import divisors
from parplan.planner.search_space.strategies import offers_uneven
from parplan.planner.solver.problem import Status
from parplan.planner.solver.solve import GAP

__all__ = ["MicroBatched", "Searched", "searched"]

MicroBatched = Callable[[int], PricedGraph]
"""The graph at the size of one of so many micro-batches, with its costs; CaptureError where there is no such graph."""

NEAR = 1.1
"""Plans of the whole batch are searched beside a mesh where one of those takes no longer than this, relative: layers of
their own mind gain less (3 % of Llama-3-8B on 8 RTX 4090, for half of its planning time)."""


@dataclass(frozen=True)
class Searched:
    """A search that ended with a plan, and the numbers of micro-batches that were compared.

    Args:
        peaks: bytes of every device, of a plan in pipeline stages.
        without: what meshes take that lack something of a mesh that was chosen.
        sized: the case at the size of so many micro-batches, counted in those that were asked for; None where there is
            none.
        why_whole: a line for messages: why there can be no more than one, once more were asked for.
    """

    search: ShapeSearch
    found: Found
    peaks: tuple[int, ...] = ()
    without: tuple[Without, ...] = ()
    sized: Callable[[int], Case | None] = lambda count: None
    tried: tuple[MicroBatchesTried, ...] = ()
    why_whole: str = ""

    @property
    def case(self) -> Case:
        """The model at the size of the plan's micro-batches."""
        return self.search.case

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes that every device takes at most."""
        peaks = self.peaks or self.case.costs.peaks(self.found.plan.layers)
        return peaks or self.found.formulation.device_peaks(self.found.choice, self.case.cluster.count)

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the fullest device lacks; below 0: has left."""
        peak, limit = self.case.cluster.fullest(self.memory_bytes)
        return peak - limit

    @property
    def fits(self) -> bool:
        """Whether the plan fits with its transfers; else it is the nearest to that."""
        return self.lacking_bytes <= 0

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest plan, where a simpler one is taken."""
        proof = self.found.proof
        return proof.objective if proof.simpler is None else proof.simpler.fastest_s

    @cached_property
    def held_up(self) -> bool:
        """Whether a plan of as many micro-batches would be faster if devices had all the memory it wants."""
        return held_up(self.case, self.search.one_pass(), self.search.asked.whole, self.fastest_s)


def searched(
    case: Case, questions: Callable[[LayerGraph], Questions], micro_batched: MicroBatched | None = None
) -> Searched:
    """The fastest plan of a case, in more micro-batches where memory asks for them.

    Args:
        questions: about pins, of the graph at the size of a micro-batch.
        micro_batched: None: with the case's own number of micro-batches.

    Raises:
        InfeasiblePlan, PinError, PlanError: there is no plan, or options contradict each other.
    """
    counts = _Counts(case, questions, micro_batched)
    asked = case.request.stages
    if case.request.schedule is not None and (asked or 1) == 1:
        raise PlanError(
            f"schedule {case.request.schedule} is of pipeline stages; say how many with --stages S (stages=S), or "
            "leave it out"
        )
    if asked != 1 and counts.ways != _Ways() and counts.too_large and counts.in_meshes():
        return counts.found()
    if asked is not None and asked > 1:
        counts.in_stages(asked)
        return counts.found()
    counts.attempt(1, _Ways())
    # Before searches that take longer: a plan in stages cuts those short.
    if in_stages := asked is None and (counts.apart or counts.idle):
        counts.in_stages()
    if counts.tight and counts.ways != _Ways():
        counts.attempt(1, counts.ways)
    for count in counts.doubled[1:]:
        if not counts.tight or (not counts.attempt(count, counts.ways) and counts.best is not None):
            break
    half = max((n for n in counts.doubled if n < counts.count), default=1)
    for count in (n for n in counts.every if half < n < counts.count and not counts.staged):
        counts.attempt(count, counts.ways)
    for count in counts.postponed():
        counts.attempt(count, counts.ways, later=False)
    counts.with_sharded_state()
    # Equal blocks apart only where they fit alike in no number of micro-batches: that takes ten times as long.
    for count in counts.doubled if counts.best is None else ():
        if counts.attempt(count, counts.ways, alike=False):
            break
    if asked is None and not in_stages and (counts.apart or counts.idle or (counts.several and counts.tight)):
        counts.in_stages()
    return counts.found()


IDLE = 1.1
"""Step over the least work of its layers from which stages are compared: with eight micro-batches for each stage, a
pipeline waits for about so long, and comparing takes longer than all else."""


@dataclass(frozen=True)
class _Ways:
    """Ways to need less memory that layers may have: states, and what is saved (plan.Strategy)."""

    states: tuple[str, ...] = STATES[:1]
    saved: tuple[str, ...] = SAVED[:1]


class _Counts:
    """The numbers of micro-batches that are compared, and the best plan so far.

    Attributes:
        ways: all that layers may have, where everything whole and kept does not fit, or is slow.
        every, doubled: numbers that may be tried, and those of them that at least double the one before.
        why: the reason for which there can be no more than one micro-batch, once more were asked for.
    """

    def __init__(
        self, case: Case, questions: Callable[[LayerGraph], Questions], micro_batched: MicroBatched | None
    ) -> None:
        request = case.request
        given = request.plan is not None or request.scheme not in ("auto", "gather")
        given = given or not case.graph.training or any(pin.update_period for pin in request.pins)
        self._case, self._questions = case, questions
        self._micro_batched = None if given else micro_batched
        self._whole = case.costs.step.micro_batches  # counted as one: more where so many are asked for
        # One process keeps the weights of all its devices whole, and their optimizer's state.
        sliced = case.cluster.home is None and case.cluster.count > 1
        states, saved = STATES if sliced else STATES[:1], SAVED if units(case.graph) else SAVED[:1]
        self.ways = _Ways() if given else _Ways(states, saved)
        self._searches: dict[int, ShapeSearch] = {}
        self._nearest: Searched | None = None  # the plan that lacks least
        self._error: InfeasiblePlan | None = None
        self._tried: dict[tuple[int, bool, bool], MicroBatchesTried] = {}
        self._bounds_s: dict[int, float] = {}  # seconds that plans of so many, that fit, take at least
        self.best: Searched | None = None
        self._before: list[Searched] = []  # best plans before the best one
        self.why, self._stages = "", decision.NOT_COMPARED  # how plans in stages were compared
        self.every = (1,) if self._micro_batched is None else divisors(case.graph.batch or 1)
        self.doubled = [1]
        for count in self.every:
            if count >= 2 * self.doubled[-1]:
                self.doubled.append(count)

    @property
    def count(self) -> int:
        """Micro-batches of the best plan."""
        return 1 if self.best is None else self.best.found.plan.micro_batches // self._whole

    @property
    def too_large(self) -> bool:
        """Whether no device has room for all weights, gradients and optimizer state."""
        case = self._case
        return training_state_bytes(case.graph, case.request.optimizer) > max(case.cluster.memory_bytes)

    @property
    def tight(self) -> bool:
        """Whether no plan was found to fit, or memory keeps the best one slow."""
        return self.best is None or self.best.held_up

    def attempt(self, count: int, ways: _Ways, alike: bool = True, below_s: float = inf, later: bool = True) -> bool:
        """Whether a plan of so many micro-batches fits and is faster than the best one.

        Args:
            alike: with equal blocks alike, where they may be; False: apart, where that was not tried.
            below_s: seconds that its step has to stay below.
            later: layers on any block may be left for later, as long as no plan fits and there are other ways.
        """
        key, several = (count, len(ways.states) > 1, len(ways.saved) > 1), count * self._whole
        below_s = min(below_s, self.best.fastest_s if self.best is not None else inf)
        search = self._search(count, ways, alike)
        if search is None:
            return False
        more = self.doubled if later and self.best is None else ()
        left = (ways != self.ways or (ways != _Ways() and n > count and bool(self._sized(n))) for n in more)
        try:
            own = Searched(search, search.best(search.asked.whole, below_s=below_s, left=left))
        except InfeasiblePlan as reason:
            self._error = reason
            known = self._tried.get(key)
            if known is None or not known.fits:  # else of fewer states
                self._tried[key] = MicroBatchesTried(several, None, None, isinstance(reason, NothingFaster), *key[1:])
            self._bounds_s[count] = search.least_s()
            return False
        step_s, taken = own.found.proof.objective, (bool(own.found.plan.sharded), bool(own.found.plan.replayed))
        self._tried[key] = MicroBatchesTried(several, step_s, max(own.memory_bytes), own.fits, *taken)
        if key[1:] != taken and own.fits and own.fastest_s >= below_s:  # the best plan of fewer ways again
            self._tried[key] = MicroBatchesTried(several, None, None, True, *key[1:])
        # Plans of all ways are those of the first search and more.
        self._bounds_s[count] = search.least_s() if search.postponed else own.found.proof.bound
        if not own.fits:
            self._nearest = min(filter(None, (own, self._nearest)), key=lambda one: one.lacking_bytes)
        elif own.fastest_s < below_s:
            self._before += [self.best] if self.best is not None else []
            self.best = own
        return self.best is own

    def postponed(self) -> list[int]:
        """Numbers of which layers on any block were left for later: below the best plan's, or one if none fits."""
        # One keeps no sums beside the gradients; others need more memory than those tried. Equal blocks are apart next.
        most = self.count if self.best is not None else 2 if self._case.fold is None else 0
        return sorted(n for n, search in self._searches.items() if search.postponed and n < most and not self.staged)

    @property
    def several(self) -> bool:
        """Whether more was compared than everything whole and kept in one micro-batch."""
        return len(self._tried) > 1

    @property
    def apart(self) -> bool:
        """Whether the best plan has layers on devices that others have none in common with, which wait meanwhile."""
        if self.best is None:
            return False
        return len(stage_numbers(self.best.case.graph, self.best.found.plan.layers).groups) > 1

    @cached_property
    def _least_s(self) -> float:
        """Seconds that no plan of the whole batch takes less than."""
        return self._searches[1].least_work_s()

    @property
    def idle(self) -> bool:
        """Whether devices wait for others, or for the links, longer than stages mostly would that there may be."""
        return not why_not(self._case) and self.best is not None and self.best.fastest_s > IDLE * self._least_s

    def with_sharded_state(self) -> None:
        """Search sharded state that memory did not ask for, where the best plan would gain by it half of what a simpler
        plan may cost: other plans gain more by it. Not on CPUs, where its messages take longer than is predicted."""
        known = any(key[1] for key in self._tried) or len(self.ways.states) == 1 or self._case.cluster.of_cpus
        if self.best is None or self.staged or known:
            return
        before, count = self.best, self.count
        sharded_s = before.case.step_s(in_slices(before.case.graph, before.found.plan))
        if (1 + before.case.request.tolerance / 2) * sharded_s >= before.fastest_s:
            return
        bound_s = self._bounds_s[count]
        if self.attempt(count, _Ways(STATES[:2])):
            own = self.best.found  # plans in passes are those of the search before
            covered = tuple(dict.fromkeys((*before.found.proof.covered, *own.proof.covered)))
            self.best = replace(self.best, found=replace(own, proof=replace(own.proof, covered=covered)))
        self._bounds_s[count] = min(bound_s, self._bounds_s[count])

    @property
    def staged(self) -> bool:
        """Whether the best plan is in pipeline stages."""
        return self.best is not None and self.best.found.plan.schedule != SCHEDULES[0]

    def in_stages(self, groups: int | None = None) -> None:
        """Compare plans in pipeline stages, in numbers of micro-batches that are doubled.

        Args:
            groups: of devices; None: all numbers of them.

        Raises:
            InfeasiblePlan, PlanError: so many were asked for, and none fits, or there cannot be any.
        """
        why = why_not(self._case)
        if not why and groups is not None and self._case.cluster.count % groups:
            why = f"{self._case.cluster.count} devices are no {groups} equal groups"
        if not why and self._micro_batched is None and self._whole == 1:
            why = "one micro-batch is no pipeline"
        if why and groups is not None:
            raise PlanError(f"{groups} stages were asked for, and {why}")
        if why:
            return
        least_s = inf if self.best is None else self.best.found.proof.bound
        if not self._case.deadline.over():
            self._stages = "by one cut each"
        for count in self.doubled:
            search = self._searches.get(count) or self._search(count, self.ways, alike=True)
            if search is None or self._case.deadline.over():
                break
            below_s = self.best.fastest_s if self.best is not None else inf
            own_s = search.least_work_s()
            least_s = min(least_s, own_s)
            if count * self._whole == 1:
                continue  # no pipeline, and what its plans take at least
            staged = fastest_in_stages(search, below_s, own_s, groups)
            if staged is None:
                continue
            self._take(search, staged, least_s, STAGES)
        if groups is not None and self.best is None:
            raise InfeasiblePlan(
                f"no plan in {groups} stages was found to fit; leave out --stages, or give more memory"
            )

    def in_meshes(self) -> bool:
        """Whether a mesh of a model of equal blocks fits; where meshes of the whole batch are about as fast, plans of
        it that are none may be faster."""
        begin = time.perf_counter()
        found = fastest_mesh(self._case, self._sized)
        self._case.deadline.extend(time.perf_counter() - begin)  # of fixed effort, whatever the clock says
        if found is None or self._sized(1) is None:
            return False
        search, whole = (self._searches[n] for n in (found.staged.plan.micro_batches // self._whole, 1))
        self._case, mesh_s = replace(self._case, widest=True), found.staged.step_s
        self._stages = "as counted meshes of equal blocks alone"
        if found.whole_s >= NEAR * mesh_s or not self.attempt(1, self.ways, below_s=mesh_s):
            self._take(search, found.staged, whole.least_work_s(), MESHES, found.without())
        return True

    def _take(
        self, search: ShapeSearch, staged: Staged, least_s: float, compared: str, without: tuple[Without, ...] = ()
    ) -> None:
        """Keep a plan that is faster than the best one.

        Args:
            least_s: seconds that no plan takes less than.
            compared: words for the plans that it is the fastest of.
            without: as in `Searched`.
        """
        case, plan = search.case, staged.plan
        gap = 1 - least_s / staged.step_s
        status = (Status.OPTIMAL if gap <= GAP else Status.FEASIBLE).value
        proof = Proof(status, staged.step_s, least_s, gap, 0.0, covered=(compared,))
        found = Found(plan, *formulated(plan, case.graph, case.cluster, case.costs), proof)
        self._before += [self.best] if self.best is not None else []
        self.best = Searched(search, found, staged.peaks, without)
        key = plan.micro_batches // self._whole, bool(plan.sharded), bool(plan.replayed)
        apart = plan.schedule != SCHEDULES[0]
        row = MicroBatchesTried(plan.micro_batches, staged.step_s, max(staged.peaks), True, *key[1:], apart)
        self._tried[key] = row

    def _sized(self, count: int) -> Case | None:
        """The case at the size of so many micro-batches; None where there is none."""
        search = self._searches.get(count)
        if search is None and (count == 1 or self._micro_batched is not None):
            search = self._search(count, self.ways, alike=True)
        return None if search is None else search.case

    def _search(self, count: int, ways: _Ways, alike: bool) -> ShapeSearch | None:
        """The search over the plans of so many micro-batches; None where there are none, or none more."""
        case = replace(self._case, states=ways.states, saved=ways.saved)
        if count > 1:
            assert self._micro_batched is not None
            try:
                equal_size(case.graph, count)
                own = self._micro_batched(count)
                self._questions(own.graph)  # replicas that are pinned need as many samples
            except (CaptureError, PinError, PlanError) as reason:
                self.why = str(reason).partition(";")[0]
                return None
            blocks = fold(own.graph) if case.fold is not None else None
            uneven = case.uneven and offers_uneven(own.graph.batch, case.cluster)
            case = replace(case, graph=own.graph, costs=own.costs, fold=blocks, uneven=uneven)
        pins = self._questions(case.graph)
        said = [by for pinned in (pins.whole, *pins.parts.values()) for by in (pinned.allowed, pinned.periods)]
        if case.fold is not None and not all(map(case.fold.treated_alike, said)):
            case = replace(case, fold=None)
        gathered = {name for name, pin in pins.whole.layers.items() if pin.state == STATES[-1]}
        if case.fold is not None and gathered and not gathered_together(case.graph, case.fold, gathered):
            case = replace(case, fold=None)
        if alike:
            self._searches[count] = ShapeSearch(case, pins)
            return self._searches[count]
        # On the first devices, layers that hold as little as they may can do so alike; on others they need not be.
        tried = self._searches.get(count)
        if tried is None or case.fold is None or case.cluster.count > ANYWHERE or tried.lacking_bytes() > 0:
            return None
        return ShapeSearch(replace(case, fold=None), pins)

    def found(self) -> Searched:
        """The best plan, or one within the tolerance that was found before, of fewer micro-batches; where none fits,
        the nearest to that, which `decide` refuses with its numbers.

        Raises:
            InfeasiblePlan: there is none.
        """
        why_whole = f"\n  it cannot be cut into micro-batches: {self.why}" if self.why else ""
        best, most = self.best or self._nearest, max((count for count, *_ in self._tried), default=1)
        if best is None:
            assert self._error is not None
            more = f"\n  this is of {most} micro-batches; fewer need more memory" if most > 1 else ""
            raise type(self._error)(f"{self._error}{why_whole or more}") from self._error
        tried = tuple(self._tried[one] for one in sorted(self._tried))
        most_s, bound_s = (1 + best.case.request.tolerance) * best.fastest_s, best.found.proof.bound
        best = next((one for one in self._before if one.found.proof.objective <= most_s), best)
        proof, bound_s = best.found.proof, min(bound_s, *self._bounds_s.values(), inf)
        if self.best is not None and bound_s <= 0 and best.case.request.plan is None:
            bound_s = self._least_s  # a search that the time ended knows no more
        if self.best is not None and (bound_s < proof.bound or proof.bound <= 0 < bound_s):
            gap = 1 - bound_s / proof.objective
            status = (Status.OPTIMAL if gap <= GAP else Status.FEASIBLE).value
            proof = replace(proof, bound=bound_s, gap=gap, status=status)
        sharded = any(sharded for _, sharded, _ in self._tried)
        proof = replace(proof, covered=(*proof.covered, *[SHARDED] * sharded, *[WIDEST] * best.case.widest))
        pipelined = self._case.request.plan is None and (self._micro_batched is not None or self._whole > 1)
        if pipelined and not why_not(self._case) and proof.objective > (1 + GAP) * self._least_s:
            proof = replace(proof, stages=self._stages)
        best = replace(best, found=replace(best.found, proof=proof), why_whole=why_whole, sized=self._sized)
        return replace(best, tried=tried if len(tried) > 1 else ())
