"""The habits of TorchAD-NN's users, in parplan: examples/seeds/torchad.py alone and as a program under torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import parplan
from examples.seeds import torchad
from parplan.plan import Plan, Strategy

ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = ("one process", "torchrun")
TORCHRUN = pytest.param("torchrun", marks=pytest.mark.full)
TRAININGS = ("plain", "data parallel", "by hand", "model parallel")


@cache
def printed(way: str) -> dict[str, str]:
    """What the program says, by the first words of its lines."""
    if way == "torchrun":
        command, output = [*LAUNCHER, "examples/seeds/torchad.py"], subprocess.PIPE
        traced = os.environ | {"PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True, env=traced)
        try:
            text, errors = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:  # the ranks say where they are
            subprocess.run(["pkill", "-ABRT", "-P", str(process.pid)], check=False)
            text, errors = process.communicate(timeout=60)
        assert process.returncode == 0, f"{text}\n{errors[:6000]}\n...\n{errors[-3000:]}"
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            torchad.main()
        text = out.getvalue()
    return dict(re.findall(r"^ *(.*?\S)(?:  +| is a )(.*)$", text, re.MULTILINE))


def off(line: str) -> float:
    """How far parameters are from the plain model's."""
    return float(line.removesuffix(" off").rpartition(" ")[2])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "each"), [("one process", 1440), pytest.param("torchrun", 720, marks=pytest.mark.full)]
)
def test_the_dataset_is_split_evenly(way: str, each: int) -> None:
    where = "1 process" if way == "one process" else "each of 2 processes"
    assert printed(way)["data parallel"].startswith(f"{each} samples in {where}")


@pytest.mark.parametrize("way", ["one process", TORCHRUN])
def test_backward_synchronises(way: str) -> None:
    assert off(printed(way)["data parallel"]) < 1e-9


@pytest.mark.parametrize("way", ["one process", TORCHRUN])
def test_synchronisation_may_be_manual(way: str) -> None:
    assert off(printed(way)["by hand"]) < 1e-9


@pytest.mark.parametrize("way", ["one process", TORCHRUN])
def test_model_parallel_layers_need_no_new_names(way: str) -> None:
    lines = printed(way)
    assert off(lines["model parallel"]) < 1e-9
    for name, whole in (("fc1", (240, 256)), ("fc2", (10, 240))):
        found = re.fullmatch(r"Linear, 2 shards of \S+; rank 0 holds \((\d+), (\d+)\) of weights", lines[name])
        assert found is not None, lines[name]
        share = 1 if way == "one process" else 2
        assert int(found[1]) * int(found[2]) == whole[0] * whole[1] // share


@pytest.mark.full
def test_all_trainings_are_the_same_training() -> None:
    losses = {re.findall(r"loss (\S+) to ([\d.]+)", printed(way)[name])[0] for way in WAYS for name in TRAININGS}
    assert len(losses) == 1
    ((first, last),) = losses
    assert float(last) < float(first) / 4


def test_without_synchronisation_processes_go_different_ways() -> None:
    """So what the program shows is worth showing: each part of the data alone trains another model."""
    plan = Plan("Sequential", "0" * 16, 96, 2, {"conv1": Strategy(2, devices=(0, 1))})
    ends = []
    for rank in range(2):
        model = torchad.network()
        few = Subset(torchad.digits(), range(192))
        part = parplan.shard_dataset(few, plan, rank=rank, world_size=2)
        torchad.train(model, DataLoader(part, 48))
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.linalg.vector_norm(ends[0] - ends[1]) > 0.1
