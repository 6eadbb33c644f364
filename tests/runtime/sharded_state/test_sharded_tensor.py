"""Sharded parameters over processes: what training code does with parameters gives plain training's numbers."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from parplan.errors import RuntimeFailure
from parplan.runtime.module.compiled import Compiled
from tests.processes import forkserver
from tests.runtime import sharded_cases, sharded_model_cases, sharded_op_cases
from tests.runtime.helpers import planner, spread
from tests.runtime.nets import mlp
from tests.runtime.ranks import on_two_and_four, run_case

CASES = sharded_cases.CASES | sharded_op_cases.CASES | sharded_model_cases.CASES


# The longest: a small model trained for each placement, optimizer or change of the gradients.
LONG = (
    "accumulation", "averaged", "captured_before", "changed_gradients", "in_inference_mode", "loaded_optimizers",
    "optimizers", "penalties",
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "ranks"),
    on_two_and_four(
        CASES,
        full_on_two=LONG,
        few_on_four=("two_placements",),
        on_two_alone=("accumulation", "averaged", "captured_before", "changed_gradients", "loaded_optimizers"),
    ),
)
def test_ranks_agree_with_plain_training(case: str, ranks: int) -> None:
    run_case(CASES[case], ranks)


def _alone(rank: int, folder: str) -> None:
    """Rank 0 runs a line that the other one does not come to."""
    torch.set_num_threads(1)
    address = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", address, timedelta(seconds=3), rank=rank, world_size=2)
    model = Compiled(mlp(), planner(spread(2, "out-features"), 2))
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    told = Path(folder) / "error"
    if rank == 0:
        try:
            model.state_dict()
        except RuntimeFailure as error:
            told.write_text(str(error))
    deadline = time.monotonic() + 30
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.full
def test_a_rank_that_gathers_alone_ends_with_an_error_at_the_timeout(tmp_path: Path) -> None:
    forkserver()
    mp.start_processes(_alone, (str(tmp_path),), 2, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
    text = (tmp_path / "error").read_text()
    assert "rank 0 is in state_dict() of the model" in text
    assert "rank 1 is in training, and has not come within 3 s" in text  # the store is a file here
