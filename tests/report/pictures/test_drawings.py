"""SVG drawings: well-formed, described, rows and connections of the net, and colours for both backgrounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from parplan.cost_models.devices.cluster_file import load_cluster
from parplan.errors import ParplanError
from parplan.graph.capture.capture import capture
from parplan.plan import Plan, Strategy
from parplan.planner.decision import Decision
from parplan.report.pictures.bars import draw_bars
from parplan.report.pictures.drawings import step_path, svg_files
from parplan.report.pictures.lanes import device_lanes, drawn_lanes, predicted_timeline
from parplan.report.pictures.memory import draw_memory, memory_over_step
from parplan.report.pictures.net import draw_net
from parplan.report.pictures.rows import Row, connections, inside, net_rows
from parplan.report.pictures.svg import BROAD, COLOURS, NARROW
from parplan.report.pictures.timeline import draw_timeline
from tests.every_case import every_case
from tests.report.decisions import alexnet
from tests.report.pictures.drawn import HOSTILE, SVG, data_parallel, priced, residual, svg_of

DOCS = Path(__file__).resolve().parents[3] / "docs"
SHARDED = Strategy(1, 2, "out-features", (0, 1))


def decision(devices: int = 2) -> Decision:
    return priced(residual(), data_parallel(residual(), devices))


def in_shards(found: Decision) -> Decision:
    """The same with shards of the classifier, so that its plan has more than one placement."""
    return priced(residual(), found.plan.with_layers({"fc": SHARDED}))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_both_files_stand_alone() -> None:
    found = svg_files(decision(), "out/plan.svg")
    assert list(found) == ["out/plan.svg", "out/plan-step.svg"]
    for text in found.values():
        root = svg_of(text)
        assert root.get("width")
        assert "prefers-color-scheme:dark" in (root.findtext(f"{SVG}style") or "")


@pytest.mark.parametrize(("path", "step"), [("a.svg", "a-step.svg"), ("b/c.d.svg", "b/c.d-step.svg"), ("e", "e-step")])
def test_the_step_is_beside_the_net(path: str, step: str) -> None:
    assert step_path(path) == step


def test_drawings_are_not_written_under_the_name_of_another_format() -> None:
    with pytest.raises(ParplanError, match=r"drawings are SVG, not \.png; name it plan\.svg"):
        svg_files(decision(), "out/plan.png")


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    used = {name for text in svg_files(decision(), "x.svg").values() for name in classes(svg_of(text))}
    named = {name.removeprefix("line-") for name in used if not name.startswith("on-")}
    assert named <= set(COLOURS)


def classes(root: ElementTree.Element) -> set[str]:
    return {name for element in root.iter() for name in (element.get("class") or "").split()}


def test_layers_without_weights_are_in_the_row_that_feeds_them() -> None:
    rows = net_rows(in_shards(decision()))
    assert [row.layers[0].name for row in rows][:3] == ["first", "second", "third"]
    assert "fc" in [row.layers[0].name for row in rows]
    assert sum(len(row.layers) for row in rows) == len(decision().layers)
    assert rows[0].count == "2 layers"


def test_a_skip_connection_is_an_arc() -> None:
    found = connections(net_rows(in_shards(decision())), residual())
    assert found.skips == ((0, 2),)
    assert {1, 2, 3} <= set(found.direct)


def test_a_uniform_plan_is_one_row_that_can_be_looked_into() -> None:
    found = decision()
    (row,) = net_rows(found)
    assert row.layers == found.layers
    assert row.count == f"{len(found.layers)} layers"
    assert [own.label for own in inside(row, residual())][:3] == ["first", "second", "third"]


def blocks(count: int, cut: str = "last") -> Decision:
    """So many equal blocks of two layers on two devices, some of the layers in shards."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)) for _ in range(count)))
            self.last = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last(self.h(x))
            return y

    graph = capture(Net(), (torch.randn(4, 8),))
    sharded = {name: SHARDED for name in graph.layers if name.endswith(cut)}
    return priced(graph, data_parallel(graph, 2).with_layers(sharded))


@pytest.mark.full
def test_equal_neighbours_are_one_row_from_three_on() -> None:
    for count in (3, 14):
        rows = [row for row in net_rows(blocks(count), 8) if row.label.startswith("h.")]
        if count == 14:  # more layers than rows: grouped by module
            assert [(row.label, row.count) for row in rows] == [("h.0-13", "14 x 2 layers")]
    assert [(row.label, row.repeats) for row in net_rows(blocks(3))] == [("h.0-2.0", 3), ("h.0-2.1", 3), ("last", 1)]
    assert [row.label for row in net_rows(blocks(2))] == ["h.0.0", "h.0.1", "h.1.0", "h.1.1", "last"]


def test_a_row_of_equal_modules_shows_the_first_of_them_inside() -> None:
    found = blocks(14)
    row = net_rows(found, 8)[0]
    assert [(own.label, own.repeats) for own in inside(row, None)] == [("h.0.0", 1), ("h.0.1", 1)]
    assert inside(net_rows(found, 8)[-1], None) == ()


def test_equal_layers_whose_activations_join_them_are_one_row_without_a_bracket() -> None:
    """A sequence of two rows that ends as one; the classifier lies elsewhere, so that rows are not by placement."""
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 4))
    graph = capture(net, (torch.randn(8, 8),))
    plan = data_parallel(graph, 2)
    last = list(graph.layers)[-1]
    decision = priced(graph, plan.with_layers({last: Strategy(1, 2, "out-features", (0, 1))}))
    rows = net_rows(decision)
    assert [(row.repeats, len(row.layers)) for row in rows] == [(4, 8), (1, 1)]
    for width in (BROAD, NARROW):
        assert svg_of(draw_net(decision, rows, width=width).standalone()) is not None


@pytest.mark.full
def test_equal_modules_of_two_placements_are_two_rows_in_a_bracket() -> None:
    rows = net_rows(blocks(14, ".1"), 8)
    assert [(row.label, row.repeats, row.strategy.shards) for row in rows[:2]] == [
        ("h.0-13.0", 14, 1),
        ("h.0-13.1", 14, 2),
    ]
    assert rows[0].run is not None
    assert rows[0].run == rows[1].run
    assert rows[-1].run is None


@pytest.mark.full
@pytest.mark.parametrize("limit", [3, 5, 8, 24])
def test_rows_have_every_layer_once_and_are_of_one_placement(limit: int) -> None:
    for found in (decision(), blocks(14), blocks(14, ".1"), alexnet()):
        rows = net_rows(found, limit)
        names = [layer.name for row in rows for layer in row.layers]
        assert sorted(names) == sorted(layer.name for layer in found.layers)
        assert all(len({layer.strategy.placement for layer in row.layers}) == 1 for row in rows)
        assert len(rows) <= max(limit, 2 * len({layer.strategy.placement for layer in found.layers}))


def test_the_strategy_stands_beside_the_name_of_every_row_at_both_widths() -> None:
    found = in_shards(decision())
    rows = net_rows(found)
    for width in (BROAD, NARROW):
        root = svg_of(draw_net(found, rows, width=width).standalone())
        places = [
            (element.text or "", float(element.get("x") or 0), float(element.get("y") or 0))
            for element in root.iter(f"{SVG}text")
        ]
        for row in rows:
            (_, x, y), *_ = [one for one in places if one[0] == row.label]
            assert [one[0] for one in places if one[2] == y and one[1] > x and one[0] == row.words] == [row.words]


def test_a_strategy_that_is_too_long_for_a_narrow_picture_leaves_out_its_axis_and_is_not_cut() -> None:
    cut = Strategy(2, 2, "in-features", (0, 1, 2, 3))
    found = priced(residual(), data_parallel(residual(), 4).with_layers({"fc": cut}))
    said = texts(svg_of(draw_net(found, width=NARROW).standalone()))
    assert "2 replicas x 2 shards" in said
    assert not any("…" in text for text in said if "replicas" in text)
    assert "2 replicas x 2 shards of in-features" in texts(svg_of(draw_net(found).standalone()))


@pytest.mark.parametrize("width", [BROAD, NARROW])
@pytest.mark.parametrize("devices", [2, 8])
def test_nothing_is_drawn_outside_of_a_picture(width: float, devices: int) -> None:
    """Texts by the width of their characters, in the fonts of most screens."""
    found = priced(residual(), data_parallel(residual(), devices).with_layers({"fc": SHARDED}))
    timeline = predicted_timeline(found)
    memory = memory_over_step(found, timeline)
    assert timeline is not None
    assert memory is not None
    lanes = drawn_lanes(device_lanes(timeline), 1000)
    drawings = (draw_net(found, width=width), draw_bars(found, width), draw_memory(memory, "net", width),
                draw_timeline(lanes, timeline.step_s, "net", None, width))  # fmt: skip
    for drawing in drawings:
        assert drawing.width == width
        for anchor, element in anchored(ElementTree.fromstring(drawing.inline())):
            long, x = 5.2 * len(element.text or ""), float(element.get("x") or 0)
            left = x - {"end": long, "middle": long / 2}.get(anchor, 0.0)
            assert -14 <= left <= left + long <= width + 14, element.text


def anchored(root: ElementTree.Element, anchor: str = "start") -> Iterator[tuple[str, ElementTree.Element]]:
    """All texts with the anchor that they have or inherit."""
    anchor = root.get("text-anchor", anchor)
    if root.tag == "text":
        yield anchor, root
    for own in root:
        yield from anchored(own, anchor)


def test_axes_of_all_layers_of_a_row_are_named() -> None:
    layers = decision().layers
    strategies = (
        Strategy(1, 2, "sequence", (0, 1)),
        Strategy(1, 2, "heads", (0, 1)),
        Strategy(1, 2, "features", (0, 1)),
    )
    few = [replace(layer, strategy=strategy, parameters=1) for layer, strategy in zip(layers, strategies, strict=False)]
    assert Row("x", tuple(few[:1])).words == "2 shards of sequence"
    assert Row("x", tuple(few[:2])).words == "2 shards of sequence and heads"
    assert Row("x", tuple(few)).words == "2 shards of several axes"


def test_replicas_and_shards_are_told_apart() -> None:
    graph = residual()
    plan = data_parallel(graph, 2)
    root = svg_of(draw_net(priced(graph, plan.with_layers({"fc": SHARDED}))).standalone())
    assert {"1/2", "2/2", "2 replicas", "2 shards of out-features"} <= set(texts(root))
    (cut,) = (element.text or "" for element in root.iter(f"{SVG}title") if "shard" in (element.text or ""))
    assert "device 0: shard 1 of 2; device 1: shard 2 of 2;" in cut
    assert {"replicas", "shards"} <= classes(root)


def test_kinds_of_devices_are_named_where_there_are_several() -> None:
    graph = residual()
    mixed = load_cluster(DOCS.parent / "examples" / "clusters" / "workstation.toml")
    root = svg_of(draw_net(priced(graph, data_parallel(graph, mixed.count), mixed)).standalone())
    assert {"rtx4090", "desktop-cpu"} <= set(texts(root))


def test_many_devices_share_columns_and_have_no_timeline() -> None:
    graph = residual()
    plan = Plan(graph.model, graph.fingerprint, 8, 128, {name: Strategy() for name in graph.layers})
    found = svg_files(priced(graph, plan), "many.svg")
    assert list(found) == ["many.svg"]
    assert "120-127" in texts(svg_of(found["many.svg"]))


@every_case("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_stay_text(name: str) -> None:
    made = alexnet()
    layers = tuple(replace(layer, name=f"{i}{name}") for i, layer in enumerate(made.layers))
    plan = replace(made.plan, model=name, layers={layer.name: layer.strategy for layer in layers})
    text = draw_net(replace(made, layers=layers, plan=plan)).standalone()
    root = svg_of(text)
    assert len(text) < 200_000
    assert {element.tag for element in root.iter()} <= {
        SVG + tag for tag in ("svg", "title", "desc", "style", "rect", "g", "text", "path", "circle")
    }
    assert [key for element in root.iter() for key in element.attrib if key.startswith("on")] == []


# ---- memory over the step --------------------------------------------------------------------------------------------


def test_the_highest_point_of_memory_is_the_predicted_peak() -> None:
    found = decision()
    memory = memory_over_step(found, predicted_timeline(found))
    assert memory is not None
    peaks = {device: curve.peak_bytes for curve in memory.curves for device in curve.devices}
    assert tuple(peaks[device] for device in range(2)) == found.prediction.memory_bytes
    assert memory.starts_s is not None
    assert list(memory.starts_s) == sorted(memory.starts_s)
    assert len(memory.starts_s) == len(memory.curves[0].nbytes)


def test_memory_near_the_limit_is_drawn_against_it_and_far_from_it_named() -> None:
    found = decision()
    memory = memory_over_step(found, predicted_timeline(found))
    assert memory is not None
    peak = max(found.prediction.memory_bytes)
    for limit, drawn in ((2 * peak, True), (40 * peak, False)):
        curves = tuple(replace(curve, limit_bytes=limit) for curve in memory.curves)
        root = svg_of(draw_memory(replace(memory, curves=curves), "net").standalone())
        assert ("limit" in classes(root)) is drawn
        assert any("limit" in text for text in texts(root))


def test_plans_whose_layers_have_no_common_order_show_memory_by_phase() -> None:
    found = decision()
    memory = memory_over_step(found, None)
    assert memory is not None
    assert memory.starts_s is None
    assert any("not to scale in time" in text for text in texts(svg_of(draw_memory(memory, "net").standalone())))


# ---- the documentation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alexnet-k20.svg", "alexnet-k20-step.svg"])
def test_pictures_of_the_documentation_are_drawings_of_today(name: str) -> None:
    """Their colours are those of drawings made now."""
    root = svg_of((DOCS / "pictures" / name).read_text(encoding="utf-8"))
    today = svg_of(svg_files(decision(), "x.svg")["x.svg"])
    assert root.findtext(f"{SVG}style") == today.findtext(f"{SVG}style")
    assert name in (DOCS / "pictures.md").read_text(encoding="utf-8")
