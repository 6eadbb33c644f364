"""Names from models, plans and reports on the terminal: no control or direction character, no broken layout.

The report itself is in sections/test_verdict.py; page, drawings and trace are in pictures/.
"""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from parplan.cli.main import main
from parplan.planner.decision import Alternative, Decision
from parplan.report.as_json import to_dict, to_json
from parplan.report.explanation import layer_named, render_explanation
from parplan.report.plan_diff import plan_diff, render_diff
from parplan.report.terminal import Detail, render
from tests.every_case import every_case
from tests.report.decisions import DATA, HYBRID, alexnet
from tests.report.pictures.drawn import HOSTILE

WIDTH = 80


def acts(text: str) -> set[str]:
    """The characters that a terminal does not show but obeys."""
    return {one for one in text if unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and one != "\n"}


def harmless(text: str, name: str) -> None:
    """Nothing acts on the terminal, and no line is wider than the page but one with the name alone."""
    assert acts(text) == set()
    start = f"  {' '.join(name.split())}"[: WIDTH // 2]
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith(start)] == []


def printed(write: Callable[[Console], None]) -> str:
    """The text on a stream that is no terminal."""
    stream = io.StringIO()
    write(Console(file=stream, width=WIDTH))
    return stream.getvalue()


def named(name: str) -> Decision:
    """AlexNet with this name for its model, a layer, a pin, a reason and the notes."""
    decision = alexnet()
    first, second, *others = decision.layers
    first = replace(
        first, name=name, why=name, pinned=name, kind=name, refused=(name,), bends=(name,),
        alternatives=(Alternative(DATA, 1e-3, 0, 0), Alternative(HYBRID, 2e-3, 0, 0)),
    )  # fmt: skip
    layers = (first, replace(second, inputs=(name,)), *others)
    plan = replace(
        decision.plan, model=name, note=name, notes={name: name},
        layers={layer.name: layer.strategy for layer in layers},
    )  # fmt: skip
    return replace(decision, layers=layers, plan=plan, notes=(name,), times_from=name)


def check_all(name: str) -> None:
    """Everything that prints names."""
    decision, other = named(name), alexnet()
    for detail in Detail:
        harmless(printed(partial(render, decision, detail=detail)), name)
    report = to_dict(decision)
    harmless(printed(lambda console: render_explanation(report, layer_named(report, name), console)), name)
    for pair in ((decision.plan, other.plan), (other.plan, decision.plan)):
        found = plan_diff(*pair)
        harmless(printed(partial(render_diff, found, (name, name), {name: (1.0, 2.0)})), name)


@pytest.mark.full
@every_case("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text_on_the_terminal(name: str) -> None:
    check_all(name)


@pytest.mark.full
@settings(max_examples=40)
@given(st.text(min_size=1, max_size=60))
def test_any_name_is_text_on_the_terminal(name: str) -> None:
    check_all(name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_messages_on_files_are_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans, pins and reports with such names, refused or not: what is printed acts on no terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    plan = json.loads(alexnet().plan.to_json())
    layer = dict(next(iter(plan["layers"].values())))
    texts = {
        "layer.json": {**plan, "layers": {name: {**layer, "replicas": 3}}},
        "field.json": {**plan, name: 1},
        "scheme.json": {**plan, "scheme": name},
        "axis.json": {**plan, "layers": {name: {**layer, "axis": name}}},
        "notes.json": {**plan, "note": name, "layers": {**plan["layers"], name: {**layer, "note": name}}},
    }
    for file, text in texts.items():
        Path(file).write_text(json.dumps(text))
    Path("report.json").write_text(to_json(alexnet()))
    Path("pins.toml").write_text(f"[pins]\n{json.dumps(name)} = 'nothing:4'\n", errors="replace")
    for command in (
        *(["diff", file, "layer.json"] for file in texts),
        ["diff", "report.json", "notes.json"],
        ["explain", "report.json", name],
        ["explain", "notes.json", name],
        ["analyze", "missing.py", "--gpus", "2", "--pins", "pins.toml"],
        ["analyze", name, "--gpus", "2"],
        ["analyze", "missing.py", "--gpus", "2", "--gpu", name],
    ):
        if "\x00" not in name:
            main(command)
        out, err = capsys.readouterr()
        assert acts(f"{out}{err}") == set()
        assert "a bug of parplan" not in err
