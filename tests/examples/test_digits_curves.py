"""The same training three ways: the plain model, one process on 4 logical devices, torchrun on 2 processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples import train_digits

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Run:
    """Loss of every step, and the share of test digits told right."""

    losses: list[float]
    accuracy: float


def train(way: str, dtype: str, epochs: int, folder: Path) -> Run:
    history = folder / "history.json"
    options = ["--dtype", dtype, "--epochs", str(epochs), "--history", str(history)]
    if way == "torchrun":
        command = [*TORCHRUN, "examples/train_digits.py", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        train_digits.main([*options, *(["--devices", "4"] if way == "one process" else [])])
    return Run(**json.loads(history.read_text()))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "epochs", "ways"),
    [
        ("float64", 1e-9, 1, ["one process"]),
        pytest.param("float64", 1e-9, 3, ["one process", "torchrun"], marks=pytest.mark.full),
        pytest.param("float32", 1e-4, 2, ["one process", "torchrun"], marks=pytest.mark.full),
    ],
    ids=["float64, briefly", "float64", "float32"],
)
def test_three_ways_give_one_loss_curve(
    dtype: str, tolerance: float, epochs: int, ways: list[str], tmp_path: Path
) -> None:
    plain = train("plain", dtype, epochs, tmp_path)
    assert len(plain.losses) >= 20 * epochs
    for way in ways:
        run = train(way, dtype, epochs, tmp_path)
        assert run.losses == pytest.approx(plain.losses, rel=tolerance)
        assert run.accuracy == plain.accuracy
