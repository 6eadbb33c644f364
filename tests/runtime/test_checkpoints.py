"""Checkpoints between plans and numbers of processes; `python -m benchmarks.checkpoints` runs the whole matrix."""

from __future__ import annotations

from functools import partial

import pytest

from tests.runtime.checkpoint_cases import ALONE, WITH_FILES, cases
from tests.runtime.checkpoint_cells import Cell, Setup, read, write
from tests.runtime.ranks import Case, run_cases

# The first test waits for all cases of four groups of processes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
    )
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed, by cell; processes of another number join after those that wrote what they read have ended."""
    folder, found, written = tmp_path_factory.mktemp("checkpoints"), dict[str, str](), set[int]()
    for ranks in (1, 2, 4, 2, 1):
        cases: dict[str, Case] = {}
        if ranks not in written:
            saving = [cell for cell in CELLS if cell.source.processes == ranks]
            cases |= {f"writing {cell}": partial(write, cell, folder) for cell in saving}
            written.add(ranks)
        ready = [c for c in CELLS if c.target.processes == ranks and c.source.processes in written]
        cases |= {str(cell): partial(read, cell, folder) for cell in ready if str(cell) not in found}
        found |= run_cases(cases, ranks, tmp_path_factory.mktemp(f"ranks{ranks}"))
    return found


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_training_goes_on_as_if_it_had_not_stopped(reports: dict[str, str], cell: Cell) -> None:
    wrong = {name: reports[name] for name in (f"writing {cell}", str(cell)) if reports[name]}
    assert wrong == {}


@pytest.fixture(scope="module")
def promises(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed of the other cases, by name."""
    return run_cases(cases(tmp_path_factory.mktemp("files")), 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [case.__name__ for case in (*ALONE, *WITH_FILES)])
def test_checkpoints_keep_their_promises(promises: dict[str, str], case: str) -> None:
    assert promises[case] == "", promises[case]
