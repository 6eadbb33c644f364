"""The layer-parameter file: learning rates, parameter groups, update periods; and rates for larger batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from parplan.convnet2 import LayerFile, Schedule, read
from parplan.errors import LayerFileError, ParplanError
from parplan.runtime.data import scaled_lr
from tests.convnet2.layer_files import SMALL, fixture, write

RATE = "[{name}]\nepsW={w}\nepsB={b}\nmomW=0.9\nmomB=0.8\nwc=0.01\n"
ALL = "".join(RATE.format(name=name, w=w, b=2 * w) for name, w in (("conv1", 0.04), ("fca", 0.01), ("fcb", 0.01),
                                                                   ("fc2", 0.02)))  # fmt: skip


def with_params(folder: Path, params: str) -> LayerFile:
    write(folder, params, "layer-params-some.cfg")
    return read(write(folder, SMALL))


SCHEDULES = [
    ("0.1", Schedule(0.1), (0.1, 0.1, 0.1)),
    ("const[base=0.1]", Schedule(0.1), (0.1, 0.1, 0.1)),
    ("linear[base=0.1;tgtFactor=10]", Schedule(0.1, "linear", 10.0), (0.1, 0.055, 0.01)),
    ("exp[base=0.1;tgtFactor=100]", Schedule(0.1, "exp", 100.0), (0.1, 0.01, 0.001)),
    ("dexp[base=0.1;tgtFactor=100;numSteps=3]", Schedule(0.1, "dexp", 100.0, 3), (0.1, 0.01, 0.001)),
    ("dexp[ numSteps=3; base=0.1;TGTFACTOR=100 ]", Schedule(0.1, "dexp", 100.0, 3), (0.1, 0.01, 0.001)),
]


@pytest.mark.parametrize(("text", "schedule", "rates"), SCHEDULES, ids=[text for text, *_ in SCHEDULES])
def test_schedules(tmp_path: Path, text: str, schedule: Schedule, rates: tuple[float, float, float]) -> None:
    found = with_params(tmp_path, RATE.format(name="fca", w=text, b=text)).rates["fca"]
    assert found.weights == found.biases == schedule
    assert [schedule.at(share) for share in (0.0, 0.5, 1.0)] == [pytest.approx(rate) for rate in rates]


def test_a_step_of_sgd_is_cuda_convnet2s() -> None:
    """It keeps v = momentum v - decay eps w + eps gradient, and adds v (its gradients point uphill)."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    group = {"params": [weight], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = torch.optim.SGD([group])
    expected, v = weight.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(4):
        gradient = torch.tensor([0.5 * step, 1.0], dtype=torch.float64)
        v = 0.9 * v - 0.01 * 0.1 * expected + 0.1 * -gradient
        expected = expected + v
        weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


def test_parameter_groups(tmp_path: Path) -> None:
    found = with_params(tmp_path, ALL)
    groups = {group["name"]: group for group in found.parameter_groups(lr_scale=2.0)}
    parts = ("weights", "biases")
    assert list(groups) == [f"{name} {part}" for name in ("conv1", "fca", "fcb", "fc2") for part in parts]
    conv = found.network.get_submodule("conv1")
    weights, biases = groups["conv1 weights"], groups["conv1 biases"]
    assert (weights["lr"], weights["momentum"], weights["weight_decay"]) == (0.08, 0.9, 0.01)
    assert (biases["lr"], biases["momentum"], biases["weight_decay"]) == (0.16, 0.8, 0.0)
    assert weights["params"][0] is conv.get_parameter("weight")
    assert biases["params"][0] is conv.get_parameter("bias")
    held = [parameter for group in groups.values() for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in found.network.parameters()}
    assert len(held) == len({id(parameter) for parameter in held})
    torch.optim.SGD(list(groups.values()))


def test_a_layer_without_rates_is_named(tmp_path: Path) -> None:
    found = with_params(tmp_path, RATE.format(name="conv1", w=1, b=1))
    with pytest.raises(LayerFileError, match=r"fca has weights and no rates; give it a section \[fca\]"):
        found.parameter_groups()


@pytest.mark.parametrize(("line", "period"), [("", None), ("updatePeriod=1\n", 1), ("updatePeriod=2\n", 2),
                                              ("updatePeriod=0\n", 1)])  # fmt: skip
def test_update_periods_are_pins(tmp_path: Path, line: str, period: int | None) -> None:
    """0 is cuda-convnet2's word for as often as possible."""
    found = with_params(tmp_path, RATE.format(name="fca", w=1, b=1) + line)
    assert {pin.pattern: pin.update_period for pin in found.pins}["fca"] == period
    assert {pin.update_period for pin in found.pins if pin.pattern != "fca"} == {None}


def test_the_hybrid_updates_its_fully_connected_layers_in_every_pass() -> None:
    found = fixture("4gpu-data-model")
    columns = [f"fc{layer}{column}" for layer in (6, 7) for column in "abcd"]
    periods = {pin.pattern: pin.update_period for pin in found.pins if pin.update_period is not None}
    assert periods == dict.fromkeys([*columns, "fc8"], 1)
    assert {name: rate.weights.base for name, rate in found.rates.items()} == {
        **dict.fromkeys([f"conv{n}" for n in range(1, 6)], 0.04),
        **dict.fromkeys([*columns, "fc8"], 0.01),
    }


def test_a_layer_parameter_file_by_name(tmp_path: Path) -> None:
    """The one named counts, not the one beside."""
    write(tmp_path, RATE.format(name="fca", w=1, b=1), "layer-params-some.cfg")
    other = write(tmp_path, RATE.format(name="fca", w=3, b=1), "other.cfg")
    assert read(write(tmp_path, SMALL), other).rates["fca"].weights.base == 3
    assert read(tmp_path / "layers-some.cfg").rates["fca"].weights.base == 1


def test_what_is_not_applied_is_told(tmp_path: Path) -> None:
    notes = with_params(tmp_path, RATE.format(name="fca", w=1, b=1) + "wball=0.5\nsuperEps=0\n").notes
    assert any("not applied here: fca wball=0.5." in note for note in notes)


def test_learning_rates_grow_as_batches_do() -> None:
    """Krizhevsky 2014: k times, not the square root of k; the layer-parameter files of cuda-convnet2 agree."""
    assert [scaled_lr(0.01, batch) for batch in (128, 256, 512, 1024)] == pytest.approx([0.01, 0.02, 0.04, 0.08])
    assert scaled_lr(0.1, 30, base_batch=10) == pytest.approx(0.3)
    assert not math.isclose(scaled_lr(0.01, 512), 0.01 * math.sqrt(4))


@pytest.mark.parametrize(("batch", "base"), [(0, 128), (128, 0), (-1, 128)])
def test_batches_below_one(batch: int, base: int) -> None:
    with pytest.raises(ParplanError, match="both are at least 1"):
        scaled_lr(0.01, batch, base)
