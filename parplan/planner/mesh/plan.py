"""A mesh as a plan: every layer with its replicas, shards and devices, to be simulated, reviewed and run."""

from __future__ import annotations

from dataclasses import replace

from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import unit_of
from parplan.lowering.holdings import slices
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Strategy
from parplan.planner.mesh.parts import Parts, blocks_of
from parplan.planner.mesh.step import Step, split

__all__ = ["plan_of"]


def plan_of(graph: LayerGraph, parts: Parts, step: Step) -> Plan:
    """The plan of a step.

    The first blocks of every stage are those that are replayed: what they keep is freed last.

    Args:
        graph: with all blocks, at the size of a micro-batch on all data-parallel copies.
    """
    mesh, blocks, names = step.mesh, blocks_of(graph), list(graph.layers)
    group_of, replayed = list[int](), list[int]()  # by block: its group, and its place among those of its group
    for turn in range(mesh.rounds):
        for group, stage in enumerate(step.stages):
            first, end = split(stage.blocks, mesh.rounds, turn)
            group_of += [group] * (end - first)
            replayed += range(first, end)
    units, layers = unit_of(graph), dict[str, Strategy]()
    middle = blocks.begin + blocks.period
    own_units = list(dict.fromkeys(units[name] for name in names[middle : middle + blocks.period] if name in units))
    for place, name in enumerate(names):
        block, within = divmod(place - blocks.begin, blocks.period)
        inside = blocks.begin <= place < blocks.end
        group = group_of[block] if inside else 0 if place < blocks.begin else mesh.groups - 1
        like = names[middle + within] if inside else name
        one = parts.layers[like]
        first, layer = group * mesh.tensor * mesh.data, graph.layers[name]
        copies = 1 if layer.batch is None and not layer.constant else mesh.data  # of all samples there is one
        devices = tuple(first + copy * mesh.tensor + own for copy in range(copies) for own in one.devices)
        one = replace(one, replicas=one.replicas * copies, devices=devices)
        if mesh.state != STATES[0] and slices(graph, layer, replace(one, state=mesh.state)):
            one = replace(one, state=mesh.state)
        if inside and like in units:
            number = own_units.index(units[like])
            if replayed[block] < step.stages[group].replays[number]:
                one = replace(one, saved=SAVED[-1])
        layers[name] = one
    schedule = mesh.schedule if mesh.groups > 1 else SCHEDULES[0]
    return Plan(
        graph.model, graph.fingerprint, mesh.batch, mesh.devices, layers, micro_batches=mesh.micro_batches,
        schedule=schedule,
    )  # fmt: skip
