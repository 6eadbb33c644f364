"""Checkpoints between plans and numbers of processes; `python -m benchmarks.checkpoints` runs the whole matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.runtime.checkpoint_cases import ALONE, WITH_FILES, on_one_rank_alone
from tests.runtime.checkpoint_cells import Cell, Setup, read, write
from tests.runtime.ranks import Case, run_case

CELLS = [
    Cell(Setup(a, before), Setup(b, after), optimizer, route, cut_first)
    for a, before, b, after, optimizer, route, cut_first in (
        ("sharded", 2, "plain", 1, "sgd", "torch.save", False),
        ("sharded", 2, "sharded", 4, "adamw", "torch.save", False),
        ("plain", 1, "sharded", 2, "sgd", "torch.save", True),
        ("hybrid", 4, "data", 2, "adamw", "torch.save", False),
        ("data", 2, "hybrid", 1, "sgd", "torch.save", True),
        ("hybrid", 1, "sharded", 2, "adamw", "torch.save", False),
        ("sharded", 4, "hybrid", 2, "sgd", "save_checkpoint", True),
        ("hybrid", 2, "sharded", 2, "adamw", "save_checkpoint", False),
        ("plain", 1, "hybrid", 4, "adamw", "save_checkpoint", True),
        ("sharded", 2, "data", 4, "sgd", "save_checkpoint", False),
        ("data", 4, "plain", 1, "adamw", "save_checkpoint", False),
        ("sharded", 2, "sharded", 4, "adamw", "dcp", True),
        ("sharded", 4, "hybrid", 2, "sgd", "dcp", True),
        ("hybrid", 2, "plain", 1, "adamw", "dcp", False),
        ("plain", 1, "sharded", 2, "sgd", "dcp", False),
        ("hybrid", 4, "sharded", 2, "adamw", "dcp", True),
        ("slices", 4, "stages", 2, "adamw", "save_checkpoint", True),
        ("stages", 4, "slices", 2, "adamw", "dcp", False),
        ("stages", 2, "plain", 1, "sgd", "torch.save", False),
        ("data", 2, "slices", 4, "sgd", "dcp", True),
    )
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the cells' checkpoints, which cells share."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_training_goes_on_as_if_it_had_not_stopped(written: Path, cell: Cell) -> None:
    run_case(partial(write, cell, written), cell.source.processes)
    run_case(partial(read, cell, written), cell.target.processes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [case if case is not on_one_rank_alone else pytest.param(case, marks=pytest.mark.full) for case in ALONE],
    ids=lambda case: case.__name__,
)
def test_checkpoints_keep_their_promises(case: Case) -> None:
    run_case(case, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", WITH_FILES)
def test_checkpoint_files_keep_their_promises(case: Callable[[Path, int, int], None], tmp_path: Path) -> None:
    run_case(partial(case, tmp_path), 2)
