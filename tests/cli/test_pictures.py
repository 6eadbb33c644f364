"""`parplan analyze --html, --svg, --trace`: what is written where, what is refused before the search, what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parplan import api
from parplan.cli.main import main
from parplan.planner.decision import Decision
from tests.report.decisions import alexnet
from tests.report.pictures.drawn import Page, data_parallel, priced, residual, svg_of

MODEL = "import torch\nmodel = torch.nn.Linear(6, 2)\nexample_inputs = torch.randn(8, 6)\n"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """A model in the current folder; the decision that is answered can be put in the list."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    given = [priced(residual(), data_parallel(residual(), 2))]
    monkeypatch.setattr(api, "analyze", lambda *_, **__: given[-1])
    return given


def test_all_pictures_are_written(answers: list[Decision], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["analyze", "net.py", "--gpus", "2", "--html", "a b.html", "--svg", "a.svg", "--trace", "a.json"]
    assert main(command) == 0
    page = Page(Path("a b.html").read_text(encoding="utf-8"))
    assert page.trouble == []
    assert "parplan analyze net.py --gpus 2 --html 'a b.html' --svg a.svg --trace a.json" in page.shown
    assert "parplan verify net.py --plan plan.json" in page.shown
    for name in ("a.svg", "a-step.svg"):
        svg_of(Path(name).read_text(encoding="utf-8"))
    assert json.loads(Path("a.json").read_text(encoding="utf-8"))["traceEvents"]
    said = capsys.readouterr().out
    for name in ("a b.html", "a.svg", "a-step.svg", "a.json"):
        assert name in said


def test_what_cannot_be_drawn_is_said(answers: list[Decision], capsys: pytest.CaptureFixture[str]) -> None:
    answers.append(alexnet())
    assert main(["analyze", "net.py", "--svg", "a.svg", "--trace", "a.json"]) == 0
    said = capsys.readouterr().out
    assert "a-step.svg is not written: the step is not simulated" in said
    assert "a.json is not written: there is no trace to write: no graph is known" in said
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == ["a.svg", "net.py"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--html", "x", "--trace", "x"], "--html and --trace both name x"),
        (["--out", "a-step.svg", "--svg", "a.svg"], "--out and --svg both name a-step.svg"),
        (["--html", "nowhere/x.html"], "--html nowhere/x.html: there is no folder"),
        (["--svg", "x.png"], "x.png: drawings are SVG, not .png; name it x.svg"),
        (["--trace", ""], "--trace: the name of the file is empty"),
    ],
)
def test_files_are_refused_before_the_search(
    answers: list[Decision], capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    answers.clear()
    assert main(["analyze", "net.py", *options]) == 2
    assert words in capsys.readouterr().err
