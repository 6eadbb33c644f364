"""Prices of a lowered program's entries: seconds of every layer's parts, and of every transfer with the lanes it uses.

A transfer is priced between the layouts of its slots. Where a sum's terms meet on the way (lowering/placement.py), both
transfers are one collective, with the price of the whole way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import lcm

from parplan.cluster import Cluster
from parplan.cost_models.communication.traffic import traffic
from parplan.cost_models.costs import CostModel, LayerCharges, charges, statistics_transfer
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import group_of
from parplan.layout import Grid, Layout
from parplan.lowering.lower import lower
from parplan.lowering.program import Compute, Join, Program, Slot, Split, Transfer
from parplan.lowering.stages import stages
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Plan, Scheme

__all__ = ["RUNTIME_POLICY", "Busy", "LayerWork", "Move", "PassPolicy", "PricedProgram", "lowered", "priced"]


@dataclass(frozen=True)
class PassPolicy:
    """How passes are run and fed; other programs than the runtime do it otherwise.

    Args:
        one_f_one_b: whether each pass goes back before the next one begins; None: where some layer's weights are
            updated between passes (`update_period`).
        prefetch: whether samples travel between passes while others are computed.
        scatter_allgather: whether a broadcast to many is dealt out first (cost_models/communication/schemes.py).
    """

    one_f_one_b: bool | None = None
    prefetch: bool = True
    scatter_allgather: bool = True


RUNTIME_POLICY = PassPolicy()


@dataclass(frozen=True)
class LayerWork:
    """A layer of the program with its charges.

    Args:
        passes: how often it runs in a step.
        period: passes between updates.
        group: the number of its gather group.
    """

    name: str
    passes: int
    devices: tuple[int, ...]
    period: int
    group: int
    cost: LayerCharges


Busy = tuple[tuple[int, float], ...]
"""Devices, each with a part from 0 to 1."""


@dataclass(frozen=True)
class Move:
    """A transfer of the program with its price; both times are 0 where all devices have what they want.

    Args:
        given, wanted: the slots it reads and fills; `given` is where a sum's terms are, where they meet on the way.
        layouts: of those devices of both that have samples.
        nbytes: what the busiest lane carries.
        sent, received: how busy each lane is, against the busiest one.
        devices: those that hold the value before or after.
        inwards: it brings one pass's samples to the layers that run in passes.
        beside: devices compute meanwhile, as it crosses the boundary of passes.
        readers: layers that read it, in forward order; None is the user.
    """

    given: Slot
    wanted: Slot
    layouts: tuple[Layout, Layout]
    nbytes: float
    forward_s: float
    backward_s: float
    sent: Busy
    received: Busy
    devices: tuple[int, ...]
    inwards: bool
    beside: bool
    readers: tuple[str | None, ...]

    @property
    def value(self) -> str:
        """Name of the value."""
        return self.wanted.value

    @cached_property
    def apart(self) -> bool:
        """Whether none that send receive, as from stage to stage."""
        return {device for device, _ in self.sent}.isdisjoint(device for device, _ in self.received)


@dataclass(frozen=True, eq=False)
class PricedProgram:
    """A program and the seconds of its entries.

    Args:
        layers: in forward order.
        moves: by the slot that is filled, in forward order.
        sliced: the layers whose weights come from slices, by parameter.
        hidden: the share of what goes on beside compute that takes nothing from it (StepCost.overlap).
    """

    program: Program
    layers: Mapping[str, LayerWork]
    moves: Mapping[str, Move]
    sliced: Mapping[str, str]
    overhead_s: float
    hidden: float = 1.0
    policy: PassPolicy = RUNTIME_POLICY

    def moves_to_layers(self, graph: LayerGraph) -> Iterator[tuple[str, Move]]:
        """Transfers of what layers make, each with the layer that reads it first; not those to the user."""
        for move in self.moves.values():
            if move.given.value in graph.producer and (name := move.readers[0]) is not None:
                yield name, move


def lowered(graph: LayerGraph, plan: Plan, cluster: Cluster) -> Program:
    """The program of a training step of `plan` in the cluster's setting, as prices see it: all parts are equal.

    Prices are of the mean or the largest part. So it is of a batch that all replicas and passes share evenly, in which
    no part is empty or happens to lie where another one does.

    Raises:
        PlanError: the plan leaves a layer out, has too many devices, or its scheme asks for passes that cannot be.
    """
    passes = stages(graph, plan.layers, plan.scheme).passes
    even = lcm(cluster.count, *(strategy.replicas for strategy in plan.layers.values())) * passes
    return lower(graph, plan.layers, StepSetting.on(cluster, even * (graph.batch or 1), plan.scheme))


def priced(graph: LayerGraph, program: Program, costs: CostModel, policy: PassPolicy = RUNTIME_POLICY) -> PricedProgram:
    """Prices of a program that was lowered from `graph`."""
    numbers = {name: step.pass_number for step in program.forward if isinstance(step, Compute) for name in step.layers}
    passes = 1 + max((number for number in numbers.values() if number is not None), default=0)
    groups = group_of(graph)

    def work(name: str) -> LayerWork:
        strategy, runs = program.strategies[name], passes if numbers[name] is not None else 1
        own = charges(costs, graph.layers[name], replace(strategy, update_period=None), runs)
        return LayerWork(name, runs, strategy.devices, strategy.update_period or passes, groups[name], own)

    hidden = costs.step.hidden if policy.prefetch else 0.0
    layers, moves = {name: work(name) for name in graph.layers}, _moves(graph, program, costs, passes, policy)
    sliced = {parameter: graph.users[parameter][0] for parameter in program.slices}
    return PricedProgram(program, layers, moves, sliced, costs.step.overhead_s, hidden, policy)


def _moves(graph: LayerGraph, program: Program, costs: CostModel, passes: int, policy: PassPolicy) -> dict[str, Move]:
    """Priced transfers by the slot that they fill; without those whose price is in another one's."""
    used: dict[str, list[str | None]] = defaultdict(list)  # by slot: layers that read it, and the user
    for step in program.forward:
        if isinstance(step, Compute):
            for operand in step.operands:
                reading = [name for name in step.layers if operand.name in graph.layers[name].inputs]
                used[operand.slot] += reading or step.layers
    for slot in (*program.outputs, *program.updates.values()):
        used[slot].append(None)
    readers = defaultdict(list, {slot: list(own) for slot, own in used.items()})  # also by way of other slots
    inwards, outwards = set[str](), set[str]()  # slots of one pass's samples, before and behind the passes
    for step in program.forward:
        if isinstance(step, Split):
            inwards.update(step.targets)
        elif isinstance(step, Transfer) and step.source in inwards:
            inwards.add(step.target)
    for step in reversed(program.forward):
        if isinstance(step, Join):
            outwards.update(step.sources)
            for source in step.sources:
                readers[source] += readers[step.target]
        elif isinstance(step, Transfer):
            outwards |= {step.source} if step.target in outwards else set()
            readers[step.source] += readers[step.target]
    order = {name: number for number, name in enumerate(graph.layers)}
    found: dict[str, Move] = {}
    begins: dict[str, Slot] = {}  # by slot: where the terms of its sum are, or what a lone sender deals out
    for transfer in program.transfers:
        if transfer.weights:
            continue  # in the layer's charges
        given, wanted = begins.get(transfer.source, transfer.given), transfer.wanted
        if given.layout.partial or not policy.scatter_allgather:
            begins[wanted.name] = given
            if wanted.name not in used and wanted.name not in outwards:
                continue
        layouts = given.layout, wanted.layout
        if program.scheme is Scheme.BROADCAST:  # those who have none of a pass's samples do not take part
            layouts = _with_samples(given), _with_samples(wanted)
        if given.value in graph.values:
            spec = graph.of_pass(given.value, 1 if given.pass_number is None else passes)
            cost = costs.transfer(spec, *layouts)
        else:  # statistics of a batch norm
            spec, cost = given.spec, statistics_transfer(costs, given.spec, *layouts)
        most, sent, received, devices = _lanes(*layouts)
        crosses = wanted.name in inwards, wanted.name in outwards and not used[wanted.name]
        found[wanted.name] = Move(
            given,
            wanted,
            layouts,
            most * spec.nbytes,
            cost.forward_s,
            cost.backward_s,
            sent,
            received,
            devices,
            inwards=crosses[0],
            beside=any(crosses),
            readers=tuple(sorted(dict.fromkeys(readers[wanted.name]), key=lambda n: order.get(n or "", len(order)))),
        )
    return found


def _with_samples(slot: Slot) -> Layout:
    """A slot's layout without the rows that have none of its samples."""
    if slot.rows is None or all(slot.rows) or not any(slot.rows):
        return slot.layout
    kept = [row for row, samples in enumerate(slot.rows) if samples]
    devices = tuple(device for row in kept for device in slot.layout.grid.row(row))
    return replace(slot.layout, grid=Grid(devices, len(kept), slot.layout.grid.shards))


@lru_cache(maxsize=10_000)
def _lanes(source: Layout, target: Layout) -> tuple[float, Busy, Busy, tuple[int, ...]]:
    """The busiest lane's part of the tensor, how busy senders and receivers are against it, and the devices of both."""
    moved = traffic(source, target)
    gives, takes = moved.foreign.sent, moved.foreign.received
    most = max(gives.max(), takes.max())
    sent = tuple((d, float(amount / most)) for d, amount in zip(moved.senders, gives, strict=True) if amount)
    received = tuple((d, float(amount / most)) for d, amount in zip(moved.receivers, takes, strict=True) if amount)
    return float(most) / moved.total, sent, received, tuple(sorted({*moved.senders, *moved.receivers}))
