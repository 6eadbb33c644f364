"""The processes that run one task after another: each task has a group of its own, whatever became of the last one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.training import Outcome, Verdict
from benchmarks.workers import Workers


def _sum(rank: int, ranks: int) -> Outcome:
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return Outcome(Verdict.RIGHT if total.item() == sum(range(1, ranks + 1)) else Verdict.WRONG)


def _spoil(rank: int, ranks: int) -> Outcome:
    """Let rank 1's next group fail as it is made."""

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no connection")

    if rank == 1:
        dist.init_process_group = failing
    return _sum(rank, ranks)


def test_a_rank_whose_group_fails_is_replaced_with_all_others() -> None:
    with Workers(2, collective_s=2.0) as workers:
        verdicts = [[found.verdict for found in workers.outcomes(task)] for task in (_sum, _spoil, _sum, _sum, _sum)]
    assert verdicts[2] == [Verdict.CRASHED, Verdict.CRASHED]
    assert all(found == [Verdict.RIGHT, Verdict.RIGHT] for number, found in enumerate(verdicts) if number != 2)
