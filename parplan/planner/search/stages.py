"""Plans in pipeline stages: one stage's strategies solved on its devices, layers cut into stages, the step simulated.

All groups of devices are alike, so the strategies of all layers are solved once, on the first group, with the memory of
all groups together. Layers in forward order are then cut where the longest stage and what is sent between stages take
least, every stage within its memory, and the step is simulated. Which strategies and which cut are a choice by parts:
what is said of the step is simulated, and what is proven is the least work of all plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from parplan.cost_models.costs import Moments
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.pipeline.orders import most_in_flight, orders
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Strategy
from parplan.planner.search.context import SIMULATED, Case, pipeline_peaks, simulated_step
from parplan.planner.search.formulations import Formulations
from parplan.planner.search_space.pin_search import masked
from parplan.planner.search_space.strategies import data_parallel
from parplan.planner.simulation.priced_program import lowered, priced
from parplan.planner.solver.problem import FloatArray, Problem, restrict
from parplan.planner.solver.solve import solve

__all__ = ["Staged", "equal_parts", "fastest_in_stages", "has_loss", "why_not", "why_one_group"]

SHARE = 0.2
"""Part of the time left for the strategies of one number of stages."""

ROUNDS = (1, 2, 4)
"""Stages per group that are compared: interleaved ones idle less and send more."""

PIPELINED = SCHEDULES[1:]

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Staged:
    """A plan in pipeline stages, with its simulated seconds, and peak bytes of every device."""

    plan: Plan
    step_s: float
    peaks: tuple[int, ...]


def why_not(case: Case) -> str:
    """The reason for which no stages are tried, in words; empty where they are."""
    if not has_loss(case.graph):
        return "the model has no loss inside, from which the last stage goes back (give loss=fn, targets=...)"
    return why_one_group(case)


def has_loss(graph: LayerGraph) -> bool:
    """Whether training has a loss inside the model, from which the last stage can go back."""
    return graph.training and bool(graph.losses)


def why_one_group(case: Case, most: int = SIMULATED) -> str:
    """The reason in the devices, or in what is asked for, for which layers are not spread over equal groups of them.

    Args:
        most: devices that are compared.
    """
    cluster, request = case.cluster, case.request
    if cluster.home is not None:
        return "one process runs all devices; under torchrun every process takes its own stage"
    if cluster.mixed or not 1 < cluster.count <= most:
        return f"stages are on 2 to {most} devices of one kind"
    if (
        request.plan is not None
        or request.pins
        or request.rules == "strict"
        or request.scheme not in ("auto", "gather")
    ):
        return "they are not compared beside a plan, pins, a scheme or strict rules"
    return ""


def fastest_in_stages(search: Formulations, below_s: float, least_s: float, groups: int | None = None) -> Staged | None:
    """The fastest plan in stages that fits and takes less than `below_s`, of those that are tried.

    Args:
        search: of the number of micro-batches that is asked.
        least_s: seconds of all its work, shared by all devices.
        groups: of devices; None: every number that divides them.
    """
    case, best = search.case, None
    count, micro_batches = case.cluster.count, case.costs.step.micro_batches
    for number in (n for n in range(2, count + 1) if count % n == 0 and n <= micro_batches and groups in (None, n)):
        if case.deadline.over():
            break
        # Stages are cut about equal: each group waits for as many of them as there are groups before it, or behind.
        rounds = ROUNDS[-1] if case.request.schedule != "gpipe" and micro_batches % number == 0 else 1
        if least_s * (1 + (number - 1) / (rounds * micro_batches)) >= below_s:
            continue
        layers = _one_stage(search, number, below_s)
        if layers is None:
            continue
        for plan, least_s in sorted(_cut(case, layers, number), key=lambda one: one[1]):
            if least_s >= below_s:
                break
            peaks = pipeline_peaks(plan, case.graph, case.costs)
            if not case.cluster.has_room(peaks):
                continue
            timeline = case.simulated(plan)
            if timeline is not None and timeline.step_s < below_s:
                below_s = timeline.step_s
                best = Staged(plan, below_s, peaks)
    return best


def equal_parts(case: Case) -> Staged | None:
    """GPipe's plan by hand: layers in their order, cut into a stage for each device that take about equally long, all
    state and activations kept; None where there are fewer layers than devices. It need not fit."""
    request = replace(case.request, schedule=PIPELINED[0])
    roomy = replace(case, request=request, cluster=case.cluster.with_memory(sys.maxsize))
    for plan, _ in _cut(roomy, data_parallel(case.graph, (0,), STATES[0], SAVED[0]), case.cluster.count):
        timeline = simulated_step(plan, case.graph, case.cluster, case.costs)
        assert timeline is not None  # T does not describe stages
        return Staged(plan, timeline.step_s, pipeline_peaks(plan, case.graph, case.costs))
    return None


def _one_stage(search: Formulations, groups: int, below_s: float) -> Mapping[str, Strategy] | None:
    """Strategies of all layers on the devices of the first group; None where they are no part of a faster plan."""
    case, formulation = search.case, search.one_pass()
    each = case.cluster.count // groups
    kept = [np.array([max(o.strategy.devices) < each for o in options]) for options in formulation.options]
    kept += [np.ones(node.size, dtype=bool) for node in formulation.problem.nodes[len(kept) :]]
    problem: Problem = masked(formulation, search.asked.whole)
    # One stage has a part of the layers, and activations of at most so many micro-batches in flight.
    loss = Moments(len(case.graph.layers)).loss
    nodes = [
        replace(
            node,
            usages=tuple(
                replace(one, amounts=groups * one.amounts) if 0 < one.start <= loss < one.end else one
                for one in node.usages
            ),
        )
        for node in problem.nodes
    ]
    problem = replace(problem, nodes=tuple(nodes), limits=tuple(groups * limit for limit in problem.limits))
    narrowed = restrict(problem, kept)
    # All groups are busy all the time at best.
    found = case.deadline.watched(solve(narrowed.problem, case.deadline.part_s(SHARE), cutoff=groups * below_s))
    return None if found.choice is None else formulation.strategies(narrowed.lift(found.choice))


def _cut(case: Case, layers: Mapping[str, Strategy], groups: int) -> Iterator[tuple[Plan, float]]:
    """Plans with the layers cut into stages, and about the least that each takes."""
    graph, cluster, count = case.graph, case.cluster, case.costs.step.micro_batches
    plan = Plan(
        graph.model, graph.fingerprint, count * (graph.batch or 1), cluster.count, layers, case.request.rules,
        micro_batches=count,
    )  # fmt: skip
    load = _load(case, plan, cluster.count // groups)
    for schedule in PIPELINED if case.request.schedule is None else (case.request.schedule,):
        for rounds in ROUNDS if schedule == "1f1b" else ROUNDS[:1]:
            if rounds > 1 and count % groups:
                continue
            stages = rounds * groups
            flying = [most_in_flight(own, rounds) for own in orders(schedule, groups, stages, count)]
            ends = load.ends([flying[k % groups] for k in range(stages)], min(cluster.memory_bytes), count, rounds)
            if ends is None:
                continue
            times = load.times(ends)
            own = [sum(times[k::groups]) for k in range(groups)]
            each, chosen = cluster.count // groups, dict[str, Strategy]()
            for place, (name, one) in enumerate(layers.items()):
                first = sum(place >= end for end in ends[:-1]) % groups * each
                chosen[name] = replace(one, devices=tuple(device + first for device in one.devices))
            yield replace(plan, layers=chosen, schedule=schedule), count * max(own)


@dataclass(frozen=True, eq=False)
class _Load:
    """Seconds and bytes of layers in forward order, one micro-batch, on the devices of one group.

    Args:
        seconds: summed up to every layer.
        crossing_s: seconds of what is sent over a cut in front of every layer.
        held: bytes by moment of the step, summed up to every layer likewise: (layers + 1, moments).
        loss: the moment at which everything saved for backward is there.
    """

    seconds: FloatArray
    crossing_s: FloatArray
    held: FloatArray
    loss: int

    def times(self, ends: Sequence[int]) -> list[float]:
        """Seconds of every stage."""
        found: list[float] = np.diff(self.seconds[[0, *ends]]).tolist()
        return found

    def ends(self, flying: Sequence[float], limit: float, micro_batches: int, rounds: int) -> tuple[int, ...] | None:
        """Where stages end so that the step is about the shortest; None where they do not fit.

        The longest stage, or what it sends if that takes longer, is waited for by every micro-batch in every round;
        the sends of one micro-batch come one after another.

        Args:
            flying: micro-batches in flight, by stage.
            limit: bytes of each device.
            rounds: stages of each group, which share its memory.
        """
        places, seconds, resident, saved, extra = self._between
        if len(places) <= len(flying):
            return None
        longest_s, sent_s = np.full((2, len(places)), inf)
        longest_s[0] = sent_s[0] = 0.0
        choices = list[IntArray]()
        for number in flying:
            # Of several stages one at a time computes, and all hold what they keep.
            roomy = rounds * (resident + number * saved) + extra <= limit
            worst_s = np.where(roomy, np.maximum(longest_s[:, None], seconds), inf)
            all_s = sent_s[:, None] + np.where(np.isfinite(worst_s), self.crossing_s[places][:, None], inf)
            chosen = np.argmin(micro_batches * rounds * worst_s + all_s, axis=0)
            every = np.arange(len(places))
            longest_s, sent_s = worst_s[chosen, every], all_s[chosen, every]
            choices.append(chosen)
        if longest_s[-1] == inf:
            return None
        at, found = len(places) - 1, list[int]()
        for chosen in reversed(choices):
            found.append(int(places[at]))
            at = int(chosen[at])
        return tuple(reversed(found))

    @cached_property
    def _between(self) -> tuple[IntArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """The places of cuts, and from each to each: seconds of a stage or of what it sends, bytes resident and
        saved for backward, and more bytes at its peak; seconds are inf where no stage is."""
        count = len(self.seconds) - 1
        # Where no less crosses in front of the layer before, or behind: between blocks rather than inside of them.
        near = [inf, *self.crossing_s[1:count], inf]
        places = np.array([0, *(p for p in range(1, count) if near[p] <= min(near[p - 1], near[p + 1])), count])
        done_s, sent_s = self.seconds[places], self.crossing_s[places]
        # A device sends forward over one cut and back over the other, which each are half of what crosses.
        seconds = np.maximum(done_s - done_s[:, None], (sent_s + sent_s[:, None]) / 2)
        seconds[np.tril_indices(len(places))] = inf
        held = self.held[places]
        resident, loss = (held[:, moment] - held[:, moment][:, None] for moment in (0, self.loss))
        peaks = np.array([(held - held[place]).max(axis=1) for place in range(len(places))])
        return places, seconds, resident, loss - resident, peaks - loss


def _load(case: Case, plan: Plan, each: int) -> _Load:
    """The load of layers that are all on the first `each` devices."""
    graph, costs, layers = case.graph, case.costs, plan.layers
    work = priced(graph, lowered(graph, plan, case.cluster), costs)
    moved_s = dict.fromkeys(graph.layers, 0.0)
    for name, move in work.moves_to_layers(graph):
        moved_s[name] += move.forward_s + move.backward_s
    moments, seconds = Moments(len(graph.layers)), np.zeros(len(graph.layers) + 1)
    held = np.zeros((len(seconds), moments.end))
    for place, (name, layer) in enumerate(graph.layers.items(), 1):
        cost = work.layers[name].cost
        seconds[place] = cost.forward_s + cost.backward_s + cost.replay_s + cost.gathers_s + moved_s[name]
        for one in costs.memory(layer, layers[name]).held:
            held[place, one.start : one.end] += one.nbytes
    crossing_s = np.array([*_crossing_s(graph, case, layers, each), 0.0])
    return _Load(seconds.cumsum(), crossing_s, held.cumsum(axis=0), moments.loss)


def _crossing_s(graph: LayerGraph, case: Case, layers: Mapping[str, Strategy], each: int) -> list[float]:
    """Seconds of what is sent over a cut in front of every layer, to the devices of the next group and back."""
    order = {name: place for place, name in enumerate(graph.layers)}
    changes = [0.0] * (len(order) + 1)
    for value, maker in graph.producer.items():
        last = max((order[reader] for reader in graph.consumers(value)), default=0)
        if last > order[maker]:
            given = graph.layers[maker].layout(value, layers[maker])
            there = replace(layers[maker], devices=tuple(device + each for device in layers[maker].devices))
            wanted = replace(graph.layers[maker].layout(value, there), partial=False)
            cost = case.costs.transfer(graph.values[value], given, wanted)
            changes[order[maker] + 1] += cost.forward_s + cost.backward_s
            changes[last + 1] -= cost.forward_s + cost.backward_s
    return list(accumulate(changes))[: len(order)]
