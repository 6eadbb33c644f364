"""Pipeline stages of a program: its steps by the group of devices that takes them.

Groups are the devices that layers have in common, in the order in which layers first use them. A layer's stage is the
first one on its own devices that is not before those of the layers that it reads from; where a layer goes back to an
earlier group, a further round of stages begins (interleaved stages). Nothing has to be declared: a plan says where
layers are, and that says which stages there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.program import Compute, Forward, Program, Reduce, Regather, Step, Transfer
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
        kept: slots that are not dropped before the deliveries.
    """

    numbers: StageNumbers
    arrivals: tuple[Forward, ...]
    stages: tuple[PipelineStage, ...]
    deliveries: tuple[Forward, ...]
    homes: tuple[str, ...]
    kept: frozenset[str]


def stage_numbers(graph: LayerGraph, strategies: Mapping[str, Strategy]) -> StageNumbers:
    """The stage of every layer under `strategies`."""
    leader = dict[int, int]()  # of every device: the first one that it has layers in common with

    def first(device: int) -> int:
        while leader.setdefault(device, device) != device:
            device = leader[device]
        return device

    for name in graph.layers:
        own = [first(device) for device in strategies[name].devices]
        for device in own[1:]:
            leader[first(device)] = first(own[0])
    order = {
        one: number for number, one in enumerate(dict.fromkeys(first(strategies[n].devices[0]) for n in graph.layers))
    }
    members: list[list[int]] = [[] for _ in order]
    for device in sorted(leader):
        members[order[first(device)]].append(device)
    found = dict[str, int]()
    for name, layer in graph.layers.items():
        group = order[first(strategies[name].devices[0])]
        before = max((found[graph.producer[value]] for value in layer.inputs if value in graph.producer), default=0)
        found[name] = before + (group - before) % len(order)
    return StageNumbers(tuple(map(tuple, members)), found)


def pipeline(graph: LayerGraph, program: Program) -> Pipeline:
    """The steps of a program in one pass, by stage; steps of one stage keep their order."""
    numbers = stage_numbers(graph, program.strategies)
    readers = dict[str, int]()  # by slot: the first stage that reads it, if need be by way of other slots

    def read(slot: str, stage: int) -> None:
        readers[slot] = min(stage, readers.get(slot, stage))

    for step in reversed(program.forward):
        if isinstance(step, Compute):
            for slot in step.reads:
                read(slot, numbers.of[step.layers[0]])
        elif isinstance(step, Transfer) and step.target in readers:
            read(step.source, readers[step.target])
    forward: list[list[Forward]] = [[] for _ in range(numbers.count)]
    backward: list[list[Step]] = [[] for _ in range(numbers.count)]
    arrivals, deliveries = list[Forward](), list[Forward]()
    made, homes = dict[str, int](), dict[str, str]()
    for step in program.forward:
        if isinstance(step, Compute):
            stage = numbers.of[step.layers[0]]
            forward[stage].append(step)
            made |= {result.slot: stage for result in step.results}
            continue
        assert isinstance(step, Transfer)  # a program without passes splits nothing
        homes[step.target] = homes.get(step.source, step.source)
        if step.target not in readers:
            deliveries.append(step)
        elif step.weights:
            forward[readers[step.target]].append(step)
        elif step.source in made:
            made[step.target] = made[step.source]
            forward[made[step.source]].append(step)
        else:
            arrivals.append(step)
    for back in program.backward:
        if isinstance(back, Compute):
            backward[numbers.of[back.layers[0]]].append(back)
        elif isinstance(back, Reduce):
            users = (name for parameter in back.bucket.parameters for name in graph.users[parameter])
            backward[min(map(numbers.of.__getitem__, users))].append(back)
        else:
            transfer = back.transfer if isinstance(back, Regather) else back
            assert isinstance(transfer, Transfer)  # as above
            if transfer.target in readers:
                backward[readers[transfer.target]].append(back)
    return Pipeline(
        numbers,
        tuple(arrivals),
        tuple(PipelineStage(tuple(ahead), tuple(back)) for ahead, back in zip(forward, backward, strict=True)),
        tuple(deliveries),
        tuple(homes.get(slot, slot) for slot in program.outputs),
        frozenset((*program.outputs, *(slot for step in deliveries for slot in step.reads))),
    )
