"""The conditions here: the machine's processor, torch, and switches that are not as torch sets them."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from parplan.cost_models.measurement.conditions import cpu_name, current_conditions
from parplan.cost_models.profile.records import Conditions
from tests.cost_models.store_writers import tell_switches


def test_the_conditions_here_are_this_machines() -> None:
    found = current_conditions(torch.device("cpu"), 2)
    assert found == Conditions(f"{cpu_name()}, 1 thread", 2, torch.__version__.partition("+")[0], "", found.flags)


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor\t: 0\nmodel name\t: A  CPU @ 2 GHz\nmodel name\t: other\n", "A CPU @ 2 GHz"), ("BogoMIPS: 5\n", "")],
)
def test_the_processors_name(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = cpu_name(tmp_path / "cpuinfo")
    assert found == name if name else found == cpu_name(tmp_path / "missing") != ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("device", "setting", "value", "words"),
    [
        ("cpu", "mkldnn.matmul.fp32_precision", "bf16", ["bf16 matmul"]),
        ("cpu", "mkldnn.conv.fp32_precision", "bf16", ["bf16 convolution"]),
        ("cpu", "cudnn.benchmark", True, []),
        ("cuda", "cudnn.benchmark", True, ["cudnn benchmark"]),
        ("cuda", "cudnn.deterministic", True, ["cudnn deterministic"]),
        ("cuda", "cuda.matmul.fp32_precision", "tf32", ["tf32 matmul"]),
        ("cuda", "cuda.matmul.fp32_precision", "ieee", []),
        ("cuda", "cudnn.conv.fp32_precision", "ieee", ["no tf32 cudnn convolution"]),
    ],
)
def test_switches_that_are_not_torchs_defaults(
    device: str, setting: str, value: str | bool, words: list[str], processes: ForkServerContext
) -> None:
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=tell_switches, args=(device, setting, value, sender))
    process.start()
    sender.close()
    assert receiver.recv() == [[], words]
    process.join()
    receiver.close()


def test_deterministic_algorithms_are_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deterministic" not in current_conditions(torch.device("cpu"), 1).flags
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in current_conditions(torch.device("cpu"), 1).flags
