"""Plans edited by hand: each rule is refused with its number, whoever wrote the plan."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from parplan.errors import PlanError, RuleError
from parplan.graph.axes.table import unknown_ops
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.explain.reasons import only_way
from parplan.planner.search_space.verifier import bends, check
from tests.planner.graphs import classifier, perceptron


class Distances(nn.Module):
    """An op that no axis is known of, and one that is taken apart as ever."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.cdist(x, x))


DATA = Strategy(4, 1, None, (0, 1, 2, 3))
TWO = Strategy(2, 1, None, (0, 1))
THREE = Strategy(3, 1, None, (0, 1, 2))


def plan_of(graph: LayerGraph, layers: Mapping[str, Strategy], rules: str = "default", batch: int = 12) -> Plan:
    every = {name: layers.get(name, Strategy()) for name in graph.layers}
    return Plan(graph.model, graph.fingerprint, batch, 4, every, rules)


BROKEN = [
    ("R1", {"conv": Strategy(4, 1, None, (0, 1, 2, 3))}, "strict", 10),
    ("R1", {"conv": Strategy(4, 1, None, (0, 1, 2, 3))}, "default", 3),
    ("R2", {"conv": DATA, "norm": DATA, "mix": TWO, "add": TWO}, "strict", 12),
    ("R3", {"conv": DATA, "norm": DATA, "mix": DATA, "add": TWO}, "strict", 12),
    ("R4", {"conv": DATA, "norm": THREE}, "strict", 12),
    ("R5", {"fc": Strategy(1, 4, "vocabulary", (0, 1, 2, 3))}, "default", 12),
    ("R5", {"conv": Strategy(1, 2, "in-channels", (0, 1))}, "default", 12),
    ("R6", {"fc": Strategy(1, 2, "out-features", (0, 1, 2))}, "default", 12),
    ("R6", {"fc": Strategy(1, 2, "out-features", (0, 7))}, "default", 12),
    ("R7", {"loss": Strategy(1, 2, "vocabulary", (0, 1))}, "strict", 12),
    ("R8", {"conv": Strategy(4, 1, None, (0, 1, 2, 3), update_period=3)}, "default", 12),
]


@pytest.mark.parametrize(("rule", "edits", "reading", "batch"), BROKEN)
def test_each_rule_is_refused_by_number(rule: str, edits: Mapping[str, Strategy], reading: str, batch: int) -> None:
    graph = classifier()
    with pytest.raises(RuleError) as caught:
        check(plan_of(graph, edits, reading, batch), graph)
    assert caught.value.rule == rule


def test_replicas_of_a_layer_that_mixes_samples_are_refused() -> None:
    graph = classifier()
    with pytest.raises(RuleError, match=r"loss\.batch_mean: its samples depend on each other.*R1"):
        check(plan_of(graph, {"loss.batch_mean": TWO}), graph)


def test_a_sharded_loss_bends_r7() -> None:
    graph, cut = classifier(), Strategy(1, 2, "vocabulary", (0, 1))
    plan = plan_of(graph, {"loss": cut, "fc": Strategy(1, 2, "out-features", (0, 1))})
    check(plan, graph)
    assert bends(plan, graph, "loss") == ("R7: a loss is never sharded, the plan cuts it in 2",)
    assert bends(plan, graph, "fc") == ()


@pytest.mark.full
def test_an_op_that_parplan_does_not_know_is_named() -> None:
    graph = capture(Distances(), (torch.randn(12, 6),))
    assert {name: unknown_ops(layer.nodes) for name, layer in graph.layers.items()} == {"cdist": ("aten.cdist",)}
    with pytest.raises(RuleError, match=r"cdist: parplan does not know how aten\.cdist treats samples.*R1"):
        check(plan_of(graph, {"cdist": TWO}), graph)
    assert "aten.cdist" in only_way(graph.layers["cdist"])


def test_a_plan_for_another_model_is_refused_by_layer_names() -> None:
    with pytest.raises(PlanError, match="the plan is for another model: it has no layer '0'"):
        check(plan_of(classifier(), {}), perceptron())


def test_a_plan_for_other_widths_is_refused_by_fingerprint() -> None:
    with pytest.raises(PlanError, match="layers have other sizes"):
        check(plan_of(perceptron(12), {}), perceptron(24))


def test_by_default_a_transfer_stands_in_for_r2_to_r4_and_is_named() -> None:
    graph = classifier()
    plan = plan_of(graph, {"conv": DATA, "norm": THREE, "mix": DATA})
    check(plan, graph)
    assert any("R4" in text for text in bends(plan, graph, "conv"))
    assert bends(plan_of(graph, {}), graph, "conv") == ()
