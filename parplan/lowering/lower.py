"""Lower a graph and a plan to a program: which steps, in which order, moving which pieces.

A pure function of the captured graph, the plan's strategies and the sizes of one step, so that its result can be read
and tested as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from parplan.errors import PlanError
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import gather_groups, group_of, unit_of, why_kept
from parplan.lowering.holdings import buckets, holdings, segment_heads, slices
from parplan.lowering.ordering import Gathers, backward, forward, staged
from parplan.lowering.passes import passes_of, update_periods
from parplan.lowering.per_replica_scalars import spread
from parplan.lowering.placement import SlotAssigner
from parplan.lowering.program import Program
from parplan.lowering.segments import Segments
from parplan.lowering.stages import Stage, stages
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy

__all__ = ["lower"]


def lower(graph: LayerGraph, strategies: Mapping[str, Strategy], step_setting: StepSetting) -> Program:
    """The program of one step of `graph` under `strategies`.

    Raises:
        PlanError: the plan leaves a layer out, uses a device that is not there, or replays a layer that cannot be.
    """
    _check(graph, strategies, step_setting)
    known = stages(graph, strategies, step_setting.scheme)
    replayed = _replayed(graph, strategies, known.passes)
    passes = passes_of(known, step_setting)
    laid = spread(graph, strategies, step_setting)
    held = holdings(graph, laid.strategies)
    filled = buckets(graph, held, step_setting.memories, update_periods(graph, strategies, known))
    assigner = SlotAssigner(graph, step_setting, laid.numbers, passes)
    sliced = {
        p: own for n, layer in graph.layers.items() for p, own in slices(graph, layer, laid.strategies[n]).items()
    }
    # A unit is one segment, where nothing moves inside: what one segment hands on to another would be kept.
    inside = {
        other for name, other in pairwise(graph.layers) if name in replayed and replayed[name] == replayed.get(other)
    }
    groups = gather_groups(graph) if sliced else ()
    heads = segment_heads(graph, filled).union(own[0] for own in groups) - inside
    segments = Segments(graph, laid, assigner, heads, replayed)
    for value in (name for name in graph.user_inputs if name is not None):
        assigner.add(assigner.slot(value, step_setting.arrival(graph.batch_dims.get(value))), -1)
    freed = {p for p in sliced if laid.strategies[graph.users[p][0]].state == "gathered"}
    for value, own in sliced.items():
        assigner.add(replace(assigner.slot(value, own.layout), rows=own.rows), -1)

    def add_once(stage: Stage) -> None:
        """Append the layers of a stage that runs once, on the whole batch."""
        for name in known.layers(stage):
            layer = laid.layers[name]
            shared = layer.mixes_batch and laid.strategies[name].replicas > 1 and step_setting.global_statistics
            segments.add_batch_norm(layer) if shared else segments.add(layer)

    add_once(Stage.BEFORE)
    for one in passes:
        assigner.begins.append(len(segments))
        for name in known.layers(Stage.PASSES):
            segments.add(laid.layers[name], one.number)
    assigner.begins.append(len(segments))
    add_once(Stage.AFTER)
    outputs = tuple(assigner.deliver(value, len(segments)) for value in graph.results)
    updates = {buffer: assigner.deliver(value, len(segments)) for buffer, value in graph.buffer_updates.items()}
    read = {*outputs, *updates.values(), *segments.read}
    read.update(slot for placed in assigner.moves for slot in placed.step.reads)
    steps = segments.steps(read, held)
    gathers = Gathers(steps, group_of(graph))
    program = Program(
        slots=assigner.slots,
        forward=tuple(forward(steps, assigner.moves, gathers)),
        backward=tuple(backward(steps, assigner.moves, filled, gathers, freed)),
        inputs={value: value for value in graph.user_inputs if value is not None},
        outputs=outputs,
        updates=updates,
        buckets=filled,
        holdings=held,
        slices=tuple(sliced),
        strategies=laid.strategies,
        devices=step_setting.devices,
        scheme=step_setting.scheme,
    )
    return replace(program, staged=staged(program, passes, step_setting)) if passes else program


def _check(graph: LayerGraph, strategies: Mapping[str, Strategy], step_setting: StepSetting) -> None:
    for name in graph.layers:
        if name not in strategies:
            raise PlanError(f"{name}: the plan does not say where it runs; add a strategy for it")
        if max(strategies[name].devices) >= step_setting.devices:
            raise PlanError(
                f"{name}: runs on devices {strategies[name].devices}, but there are only {step_setting.devices} (0 to "
                f"{step_setting.devices - 1}); give more devices or another plan"
            )


def _replayed(graph: LayerGraph, strategies: Mapping[str, Strategy], passes: int) -> dict[str, int]:
    """The number of its unit, by layer that is replayed; none where there is no backward."""
    found, known = dict[str, int](), unit_of(graph)
    for name in (name for name in graph.layers if strategies[name].saved == "replay" and graph.training):
        if passes > 1:
            raise PlanError(
                f"{name}: replays its forward, which is for steps in one pass, and the plan has {passes}; give its "
                'layers saved "keep", or use scheme "gather"'
            )
        if name not in known:
            raise PlanError(f'{name}: cannot replay its forward, as {why_kept(graph, name)}; give it saved "keep"')
        found[name] = known[name]
    values = graph.values
    trained = {unit for n, unit in known.items() if any(values[out].requires_grad for out in graph.layers[n].outputs)}
    return {name: unit for name, unit in found.items() if unit in trained}
