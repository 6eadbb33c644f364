"""The HTML page: well-formed, alone, the figures of the decision, and no name in it that acts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parplan.graph.capture.capture import capture
from parplan.plan import Strategy
from parplan.planner.decision import Alternative, Arrival, Decision
from parplan.report.pictures.figures import layer_table
from parplan.report.pictures.page import html
from parplan.report.pictures.text import visible
from tests.report.decisions import alexnet
from tests.report.pictures.drawn import ADDRESS, HOSTILE, Page, data_parallel, priced, residual

OTHERS = (Alternative(Strategy(2, 1, None, (0, 1)), 1e-3, 0.0, 0.0),) * 3
INVISIBLE = ("Cc", "Cf", "Cs")


@cache
def small() -> Decision:
    return priced(residual(), data_parallel(residual(), 2))


@cache
def page() -> Page:
    return Page(html(small(), "parplan analyze net.py --gpus 2 --html x.html", "net.py"))


def renamed(decision: Decision, names: tuple[str, ...]) -> Decision:
    """The decision with hostile words wherever words come from a model, a plan, pins or a cluster file."""
    layers = tuple(
        replace(one, name=name, kind=name, why=name, bends=(name,), pinned=name, copies=(Arrival(name, (0,)),))
        for one, name in zip(decision.layers, names * len(decision.layers), strict=False)
    )
    first = names[0]
    device = replace(decision.cluster.device, kind=first, source=first)
    links = tuple(replace(link, name=first, source=first) for link in decision.cluster.links)
    cluster = replace(decision.cluster, devices=(device,) * decision.cluster.count, links=links, name=first)
    plan = replace(decision.plan, model=first, layers={layer.name: layer.strategy for layer in layers})
    rivals = tuple(replace(one, name=first, why_not=first, bends=first, on=first) for one in decision.baselines)
    return replace(
        decision, layers=layers, plan=plan, baselines=rivals, notes=names, advice=first, times_from=first,
        cluster=cluster, priced=None,
    )  # fmt: skip


def well_formed(found: Page) -> None:
    assert found.trouble == []
    assert found.ids.most_common(1)[0][1] == 1


def harmless(found: Page) -> None:
    """Two scripts, no handlers, no address, no styles, and a policy that names script and style by digest."""
    assert found.tags["script"] == 2
    assert found.tags["style"] == 1
    assert {"img", "iframe", "link", "object", "embed", "base", "form", "foreignobject"}.isdisjoint(found.tags)
    assert [
        one for one in found.attributes if one[1].startswith("on") or one[1] in ("src", "style", "xlink:href")
    ] == []
    assert [value for _, name, value in found.attributes if name == "href" and not value.startswith("#")] == []
    assert [text for _, text in found.scripts if ADDRESS.search(text.replace("http://www.w3.org/2000/svg", ""))] == []
    assert not ADDRESS.search(found.styles[0])
    policy = next(v for tag, name, v in found.attributes if tag == "meta" and name == "content" and "script-src" in v)
    script = next(text for attrs, text in found.scripts if not attrs)
    for kind, text in (("script", script), ("style", found.styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_it_is_well_formed_and_loads_nothing() -> None:
    well_formed(page())
    harmless(page())


def test_it_says_first_what_to_do() -> None:
    shown = page().shown.replace("\N{NO-BREAK SPACE}", " ")
    places = [
        shown.index(text)
        for text in ("Use this plan on all 2", "Speed", "3.00 x as fast", "Fits", "Proven", "The net on the")
    ]
    assert places == sorted(places)
    assert "parplan analyze net.py --gpus 2 --html x.html" in shown


def test_tables_have_heads_and_pictures_words() -> None:
    found = page()
    assert found.tags["table"] == found.tags["caption"] == 5
    scopes = [value for tag, name, value in found.attributes if (tag, name) == ("th", "scope")]
    assert len(scopes) == found.tags["th"]
    roles = [value for tag, name, value in found.attributes if tag == "svg" and name == "role"]
    nets = sum(1 for tag, name, value in found.attributes if (tag, name) == ("svg", "id") and value.startswith("net"))
    assert nets == 4  # the net and what is inside of it, for wide and for narrow screens
    assert sorted(roles) == ["group"] * nets + ["img"] * 6  # the rows of a net can be gone to
    assert found.tags["desc"] == len(roles)
    assert ("html", "lang", "en") in found.attributes


def test_a_sentence_says_how_to_read_each_picture() -> None:
    text = page().text
    for section in ("plan-net", "plan-step", "plan-memory", "plan-others"):
        own = text.split(f'<section id="{section}"', 1)[1].split("</section>", 1)[0]
        said = re.search(r'<p class="how">([^<]+)</p>', own)
        assert said is not None
        assert said[1].endswith(".")
        assert own.index(said[0]) < own.index("<svg")


def test_every_picture_has_a_drawing_for_narrow_screens() -> None:
    ids = page().ids
    for name in ("net", "step", "memory", "plans"):
        assert {name, f"{name}-narrow"} <= set(ids)
    style = page().styles[0]
    assert ".narrow{display:none}" in style
    assert re.search(
        r"@media screen and \(max-width:760px\)\{[^@]*\.broad\{display:none\}\n\.narrow\{display:block\}", style
    )
    assert "min-width:760px" not in style


def test_a_row_of_many_layers_is_looked_into_below_the_picture() -> None:
    found = page()
    (fold,) = (
        value for tag, name, value in found.attributes if (tag, name) == ("details", "id") and value.startswith("net-")
    )
    opens = [value for _, name, value in found.attributes if name == "data-zoom" and value.startswith("net")]
    assert opens == [fold, fold]  # a row of each of both drawings
    inside = found.text.split(f'id="{fold}"', 1)[1].split("</details>", 1)[0]
    for name in ("first", "second", "third", "fc"):
        assert f">{name}</text>" in inside


def test_reasons_are_in_a_fold() -> None:
    decision = replace(small(), layers=tuple(replace(one, why=f"why of {one.name}") for one in small().layers))
    text = html(decision)
    for one in decision.layers:
        assert f"<details><summary>why</summary>why of {one.name}" in text


def test_equal_neighbours_are_one_row_of_the_table_with_sums() -> None:
    graph = capture(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4)), (torch.randn(4, 8),))
    table = layer_table(priced(graph, data_parallel(graph, 2)).layers)
    layers = priced(graph, data_parallel(graph, 2)).layers
    (row,) = (row for row in table["rows"] if " x" in row[1].text)
    first, last = re.fullmatch(r"(\d)-(\d), \d x", row[1].text).groups()  # type: ignore[union-attr]
    run = [layer for layer in layers if layer.name.isdigit() and int(first) <= int(layer.name) <= int(last)]
    assert len(run) >= 3
    assert row[1].text == f"{first}-{last}, {len(run)} x"
    forward = table["heads"].index(next(head for head in table["heads"] if head.startswith("forward")))
    size = {"µs": 1e-6, "ms": 1e-3}[table["heads"][forward].split("(")[1][:2]]
    assert float(row[forward].text) * size == pytest.approx(sum(layer.forward_s for layer in run), rel=1e-2)
    assert table["figures"] == "the sums of their figures"
    assert not layer_table(layers[:2])["figures"]


def test_a_row_of_the_net_says_to_keys_and_readers_what_it_says_when_pointed_at() -> None:
    nets = re.findall(r"<svg[^>]* id=\"(net[^\"]*)\"(.*?)</svg>", page().text, re.DOTALL)
    assert len(nets) == 4
    drawn = re.search(r"<svg[^>]* id=\"net-0\".*?</svg>", page().text, re.DOTALL)
    assert drawn is not None
    targets = [one for one in ElementTree.fromstring(drawn[0]).iter("rect") if one.get("tabindex") == "0"]
    said = [one.get("aria-label") or "" for one in targets]
    assert said == [one.findtext("title") for one in targets]
    assert {one.get("role") for one in targets} == {"img"}
    for layer in small().layers:
        (words,) = (text for text in said if re.search(rf"(^|, ){re.escape(layer.name)}[,:]", text))
        assert f"{layer.strategy.describe()} on devices 0, 1" in words
        assert "compute " in words


def test_paper_repeats_heads_keeps_rows_whole_and_leaves_out_alternatives() -> None:
    style = page().styles[0].split("@media print{", 1)[1]
    assert "thead{display:table-header-group}" in style
    assert re.search(r"[,\n]tr,thead,[^{]*\{break-inside:avoid\}", style)
    assert "#layers .more{display:none}" in style
    text = html(replace(small(), layers=tuple(replace(one, alternatives=OTHERS) for one in small().layers)))
    assert text.count('<span class="more">; ') == len(small().layers)


def test_the_plan_in_it_can_be_saved_as_it_is() -> None:
    text = re.search(r'<pre tabindex="0" id="plan"[^>]*>(.*?)</pre>', page().text, re.DOTALL)
    assert text is not None
    plain = Page(text[1]).shown
    assert plain == small().plan.to_json()


def test_blocks_for_the_script_are_those_of_the_picture() -> None:
    data, found = page().data, page()
    numbers = [int(value) for _, name, value in found.attributes if name == "data-n"]
    assert sorted(numbers) == list(range(len(data["blocks"])))
    assert max(end for _, _, _, end, _, _ in data["blocks"]) == pytest.approx(data["step"])
    words = {data["names"][block[1]] for block in data["blocks"]}
    assert {"first · forward", "fc · backward"} <= words


def test_the_layers_are_listed_with_their_figures() -> None:
    shown = page().shown
    for layer in small().layers:
        assert layer.name in shown
        assert layer.strategy.describe() in shown


def test_without_a_graph_it_says_what_is_not_drawn() -> None:
    found = Page(html(alexnet()))
    well_formed(found)
    harmless(found)
    assert "The step is not drawn: no graph is known." in found.shown


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_text(name: str) -> None:
    names = tuple(f"{number}{name}" for number in range(len(alexnet().layers)))
    text = html(renamed(alexnet(), names), name, name)
    found = Page(text)
    well_formed(found)
    harmless(found)
    hidden = {one for one in found.shown if unicodedata.category(one) in INVISIBLE} - {"\n"}
    assert hidden == set()
    assert visible(f"0{name}") in found.shown
    assert len(text) < 1_000_000


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(), max_size=40), min_size=1, max_size=6), st.text(max_size=60))
def test_any_name_is_text(names: list[str], command: str) -> None:
    unique = tuple(f"{number}{names[number % len(names)]}" for number in range(len(alexnet().layers)))
    found = Page(html(renamed(alexnet(), unique), command, command))
    well_formed(found)
    harmless(found)


@pytest.mark.full
def test_hostile_modules_are_drawn_as_text() -> None:
    """Through capture, simulation and drawing, as a model brings them."""
    net = nn.Sequential()
    for number, name in enumerate(one for one in HOSTILE if "." not in one and one != "\ud800"):
        net.add_module(name, nn.Linear(4, 4, bias=number % 2 == 0))
    graph = capture(net, (torch.randn(4, 4),))
    found = Page(html(priced(graph, data_parallel(graph, 2))))
    well_formed(found)
    harmless(found)
    assert any("onerror" in name for name in found.data["names"])


def test_five_hundred_layers_without_a_graph_stay_below_a_megabyte() -> None:
    made = alexnet()
    layers = tuple(replace(made.layers[i % 20], name=f"features.denseblock{i // 40}.layer{i}.conv") for i in range(500))
    plan = replace(made.plan, layers={layer.name: layer.strategy for layer in layers})
    text = html(replace(made, layers=layers, plan=plan))
    assert text.count("layer499.conv, 25 x</th>") == 1
    assert len(text.encode()) < 1_000_000


def test_data_for_the_script_has_no_markup() -> None:
    decision = priced(residual(), data_parallel(residual(), 2))
    text = html(replace(decision, plan=replace(decision.plan, model=HOSTILE[0])))
    data = re.search(r'<script type="application/json" id="blocks">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert not set("<>&'") & set(data[1])
    assert json.loads(data[1])["step"] > 0


@pytest.mark.full
def test_five_hundred_layers_stay_below_a_megabyte() -> None:
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(500)))
    graph = capture(net, (torch.randn(8, 16),))
    text = html(priced(graph, data_parallel(graph, 8)))
    well_formed(Page(text))
    assert "1-498, 498 x</th>" in text  # the ends take other times
    assert len(text.encode()) < 1_000_000
