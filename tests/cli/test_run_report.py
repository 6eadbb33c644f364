"""`parplan run-report`, end to end: in this process, in processes of its own, learning, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parplan.cli.main import main
from tests.processes import fork_ranks
from tests.report.pictures.drawn import Page
from tests.report.pictures.test_page import well_formed
from tests.report.pictures.test_trace import lanes

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
from torch import nn
print("a print of the model's file")
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
example_inputs = torch.randn(8, 16)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model file in the current folder, and a profile store of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PARPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py"


def test_the_comparison_alone_is_on_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", model, "--devices", "2", "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("net: 2 training steps of 8 samples on 2 devices in 1 process")
    assert "a print of the model's file" in err
    assert "took turns" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for line in ("Layers", "Step", "  runtime", "  step", "Peak memory"):
        assert line in out


def test_json_says_the_same(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", model, "--steps", "1", "--json", "-", "--optimizer", "rmsprop", "--batch", "4"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert "1 training step of 4 samples" in read["title"]
    *lines, step = read["lines"]
    both = ("measured_forward_s", "measured_backward_s")
    assert sum(line[key] for line in lines for key in both) == pytest.approx(step["measured_forward_s"], rel=1e-9)
    assert {line["label"] for line in lines} >= {"0", "1", "2", "update", "runtime"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("processes", [False, True], ids=["one process", "processes"])
def test_the_trace_has_predicted_and_measured_of_every_device(
    model: str, processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    files = ["--trace", "step.json", "--html", "step.html"]
    command = ["run-report", model, "--devices", "2", "--steps", "2", *files]
    assert main([*command, *["--processes"] * processes]) == 0
    found = lanes(Path("step.json").read_text(encoding="utf-8"))
    tracks = list(dict.fromkeys(track for track, _ in found))
    each = [f"device {device}{end}" for device in (0, 1) for end in (" (cpu), predicted", ", measured")]
    assert tracks == (each if processes else [*each, "process 0, measured"])
    page = Page(Path("step.html").read_text(encoding="utf-8"))
    well_formed(page)
    shown = page.shown.replace("\N{NO-BREAK SPACE}", " ")
    assert "Measured step" in shown
    assert all(track.replace(" (cpu)", "") in shown for track in tracks)
    for device in (0, 1) if processes else ():
        own = found[f"device {device}, measured", "compute"]
        assert {"update", "forward", "backward"} <= {event["cat"] for event in own}


def test_trace_and_json_need_files_of_their_own(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", model, "--json", "x.json", "--trace", "x.json"]) == 2
    assert "--json and --trace both name x.json" in capsys.readouterr().err


def test_a_plan_of_ones_own_is_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", model, "--gpus", "3", "--gpu", "v100-sxm2", "--out", "plan.json"]) == 0
    assert main(["run-report", model, "--plan", "plan.json", "--steps", "1", "--json", "found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["plan"]["layers"] == json.loads((tmp_path / "plan.json").read_text())["layers"]
    assert "on 3 devices" in capsys.readouterr().out


@pytest.mark.full
def test_learning_keeps_the_figures_and_plans_again(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", model, "--steps", "2", "--learn"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 measured parts of layers kept, 0 of them in place of older figures" in out
    assert "Planned again, the choice" in out
    assert main(["run-report", model, "--steps", "2", "--learn"]) == 0
    assert "measured parts of layers kept" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "0 is not a whole number of at least 1"),
        (["--devices", "two"], "two is not a whole number"),
        (["--optimizer", "lion"], "invalid choice: 'lion'"),
        (["--plan", "gone.json"], "gone.json"),
        (["--json", "no/such/folder.json"], "there is no folder"),
        (["--step", "3"], "did you mean --steps"),
    ],
)
def test_bad_input_is_one_message(
    model: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["run-report", model, *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_plan_for_other_devices_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", model, "--gpus", "3", "--gpu", "v100-sxm2", "--out", "plan.json"]) == 0
    assert main(["run-report", model, "--plan", "plan.json", "--devices", "2"]) == 2
    assert "the plan is for 3 devices, here are 2" in capsys.readouterr().err


@pytest.mark.full
def test_processes_are_started_and_their_figures_joined(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", model, "--devices", "2", "--steps", "2", "--processes", "--learn"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("net: 2 training steps of 8 samples on 2 devices in 2 processes")
    assert "took turns" not in out
    assert "Planned again" in out


@pytest.mark.full
def test_what_ends_a_process_is_told_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", model, "--devices", "2", "--processes", "--batch", "1"]) == 2
    err = capsys.readouterr().err
    assert "a batch of 1 leaves some of 2 processes without a sample; give --batch 2" in err
    assert "Traceback" not in err


def _children(parent: int) -> list[int]:
    """Processes whose parent this is, and theirs."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    by_parent: dict[int, list[int]] = {}
    for line in listed.splitlines():
        pid, above = map(int, line.split())
        by_parent.setdefault(above, []).append(pid)
    found, left = [], [parent]
    while left:
        own = by_parent.get(left.pop(), [])
        found += own
        left += own
    return found


def _alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_an_interruption_leaves_no_process_behind(model: str) -> None:
    command = [sys.executable, "-m", "parplan", "run-report", model, "--devices", "2", "--processes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [*command, "--steps", "1000000"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while len(_children(running.pid)) < 3 and time.monotonic() < deadline:  # two, and multiprocessing's tracker
            time.sleep(0.2)
        started = _children(running.pid)
        assert len(started) >= 3
        time.sleep(3)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert out == ""
    assert "parplan: interrupted" in err
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while any(map(_alive, started)) and time.monotonic() < deadline:  # the tracker ends when it sees that all have
        time.sleep(0.1)
    assert [pid for pid in started if _alive(pid)] == []
