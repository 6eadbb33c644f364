"""Strategies for every layer of a captured graph, from a plan that may have been made for another capture of the model.

A plan is made for the training graph. The evaluation graph has nearly the same layers under the same names; a layer the
plan does not know runs as the layer it reads from does, where that is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import unit_of
from parplan.graph.sites import site_of
from parplan.plan import Plan, Strategy

__all__ = ["on_every_process", "strategies_for"]

FEW_ELEMENTS = 1 << 14
"""Elements up to which values reach every process in the time that a message takes in any case."""


def strategies_for(
    graph: LayerGraph, plan: Plan, held: Mapping[str, Strategy] = MappingProxyType({})
) -> dict[str, Strategy]:
    """One strategy per layer of `graph`.

    Args:
        held: by parameters, the strategies of the layers that read them in earlier graphs, under names of their own.

    Raises:
        PlanError: a layer is given replicas or shards that it cannot have.
    """
    found: dict[str, Strategy] = {}
    # A module may be called more often than when the plan was made; its parameters stay where they are.
    planned = [(layer, plan.layers[name]) for name, layer in graph.layers.items() if name in plan.layers]
    holding = {**held, **{parameter: own for layer, own in planned for parameter in layer.parameters}}
    for name, layer in graph.layers.items():
        known = plan.layers.get(name) or next((holding[p] for p in layer.parameters if p in holding), None)
        found[name] = _following(graph, layer, found, plan) if known is None else _uncut(graph, layer, known)
        strategy = found[name]
        if strategy.saved == "replay" and (held or name not in plan.layers) and name not in unit_of(graph):
            # Units of this capture are others: weights were frozen, or the layer is not one of the plan's.
            found[name] = strategy = replace(strategy, saved="keep")
        if strategy.replicas * strategy.shards != len(strategy.devices):
            raise PlanError(
                f"{name}: {strategy.replicas} replicas x {strategy.shards} shards do not fill "
                f"{len(strategy.devices)} devices (R6); name one device for each"
            )
        bound = strategy.replicas > 1 and layer.batch is None and not layer.constant
        if bound and graph.batch == 1:  # one replica has the sample, however many there are
            found[name] = strategy = replace(strategy, replicas=1, devices=strategy.grid.row(0))
        elif bound:
            raise PlanError(f"{name}: {strategy.replicas} replicas, but its samples depend on each other; use 1")
        axis = layer.axis(strategy.axis)
        if strategy.shards > 1 and axis is None:
            names = ", ".join(axis.name for axis in layer.axes) or "none"
            raise PlanError(f"{name}: has no axis {strategy.axis!r} to cut; its axes: {names}")
        if axis is not None and axis.units % strategy.shards:
            raise PlanError(f"{name}: {axis.units} {axis.name} cannot be cut in {strategy.shards} (R5)")
    return found


def _uncut(graph: LayerGraph, layer: Layer, strategy: Strategy) -> Strategy:
    """A strategy of the plan, with replicas in place of shards where these do not divide, or no longer have, the axis.

    Such as that of a sequence, where another length than the plan's comes, or the last word alone. Cuts no parameters,
    so that the same devices hold the same of them.
    """
    axis = layer.axis(strategy.axis)
    if strategy.shards == 1 or layer.batch is None:
        return strategy
    if axis is not None and (axis.units % strategy.shards == 0 or axis.dims.keys() & layer.parameters):
        return strategy
    if axis is None and layer.parameters and all(1 not in graph.values[name].shape for name in layer.outputs):
        return strategy  # a plan's mistake; where a dimension has one entry, it is no axis here
    return replace(strategy, replicas=len(strategy.devices), shards=1, axis=None)


def _following(graph: LayerGraph, layer: Layer, known: Mapping[str, Strategy], plan: Plan) -> Strategy:
    makers = graph.makers(layer)
    if layer.constant and not makers:  # cheap, and then there where it is read
        widest = max((strategy.devices for strategy in plan.layers.values()), key=len, default=(0,))
        return Strategy(len(widest), 1, None, widest)
    strategy = known[makers[0]] if makers else Strategy()
    axis = layer.axis(strategy.axis)
    if strategy.shards > 1 and (axis is None or axis.units % strategy.shards):
        strategy = replace(strategy, shards=1, axis=None, devices=strategy.grid.column(0))
    if strategy.replicas > 1 and layer.batch is None:
        strategy = replace(strategy, replicas=1, devices=strategy.grid.row(0))
    return strategy


def on_every_process(graph: LayerGraph, strategies: Mapping[str, Strategy], processes: int) -> dict[str, Strategy]:
    """The strategies, with numbers of the whole batch computed redundantly by all processes, not by one for all, where
    they are made from few.

    A loss inside a model takes a number or two of every sample. All processes want it, so giving them those numbers
    takes one exchange where the way over one process takes two, forward and backward alike.

    Args:
        processes: of which each is a device.
    """
    everywhere, found = tuple(range(processes)), dict(strategies)

    def is_everywhere(name: str) -> bool:
        layer = graph.layers[name]
        return set(found[name].devices) == set(everywhere) or (layer.constant and repeats(layer))

    def repeats(layer: Layer) -> bool:
        named = any(state not in graph.constants for state in (*layer.parameters, *layer.buffers))
        own_code = any(site_of(node) is not None for node in layer.nodes)
        random = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in layer.nodes)
        elements = sum(graph.values[value].elements for value in layer.inputs)
        # Sizes in the code of replicas are those of their own samples: it may have none, where they matter.
        sized = not layer.constant and any(getattr(node.meta.get("val"), "shape", None) != () for node in layer.nodes)
        if named or own_code or random or sized or elements > FEW_ELEMENTS:
            return False
        if not all(map(is_everywhere, graph.makers(layer))):
            return False
        found[layer.name] = Strategy(len(everywhere), 1, None, everywhere)
        return True

    for layer in graph.layers.values() if processes > 1 else ():
        if layer.batch is None and not layer.constant:
            repeats(layer)
    return found
