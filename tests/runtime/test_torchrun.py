"""Plans over processes: the plain model's numbers, DistributedDataParallel's conventions, no hang when a rank dies."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from parplan.errors import RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from tests.processes import forkserver
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import mlp
from tests.runtime.rank_cases import CASES
from tests.runtime.ranks import on_two_and_four, run_case

# Every scheme, period, layer or seed in turn; single processes run the same in the default tier.
LONG = ("drawn_passes", "own_backwards", "running_statistics", "train_steps")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "ranks"),
    on_two_and_four(
        CASES,
        full_on_two=LONG,
        few_on_four=("group_inputs", "group_train_steps", "hybrid"),
        on_two_alone=("drawn_passes", "own_backwards"),
        on_four_alone=("group_train_steps",),
    ),
)
def test_ranks_agree_with_the_plain_model(case: str, ranks: int) -> None:
    run_case(CASES[case], ranks)


def _dying(rank: int, folder: str) -> None:
    """Rank 1 leaves after one step; rank 0 must learn of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = Compiled(mlp(), planner(spread(2, "out-features"), 2))
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    if rank == 1:
        return
    try:
        for _ in range(100):
            model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
            time.sleep(0.05)
    except RuntimeFailure as error:
        (Path(folder) / "error").write_text(str(error))


def test_a_rank_that_dies_ends_the_others_with_an_error(tmp_path: Path) -> None:
    forkserver()
    mp.start_processes(_dying, (str(tmp_path),), 2, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
    text = (tmp_path / "error").read_text()
    assert text.startswith("rank 0: ")
    assert "another rank has probably stopped" in text


# A program whose model is there to its end, as most are: it says how many threads it has then, and at its exit, where
# functions are called from the last to the first.
LEAVING = """
import atexit, os, sys
atexit.register(lambda: print(len(os.listdir("/proc/self/task"))))
import torch
import torch.distributed as dist
import parplan
torch.set_num_threads(1)
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
model = parplan.compile(net, torch.ones(4, 8), pins={"0": "shards:2", "2": "replicas:2"})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 8)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
dist.destroy_process_group()
print(len(os.listdir("/proc/self/task")) > 1)  # those of the default group, which torch itself still holds
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_a_destroyed_group_leaves_no_thread_behind(tmp_path: Path) -> None:
    # A thread of gloo that frees a tensor while the interpreter ends aborts the process, or waits forever.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, str(tmp_path / "rendezvous"), str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said == [["True", "1"]] * 2
