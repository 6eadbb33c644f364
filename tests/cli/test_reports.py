"""`parplan diff`, `parplan explain` and `parplan analyze --check` as commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parplan import api
from parplan.cli.main import main
from parplan.planner.decision import Decision
from parplan.report.as_json import to_dict, to_json
from tests.report.decisions import DATA, alexnet

MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
example_inputs = torch.randn(16, 16)
"""
K20 = ["--gpus", "2", "--gpu", "k20"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a report in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("net.py").write_text(MODEL)
    Path("report.json").write_text(to_json(alexnet()))


def planned(monkeypatch: pytest.MonkeyPatch, decision: Decision) -> None:
    """A planner that decides so."""
    monkeypatch.setattr(api, "analyze", lambda *args, **options: decision)


@pytest.mark.full
def test_diff_prices_both_plans_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "net.py", *K20, "--out", "plan.json", "--json", "of_net.json"]) == 0
    step_s = json.loads(Path("of_net.json").read_text())["predicted"]["step_s"]
    plan = json.loads(Path("plan.json").read_text())
    for layer in plan["layers"].values():
        layer.update(replicas=1, shards=1, axis=None, devices=[1])
    plan["note"] = "all on one"
    Path("edited.json").write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["diff", "plan.json", "edited.json", "net.py", "--gpu", "k20"]) == 1
    out = capsys.readouterr().out
    assert "plan.json -> edited.json: " in out
    assert f"of net.py {step_s * 1e6:.1f} µs" in " ".join(out.split())
    assert "net.py is priced on 2 x k20, pcie2, with fp32 and adam." in out
    assert "the plan: none -> all on one" in out
    assert main(["analyze", "net.py", *K20, "--plan", "edited.json", "--out", "again.json", "--summary"]) == 0
    assert "Note: all on one" in capsys.readouterr().out
    assert json.loads(Path("again.json").read_text())["note"] == "all on one"
    assert main(["diff", "plan.json", "plan.json"]) == 0


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "report.json", "fc6"]) == 0
    assert capsys.readouterr().out.startswith("fc6: linear, 1,000 parameters")
    assert main(["explain", "report.json", "fc66"]) == 2
    assert "did you mean fc6?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factor", "options", "code", "words"),
    [
        (1.0, [], 0, "CHECK PASSED."),
        (0.5, [], 0, "CHECK PASSED."),
        (1.04, [], 0, "CHECK PASSED."),
        (1.06, [], 1, "CHECK FAILED: the step is 6.0% slower, and 5.0% is allowed."),
        (1.06, ["--check-tolerance", "10%"], 0, "CHECK PASSED."),
        (1.06, ["--check-tolerance", "0.01"], 1, "and 1.0% is allowed."),
    ],
)
def test_a_slower_step_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], factor: float, options: list[str], code: int,
    words: str,
) -> None:  # fmt: skip
    step = alexnet().prediction
    planned(monkeypatch, replace(alexnet(), prediction=replace(step, step_s=factor * step.step_s)))
    assert main(["analyze", "net.py", "--check", "report.json", *options]) == code
    assert words in " ".join(capsys.readouterr().out.split())


def test_another_plan_fails_the_check_and_a_note_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = alexnet()
    planned(monkeypatch, replace(decision, plan=replace(decision.plan, note="as agreed")))
    assert main(["analyze", "net.py", "--check", "report.json"]) == 0
    planned(monkeypatch, replace(decision, plan=decision.plan.with_layers({"fc6": DATA})))
    assert main(["analyze", "net.py", "--check", "report.json", "--json", "new.json"]) == 1
    assert "CHECK FAILED: the plan changed." in capsys.readouterr().out
    assert json.loads(Path("new.json").read_text())["plan"]["layers"]["fc6"]["replicas"] == 4


def test_a_plan_has_no_step_to_check_against(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text(alexnet().plan.to_json())
    assert main(["analyze", "net.py", "--check", "plan.json"]) == 2
    assert "--check plan.json is a plan; name a report" in capsys.readouterr().err


def test_two_runs_as_profiled_print_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("a.json", "b.json"):
        assert main(["analyze", "net.py", *K20, "--as-profiled", "--json", name]) == 0
        found.append((capsys.readouterr().out, Path(name).read_text()))
    assert found[0] == found[1]
    assert "parplan took" not in found[0][0]
    assert to_dict(alexnet())["seconds"]["total"] > 0
