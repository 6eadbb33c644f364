"""The decision of `parplan.analyze` writes itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import parplan
from parplan.errors import ParplanError
from parplan.report.analysis import Analysis
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
