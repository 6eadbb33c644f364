"""`parplan export`: a program that imports torch alone, on standard output or in a file, and what is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from parplan.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plan of the perceptron for two devices."""
    path = tmp_path / "plan.json"
    assert main(["analyze", f"{EXAMPLES / 'mlp.py'}", "--gpus", "2", "--gpu", "k20", "--out", f"{path}"]) == 0
    capsys.readouterr()
    return path


def test_a_program_in_torch_alone(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = f"{EXAMPLES / 'mlp.py'}", tmp_path / "parallel.py"
    assert main(["export", target, "--plan", f"{plan}"]) == 0
    text = capsys.readouterr().out
    tree = ast.parse(text)
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert {(name or "").partition(".")[0] for name in imported} == {"os", "torch"}
    assert max(map(len, text.splitlines())) <= 120
    assert main(["export", target, "--plan", f"{plan}", "--to", "torch", "--out", f"{out}"]) == 0
    assert out.read_text() == text
    assert capsys.readouterr().out.startswith(f"Program written to {out}.")


@pytest.mark.full
def test_a_configuration_of_torchtitan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, plan, out = f"{EXAMPLES / 'gpt2.py'}", tmp_path / "plan.json", tmp_path / "planned.py"
    assert main(["analyze", target, "--gpus", "2", "--gpu", "a100", "--batch", "2", "--out", f"{plan}"]) == 0
    assert main(["export", target, "--plan", f"{plan}", "--to", "torchtitan", "--out", f"{out}"]) == 0
    assert "Otherwise than in the plan: torchtitan cuts its own models" in capsys.readouterr().out
    assert "config.training.max_context_length = 1024" in out.read_text()


@pytest.mark.full
def test_a_plan_of_another_model_is_refused(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "parallel.py"
    command = ["export", f"{EXAMPLES / 'alexnet.py'}", "--batch", "8", "--plan", f"{plan}", "--out", f"{out}"]
    assert main(command) == 2
    assert "the plan is for another model" in capsys.readouterr().err
    assert not out.exists()


def test_a_plan_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"{EXAMPLES / 'mlp.py'}"]) == 2
    assert "--plan" in capsys.readouterr().err
