"""Bad input, one clear error each: exit code 2, one message, no traceback, no file touched.

Everything here goes through the real command on real models; nothing is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parplan.cli.main import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=1)
        self.fc = nn.Linear(12 * 36, 24)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, target):
        x = self.conv1(x)
        x = torch.relu(self.conv2(x) + x)
        return self.loss(self.fc(x.flatten(1)), target)

model = Net()
example_inputs = (torch.zeros(12, 3, 6, 6), torch.zeros(12, dtype=torch.long))
"""

BRANCH = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # depends on values
            return x
        return -x

model = Net()
example_inputs = torch.zeros(4, 4)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a refused command."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("parplan: error: ")
    assert "Traceback" not in captured.err
    return captured.err


PLANS: dict[tuple[str, int], str] = {}
"""Plan files by the text of the model and the number of GPUs; each is searched for once."""


def plan_of(model: Path, capsys: pytest.CaptureFixture[str], gpus: int = 4) -> dict[str, Any]:
    key = model.read_text(), gpus
    if key not in PLANS:
        out = model.with_name("plan.json")
        assert main(["analyze", str(model), "--gpus", str(gpus), "--out", str(out)]) == 0
        capsys.readouterr()
        PLANS[key] = out.read_text()
    plan: dict[str, Any] = json.loads(PLANS[key])
    return plan


def written(plan: dict[str, Any], model: Path) -> str:
    path = model.with_name("edited.json")
    path.write_text(json.dumps(plan))
    return str(path)


def test_a_file_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    assert "no model" in refused(["analyze", str(path), "--gpus", "2"], capsys)


def test_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.py"
    path.write_text("from torch import nn\nfirst = nn.Linear(2, 2)\nsecond = nn.Linear(2, 2)\n")
    text = refused(["analyze", str(path), "--gpus", "2"], capsys)
    assert "first" in text
    assert "second" in text


def test_a_model_that_cannot_be_exported_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "branch.py"
    path.write_text(BRANCH)
    text = refused(["analyze", str(path), "--gpus", "2"], capsys)
    assert "branch.py:7" in text
    assert "if x.sum() > 0" in text


@pytest.mark.parametrize("gpus", ["0", "-1"])
def test_no_gpus(gpus: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least 1" in refused(["analyze", str(model), "--gpus", gpus], capsys)


def test_more_gpus_than_can_be_planned_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "up to 1024 devices" in refused(["analyze", str(model), "--gpus", "1000000000"], capsys)


def test_an_unknown_preset_lists_those_known(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(["analyze", str(model), "--gpus", "2", "--gpu", "v10"], capsys)
    assert "did you mean v100" in text
    assert "h200-sxm" in text


@pytest.mark.full
def test_memory_that_cannot_fit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(["analyze", str(model), "--gpus", "2", "--memory", "0.0001"], capsys)
    assert "lacks" in text
    assert "fc" in text
    assert "possible remedies" in text


@pytest.mark.full
def test_a_plan_for_another_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(plan_of(model, capsys), model)
    other = tmp_path / "other.py"
    other.write_text(MODEL.replace("conv2", "second"))
    for command in (["analyze", str(other), "--gpus", "4"], ["verify", str(other)]):
        assert "another model" in refused([*command, "--plan", plan], capsys)


@pytest.mark.full
def test_a_plan_for_other_sizes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(plan_of(model, capsys), model)
    other = tmp_path / "other.py"
    other.write_text(MODEL.replace("24", "48"))
    assert "other sizes" in refused(["analyze", str(other), "--gpus", "4", "--plan", plan], capsys)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "parplan.plan/9"}', "\x00\x01"])
def test_a_file_that_is_no_plan(text: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model.with_name("broken.json")
    path.write_text(text)
    assert "plan" in refused(["verify", str(model), "--plan", str(path)], capsys)
    assert path.read_text() == text


DATA = {"replicas": 4, "shards": 1, "axis": None, "devices": [0, 1, 2, 3]}
TWO = {"replicas": 2, "shards": 1, "axis": None, "devices": [0, 1]}
THREE = {"replicas": 3, "shards": 1, "axis": None, "devices": [0, 1, 2]}
ONE = {"replicas": 1, "shards": 1, "axis": None, "devices": [0]}


def edit(rules: str = "default", **layers: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """All layers on one device but those given (`first` is conv1, and so on), as read by `rules`."""

    def edited(plan: dict[str, Any]) -> dict[str, Any]:
        placed = {name: layers.get(name, ONE) for name in plan["layers"]}
        return {**plan, "rules": rules, "layers": placed}

    return edited


EDITS = [
    ("R1", edit("strict", conv1={**DATA, "replicas": 5, "devices": [0, 1, 2, 3, 4]}), "5 replicas"),
    ("R2", edit("strict", conv1=DATA, conv2=TWO, add=TWO), "equal replicas"),
    ("R3", edit("strict", conv1=DATA, conv2=DATA, add=TWO), "equal replicas"),
    ("R4", edit("strict", conv1=DATA, conv2=THREE, add=THREE), "the 3 replicas of"),
    ("R5", edit(fc={**ONE, "shards": 5, "axis": "out-features", "devices": [0, 1, 2, 3, 4]}), "cannot be cut in 5"),
    ("R6", edit(fc={**ONE, "shards": 2, "axis": "out-features"}), "need 2 devices"),
    ("R7", edit("strict", loss={**ONE, "shards": 2, "axis": "vocabulary", "devices": [0, 1]}), "never sharded"),
    ("R8", edit(conv1={**DATA, "update_period": 3}), "3 passes, but there is one"),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rule", "change", "words"), EDITS, ids=[rule for rule, _, _ in EDITS])
def test_an_edited_plan_that_breaks_a_rule(
    rule: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    words: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = change(plan_of(model, capsys, gpus=6))
    path = written(plan, model)
    for command in (["analyze", str(model), "--gpus", "6"], ["verify", str(model)]):
        text = refused([*command, "--plan", path], capsys)
        assert f"({rule})" in text
        assert words in text
    assert json.loads(Path(path).read_text()) == plan


@pytest.mark.full
def test_a_batch_that_does_not_divide_is_told_in_the_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(model), "--gpus", "5", "--rules", "strict"]) == 0
    assert "a batch of 12 does not divide by 5; 15 does" in " ".join(capsys.readouterr().out.split())
    assert main(["analyze", str(model), "--gpus", "5"]) == 0
    assert "R1: 3, 2, 3, 2, 2 samples" in " ".join(capsys.readouterr().out.split())
