"""A new field of a strategy: caches, comparisons, copies, files and reports tell two apart that differ in it alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts, part_key
from parplan.errors import PlanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.lowering.strategies import strategies_for
from parplan.pins import Pin
from parplan.plan import Plan, Strategy
from parplan.planner.decide import decide
from parplan.planner.explain.reasons import against
from parplan.planner.request import PlanRequest
from parplan.planner.search.simpler import differences
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.pin_constraints import FIELDS, LayerPin
from parplan.report.as_json import to_dict
from parplan.report.plan_diff import plan_diff
from parplan.report.sections.layer_groups import block_groups


@dataclass(frozen=True)
class Extended(Strategy):
    """A strategy with one more field, as it could say which link a layer sends by."""

    lane: str = "near"


WHOLE = Extended(2, 1, None, (0, 1))
SPLIT = replace(WHOLE, lane="far")


def graph_of() -> LayerGraph:
    return capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.randn(4, 8),))


def plan_of(graph: LayerGraph, strategy: Strategy) -> Plan:
    return Plan(graph.model, graph.fingerprint, 4, 2, dict.fromkeys(graph.layers, strategy))


KEYS: dict[str, Callable[[Strategy], object]] = {
    "the strategy": lambda own: own,
    "costs, memory and reductions": lambda own: part_key(next(iter(graph_of().layers.values())), own),
    "any block of devices": lambda own: own.key,
    "groups of a report": lambda own: own.placement,
    "words": lambda own: own.describe(),
    "a plan's file": lambda own: plan_of(graph_of(), own).to_json(),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_every_field(key: str) -> None:
    assert KEYS[key](WHOLE) != KEYS[key](SPLIT)
    assert KEYS[key](SPLIT) == KEYS[key](replace(SPLIT))


def copies(found: Iterable[object]) -> set[object]:
    return {getattr(one, "lane", None) for one in found}


def test_costs_are_kept_apart() -> None:
    graph = graph_of()
    costs = RooflineCosts(graph, cluster_preset("k20", 2))
    layer = next(layer for layer in graph.layers.values() if layer.parameters)
    for own in (WHOLE, SPLIT):
        costs.layer(layer, own)
        costs.memory(layer, own)
        costs.reduction(layer, own)
    assert [len(cache) for cache in (costs._layers, costs._memories, costs._reductions)] == [2, 2, 2]


def test_what_is_enumerated_keeps_the_field() -> None:
    graph, cluster = graph_of(), cluster_preset("k20", 2)
    offered = dict.fromkeys(graph.layers, (WHOLE, SPLIT))
    found = formulate(graph, cluster, RooflineCosts(graph, cluster), offered)
    assert all(copies(option.strategy for option in options) == {"near", "far"} for options in found.options)
    assert found.strategies(found.choice(dict.fromkeys(graph.layers, SPLIT))) == dict.fromkeys(graph.layers, SPLIT)


def test_what_is_lowered_keeps_the_field() -> None:
    graph = graph_of()
    assert copies(strategies_for(graph, plan_of(graph, SPLIT)).values()) == {"far"}
    cut = replace(SPLIT, replicas=1, shards=2, axis="out-features")
    one = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(1, 8),))
    for own in (cut, SPLIT):  # layers that follow others, and one sample for several replicas
        known = Plan(one.model, one.fingerprint, 1, 2, {next(iter(one.layers)): own})
        assert copies(strategies_for(one, known).values()) == {"far"}


def test_reports_and_differences_tell_it() -> None:
    graph, cluster = graph_of(), cluster_preset("k20", 2)
    request = PlanRequest(plan=plan_of(graph, SPLIT))
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), request)
    assert copies(layer.strategy for layer in decision.layers) == {"far"}
    assert {layer["lane"] for layer in to_dict(decision)["layers"]} == {"far"}
    assert all("lane far" in group.words for group in block_groups(decision.layers))
    whole, split = plan_of(graph, WHOLE), plan_of(graph, SPLIT)
    assert differences(split, whole, graph) != ""
    assert not plan_diff(whole, split).runs_alike
    alone = Extended()
    assert not plan_diff(plan_of(graph, alone), plan_of(graph, replace(alone, lane="far"))).runs_alike
    other = replace(decision.layers[0].alternatives[0], strategy=SPLIT) if decision.layers[0].alternatives else None
    assert other is None or "lane far" in against(other)


def test_a_plan_with_a_field_that_is_not_known_is_refused() -> None:
    text = plan_of(graph_of(), SPLIT).to_json()
    assert json.loads(text)["layers"]["0"]["lane"] == "far"
    with pytest.raises(PlanError, match="lane"):
        Plan.from_json(text)


def test_pins_have_every_field() -> None:
    every = {one.name for one in fields(Strategy)}
    assert set(FIELDS) == every
    assert every <= {one.name for one in fields(Pin)}
    assert every <= {one.name for one in fields(LayerPin)}
