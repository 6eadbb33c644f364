"""Which lines the layer table has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parplan.cost_models.costs import Source
from parplan.planner.decision import LayerReport
from parplan.report.sections.layer_groups import StrategyGroup, group_layers
from tests.report.decisions import DATA, ONE, SHARDED, facts, resnet


def lines(groups: tuple[StrategyGroup, ...]) -> list[tuple[str, str]]:
    """Label and count of every line."""
    return [(row.label, row.count) for group in groups for row in group.rows]


def blocks(count: int, strategy_of_last: object = None) -> Iterator[LayerReport]:
    """`h.0` to `h.{count-1}`, four equal layers each; the last layer of all may have another strategy."""
    for index in range(count):
        for name in ("norm", "attention.core", "attention.out", "mlp"):
            last = strategy_of_last and (index, name) == (count - 1, "mlp")
            yield facts(f"model.h.{index}.{name}", name, SHARDED if last else DATA, 0.5, f"as {name}")


def test_blocks_of_a_short_model_are_one_and_their_layers_have_lines() -> None:
    names = ("norm", "attention.core", "attention.out", "mlp")
    assert lines(group_layers(list(blocks(2)), 4)) == [(f"model.h.0-1.{name}", "2 x") for name in names]


def test_without_a_limit_every_layer_has_a_line() -> None:
    groups = group_layers(resnet().layers, None)
    assert [label for label, _ in lines(groups)] == [layer.name for layer in resnet().layers]


def test_equal_blocks_in_a_row_are_one_line() -> None:
    layers = [facts("embed", "embedding", DATA, 0.1, "as it is"), *blocks(12)]
    assert lines(group_layers(layers, 4)) == [("embed", ""), ("model.h.0-11", "12 x 4")]


def test_a_module_of_two_strategies_is_named_by_its_layers() -> None:
    layers = list(blocks(12, strategy_of_last=SHARDED))
    groups = group_layers(layers, 4)
    assert [(group.strategy, group.label) for group in groups] == [
        (DATA, ": model.h.0.norm .. model.h.11.attention.out (47 layers)"),
        (SHARDED, ""),
    ]
    assert lines(groups) == [("model.h.0-10", "11 x 4"), ("model.h.11", "3"), ("model.h.11.mlp", "")]


def test_a_module_in_two_places_is_named_by_its_layers() -> None:
    layers = [facts(f"a.{i}", "relu", ONE if i == 5 else DATA, 0.1 * i, f"reason {i}") for i in range(12)]
    assert lines(group_layers(layers, 4)) == [("a.0-4", "5"), ("a.5", ""), ("a.6-11", "6")]


def test_blocks_of_other_figures_are_lines_of_their_own() -> None:
    layers = [facts(f"h.{i}.{j}", "linear", DATA, 1.0 + (i == 1), "so") for i in range(3) for j in range(3)]
    assert lines(group_layers(layers, 4)) == [("h.0.0-2", "3 x"), ("h.1.0-2", "3 x"), ("h.2.0-2", "3 x")]


def test_without_modules_to_fold_by_adjacent_layers_share_lines() -> None:
    layers = [facts(f"layer{i}", "linear", ONE if i == 7 else DATA, 1.0 + i, "so") for i in range(12)]
    assert lines(group_layers(layers, 4)) == [
        ("layer0-2", "3"),
        ("layer3-5", "3"),
        ("layer6", ""),
        ("layer7", ""),
        ("layer8-10", "3"),
        ("layer11", ""),
    ]


def test_a_module_that_holds_most_of_the_model_does_not_become_one_line() -> None:
    layers = [facts(f"body.{i}.{j}", "linear", DATA, 1.0 + i, f"{i}") for i in range(8) for j in ("a", "b")]
    assert lines(group_layers([*layers, facts("head", "linear", DATA, 1.0, "so")], 6)) == [
        ("body.0.a .. body.1.b", "4"),
        ("body.2.a .. body.3.b", "4"),
        ("body.4.a .. body.5.b", "4"),
        ("body.6.a .. body.7.b", "4"),
        ("head", ""),
    ]


def test_a_folded_line_sums_and_gives_the_reason_of_what_takes_longest() -> None:
    layers = [facts(f"h.{i}", "linear", DATA, 1.0 + i, f"reason {i}", source=Source.MEASURED) for i in range(5)]
    ((row,),) = (group.rows for group in group_layers(layers, 1))
    assert row.total("forward_s") == pytest.approx(15e-3)
    assert row.why == "h.4: reason 4"


@pytest.mark.parametrize(
    ("bends", "text"),
    [
        pytest.param([("R2: a",)], "R2: a", id="one layer"),
        pytest.param([(), ("R2: a",)], "R2: a", id="one of several"),
        pytest.param([("fc2: 1 cannot feed 2 (R4)",), ("fc3: so (R4)",)], "R4 x 2", id="rules at the end"),
        pytest.param([("R2: a",), ("R4: b", "R2: c")], "R2 x 2, R4 x 1", id="several"),
        pytest.param([(), ()], "", id="none"),
    ],
)
def test_bent_rules(bends: list[tuple[str, ...]], text: str) -> None:
    layers = [facts(f"h.{i}", "linear", DATA, 1.0 + i, "so", bends=bent) for i, bent in enumerate(bends)]
    ((row,),) = (group.rows for group in group_layers(layers, len(layers) if len(layers) == 1 else 1))
    assert row.bends == text
