"""The decision of `parplan.analyze` writes itself."""

from __future__ import annotations

import json
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import parplan
from parplan.errors import ParplanError
from parplan.report.analysis import Analysis
from parplan.report.terminal import render
from tests.report.decisions import alexnet
from tests.report.pictures.drawn import Page, svg_of


def test_a_model_is_analysed_and_drawn(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    decision = parplan.analyze(net, torch.randn(8, 16), gpus=2, gpu="v100-sxm2")
    decision.html(tmp_path / "a.html")
    decision.svg(tmp_path / "a.svg")
    decision.trace(tmp_path / "a.json")
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert page.trouble == []
    assert decision.advice in page.shown
    for name in ("a.svg", "a-step.svg"):
        svg_of((tmp_path / name).read_text(encoding="utf-8"))
    facts = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["otherData"]
    assert facts["predicted_step_s"] == decision.prediction.step_s


def test_it_is_the_same_decision() -> None:
    assert vars(Analysis.of(alexnet())) == vars(alexnet())


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ParplanError, match="cannot write"):
        Analysis.of(alexnet()).html(tmp_path / "none" / "a.html")


def test_it_prints_as_the_report_of_the_terminal() -> None:
    decision = Analysis.of(alexnet())
    stream = StringIO()
    render(alexnet(), Console(file=stream, width=80, force_terminal=False))
    assert f"{decision}\n" == stream.getvalue()
    assert [line.split()[0] for line in decision.summary().splitlines() if line[0] != " "][:4] == [
        "Use", "Speed", "Fits", "Proven",
    ]  # fmt: skip
    assert str(decision).startswith(decision.summary())


def test_its_representation_is_one_line() -> None:
    decision = Analysis.of(alexnet())
    assert repr(decision) == f"<Analysis of AlexNet on {decision.cluster.describe()}: " + (
        f"{decision.prediction.step_s * 1e3:.3g} ms a step, {decision.proof.status}>"
    )
    assert "\n" not in repr(decision)


def test_a_notebook_shows_the_page_in_a_frame(tmp_path: Path) -> None:
    decision = Analysis.of(alexnet())
    decision.html(tmp_path / "a.html")
    shown = decision._repr_html_()
    begin, end = '<iframe srcdoc="', '" style="width: 100%; height: 60em; border: 0"></iframe>'
    assert shown.startswith(begin)
    assert shown.endswith(end)
    inner = shown[len(begin) : -len(end)]
    assert '"' not in inner
    assert unescape(inner) == (tmp_path / "a.html").read_text(encoding="utf-8")
