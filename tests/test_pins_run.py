"""Pins from where people write them to where plans run: the command line, code, the report, and float64 numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import parplan
from examples.two_tower import small
from parplan.cli.main import main
from parplan.errors import PinError
from tests.test_bad_input import MODEL, refused

# Towers on devices of their own; what joins them runs where its first input is, until fc8 is pinned elsewhere.
TOWERS: dict[str, dict[str, Any]] = {
    "two devices each": {"*a": "gpu:0,1", "*b": "gpu:3,2", "fc8": "gpu:1,2,3 shards:3"},
    "replicas and shards": {
        "*a": {"gpu": [0, 2]}, "*b": "gpu:1", "conv?a": "replicas:2", "fc?a": "shards:2", "fc8": "gpu:2 update:2",
    },
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("pins", TOWERS.values(), ids=TOWERS)
def test_pinned_towers_give_the_plain_models_numbers(pins: dict[str, Any]) -> None:
    model, inputs = small()
    found = parplan.verify(model, inputs, pins=pins)
    assert found.passed, found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def analyzed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The facts that `parplan analyze ... --json -` prints."""
    assert main(["analyze", *arguments, "--gpu", "k20", "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.full
def test_pins_on_the_command_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file comes first, so that the command line has the last word; every copy between devices is listed."""
    table = model.with_name("pins.toml")
    table.write_text('[pins]\nfc = "shards:4"\n"conv?" = { gpu = [0, 1] }\n')
    given = [str(model), "--gpus", "4", "--pins", str(table), "--pin", "fc=shards:2 gpu:3,2", "--pin", "loss=gpu:0"]
    found = analyzed(given, capsys)
    layers = found["plan"]["layers"]
    assert (layers["fc"]["shards"], layers["fc"]["devices"]) == (2, [3, 2])
    assert [layers[name]["devices"] for name in ("conv1", "conv2", "loss")] == [[0, 1], [0, 1], [0]]
    names = [(one["pin"], one["origin"]) for one in found["pins"]["each"]]
    assert names == [("fc=shards:4", str(table)), ("conv?=gpu:0,1", str(table)), ("fc=shards:2 gpu:3,2", "--pin"),
                     ("loss=gpu:0", "--pin")]  # fmt: skip
    before = next(name for name in reversed(layers) if name != "fc" and not name.startswith("loss"))
    assert found["copies"]["fc"] == [{"layer": before, "devices": layers[before]["devices"]}]
    assert found["copies"]["loss"] == [{"layer": "fc", "devices": [3, 2]}]
    free = analyzed([str(model), "--gpus", "4"], capsys)
    # Pins of devices open more subsets of them to the search than there are without. Their prices are against plans for
    # all processes; one device alone, which is advised without pins, has no samples to gather.
    fastest_s = max(free["predicted"]["step_s"], free["proof"]["bound"])
    assert found["pins"]["free_s"] <= fastest_s * (1 + 1e-6)
    assert found["pins"]["step_s"] == found["predicted"]["step_s"]


@pytest.mark.full
def test_the_report_prices_every_pin(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(model), "--gpus", "2", "--pin", "fc=gpu:1"]) == 0
    text = capsys.readouterr().out
    section = text[text.index("\nPins") : text.index("Against other plans")]
    assert "fc=gpu:1" in section
    assert "all pins" in section
    assert "pinned by fc=gpu:1" in text
    assert "copies fc from device 1" not in text  # the loss takes over the device of its first input


def test_a_plan_with_pins_is_kept_and_verified(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.with_name("plan.json")
    given = ["--pin", "conv*=replicas:2", "--pin", "fc=gpu:1 update:2"]
    assert main(["analyze", str(model), "--gpus", "2", *given, "--out", str(out)]) == 0
    plan = json.loads(out.read_text())
    assert plan["layers"]["fc"] == {"replicas": 1, "shards": 1, "axis": None, "devices": [1], "update_period": 2}
    assert main(["verify", str(model), "--plan", str(out)]) == 0
    assert main(["verify", str(model), *given]) == 0
    capsys.readouterr()


def test_a_compiled_model_runs_its_pins() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    inputs = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compiled = parplan.compile(net, inputs, devices=["cpu", "cpu"], pins={"0": "shards:2 gpu:1,0", "2": "gpu:1"})
    assert compiled.plan is not None
    assert compiled.report.pins is None  # nobody reads what they cost
    assert compiled.plan.layers["0"].devices == (1, 0)
    assert compiled.plan.layers["2"].devices == (1,)
    torch.testing.assert_close(compiled(inputs), net(inputs))


def test_a_plan_leaves_nothing_to_pin() -> None:
    net, inputs = nn.Linear(4, 4), torch.randn(4, 4)
    plan = parplan.analyze(net, inputs, gpus=2, gpu="k20").plan
    for call in (parplan.analyze, parplan.verify, parplan.compile):
        with pytest.raises(PinError, match="leave out the plan or the pins"):
            call(net, inputs, plan=plan, pins=["*=gpu:0"])


BAD = {
    "grammar": (["--pin", "fc"], "there is no '='"),
    "word": (["--pin", "fc=shard:2"], "did you mean shards"),
    "layer": (["--pin", "cnv1=shards:2"], "did you mean conv1"),
    "rule": (["--pin", "fc=shards:5 axis:out-features"], "24 out-features cannot be cut in 5"),
    "device": (["--pin", "fc=gpu:7"], "device 7 does not exist"),
    "loss": (["--pin", "loss.batch_mean=shards:2"], "(R5)"),
    "file": (["--pins", "none.toml"], "cannot read the pins none.toml"),
    "folder": (["--pins", "."], "that is a folder; name a TOML file"),
    "empty name": (["--pins", ""], "the name of the pins is empty; name a TOML file"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("command", [["analyze", "--gpus", "6"], ["verify", "--devices", "6"]], ids=lambda c: str(c[0]))
def test_bad_pins_are_refused(
    options: list[str], words: str, command: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused([*command, str(model), *options], capsys)


@pytest.mark.full
def test_pins_beside_a_plan_are_refused_before_the_model_is_loaded(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = model.with_name("plan.json")
    assert main(["analyze", str(model), "--gpus", "2", "--out", str(out)]) == 0
    capsys.readouterr()
    model.write_text("raise RuntimeError")
    for command in ("analyze", "verify"):
        text = refused([command, str(model), "--plan", str(out), "--pin", "fc=shards:2"], capsys)
        assert "leave out the plan or the pins" in text


@pytest.mark.full
def test_pins_without_memory_for_them(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Legal one by one; together on one device too large."""
    free = analyzed([str(model), "--gpus", "1"], capsys)
    memory = ["--memory", f"{0.7 * free['predicted']['memory_bytes'][0] / 2**30:.9f}", "--gpu", "k20"]
    pins = ["--pin", "conv*=gpu:0", "--pin", "fc=gpu:0"]
    text = refused(["analyze", str(model), "--gpus", "2", *memory, *pins], capsys)
    assert "no plan keeps together 'conv*=gpu:0' (--pin), 'fc=gpu:0' (--pin)" in text
