"""Plans over processes: the plain model's numbers, DistributedDataParallel's conventions, no hang when a rank dies."""

from __future__ import annotations

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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("case", "ranks"),
    on_two_and_four(
        CASES,
        full_on_two=LONG,
        few_on_four=("group_inputs", "group_train_steps", "hybrid"),
        on_two_alone=("drawn_passes", "own_backwards"),
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
