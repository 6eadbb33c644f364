"""Pipeline stages of a program: its steps by the group of devices that takes them.

Groups are the devices that layers have in common, in the order in which layers first use them. A layer's stage is the
first one on its own devices that is not before those of the layers that it reads from; where a layer goes back to an
earlier group, a further round of stages begins (interleaved stages). Nothing has to be declared: a plan says where
layers are, and that says which stages there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.program import Compute, Forward, Program, Reduce, Regather, Step, Transfer, last_reads
from parplan.plan import Strategy

__all__ = ["Pipeline", "PipelineStage", "StageNumbers", "pipeline", "stage_numbers"]


@dataclass(frozen=True)
class StageNumbers:
    """The stage of every layer.

    Args:
        groups: devices of each group; stage k is on group k modulo the groups.
        of: stage per layer.
    """

    groups: tuple[tuple[int, ...], ...]
    of: Mapping[str, int]

    @property
    def count(self) -> int:
        """How many stages there are: as many for each group, some of which may have no layers."""
        rounds = 1 + max(self.of.values(), default=0) // len(self.groups)
        return rounds * len(self.groups)


@dataclass(frozen=True)
class PipelineStage:
    """The steps of one stage for one micro-batch; what a step sends to another stage is one of them."""

    forward: tuple[Forward, ...]
    backward: tuple[Step, ...]


@dataclass(frozen=True)
class Pipeline:
    """A program's steps by stage.

    Args:
        arrivals: of the user's inputs at the stages that read them; they may begin before any stage does.
        deliveries: of results to the user, when all stages are done.
        homes: per result, the slot in which its layer leaves it.
        last_reads: per forward step (by its id), the slots that no later one reads, in the order of the stages.
    """

    numbers: StageNumbers
    arrivals: tuple[Transfer, ...]
    stages: tuple[PipelineStage, ...]
    deliveries: tuple[Transfer, ...]
    homes: tuple[str, ...]
    last_reads: Mapping[int, Sequence[str]]


def stage_numbers(graph: LayerGraph, strategies: Mapping[str, Strategy]) -> StageNumbers:
    """The stage of every layer under `strategies`; layers that run as one segment have the last of their stages
    (`pipeline`)."""
    groups, group_of = _groups(graph, strategies)
    found = dict[str, int]()
    for name, layer in graph.layers.items():
        before = max((found[graph.producer[value]] for value in layer.inputs if value in graph.producer), default=0)
        found[name] = _next(before, group_of[strategies[name].devices[0]], len(groups))
    return StageNumbers(groups, found)


def _next(before: int, group: int, groups: int) -> int:
    """The first stage of a group that is not before another one."""
    return before + (group - before) % groups


def _groups(
    graph: LayerGraph, strategies: Mapping[str, Strategy]
) -> tuple[tuple[tuple[int, ...], ...], Mapping[int, int]]:
    """The devices of each group, in the order in which layers first use them, and the group of every device."""
    leader = dict[int, int]()  # of every device: the first one that it has layers in common with

    def first(device: int) -> int:
        while leader.setdefault(device, device) != device:
            device = leader[device]
        return device

    for name in graph.layers:
        for device in strategies[name].devices:
            leader[first(device)] = first(strategies[name].devices[0])
    used = dict.fromkeys(first(strategies[name].devices[0]) for name in graph.layers)
    order = {one: number for number, one in enumerate(used)}
    group_of = {device: order[first(device)] for device in sorted(leader)}
    members = (tuple(device for device, own in group_of.items() if own == number) for number in order.values())
    return tuple(members), group_of


def pipeline(graph: LayerGraph, program: Program) -> Pipeline:
    """The steps of a program in one pass, by stage; steps of one stage keep their order."""
    groups, group_of = _groups(graph, program.strategies)
    made, of = dict[str, int](), dict[str, int]()  # the stage of every slot that a layer makes, and of every layer
    homes = dict[str, str]()
    for step in program.forward:
        if isinstance(step, Compute):
            before = max((made.get(slot, 0) for slot in step.reads), default=0)
            stage = _next(before, group_of[step.grid.devices[0]], len(groups))
            made |= {result.slot: stage for result in step.results}
            of |= dict.fromkeys(step.layers, stage)
        elif isinstance(step, Transfer):
            homes[step.target] = homes.get(step.source, step.source)
            made |= {step.target: made[step.source]} if step.source in made else {}
    numbers = StageNumbers(groups, of)
    readers = dict[str, int]()  # by slot: the first stage that reads it, if need be by way of other slots
    for step in reversed(program.forward):
        if isinstance(step, Compute):
            stage = of[step.layers[0]]
            readers |= {slot: min(stage, readers.get(slot, stage)) for slot in step.reads}
        elif isinstance(step, Transfer) and step.target in readers:
            stage = readers[step.target]
            readers[step.source] = min(stage, readers.get(step.source, stage))
    forward: list[list[Forward]] = [[] for _ in range(numbers.count)]
    backward: list[list[Step]] = [[] for _ in range(numbers.count)]
    arrivals, deliveries = list[Transfer](), list[Transfer]()
    for step in program.forward:
        if isinstance(step, Compute):
            forward[of[step.layers[0]]].append(step)
            continue
        assert isinstance(step, Transfer)  # a program without passes splits nothing
        if step.target not in readers:
            deliveries.append(step)
        elif step.weights:
            forward[readers[step.target]].append(step)
        elif step.source in made:
            forward[made[step.source]].append(step)
        else:
            arrivals.append(step)
    for back in program.backward:
        if isinstance(back, Compute):
            backward[of[back.layers[0]]].append(back)
        elif isinstance(back, Reduce):
            users = (name for parameter in back.bucket.parameters for name in graph.users[parameter])
            backward[min(map(of.__getitem__, users))].append(back)
        else:
            transfer = back.transfer if isinstance(back, Regather) else back
            assert isinstance(transfer, Transfer)  # as above
            if transfer.target in readers:
                backward[readers[transfer.target]].append(back)
    every = [*arrivals, *chain.from_iterable(forward), *deliveries]
    return Pipeline(
        numbers,
        tuple(arrivals),
        tuple(PipelineStage(tuple(ahead), tuple(back)) for ahead, back in zip(forward, backward, strict=True)),
        tuple(deliveries),
        tuple(homes.get(slot, slot) for slot in program.outputs),
        last_reads(every),
    )
