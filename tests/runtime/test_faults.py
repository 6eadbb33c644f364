"""Faults of one rank: each ends the others with an error within the timeout, and leaves a whole checkpoint."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest

from parplan.runtime.module.checkpoints import load_checkpoint
from tests.processes import forkserver
from tests.runtime.fault_cases import FAULTS, KINDS, MOMENTS, UNLIKE, not_a_number, train_with_a_fault, unlike
from tests.runtime.ranks import run_case

PATIENCE_S = 240  # until a rank that has not ended counts as hanging


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_start_unlike_are_told_what_differs(name: str, ranks: int) -> None:
    run_case(partial(unlike, name=name), ranks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_numbers_are_so_on_every_rank(kind: str, ranks: int) -> None:
    run_case(partial(not_a_number, kind=kind), ranks)


# Every moment of every kind of plan, and the other faults; the rank that fails alternates, and a stuck one takes time.
CASES = [
    *((kind, "killed", moment, n % 2) for n, (kind, moment) in enumerate(product(KINDS, MOMENTS), start=1)),
    *(
        (KINDS[n % 4], fault, moment, n // 2 % 2)
        for n, (fault, moment) in enumerate(product(FAULTS, MOMENTS))
        if fault != "stuck" or moment in ("forward", "save")
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "fault", "moment", "faulty"), dict.fromkeys(CASES))
def test_a_fault_of_one_rank_ends_the_other_with_an_error(
    tmp_path: Path, kind: str, fault: str, moment: str, faulty: int
) -> None:
    context = forkserver()
    timeout_s = 15.0 if fault == "stuck" else 120.0
    given = (2, str(tmp_path), kind, fault, moment, faulty, timeout_s)
    processes = [context.Process(target=train_with_a_fault, args=(rank, *given)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        other = processes[1 - faulty]
        other.join(PATIENCE_S)
        assert other.exitcode == 1
    finally:
        for process in processes:
            process.kill()
            process.join()
    text = (tmp_path / f"{1 - faulty}.error").read_text()
    if (fault, moment, faulty) == ("raising", "save", 0):
        assert text == f"CheckpointError: rank 0: cannot write {tmp_path}/run.pt: bad data"
    else:
        assert text.startswith((f"RuntimeFailure: rank {1 - faulty}: ", f"RankAlone: rank {1 - faulty} is in "))
        assert "This is typically caused by" not in text  # gloo's advice, which is not about parplan
        assert "another rank has probably stopped or fallen behind" in text or f"rank {faulty} is " in text
    if moment == "start":
        assert not (tmp_path / "run.pt").exists()
    else:  # without rank 1, rank 0 may write the new one before it learns that rank 1 is gone
        assert load_checkpoint(tmp_path / "run.pt")["step"] in ((1, 2) if (moment, faulty) == ("save", 1) else (1,))
