"""Which layers share a line: those without weights behind what feeds them, and repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parplan.planner.decision import Alternative, LayerReport
from parplan.report.sections.blocks import Repeat, folded, name_span, repeats
from parplan.report.sections.layer_groups import block_groups
from parplan.report.sections.verdict import group_line
from tests.report.decisions import DATA, ONE, SHARDED, alexnet, chained, facts
from tests.report.golden import printed


def names(layers: Sequence[LayerReport]) -> list[list[str]]:
    return [[layer.name for layer in line] for line in folded(layers)]


def transformer(count: int) -> tuple[LayerReport, ...]:
    """Blocks whose attention is replicated and whose mlp is sharded, between an embedding and a head."""
    layers = [facts("wte", "embedding", DATA, 0.1, "so")]
    for index in range(count):
        layers += [
            facts(f"h.{index}.attn", "linear", DATA, 0.5, "so"),
            facts(f"h.{index}.drop", "dropout", DATA, 0.1, "so"),
            facts(f"h.{index}.fc", "linear", SHARDED, 0.7, "so"),
            facts(f"h.{index}.gelu", "gelu", SHARDED, 0.1, "so"),
        ]
    return chained([*layers, facts("head", "linear", DATA, 2.0, "so")])


def test_layers_without_weights_are_behind_what_feeds_them() -> None:
    assert names(transformer(1)) == [["wte"], ["h.0.attn", "h.0.drop"], ["h.0.fc", "h.0.gelu"], ["head"]]


def test_a_layer_with_another_placement_or_another_feeder_has_its_own_line() -> None:
    conv, relu, loss = chained([
        facts("conv", "conv", DATA, 1.0, ""), facts("relu", "relu", DATA, 0.1, ""), facts("loss", "loss", ONE, 0.1, "")
    ])  # fmt: skip
    assert names([conv, relu, loss]) == [["conv", "relu"], ["loss"]]
    assert names([conv, replace(relu, inputs=()), loss]) == [["conv"], ["relu"], ["loss"]]


def test_repeated_blocks_of_several_strategies_are_listed_once() -> None:
    lines = [group_line(group) for group in block_groups(transformer(12))]
    assert lines == [
        "wte: 4 replicas on 0-3",
        "12 x h.0-11.attn .. h.0-11.drop, 24 layers: 4 replicas on 0-3",
        "12 x h.0-11.fc .. h.0-11.gelu, 24 layers: 4 shards of out-features on 0-3",
        "head: 4 replicas on 0-3",
    ]


def test_a_block_with_another_strategy_is_no_repeat() -> None:
    *layers, head = transformer(2)
    layers[6] = replace(layers[6], strategy=ONE)  # h.1.drop
    (first, *_, last) = [group_line(group) for group in block_groups([*layers, head])]
    assert (first, last) == ("wte .. h.0.drop, 3 layers: 4 replicas on 0-3", "head: 4 replicas on 0-3")


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("", []),
        ("abcd", []),
        ("aaaa", [Repeat(0, 1, 4)]),
        ("xabababy", [Repeat(1, 2, 3)]),
        ("aabaab", [Repeat(0, 3, 2)]),
        ("aabccabccd", [Repeat(0, 1, 2), Repeat(3, 1, 2), Repeat(7, 1, 2)]),
    ],
)
def test_repeats(keys: str, found: list[Repeat]) -> None:
    assert repeats(keys) == found


@pytest.mark.parametrize(
    ("named", "label"),
    [
        (["h.0.fc1", "h.1.fc1"], "h.0-1.fc1"),
        (["conv3_2", "conv3_3"], "conv3_2-3"),
        (["h.0", "h.2", "h.3"], "h.0, 2-3"),
        (["h.2", "h.0"], "h.2 .. h.0"),
        (["h.0.fc1", "h.1.fc2"], "h.0.fc1 .. h.1.fc2"),
        (["relu", "relu"], "relu .. relu"),
    ],
)
def test_names_of_a_range(named: list[str], label: str) -> None:
    assert name_span(named) == label


@pytest.mark.parametrize(("cost_s", "shown"), [(1e-4, True), (1.0, False)])
def test_the_alternative_of_a_layer_without_weights_is_shown_where_it_costs_little(cost_s: float, shown: bool) -> None:
    decision = alexnet()
    *others, loss = decision.layers
    loss = replace(loss, why="an alternative", alternatives=(Alternative(DATA, cost_s, 0.0, 0.0),))
    assert ("an alternative" in printed(replace(decision, layers=(*others, loss)), 80)) is shown
