"""Seconds and bytes of a training step of counted blocks on stages x data-parallel copies x tensor groups.

Groups of devices work as pipeline stages (docs/pipeline.md), each of them as many times as there are data-parallel
copies, each copy on a tensor group. A step is the longest path through the schedule's table, and behind it what is left
of the gradient sums, and the update. Memory is a stage's parameters in their state, what micro-batches in flight have
saved, and the largest transient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import inf

import numpy as np

from parplan.cluster import Cluster
from parplan.cost_models.communication.collectives import Linear, Topology
from parplan.cost_models.ops.efficiency import efficiency
from parplan.lowering.pipeline.orders import most_in_flight, orders
from parplan.plan import SCHEDULES, STATES
from parplan.planner.mesh.parts import Part, Parts, Unit

__all__ = ["MIXED", "PLAIN", "Links", "Mesh", "ParameterBytes", "Stage", "Step", "split", "stage_of", "step_of"]


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per trained number: of the weights that layers compute with, gradients as they add up, and the optimizer's.

    >>> PLAIN.resident, MIXED.resident
    (8, 18)
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def resident(self) -> int:
        """Bytes on a device of a number whose state is replicated."""
        return self.weights + self.gradients + self.optimizer

    @property
    def updated(self) -> int:
        """Bytes that an update reads and writes: gradients once, weights once, the optimizer's twice."""
        return self.gradients + self.weights + 2 * self.optimizer


PLAIN = ParameterBytes(2, 2, 4)
"""AdamW on bf16 weights, everything in bf16, as plain torch keeps it."""

MIXED = ParameterBytes(2, 4, 12)
"""AdamW on float32 master weights, with a copy in bf16 to compute with and gradients added up in float32."""


@dataclass(frozen=True)
class Mesh:
    """How many devices do what.

    Args:
        tensor: devices of a tensor group.
        data: copies of each stage that work on other samples.
        groups: groups of devices, a pipeline stage each, or several.
        rounds: stages of each group (interleaved where there are several).
        micro_batches: of a step, of so many `samples` on each tensor group.
        schedule, state: as a plan's (plan.Plan, plan.Strategy); `state` is that of all matrices.
    """

    tensor: int = 1
    data: int = 1
    groups: int = 1
    rounds: int = 1
    micro_batches: int = 1
    samples: int = 1
    schedule: str = SCHEDULES[-1]
    state: str = STATES[0]

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.data * self.groups

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.data * self.micro_batches * self.samples

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.groups * self.rounds

    @property
    def in_flight(self) -> tuple[float, ...]:
        """By group, how often what one micro-batch saves in all its blocks is held at most."""
        return _table(self.schedule, self.groups, self.rounds, self.micro_batches)[1]

    def describe(self) -> str:
        """Words for a report: `8 tensor x 4 data x 16 stages in 4 rounds, 16 micro-batches of 1, gathered state`."""
        parts = [f"{self.tensor} tensor"] * (self.tensor > 1) + [f"{self.data} data"] * (self.data > 1)
        rounds = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        parts += [f"{self.groups} stages{rounds}"] * (self.groups > 1)
        state = "" if self.state == STATES[0] else f", {self.state} state"
        return f"{' x '.join(parts) or 'one device'}, {self.micro_batches} micro-batches of {self.samples}{state}"


class Links:
    """Seconds of messages on a machine, by what talks: each kind worked out once.

    Args:
        by_hand: weights of sharded state are gathered once per step, those of a block in one message, and a block that
            is replayed whole takes its transfers again, as the best programs written by hand do it; else as parplan's
            runtime does it: every matrix is gathered in every micro-batch, and moved copies are kept.
    """

    def __init__(self, cluster: Cluster, by_hand: bool = True) -> None:
        self.cluster, self.by_hand = cluster, by_hand
        self._rings: dict[tuple[int, int, int], Linear] = {}
        self._topology = Topology(cluster)

    def all_reduce(self, mesh: Mesh, copies: int) -> Linear:
        """A sum over all data-parallel copies of a stage, and over `copies` devices of each tensor group: rings of all
        parts at once. Half of it gathers weights from slices, or sums gradients to slices."""
        if copies * mesh.data == 1:
            return Linear()
        key = mesh.tensor, mesh.data, copies
        if key not in self._rings:
            bases = np.arange(mesh.data)[:, None] * mesh.tensor
            parts = (np.arange(first, first + copies) for first in range(0, mesh.tensor, copies))
            self._rings[key] = self._topology.all_reduce([(bases + part).ravel().tolist() for part in parts])
        return self._rings[key]

    def message_s(self, mesh: Mesh, nbytes: float) -> float:
        """A message from each device of a stage to its neighbour in the next, all at once, where that is slowest."""
        each = mesh.tensor * mesh.data
        ends = ((number * each, (number + 1) * each) for number in range(mesh.groups - 1))
        links = {self.cluster.link(pair) for pair in ends}
        return max((one.latency_s + nbytes / (one.bandwidth_bytes_per_s * one.contention) for one in links), default=0)

    def shared(self, mesh: Mesh, block: Part) -> float:
        """The share of messages from stage to stage that transfers of a tensor group on the same links wait for."""
        ends = (0, 1), (0, mesh.tensor * mesh.data)
        if self.by_hand or mesh.tensor == 1 or len({self.cluster.link(pair) for pair in ends}) > 1:
            return 0.0
        return block.transfers_s / block.seconds

    def update_s(self, nbytes: float) -> float:
        """An update that reads and writes so many bytes."""
        device = self.cluster.devices[0]
        return nbytes / (device.bandwidth_bytes_per_s * efficiency(device, "fp32").memory)


@dataclass(frozen=True)
class Stage:
    """Work of a group of devices for one micro-batch, and its bytes.

    Args:
        blocks: how many it has.
        replays: by unit of a block, how many of them are replayed.
        forward_s, backward_s: of one micro-batch, in all its rounds, with what it waits for gathers and slices.
        last_s: more in the last micro-batch, for gradient sums that nothing hides.
        update_s: of its parameters.
        nbytes: the most that one of its devices holds.
    """

    blocks: int
    replays: tuple[int, ...]
    forward_s: float
    backward_s: float
    last_s: float
    update_s: float
    nbytes: float

    @property
    def seconds(self) -> float:
        """Forward and backward of a micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Step:
    """A training step.

    Args:
        stages: by group of devices.
        bound_s: seconds that no spread of the blocks over these groups takes less than.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    seconds: float
    bound_s: float

    @property
    def nbytes(self) -> float:
        """The most that a device holds."""
        return max(stage.nbytes for stage in self.stages)


def stage_of(
    parts: Parts, mesh: Mesh, links: Links, group: int, blocks: int, limit: float, held: ParameterBytes,
    replays: tuple[int, ...] | None = None,
) -> Stage | None:  # fmt: skip
    """A group of devices with so many blocks, of which as few seconds are replayed as memory allows; None where it does
    not fit.

    Args:
        limit: bytes of a device.
        replays: by unit of a block, how many of them are replayed, whether that fits or not.
    """
    block = parts.block
    own = [(block, blocks)] * (blocks > 0)
    own = [(parts.prologue, 1)] * (group == 0) + own
    if group == mesh.groups - 1:
        own.append((parts.last if group else parts.epilogue, 1))
    always, updated, shown, flying = 0.0, 0.0, 0.0, mesh.in_flight[group]
    for part, count in own:
        gathered = 0.0
        for copies, numbers in part.parameters.items():
            slices = copies * mesh.data if mesh.state != STATES[0] else 1
            resident = held.resident * numbers / slices
            if mesh.state == STATES[1] and links.by_hand:  # from the first forward to the last backward whole
                resident = (held.weights + held.gradients + held.optimizer / slices) * numbers
            elif mesh.state == STATES[1]:  # weights from forward to backward, of every micro-batch in flight
                resident += flying * held.weights * numbers
            elif mesh.state == STATES[2]:  # the weights of two units at a time, the gradients of one
                gathered += (2 * held.weights + held.gradients) * numbers
            always += count * resident
            updated += count * held.updated * numbers / slices
        shown = max(shown, gathered)
    transient = max((part.transient for part, _ in own), default=0.0)
    saved = flying * sum(count * part.saved for part, count in own)
    if replays is None:
        found = _fewest_replays(block.units, blocks, flying, limit - always - shown - saved, transient)
        if found is None:
            return None
        replays = found
    taken = [(unit, count) for unit, count in zip(block.units, replays, strict=True) if count]
    nbytes = always + shown + saved - flying * sum(count * unit.freed for unit, count in taken)
    nbytes += max([transient, *(unit.transient for unit, _ in taken)])
    forward_s = sum(count * part.forward_s for part, count in own)
    backward_s = sum(count * part.backward_s for part, count in own)
    backward_s += sum(count * unit.replay_s for unit, count in taken)
    last_s = 0.0
    if own and (mesh.data > 1 or any(copies > 1 for part, _ in own for copies in part.parameters)):
        more = _sums_s(mesh, links, own, backward_s, held)
        forward_s, backward_s, last_s = forward_s + more[0], backward_s + more[1], more[2]
    return Stage(blocks, replays, forward_s, backward_s, last_s, links.update_s(updated), nbytes)


def _fewest_replays(
    units: Sequence[Unit], blocks: int, flying: float, free: float, transient: float
) -> tuple[int, ...] | None:
    """By unit, how many of so many blocks are replayed, in the fewest seconds; None where memory allows none.

    Args:
        free: bytes of a device that are left where nothing is replayed.
        transient: the most bytes that layers need at a time, without replays.
    """
    if free >= transient:
        return (0,) * len(units)
    if not units or not blocks:
        return None
    *others, last = units
    counts = np.array(list(product(range(blocks + 1), repeat=len(others))))
    freed = flying * counts @ np.array([unit.freed for unit in others])
    most = np.where(counts > 0, [unit.transient for unit in others], 0.0).max(axis=1, initial=transient)
    # The last unit as often as bytes lack beside the others; where it is at all, its own transient may be the largest.
    lacking = np.where(most <= free + freed, 0.0, np.maximum(most, last.transient) - free - freed)
    each = flying * last.freed
    final = np.ceil(lacking / each) if each > 0 else np.where(lacking > 0, inf, 0.0)
    seconds = counts @ np.array([unit.replay_s for unit in others]) + final * last.replay_s
    best = int(np.argmin(np.where(final <= blocks, seconds, np.inf)))
    return (*counts[best].tolist(), int(final[best])) if final[best] <= blocks else None


def _sums_s(
    mesh: Mesh, links: Links, own: Sequence[tuple[Part, int]], backward_s: float, held: ParameterBytes
) -> tuple[float, float, float]:
    """Seconds that gathers of weights and sums of gradients add: to every forward, every backward, and to the last.

    They go on beside compute, one gather group (by hand: a block) ahead or behind. What they take longer counts, and
    the share by which they hold up compute (`Cluster.slowdown`). Parplan gathers nothing ahead for the next round.
    """
    runs = [(_gather_groups(mesh, links, part, held), count) for part, count in own]
    gather_s, scatter_s, sum_s = (
        sum(count * getattr(one, key) for run, count in runs for one in run)
        for key in ("gather_s", "scatter_s", "sum_s")
    )
    slowdown, first, last = links.cluster.slowdown, runs[0][0][0], runs[-1][0][-1]
    share = 1.0 if mesh.state == STATES[0] else 0.5  # to slices
    hidden_s = backward_s - last.backward_s  # the first sum begins when the last part has gone back
    last_s = max(share * first.sum_s, share * sum_s - hidden_s) + slowdown * share * sum_s
    if mesh.state == STATES[0]:
        return 0.0, 0.0, last_s
    begins = [(run, 0 if links.by_hand else min(count, mesh.rounds) - 1) for run, count in runs]  # of further rounds
    alone_s = first.gather_s + sum(count * run[0].gather_s for run, count in begins)
    arrive_s = alone_s + slowdown * (gather_s - alone_s) + _forward_waits_s(runs, slowdown)
    if mesh.state == STATES[1] and links.by_hand:
        return 0.0, 0.0, last_s + arrive_s
    again = mesh.state == STATES[2]
    alone_s = last.gather_s + sum(count * run[-1].gather_s for run, count in begins)
    back_s = again * (alone_s + slowdown * (gather_s - alone_s)) + slowdown * scatter_s
    waits_s, left_s = _backward_waits_s(runs, slowdown, again)
    return arrive_s, back_s + waits_s, left_s  # in every micro-batch, and behind the last


def _forward_waits_s(runs: Sequence[tuple[Sequence[_GatherGroup], int]], slowdown: float) -> float:
    """Seconds that forwards wait for weights, which are gathered beside what is in front of them.

    Args:
        runs: with how often each comes.
    """
    total_s, before = 0.0, list[_GatherGroup]()
    for run, count in runs:
        pairs = [(one, other, count) for one, other in pairwise(run)]
        pairs += [(run[-1], run[0], count - 1), *((one, run[0], 1) for one in before)]
        total_s += sum(times * max(0.0, (1 - slowdown) * b.gather_s - a.forward_s) for a, b, times in pairs)
        before = [run[-1]]
    return total_s


def _backward_waits_s(
    runs: Sequence[tuple[Sequence[_GatherGroup], int]], slowdown: float, again: bool
) -> tuple[float, float]:
    """Seconds that backwards wait for what goes on beside them, and those of the sums that are left behind them.

    Beside a group's backward go the sums that are left of the groups behind it, the gathers of the one in front, and
    its own sums, the last of which begins when it is done.

    Args:
        again: weights are gathered again for the backward.
    """
    waits_s = left_s = 0.0
    for place in reversed(range(len(runs))):
        run, count = runs[place]
        in_front = runs[place - 1][0][-1].gather_s if place else 0.0
        for turn in range(min(count, 2)):  # from the second on alike
            times = count - 1 if turn else 1
            for k in reversed(range(len(run))):
                own, gather_s = run[k], again * (run[k - 1].gather_s if k or turn + 1 < count else in_front)
                work_s, busy_s = own.backward_s + slowdown * (own.scatter_s + gather_s), left_s + gather_s
                waits_s += times * max(0.0, busy_s - work_s)
                left_s = own.scatter_s - min(own.scatter_s - own.last_s, max(0.0, work_s - busy_s))
    return waits_s, left_s


@dataclass(frozen=True)
class _GatherGroup:
    """Layers whose weights are gathered together, with what goes on beside others.

    Args:
        gather_s: of their weights.
        scatter_s, sum_s: sums of their gradients, to slices and whole.
        last_s: the sum to slices that begins when their backward is done.
    """

    forward_s: float
    backward_s: float
    gather_s: float
    scatter_s: float
    sum_s: float
    last_s: float


@lru_cache(maxsize=8)  # of one mesh, whose blocks are spread in many ways
def _gather_groups(mesh: Mesh, links: Links, part: Part, held: ParameterBytes) -> tuple[_GatherGroup, ...]:
    """The gather groups of a part; by hand all of it is one."""
    groups = (part,) if links.by_hand or not part.groups else part.groups
    return tuple(_gather_group(mesh, links, one, held) for one in groups)


def _gather_group(mesh: Mesh, links: Links, part: Part, held: ParameterBytes) -> _GatherGroup:
    gather_s = scatter_s = sum_s = 0.0
    for copies, numbers in part.parameters.items():
        ring, matrices = links.all_reduce(mesh, copies), part.matrices.get(copies, 0)
        own_s = ring.seconds(held.gradients * numbers)
        sum_s += own_s
        if matrices or links.by_hand:  # parplan's plans keep the parameters of other layers whole
            more_s = 0.0 if links.by_hand else (matrices - 1) * ring.latency_s  # a message each
            gather_s += (ring.seconds(held.weights * numbers) + more_s) / 2
            scatter_s += (own_s + more_s) / 2
    layers = () if links.by_hand else part.groups
    last_s = _gather_group(mesh, links, layers[0], held).scatter_s if layers else scatter_s
    return _GatherGroup(part.forward_s, part.backward_s, gather_s, scatter_s, sum_s, last_s)


def step_of(parts: Parts, mesh: Mesh, links: Links, stages: Sequence[Stage], bound_s: float = 0.0) -> Step:
    """The step of groups of devices with these stages: the longest path through the schedule's table, sums, update."""
    message_s, seconds = links.message_s(mesh, parts.boundary), list[tuple[float, float]]()
    held_s = (links.cluster.slowdown + links.shared(mesh, parts.block)) * message_s
    for number in range(mesh.stages):
        turn, group = divmod(number, mesh.groups)
        stage = stages[group]
        ends = [(parts.prologue, number == 0), (parts.epilogue, number == mesh.stages - 1)]
        ours = [(parts.prologue, group == 0), (parts.epilogue, group == mesh.groups - 1)]
        first, end = split(stage.blocks, mesh.rounds, turn)
        share = (end - first) / stage.blocks if stage.blocks else 0.0
        forward_s = share * (stage.forward_s - sum(part.forward_s for part, here in ours if here))
        backward_s = share * (stage.backward_s - sum(part.backward_s for part, here in ours if here))
        forward_s += sum(part.forward_s for part, here in ends if here)
        seconds.append((forward_s, backward_s + sum(part.backward_s for part, here in ends if here)))
    table = _table(mesh.schedule, mesh.groups, mesh.rounds, mesh.micro_batches)[0]
    done = [[[inf, inf] for _ in range(mesh.micro_batches)] for _ in range(mesh.stages)]
    free, place, moved = [0.0] * mesh.groups, [0] * mesh.groups, True
    while moved:
        moved = False
        for group, own_order in enumerate(table):
            while place[group] < len(own_order):
                number, micro_batch, forward = own_order[place[group]]
                begin = free[group] if forward else max(free[group], done[number][micro_batch][1])
                beside = number - 1 if forward else number + 1
                if 0 <= beside < mesh.stages:  # a message comes, and takes its share from compute
                    begin = max(begin + held_s, done[beside][micro_batch][forward] + message_s)
                if begin == inf:
                    break
                free[group] = done[number][micro_batch][forward] = begin + seconds[number][not forward]
                if 0 <= (number + 1 if forward else number - 1) < mesh.stages:
                    free[group] += held_s
                place[group] += 1
                moved = True
    total_s = max(end + stage.last_s + stage.update_s for end, stage in zip(free, stages, strict=True))
    return Step(mesh, tuple(stages), total_s, bound_s)


def split(blocks: int, rounds: int, turn: int) -> tuple[int, int]:
    """The first of a group's blocks that is in one of its rounds, and the first behind them."""
    return blocks * turn // rounds, blocks * (turn + 1) // rounds


@lru_cache(maxsize=64)
def _table(
    schedule: str, groups: int, rounds: int, micro_batches: int
) -> tuple[tuple[tuple[tuple[int, int, bool], ...], ...], tuple[float, ...]]:
    """The actions of each group (stage, micro-batch, forward), and the most micro-batches that it has in flight."""
    found = orders(schedule, groups, groups * rounds, micro_batches)
    flying = tuple(most_in_flight(own, rounds) for own in found)
    return tuple(tuple((one.stage, one.micro_batch, one.forward) for one in own) for own in found), flying
