"""The page in headless Chromium: no error on the console, no injected script, sort, filter, zoom and hover work."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.plan import Strategy
from parplan.planner.decision import Alternative
from parplan.report.pictures.page import html
from tests.report.decisions import DECISIONS, alexnet
from tests.report.pictures.browser import Browser, browser, found
from tests.report.pictures.drawn import HOSTILE, data_parallel, priced, residual
from tests.report.pictures.test_page import renamed

pytestmark = pytest.mark.skipif(not found(), reason="no Chromium here")

NAMES = "return [...document.querySelectorAll('#layers tbody th')].map((one) => one.textContent)"
VIEW = "return document.getElementById('step-plot').getAttribute('viewBox').split(' ').map(Number)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decision's page."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    plan = data_parallel(residual(), 2).with_layers({"fc": Strategy(1, 2, "out-features", (0, 1))})
    file.write_text(html(priced(residual(), plan)), encoding="utf-8")
    return file


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def opened(request: pytest.FixtureRequest, page: Path) -> Iterator[Browser]:
    """The page, open."""
    with browser(request.param) as one:
        one.open(page)
        yield one
        assert one.console() == []


@pytest.mark.full
def test_the_table_is_sorted_by_its_heads(opened: Browser) -> None:
    before = opened.run(NAMES)
    assert before[0] == "first"
    column = opened.run(
        "return [...document.querySelectorAll('#layers thead th')].findIndex((one) => /^backward/.test(one.innerText))"
    )
    opened.run("document.querySelectorAll('#layers thead button')[arguments[0]].click()", column)
    head = "return document.querySelectorAll('#layers thead th')[arguments[0]].getAttribute('aria-sort')"
    assert opened.run(head, column) == "descending"
    shown = """return [...document.querySelectorAll('#layers tbody tr')].map((row) => row.cells[arguments[0]])
        .map((cell) => Number(cell.dataset.v ?? cell.textContent))"""
    values = opened.run(shown, column)
    assert values == sorted(values, reverse=True)
    opened.run("document.querySelectorAll('#layers thead button')[1].click()")
    assert opened.run(NAMES) == sorted(before)


@pytest.mark.full
def test_the_filter_hides_rows(opened: Browser) -> None:
    opened.run("const f = document.getElementById('filter'); f.value = 'third'; f.dispatchEvent(new Event('input'))")
    rows = opened.run("return [...document.querySelectorAll('#layers tbody tr:not([hidden])')].map((r) => r.innerText)")
    assert rows
    assert all("third" in row for row in rows)
    assert "of" in opened.run("return document.getElementById('shown').textContent")


@pytest.mark.full
def test_buttons_and_keys_zoom_the_step(opened: Browser) -> None:
    whole = opened.run(VIEW)
    opened.run("document.querySelector('[data-zoom=\"0.5\"]').click()")
    near = opened.run(VIEW)
    assert near[2] == pytest.approx(whole[2] / 2)
    opened.run("document.getElementById('step-view').focus()")
    opened.act("key", [{"type": "keyDown", "value": "\ue014"}, {"type": "keyUp", "value": "\ue014"}])
    assert opened.run(VIEW)[0] > near[0]
    opened.act("key", [{"type": "keyDown", "value": "0"}, {"type": "keyUp", "value": "0"}])
    assert opened.run(VIEW) == pytest.approx(whole)


@pytest.mark.full
def test_a_block_says_what_it_is_when_pointed_at(opened: Browser) -> None:
    middle = """document.getElementById('step-view').scrollIntoView({block: 'center', behavior: 'instant'});
        const box = [...document.querySelectorAll('#step-plot [data-n]')].map((one) => one.getBoundingClientRect())
            .sort((one, other) => other.width - one.width)[0];
        return [Math.round(box.x + box.width / 2), Math.round(box.y + box.height / 2)]"""
    x, y = opened.run(middle)
    opened.act("pointer", [{"type": "pointerMove", "duration": 0, "x": x, "y": y}])
    text = opened.run("const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent")
    assert "from" in text
    assert "backward" in text or "forward" in text or "runtime" in text or "update" in text


@pytest.mark.full
def test_keys_say_of_a_row_of_the_net_what_pointing_at_it_says(opened: Browser) -> None:
    tip = "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
    titles = opened.run("return [...document.querySelectorAll('#net [tabindex] title')].map((one) => one.textContent)")
    opened.run("document.querySelector('#net [tabindex=\"0\"]').focus()")
    assert opened.run(tip) == titles[0]
    for key, wanted in (("\ue015", 1), ("\ue010", len(titles) - 1), ("\ue011", 0)):  # down, end, home
        opened.act("key", [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}])
        assert opened.run(tip) == titles[wanted]
        assert opened.run("return document.querySelectorAll('#net [tabindex=\"0\"]').length") == 1
    opened.run("document.activeElement.blur()")
    assert opened.run(tip) == ""


@pytest.mark.full
def test_paper_has_the_heads_of_the_table_on_every_page_and_few_pages(tmp_path: Path) -> None:
    made = DECISIONS["resnet"]()
    other = Alternative(Strategy(1, 8, "out-features", tuple(range(8))), 0.1, 0.1, 0.1)
    layers = tuple(replace(layer, alternatives=(other,) * 4) for layer in made.layers)
    file = tmp_path / "plan.html"
    file.write_text(html(replace(made, layers=layers)), encoding="utf-8")
    with browser() as one:
        one.open(file)
        printed = base64.b64decode(one.devtools("Page.printToPDF", {"preferCSSPageSize": True})["data"])
        pages = len(re.findall(rb"/Type\s*/Page\b", printed))
        assert 3 <= pages <= 12
        one.devtools("Emulation.setEmulatedMedia", {"media": "print"})
        style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        # Chromium repeats a head that is no form control and cannot be broken.
        assert one.run(style, "#layers thead", "display") == "table-header-group"
        assert one.run(style, "#layers thead", "breakInside") == "avoid"
        assert one.run(style, "#layers thead button", "display") == "contents"
        assert one.run(style, "#layers tbody tr", "breakInside") == "avoid"
        assert one.run(style, "#layers .more", "display") == "none"
    if shutil.which("pdftotext"):
        (tmp_path / "plan.pdf").write_bytes(printed)
        command = ["pdftotext", "-layout", str(tmp_path / "plan.pdf"), "-"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        tables = [page for page in text.split("\f") if len(re.findall(r"^ *\d+ +layer\d", page, re.MULTILINE)) > 3]
        assert len(tables) > 1
        assert all("best alternatives" in page for page in tables)


@pytest.mark.full
def test_the_theme_follows_the_reader(page: Path) -> None:
    colours = []
    for dark in (False, True):
        with browser(dark) as one:
            one.open(page)
            colours.append(one.run("return getComputedStyle(document.body).backgroundColor"))
            colours.append(one.run("return getComputedStyle(document.querySelector('#net text')).fill"))
    light, light_text, dark_paper, dark_text = colours
    assert light_text != dark_text
    assert light != dark_paper


@pytest.mark.full
def test_nothing_is_wider_than_a_telephone(page: Path) -> None:
    """Pictures are drawn for it, and their texts end inside of them."""
    wide = """const drawn = [...document.querySelectorAll('.narrow > svg')];
        return drawn.filter((one) => [...one.querySelectorAll('text')].some((text) =>
            text.getBoundingClientRect().right > one.getBoundingClientRect().right + 1)).map((one) => one.id)"""
    with browser(size=(500, 800)) as one:
        one.open(page)
        assert one.run("return document.documentElement.scrollWidth <= innerWidth")
        assert one.run("return [...document.querySelectorAll('.broad')].every((one) => !one.offsetHeight)")
        assert one.run(wide) == []


@pytest.mark.full
def test_a_row_that_stands_for_more_opens_what_is_inside_of_it(tmp_path: Path) -> None:
    file = tmp_path / "uniform.html"
    file.write_text(html(priced(residual(), data_parallel(residual(), 2))), encoding="utf-8")
    with browser() as one:
        one.open(file)
        opened = "return [...document.querySelectorAll('.zoom[open]')].map((one) => one.id)"
        assert one.run(opened) == []
        one.run("document.querySelector('#net [data-zoom]').focus()")
        one.act("key", [{"type": "keyDown", "value": "\ue007"}, {"type": "keyUp", "value": "\ue007"}])
        assert one.run(opened) == [one.run("return document.querySelector('#net [data-zoom]').dataset.zoom")]


def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    every = tuple(f"{i}{HOSTILE[i % len(HOSTILE)]}" for i in range(len(alexnet().layers)))
    file.write_text(html(renamed(alexnet(), every), HOSTILE[0], HOSTILE[0]), encoding="utf-8")
    with browser() as one:
        one.open(file)
        assert one.run("return document.querySelectorAll('img, iframe, [onerror], [onload]').length") == 0
        assert one.run(NAMES)[0].startswith("0</script>")
        assert one.run("return document.documentElement.scrollWidth <= innerWidth")
        assert one.console() == []


@pytest.mark.full
def test_timeline_names_are_text(tmp_path: Path) -> None:
    made = priced(residual(), data_parallel(residual(), 2))
    file = tmp_path / "hostile.html"
    file.write_text(html(replace(made, plan=replace(made.plan, model=HOSTILE[0]))), encoding="utf-8")
    with browser() as one:
        one.open(file)
        assert one.run("return document.querySelectorAll('script').length") == 2
        assert one.console() == []
