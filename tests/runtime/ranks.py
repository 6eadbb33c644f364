"""Run cases on a few gloo processes, which are started once per session; each case has a process group of its own."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterable
from functools import cache

import pytest
import torch

from benchmarks.training import Outcome, Verdict
from benchmarks.workers import Workers

__all__ = ["Case", "on_two_and_four", "run_case"]

Case = Callable[[int, int], object]


def on_two_and_four(
    cases: Iterable[str],
    *,
    full_on_two: Collection[str] = (),
    few_on_four: Collection[str],
    on_two_alone: Collection[str] = (),
    on_four_alone: Collection[str] = (),
) -> list[object]:
    """Parameters (case, ranks): every case on 2 and on 4 ranks.

    Args:
        full_on_two: cases that are left to the full tier on 2 ranks too.
        few_on_four: the cases that the default tier runs on 4 ranks.
        on_two_alone: cases that train on and on, to which four ranks on two cores add time and no other code.
        on_four_alone: cases of several replicas of several shards, which two ranks cannot hold.
    """
    full = {2: set(full_on_two), 4: set(cases) - set(few_on_four)}
    return [
        pytest.param(case, ranks, marks=pytest.mark.full if case in full[ranks] else (), id=f"{case}-{ranks}")
        for case in cases
        for ranks in ((2,) if case in on_two_alone else (4,) if case in on_four_alone else (2, 4))
    ]


def run_case(case: Case, ranks: int) -> None:
    """Call `case(rank, ranks)` in each of `ranks` processes.

    Raises:
        AssertionError: with the traceback of every rank where it failed.
    """
    outcomes = enumerate(_workers(ranks).outcomes(_outcome, case))
    failed = [f"rank {rank}: {found.text}" for rank, found in outcomes if found.verdict is not Verdict.RIGHT]
    assert not failed, "\n".join(failed)


@cache
def _workers(ranks: int) -> Workers:
    workers = Workers(ranks, limit_s=240, collective_s=60)
    atexit.register(workers.close)
    return workers


def _outcome(rank: int, ranks: int, case: Case) -> Outcome:
    torch.manual_seed(1)
    try:
        case(rank, ranks)
    except pytest.fail.Exception as error:  # no Exception in pytest, and it would end the process
        raise AssertionError(str(error)) from error
    return Outcome(Verdict.RIGHT)
