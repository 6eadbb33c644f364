"""The plan of a model is the same file, byte for byte, however many cores, threads and hash seeds a machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
import os, sys, warnings
name, gpus, cores, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
os.cpu_count = lambda: cores
warnings.simplefilter("ignore")
import importlib, torch, parplan, parplan.api
torch.set_num_threads(cores)
if name.endswith(".profile"):
    analysis = parplan.api.analyze_profile(name, gpus=gpus, time_limit_s=3000.0)
else:
    example = importlib.import_module(f"examples.{name}")
    analysis = parplan.analyze(example.build(), example.example_inputs(), gpus=gpus, time_limit_s=3000.0)
assert not any("time limit" in note for note in analysis.notes), analysis.notes
open(path, "w").write(analysis.plan.to_json())
"""


def planned(name: str, gpus: int, cores: int, seed: int, path: Path) -> bytes:
    settings = {"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(cores), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE, name, str(gpus), str(cores), str(path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=True)
    return path.read_bytes()


# Two of these searches end by their effort, alexnet's on 5 with a gap; two_tower branches on placements.
FULL = [
    ("examples/alexnet.profile", 4, (1, 8)),
    ("alexnet", 5, (1, 8)),
    ("two_tower", 6, (1, 8)),
    ("vgg16", 8, (1, 8)),
]


@pytest.mark.parametrize(
    ("name", "gpus", "cores"), [("mlp", 4, (1, 2)), *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
)
def test_the_plan_does_not_depend_on_cores_threads_or_hash_seeds(
    name: str, gpus: int, cores: tuple[int, ...], tmp_path: Path
) -> None:
    plans = {planned(name, gpus, count, seed, tmp_path / f"{count}.json") for seed, count in enumerate(cores)}
    assert len(plans) == 1
