"""Plans of small models that lack memory, against every plan that fits.

    python -m benchmarks.proof_memory [N] [--kinds KIND ...] [--devices N] [--loss] [--limit N] [--json FILE]

Plans are of all numbers of micro-batches, with layers in every state on any aligned blocks of devices, and units
replayed or not; of models with their loss inside also in pipeline stages of every schedule, cut anywhere. Whether a
plan fits is said by its lowered program, and its seconds by its simulated step: neither is what the search adds up. Of
each model, number of micro-batches and schedule the plans with the least bounds are tried, up to a limit; where none is
said to fit, those with the least state.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from math import inf
from pathlib import Path

import numpy as np

from benchmarks.proof_cases import KINDS, Problem, drawn
from benchmarks.proof_plans import EveryPlan, is_legal, simulated_s, words
from parplan.cost_models.roofline import RooflineCosts
from parplan.errors import CaptureError, InfeasiblePlan, PlanError
from parplan.graph.repeated import unit_of, units
from parplan.graph.resized import at_batch
from parplan.lowering.holdings import slices
from parplan.lowering.micro_batches import equal_size
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Scheme, Strategy
from parplan.planner.decide import decide
from parplan.planner.decision import Decision, PricedGraph
from parplan.planner.search.context import pipeline_peaks
from parplan.planner.search_space.rules import divisors
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.solver.problem import FloatArray, Status

__all__ = ["Answer", "EveryWay", "Tight", "answered", "tight"]

CHOICES = 2_000_000
"""Most choices of strategies in a number of micro-batches and a schedule; others are passed over."""

LIMIT, EXACT, OPTIMAL = 1_000, 1e-6, Status.OPTIMAL.value
DEFAULT = STATES[0], SAVED[0]


@dataclass(frozen=True, eq=False)
class Tight:
    """A problem whose devices have too little memory for the plan that is fastest with enough.

    Args:
        whole: in one micro-batch, with the memory there is.
        fastest_bytes: what the fastest plan takes at most on a device.
    """

    whole: Problem
    fastest_bytes: int

    @property
    def limit_bytes(self) -> int:
        """Bytes of each device."""
        return self.whole.cluster.devices[0].memory_bytes

    def sized(self, count: int) -> Problem:
        """The problem of one of so many micro-batches.

        Raises:
            CaptureError, PlanError: there is none.
        """
        own = self.whole
        if count == 1:
            return own
        graph = at_batch(own.graph, equal_size(own.graph, count))
        costs = RooflineCosts(graph, own.cluster, optimizer=own.request.optimizer, micro_batches=count)
        return replace(own, graph=graph, costs=costs)

    @cached_property
    def counts(self) -> dict[int, Problem]:
        """The problems of all numbers of micro-batches that there may be."""
        found = {}
        for count in divisors(self.whole.graph.batch or 1):
            try:
                found[count] = self.sized(count)
            except (CaptureError, PlanError):
                break
        return found

    def decided(self) -> Decision:
        """What the planner decides.

        Raises:
            InfeasiblePlan: no plan fits, or none was found.
        """
        own = self.whole

        def micro_batched(count: int) -> PricedGraph:
            sized = self.sized(count)
            return PricedGraph(sized.graph, sized.costs)

        return decide(own.graph, own.cluster, own.costs, own.request, None, micro_batched)


def tight(kind: str, seed: int, devices: int, loss: bool = False) -> Tight:
    """The problem of a seed with less memory than its fastest plan takes, and hardly less than replicas in slices take
    in as many micro-batches as there may be, all replayed."""
    problem, draw = drawn(kind, seed, devices, loss), random.Random(f"{kind} {seed} memory")
    request = replace(problem.request, started_ranks=True)
    fastest = decide(problem.graph, problem.cluster, problem.costs, request)
    most, least = max(fastest.prediction.memory_bytes), list[int]()
    for own in Tight(replace(problem, request=request), most).counts.values():
        every = tuple(range(own.cluster.count))
        graph, layers = own.graph, data_parallel(own.graph, every, STATES[-1], SAVED[-1])
        if is_legal(Plan(graph.model, graph.fingerprint, graph.batch or 1, own.cluster.count, layers), own):
            least.append(max(own.costs.peaks(layers)))
    low = 0.95 * min([*least, most])
    cluster = problem.cluster.with_memory(int(draw.uniform(low, most)))
    costs = RooflineCosts(problem.graph, cluster, optimizer=request.optimizer)
    return Tight(replace(problem, cluster=cluster, costs=costs, request=request), most)


@dataclass(frozen=True, eq=False)
class EveryWay(EveryPlan):
    """All plans of a model in so many micro-batches, layers in any state on any aligned blocks, units replayed or not.

    Args:
        micro_batches: of which the problem is one.
    """

    micro_batches: int

    @cached_property
    def strategies(self) -> dict[str, tuple[Strategy, ...]]:
        """Strategies by layer."""
        graph, again, found = self.problem.graph, unit_of(self.problem.graph), dict[str, tuple[Strategy, ...]]()
        for name, known in super().strategies.items():
            ways = [
                replace(one, state=state, saved=saved)
                for one, state, saved in product(known, STATES, SAVED if name in again else SAVED[:1])
            ]
            layer = graph.layers[name]
            found[name] = tuple(one for one in ways if one.state == STATES[0] or slices(graph, layer, one))
        return found

    def plan(self, index: int, scheme: Scheme = Scheme.GATHER) -> Plan:
        """The plan of a choice."""
        own, several = super().plan(index, scheme), self.micro_batches
        return replace(own, batch=several * own.batch, micro_batches=several)

    def least_s(self) -> FloatArray:
        """Seconds that the simulated steps of all plans take at least: those of the device with the most to do."""
        if self.micro_batches == 1:
            return self.bounds_s(1)
        seconds = [self._layer_s(name, 1) for name in self.strategies]
        often = [self.micro_batches * forward for forward, _, _ in seconds]
        costs, layers = self.problem.costs, self.problem.graph.layers
        for v, (name, own) in enumerate(self.strategies.items()):
            back = np.array([costs.layer(layers[name], one, 1).backward_s for one in own])
            often[v] = often[v] + (self.micro_batches - 1) * back + seconds[v][1] + seconds[v][2]
        return costs.step.overhead_s + self._busiest_s(often, {}, 0)

    def peaks(self, plan: Plan) -> tuple[int, ...]:
        """Peak bytes of every device."""
        found: tuple[int, ...] = tuple(self.problem.costs.peaks(plan.layers))
        return found

    def state_bytes(self) -> FloatArray:
        """Bytes of weights and optimizer state on the device with the most of them, of all plans."""
        costs, layers, held = self.problem.costs, self.problem.graph.layers, list[FloatArray]()
        for name, own in self.strategies.items():
            each = [costs.memory(layers[name], one) for one in own]
            held.append(np.array([float(one.weights_bytes + one.optimizer_bytes) for one in each]))
        return self._busiest_s(held, {}, 0)

    def fitting(self, step_s: float, limit: int) -> Iterator[tuple[Plan, float]]:
        """The legal plans that fit and whose bound is below a step, each with its simulated step.

        Of so many at most: those with the least bounds; where any step will do (inf), with the least state.
        """
        problem = self.problem
        bounds = (self.state_bytes() if step_s == inf else self.least_s()).reshape(-1)
        found = np.flatnonzero(bounds < step_s)
        for index in found[np.argsort(bounds[found], kind="stable")][:limit].tolist():
            plan = self.plan(index)
            if not self._whole_units(plan.layers) or not self.is_legal(plan):
                continue
            if problem.cluster.has_room(self.peaks(plan)):
                yield plan, simulated_s(plan, problem)

    def is_legal(self, plan: Plan) -> bool:
        """Whether a plan keeps all rules."""
        return is_legal(plan, self.problem)

    def _whole_units(self, layers: Mapping[str, Strategy]) -> bool:
        """Whether the layers of each unit are all replayed, or none."""
        return all(len({layers[name].saved for name in unit}) == 1 for unit in units(self.problem.graph))


@dataclass(frozen=True, eq=False)
class EveryCut(EveryWay):
    """All plans of a model in so many micro-batches and in pipeline stages, cut anywhere.

    Args:
        schedule: of the stages.
    """

    schedule: str

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of devices that one of several groups may have."""
        return tuple(one for one in super().blocks if 2 * len(one) <= self.problem.cluster.count)

    def plan(self, index: int, scheme: Scheme = Scheme.GATHER) -> Plan:
        """The plan of a choice."""
        return replace(super().plan(index, scheme), schedule=self.schedule)

    def is_legal(self, plan: Plan) -> bool:
        """Whether a plan keeps all rules, and its stages are on more than one group of devices."""
        return len(stage_numbers(self.problem.graph, plan.layers).groups) > 1 and super().is_legal(plan)

    def peaks(self, plan: Plan) -> tuple[int, ...]:
        """Peak bytes of every device."""
        return pipeline_peaks(plan, self.problem.graph, self.problem.costs)


@dataclass(frozen=True)
class Answer:
    """A plan that was decided, or that none fits, and the fastest plan that fits, of those tried.

    Args:
        limit_bytes, wanted_bytes: of each device; what the plan takes that is fastest with enough.
        status: of the proof; empty where no plan was decided.
        said: the plan, or the error.
        fit: how many plans that were tried fit.
        faster: the fastest of them, where it is faster than the plan.
        claimed_s: seconds of the fastest that the claim is of; plans in stages may be left out of it, in words.
    """

    model: str
    limit_bytes: int
    wanted_bytes: int
    status: str
    said: str
    step_s: float
    bound_s: float
    fit: int
    faster: str = ""
    faster_s: float = inf
    claimed_s: float = inf

    @property
    def gain(self) -> float:
        """The share of the step that the fastest plan saves; all of it where no plan was decided."""
        return 1 - self.faster_s / self.step_s if self.faster and self.step_s < inf else float(bool(self.faster))

    @property
    def wrong(self) -> bool:
        """Whether what was claimed is not so: a bound that a plan is below, or that there is no plan."""
        claimed = bool(self.status) or self.said.startswith("no plan fits")
        return claimed and self.claimed_s < self.bound_s * (1 - EXACT)


def answered(own: Tight, limit: int = LIMIT) -> Answer | None:
    """What is decided of a problem, beside what all plans say that are not too many; None where all are."""
    every = [EveryWay(problem, count) for count, problem in own.counts.items()]
    if own.whole.graph.losses:
        cuts = [(problem, count) for count, problem in own.counts.items() if count > 1]
        every += [EveryCut(*one, schedule) for one in cuts for schedule in SCHEDULES[1:]]
    every = [one for one in every if one.count <= CHOICES]
    if not every:
        return None
    try:
        decision = own.decided()
        proof, plan = decision.proof, decision.plan
        status, said, bound_s, whole = proof.status, _words(plan), proof.bound, not proof.stages
        step_s = simulated_s(plan, own.counts[plan.micro_batches])
    except InfeasiblePlan as error:
        status, said, step_s, bound_s, whole = "", str(error).partition("\n")[0], inf, inf, True
    found = [each for one in every for each in one.fitting(step_s, limit)]
    faster = [(seconds, _words(plan)) for plan, seconds in found if seconds < step_s * (1 - EXACT)]
    least_s, best = min(faster, default=(inf, ""))
    claimed_s = min((seconds for plan, seconds in found if whole or plan.schedule == SCHEDULES[0]), default=inf)
    name, bytes_s = own.whole.name, (own.limit_bytes, own.fastest_bytes)
    return Answer(name, *bytes_s, status, said, step_s, bound_s, len(found), best, least_s, claimed_s)


def _words(plan: Plan) -> str:
    """A plan in a line, with its micro-batches, states and replays."""
    ways = [f"{name}:{one.state}:{one.saved}" for name, one in plan.layers.items() if (one.state, one.saved) != DEFAULT]
    order = f"{plan.schedule} " if plan.schedule != SCHEDULES[0] else ""
    return " ".join([f"{order}{plan.micro_batches} micro-batches:", words(plan), *ways])


def main(argv: Sequence[str] | None = None) -> None:
    """A line per model, and what was better."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=60, help="models")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--devices", type=int, default=2, help="at most")
    parser.add_argument("--loss", action="store_true", help="models have their loss inside")
    parser.add_argument("--limit", type=int, default=LIMIT, help="plans of a model and number of micro-batches")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    rows = []
    for n in range(args.count):
        kind, seed = args.kinds[n % len(args.kinds)], n // len(args.kinds)
        one = answered(tight(kind, seed, args.devices, args.loss), args.limit)
        if one is None:
            continue
        rows.append(one)
        print(f"{one.model:14} {one.status or 'none':9} {one.fit:>6,} fit  {one.said}", flush=True)
        if one.faster:
            told = "WRONG" if one.wrong else "missed"
            print(f"  {told}, {one.gain:.2%}: {one.faster_s * 1e6:,.2f} us, {one.faster}", flush=True)
    decided = [one for one in rows if one.status]
    proven = sum(one.status == OPTIMAL for one in decided)
    missed = sorted((one.gain for one in decided if one.faster), reverse=True)
    none = [one for one in rows if not one.status]
    print(
        f"\n{len(rows)} models: {len(decided)} plans, {proven} called OPTIMAL; {len(missed)} of them missed a faster "
        f"one{f', {missed[0]:.1%} at most' if missed else ''}; of {len(none)} without a plan "
        f"{sum(bool(one.faster) for one in none)} have one; {sum(one.wrong for one in rows)} claims are wrong"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
