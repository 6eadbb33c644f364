"""Layer files on the command line: what `load` makes of them, and `analyze`, `verify` and `run-report` end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.cli.main import main
from parplan.cli.options import RunOptions, TargetOptions
from parplan.cli.run_report import Job
from parplan.convnet2 import ConvNet
from parplan.errors import TargetError
from parplan.plan import Plan, Strategy
from parplan.target import load
from tests.convnet2.layer_files import SMALL, write
from tests.convnet2.test_rates import ALL


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The small file in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write(tmp_path, SMALL)
    (tmp_path / "folder.cfg").mkdir()
    return "layers-some.cfg"


def test_a_layer_file_is_a_target(small: str) -> None:
    found = load(small)
    assert isinstance(found.module, ConvNet)
    assert found.name == "layers-some"
    assert [tuple(value.shape) for value in found.args] == [(256, 3, 12, 12), (256,)]
    assert (found.kwargs, found.gpus, len(found.pins)) == ({}, 2, 8)
    assert any("kernels refuse the sizes of conv1" in note for note in found.notes)


def test_other_targets_have_no_pins(tmp_path: Path) -> None:
    file = write(
        tmp_path, "from torch import nn, zeros\nmodel = nn.Linear(3, 2)\nexample_inputs = zeros(4, 3)\n", "m.py"
    )
    found = load(str(file))
    assert (found.pins, found.gpus, found.notes) == ((), None, ())


# (shapes given, batch given, shapes of the inputs)
SHAPES = [
    pytest.param((), 6, [(6, 3, 12, 12), (6,)], id="batch"),
    pytest.param(("10x3x20x20",), None, [(10, 3, 20, 20), (10,)], id="images"),
    pytest.param(("10x3x20x20",), 4, [(4, 3, 20, 20), (4,)], id="batch before the images'"),
    pytest.param(("10x3x20x20", "10:int64"), None, [(10, 3, 20, 20), (10,)], id="labels too"),
]


@pytest.mark.parametrize(("inputs", "batch", "shapes"), SHAPES)
def test_sizes_of_samples(
    small: str, inputs: tuple[str, ...], batch: int | None, shapes: list[tuple[int, ...]]
) -> None:
    found = load(small, inputs, batch)
    assert [tuple(value.shape) for value in found.args] == shapes
    assert found.args[1].tolist() == [label % 10 for label in range(shapes[1][0])]
    assert found.module(*found.args).shape == shapes[1]


# (target, inputs, layer-parameter file, what the message says)
REFUSED = [
    pytest.param("layers-sone.cfg", (), None, "no such file; did you mean layers-some.cfg?", id="no such file"),
    pytest.param("folder.cfg", (), None, "folder.cfg: that is a folder; name a layer file in it", id="folder"),
    pytest.param("folders.cfg", (), None, "folders.cfg: no such file", id="not there"),
    pytest.param("layers-some.cfg", (), "none.cfg", "--layer-params none.cfg: no such file", id="no parameters"),
    pytest.param("m.py", (), "none.cfg", "--layer-params goes with a cuda-convnet2 layer file", id="no layer file"),
    pytest.param("layers-some.cfg", ("x=4x3x12x12",), None, "a layer file's inputs go by their dataIdx", id="name"),
    pytest.param("layers-some.cfg", ("4x3x12x9",), None, "a sample of shape 3x12x9 is no square image", id="no square"),
    pytest.param("layers-some.cfg", ("4x1x12x12",), None, "data gives 1 map of 12 x 12; write channels=1", id="depth"),
    pytest.param("layers-some.cfg", ("4x3x12x12", "4x9"), None, "--input 4x9: labels needs N", id="labels"),
    pytest.param("layers-some.cfg", ("4x3x12x12", "4", "4"), None, "given 3 times for 2 data layers", id="too many"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "inputs", "params", "said"), REFUSED)
def test_refused(small: str, target: str, inputs: tuple[str, ...], params: str | None, said: str) -> None:
    with pytest.raises(TargetError) as refused:
        load(target, inputs, None, params)
    assert said in str(refused.value)


@pytest.mark.full
def test_analyze(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --gpus there are as many as the file names; the report has the notes and the pins."""
    write(tmp_path, ALL, "other.cfg")
    assert main(["analyze", small, "--gpu", "k20", "--layer-params", "other.cfg", "--out", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert "kernels refuse the sizes of conv1" in " ".join(out.split())
    assert "conv1=replicas:2 shards:1 gpu:0,1" in out
    plan = Plan.load("plan.json")
    assert plan.devices == 2
    assert plan.layers["conv1"] == plan.layers["pool1"] == Strategy(2, devices=(0, 1))
    assert plan.layers["fcb"] == Strategy(devices=(1,))
    assert main(["verify", small, "--plan", "plan.json"]) == 0


@pytest.mark.full
def test_a_pin_on_the_command_line_wins(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["analyze", small, "--gpu", "k20", "--gpus", "4", "--pin", "fcb=gpu:3", "--json", "-"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    layers = {layer["name"]: layer["devices"] for layer in facts["layers"]}
    assert (layers["fcb"], layers["fca"]) == ([3], [0])


def test_too_few_devices(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", small, "--gpu", "k20", "--gpus", "1"]) == 2
    err = capsys.readouterr().err
    assert "(layers-some.cfg [conv1]): conv1: device 1 does not exist" in err
    assert "plan for 2 devices or more" in err


@pytest.mark.full
def test_without_gpu_lines_the_solver_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "\n".join(line for line in SMALL.splitlines() if not line.startswith("gpu=")))
    assert load(str(file)).pins == ()
    assert main(["verify", str(file), "--devices", "3", "--batch", "6"]) == 0
    assert "on 3 logical CPU devices" in capsys.readouterr().out


@pytest.mark.full
def test_verify(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Named like its file, as `analyze` and `run-report` name it."""
    assert main(["verify", small]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layers-some: ")
    assert "PASSED" in out


@pytest.mark.full
def test_run_report(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-report", small, "--steps", "2", "--batch", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("layers-some: 2 training steps of 8 samples on 2 devices in 1 process")
    assert "whole on device 1" in out


def test_every_process_of_run_report_reads_the_file(small: str) -> None:
    """The file says how many processes there are."""
    write(Path(), ALL, "other.cfg")
    job = Job(TargetOptions(small, batch=4, layer_params="other.cfg"), RunOptions())
    assert job.count == 2
    assert [pin.devices for pin in job.target.load().pins][:3] == [(0, 1), (0, 1), (0,)]
    assert replace(job, options=RunOptions(devices=4)).count == 4
