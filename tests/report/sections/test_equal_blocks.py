"""Repeated blocks that are planned alike are one entry, wherever they are; blocks that differ in anything are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from parplan.cost_models.costs import Source
from parplan.plan import Strategy
from parplan.planner.decision import Arrival, LayerReport
from parplan.report.pictures.figures import layer_table
from parplan.report.sections.layer_groups import StrategyGroup, TableLine, block_groups, group_layers
from parplan.report.sections.layer_table import heading
from parplan.report.sections.verdict import group_line
from parplan.report.terminal import Detail
from tests.report.decisions import DATA, ONE, alexnet, chained, facts
from tests.report.golden import printed

PARTS = (("norm", "norm"), ("fc", "linear"), ("gelu", "gelu"), ("add", "add"))
REPLAYED = replace(DATA, saved="replay")
FIGURES = ("forward_s", "backward_s", "transfer_s", "reduce_s", "memory_bytes")


def decoder(of: Callable[[int, str], Strategy], count: int = 6) -> list[LayerReport]:
    """Blocks between an embedding and a head; `of` says the strategy of a layer of a block."""
    layers = [facts("wte", "embedding", of(0, "norm"), 0.1, "so")]
    for index in range(count):
        for name, kind in PARTS:
            layers.append(facts(f"h.{index}.{name}", kind, of(index, name), 0.5 + len(name), "so", memory_mib=8))
    return list(chained([*layers, facts("head", "linear", of(count - 1, "add"), 2.0, "so")]))


def staged(blocks: int = 6, each: int = 2, groups: int = 2) -> list[LayerReport]:
    """Stages of so many blocks on pairs of devices in turn; the first of a stage takes its input from elsewhere."""

    def stage(index: int) -> int:
        return index // each

    def place(index: int, _: str) -> Strategy:
        first = 2 * (stage(index) % groups)
        return Strategy(1, 2, "sequence", (first, first + 1))

    found = list[LayerReport]()
    for layer in decoder(place, blocks):
        index = {"wte": 0, "head": blocks - 1}.get(layer.name) or int(("h.0." + layer.name).split(".")[-2])
        later = layer.name.endswith("norm") and index % each == 0 and index > 0
        copies = (Arrival(f"h.{index - 1}.add", place(index - 1, "").devices),) if later else ()
        layer = replace(layer, transfer_s=0.01 * later, copies=copies, stage=1 + stage(index))
        found.append(replace(layer, why=f"stage {layer.stage} of {1 + stage(blocks - 1)}"))
    return found


def rows(groups: Sequence[StrategyGroup]) -> list[TableLine]:
    return [row for group in groups for row in group.rows]


def labels(groups: Sequence[StrategyGroup]) -> list[str]:
    return [f"{row.label} {row.count}".strip() for row in rows(groups)]


def report(layers: Sequence[LayerReport], detail: Detail = Detail.DEFAULT) -> str:
    """The report's text in one line."""
    shown = replace(alexnet(), layers=tuple(layers), passes=None)
    return " ".join(printed(shown, 80, detail=detail).split())


def test_blocks_alike_over_stages_are_one_entry() -> None:
    groups = block_groups(staged())
    assert labels(groups) == ["wte", "norm 4 x", "fc 4 x 3", "norm 2 x", "fc 2 x 3", "head"]
    assert ["".join(heading(group)) for group in groups] == [
        "2 shards of sequence on devices 0, 1, stage 1",
        "2 shards of sequence: 4 x norm .. add (16 layers); h.0-1 on devices 0, 1; 3 on 2, 3; 5 on 0, 1; stages 1-3",
        "2 shards of sequence: 2 x norm .. add (8 layers); h.2 on devices 2, 3; 4 on 0, 1; stages 2, 3",
        "2 shards of sequence on devices 0, 1, stage 3",
    ]


def test_groups_do_not_tell_blocks_apart_by_figures() -> None:
    assert [group_line(group) for group in block_groups(staged(), figures=False)] == [
        "wte: 2 shards of sequence on 0, 1",
        "6 x norm .. add, 24 layers: 2 shards of sequence; h.0-1 on 0, 1; 2-3 on 2, 3; 4-5 on 0, 1",
        "head: 2 shards of sequence on 0, 1",
    ]


def test_figures_over_stages_are_of_each_block_and_the_stage_is_in_the_heading() -> None:
    text = report(staged())
    assert "Blocks that are planned alike are listed once; figures are of each." in text
    assert "norm 4 x 4.50 9.00 - - 8.0 " in text
    assert "fc 4 x 3 10.50 21.00 - - 24.0 " in text
    assert "norm 2 x 4.50 9.00 10.00 - 8.0 copies 1 input each from other devices" in text
    assert "stage 1 of" not in text
    assert "26 layers on 6 lines, figures of one block each;" in text


def test_every_layer_has_its_line_in_full() -> None:
    text = report(staged(), Detail.FULL)
    assert all(text.count(f" {layer.name} {1e3 * layer.forward_s:.2f}") == 1 for layer in staged())
    assert "planned alike" not in text


def test_figures_on_the_same_devices_are_summed() -> None:
    text = report(decoder(lambda _, name: DATA if name != "fc" else ONE))
    assert "h.0-5.norm 6 x 27.00 54.00 - - 48.0 " in text
    assert "figures summed" in text
    assert "planned alike" not in text


@pytest.mark.parametrize(
    ("replayed", "kept"),
    [
        pytest.param(range(3), range(3, 6), id="the first half"),
        pytest.param((0, 2, 4), (1, 3, 5), id="every other"),
        pytest.param((3,), (0, 1, 2, 4, 5), id="one"),
    ],
)
def test_a_part_of_the_blocks_replays(replayed: Sequence[int], kept: Sequence[int]) -> None:
    layers = decoder(lambda index, name: REPLAYED if index in replayed and name != "norm" else DATA)
    fc = {row.layers[:: len(row.layers) // row.repeats] for row in rows(block_groups(layers)) if "fc" in row.label}
    assert {tuple(layer.name for layer in own) for own in fc} == {
        tuple(f"h.{index}.fc" for index in own) for own in (replayed, kept)
    }


def test_a_block_unlike_those_around_it_stands_behind_the_first_of_them() -> None:
    layers = decoder(lambda index, name: ONE if (index, name) == (3, "gelu") else DATA)
    assert [group_line(group) for group in block_groups(layers)] == [
        "wte: 4 replicas on 0-3",
        "5 x norm .. add, 20 layers: 4 replicas; h.0-2, 4-5 on 0-3",
        "h.3.norm .. h.3.fc, 2 layers: 4 replicas on 0-3",
        "h.3.gelu: whole on 0",
        "h.3.add .. head, 2 layers: 4 replicas on 0-3",
    ]


def test_a_block_on_two_places_is_not_one_on_a_single_place() -> None:
    """Each strategy alone is the same, wherever it is."""
    layers = decoder(lambda index, name: Strategy(devices=(int(index == 2 and name == "fc"),)))
    (alike,) = (group for group in block_groups(layers) if group.repeats > 1)
    assert alike.modules == ("h.0", "h.1", "h.3", "h.4", "h.5")


def test_strategies_of_blocks_on_two_places_each_have_a_heading() -> None:
    layers = decoder(lambda index, name: Strategy(devices=(2 * (index % 2) + (name == "fc"),)))
    lines = [group_line(group) for group in block_groups(layers)]
    assert lines[1:4] == [
        "6 x norm, 6 layers: whole; h.0 on 0; 1 on 2; 2 on 0; 3 on 2; 4 on 0; 5 on 2",
        "6 x fc, 6 layers: whole; h.0 on 1; 1 on 3; 2 on 1; 3 on 3; 4 on 1; 5 on 3",
        "6 x gelu .. add, 12 layers: whole; h.0 on 0; 1 on 2; 2 on 0; 3 on 2; 4 on 0; 5 on 2",
    ]


def test_the_second_heading_of_the_same_blocks_does_not_list_them_again() -> None:
    saved = {"norm": "keep"}
    layers = decoder(lambda index, name: Strategy(devices=(index // 3,), saved=saved.get(name, "replay")))
    assert [group_line(group) for group in block_groups(layers)][1:-1] == [
        "6 x norm, 6 layers: whole; h.0-2 on 0; 3-5 on 1",
        "6 x fc .. add of these blocks, 18 layers: whole, replayed",
    ]


def test_of_very_many_places_the_devices_are_told_together() -> None:
    (_, alike, _) = block_groups(decoder(lambda index, _: Strategy(devices=(index % 4,)), 20))
    assert "".join(heading(alike)) == "whole: 20 x norm .. add (80 layers); h.0-19 on 1 each of devices 0-3"


def different(layer: LayerReport) -> Iterator[LayerReport]:
    """The layer with one thing that its line prints changed, for every such thing."""
    for name in FIGURES:
        figures: Any = {name: 2 * getattr(layer, name) + 1}
        yield replace(layer, **figures)
    yield replace(layer, source=Source.MEASURED)
    yield replace(layer, pinned="pinned by fc=replicas:4")
    yield replace(layer, copies=(Arrival("wte", (3,)),))
    own = layer.strategy
    others = (replace(own, replicas=3), replace(own, axis="batch"), replace(own, state="sharded"),
              replace(own, saved="replay"), replace(own, update_period=2))  # fmt: skip
    yield from (replace(layer, strategy=other) for other in others)


@pytest.mark.parametrize("change", range(len(list(different(facts("", "", DATA, 1, ""))))))
def test_a_block_that_differs_in_anything_is_not_merged(change: int) -> None:
    layers = staged()
    place = next(index for index, layer in enumerate(layers) if layer.name == "h.3.fc")
    layers[place] = [*different(layers[place])][change]
    for row in rows(block_groups(layers)):
        heads = {layer.name for layer in row.layers[:: len(row.layers) // row.repeats]}
        assert heads == {"h.3.fc"} or "h.3.fc" not in heads


@pytest.mark.parametrize("seed", range(12))
def test_lines_add_up_to_all_layers(seed: int) -> None:
    """Whatever differs from block to block, and however many lines there may be."""
    random = Random(seed)
    layers = [
        replace(
            layer,
            forward_s=random.choice((1.0, 2.0)),
            strategy=replace(layer.strategy, saved=random.choice(("keep", "keep", "replay"))),
        )
        for layer in staged(12, random.choice((1, 2, 3)))
    ]
    for limit in (50, 20, 5, None):
        shown = rows(group_layers(layers, limit))
        assert Counter(layer.name for row in shown for layer in row.layers) == Counter(one.name for one in layers)
        for name in FIGURES:
            total = sum(getattr(layer, name) for layer in layers)
            assert sum(row.total(name) for row in shown) == pytest.approx(total)
            assert sum(row.total(name, each=True) * row.repeats for row in shown) == pytest.approx(total)
        for row in shown:
            each = len(row.layers) // row.repeats
            sums = [sum(one.forward_s for one in row.layers[at : at + each]) for at in range(0, len(row.layers), each)]
            assert sums == [sums[0]] * row.repeats


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (8, ["wte", "norm 6 x", "fc 6 x 3", "norm 5 x", "fc 5 x 3", "h.5.norm", "h.5.fc .. h.5.add 3", "head"]),
        (7, ["wte", "norm 6 x", "fc 6 x 3", "norm 5 x", "fc 5 x 3", "h.5.norm .. h.5.add 4", "head"]),
        (6, ["wte", "norm 6 x", "fc 6 x 3", "norm .. add 5 x 4", "h.5.norm .. h.5.add 4", "head"]),
        (2, ["wte", "norm .. add 6 x 4", "norm .. add 5 x 4", "h.5.norm .. h.5.add 4", "head"]),
    ],
)
def test_of_too_many_lines_those_of_the_most_blocks_stay(limit: int, found: list[str]) -> None:
    layers = staged(12)
    for index, layer in enumerate(layers):
        if layer.name.startswith("h.5."):
            layers[index] = replace(layer, strategy=replace(layer.strategy, saved="replay"))
    assert labels(group_layers(layers, limit)) == found


def test_the_page_has_a_row_for_layers_of_equal_blocks() -> None:
    table = layer_table(staged(12, 2))
    (row,) = (row for row in table["rows"] if row[1].text.startswith("h.0-1, 3, 5, 7, 9, 11.fc, 7 x"))
    devices, memory = (next(i for i, head in enumerate(table["heads"]) if word in head) for word in ("dev", "memory"))
    assert row[devices].text == "0, 1; 2, 3"
    assert float(row[memory].text) == 8.0
    assert row[-1].text == "stages 1-6"
    assert table["figures"] == "the figures of each"
