"""Checks a plan against a model, whoever wrote the plan. It knows nothing of solver or costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from parplan.errors import PlanError, RuleError
from parplan.graph.axes.table import unknown_ops
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import why_kept
from parplan.graph.sites import why_whole
from parplan.lowering.micro_batches import check_micro_batches
from parplan.lowering.stages import stages
from parplan.plan import Plan
from parplan.planner.search_space import rules
from parplan.planner.search_space.strategies import batch_units

__all__ = ["bends", "check", "is_legal", "mismatches", "other_batch", "uneven_replicas"]


def is_legal(plan: Plan, graph: LayerGraph) -> bool:
    """Whether a plan is for this model and keeps all rules."""
    try:
        check(plan, graph)
    except PlanError:
        return False
    return True


def check(plan: Plan, graph: LayerGraph) -> None:
    """Refuse a plan that is not for this model or breaks a rule.

    Raises:
        PlanError: other layers, another model, or passes or micro-batches which cannot be.
        RuleError: the first rule broken, with layer and numbers.
    """
    missing = [name for name in graph.layers if name not in plan.layers]
    unknown = [name for name in plan.layers if name not in graph.layers]
    if missing or unknown:
        parts = [f"has no layer {name!r}" for name in missing[:3]] + [
            f"has {name!r}, the model has not" for name in unknown[:3]
        ]
        count = len(missing) + len(unknown)
        raise PlanError(
            f"the plan is for another model: it {'; it '.join(parts)} "
            f"({'1 layer differs' if count == 1 else f'{count} layers differ'}); "
            "make a plan for this model with `parplan analyze --out`"
        )
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"the plan is for {plan.model} with fingerprint {plan.fingerprint}, this {graph.model} has "
            f"{graph.fingerprint}: layers have other sizes; make a plan for this model with `parplan analyze --out`"
        )
    check_micro_batches(plan, graph)
    batch, passes = plan.micro_batch, stages(graph, plan.layers, plan.scheme).passes
    if plan.sharded and passes > 1:
        raise PlanError(
            f"{plan.sharded[0]}: {plan.layers[plan.sharded[0]].state} state is for steps in one pass, and the plan has "
            f'{passes}; give its layers state "replicated", or use scheme "gather"'
        )
    if plan.replayed and passes > 1:
        raise PlanError(
            f"{plan.replayed[0]}: layers are replayed in steps of one pass, and the plan has {passes}; leave out "
            f'"saved": "replay", or use scheme "gather"'
        )
    for name in plan.replayed:
        if why := why_kept(graph, name):
            raise PlanError(f'{name}: it cannot be replayed: {why}; leave out "saved": "replay"')
    for name, strategy in plan.layers.items():
        layer = graph.layers[name]
        rules.r6_devices(name, strategy.replicas, strategy.shards, strategy.devices, plan.devices)
        axes = {axis.name: axis.units for axis in layer.axes}
        rules.r5_axis(name, strategy.axis, axes, strategy.shards, plan.devices // strategy.replicas)
        units = batch_units(layer, batch)
        units = units if graph.batch == batch else units and batch
        reasons = unknown_ops(layer.nodes), why_whole(layer.nodes)
        most, uneven = plan.devices // strategy.shards, plan.rules != "strict"
        rules.r1_batch(name, batch, units, strategy.replicas, most, *reasons, uneven, passes)
        rules.r8_update_period(name, strategy.update_period, passes)
    if plan.rules == "strict":
        for name in plan.layers:
            for check_rule in _strict_rules(plan, graph, name):
                check_rule()


def mismatches(plan: Plan, graph: LayerGraph) -> tuple[str, ...]:
    """Differences between what a plan was made for and a graph that it fits all the same, as sentences."""
    named = (
        f"The plan was made for a model called {plan.model}, this is {graph.model}; layers and sizes are the same."
        if plan.model != graph.model
        else ""
    )
    return tuple(sentence for sentence in (named, other_batch(plan, graph)) if sentence)


def other_batch(plan: Plan, graph: LayerGraph) -> str:
    """A sentence on a batch that the plan was not made for; empty where it was."""
    if graph.batch is None or plan.batch == graph.batch:
        return ""
    known = [(name, plan.layers[name].replicas) for name, layer in graph.layers.items() if name in plan.layers]
    uneven = next(((name, replicas) for name, replicas in known if graph.batch % replicas), None)
    shares = (
        f"; {graph.batch} samples over the {uneven[1]} replicas of {uneven[0]} are unequal shares" if uneven else ""
    )
    return (
        f"The plan was made for {plan.batch} samples in a step, this step has {graph.batch}: results are the plain "
        f"model's, times and memory are not those that were planned{shares}."
    )


def uneven_replicas(plan: Plan, graph: LayerGraph) -> tuple[int, ...]:
    """The numbers of replicas that do not divide the plan's batch, ascending: their parts differ by one sample."""
    return tuple(sorted({plan.layers[name].replicas for name, layer in graph.layers.items() if _uneven(plan, layer)}))


def _uneven(plan: Plan, layer: Layer) -> bool:
    return layer.batch is not None and not layer.constant and plan.micro_batch % plan.layers[layer.name].replicas != 0


def _strict_rules(plan: Plan, graph: LayerGraph, name: str) -> Iterator[Callable[[], None]]:
    """Checks of R2 to R4 and R7 at one layer."""
    yield partial(rules.r7_loss, name, graph.layers[name].is_loss, plan.layers[name].shards)
    if graph.layers[name].constant:
        return
    feeding, fed = (
        {other: plan.layers[other].replicas for other in near if not graph.layers[other].constant}
        for near in (graph.digraph.predecessors(name), graph.digraph.successors(name))
    )
    yield partial(rules.r2_feeders, name, feeding)
    yield partial(rules.r3_fed, name, fed)
    yield partial(rules.r4_divides, name, plan.layers[name].replicas, fed)


def bends(plan: Plan, graph: LayerGraph, name: str) -> tuple[str, ...]:
    """The strict rules that transfers, unequal parts of the batch or exchanges bend at this layer ("R4: ...")."""
    replicas = plan.layers[name].replicas
    uneven = _uneven(plan, graph.layers[name])
    found = [f"R1: {rules.parts_words(plan.micro_batch, replicas)} samples"] if uneven else []
    for check_rule in _strict_rules(plan, graph, name):
        try:
            check_rule()
        except RuleError as error:
            found.append(f"{error.rule}: {error.found}")
    return tuple(found)
