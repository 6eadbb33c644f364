"""SVG drawings: well-formed, described, rows and connections of the net, and colours for both backgrounds."""

from __future__ import annotations

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
from parplan.report.pictures.drawings import step_path, svg_files
from parplan.report.pictures.lanes import predicted_timeline
from parplan.report.pictures.memory import draw_memory, memory_over_step
from parplan.report.pictures.net import draw_net
from parplan.report.pictures.rows import connections, net_rows
from parplan.report.pictures.svg import COLOURS
from tests.report.decisions import alexnet
from tests.report.pictures.drawn import HOSTILE, SVG, data_parallel, priced, residual, svg_of

DOCS = Path(__file__).resolve().parents[3] / "docs"
SHARDED = Strategy(1, 2, "out-features", (0, 1))


def decision(devices: int = 2) -> Decision:
    return priced(residual(), data_parallel(residual(), devices))


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
    rows = net_rows(decision())
    assert [row.layers[0].name for row in rows] == ["first", "second", "third", "fc"]
    assert sum(len(row.layers) for row in rows) == len(decision().layers)
    assert rows[0].count == "2 layers"


def test_a_skip_connection_is_an_arc() -> None:
    found = connections(net_rows(decision()), residual())
    assert found.skips == ((0, 2),)
    assert {1, 2, 3} == set(found.direct)


def test_modules_are_rows_where_layers_are_too_many() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(12)]
    graph = capture(nn.Sequential(*blocks), (torch.randn(4, 8),))
    found = priced(graph, data_parallel(graph, 2))
    assert len(net_rows(found)) == 24
    assert [row.label for row in net_rows(found, 12)] == [str(number) for number in range(12)]
    assert [(row.label, row.count) for row in net_rows(found, 11)] == [("0 … 11", "12 x 2 layers")]
    assert len(net_rows(replace(found, priced=None), 5)) <= 5


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


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
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
