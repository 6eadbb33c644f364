"""Starts one process per device, and gathers their results, or one error that says why there are none."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from parplan import errors
from parplan.errors import ParplanError, RuntimeFailure

__all__ = ["TIMEOUT_S", "in_processes"]

# A rank that waits for longer than this waits for one that is gone.
TIMEOUT_S = 600

T = TypeVar("T")


def in_processes(ranks: int, run: Callable[[int, int], T]) -> list[T]:
    """`run(rank, ranks)` in so many processes of one thread each, joined by a gloo group; none is left afterwards.

    Args:
        run: can be pickled, and so can what it returns.

    Raises:
        ParplanError: of a process; whatever else ends one is a RuntimeFailure.
    """
    with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
        started = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _work, (run, ranks, folder), ranks, join=False, daemon=True, start_method="spawn"
        )
        running = {process.sentinel: process for process in started.processes}
        try:
            while running:
                for sentinel in connection.wait(list(running)):
                    process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:  # the others wait for it
                        raise _reason(Path(folder), ranks)
        finally:
            for process in started.processes:
                if process.is_alive():
                    process.terminate()
            for process in started.processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [pickle.loads((Path(folder) / f"{rank}.ran").read_bytes()) for rank in range(ranks)]


def _work(rank: int, run: Callable[[int, int], Any], ranks: int, folder: str) -> None:
    """One process: leaves its result, or its error, in a file."""
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            meeting = f"file://{folder}/meeting"
            dist.init_process_group("gloo", meeting, timedelta(seconds=TIMEOUT_S), rank=rank, world_size=ranks)
            found = pickle.dumps(run(rank, ranks))
            dist.destroy_process_group()
        (Path(folder) / f"{rank}.ran").write_bytes(found)
    except Exception as error:
        name = type(error).__name__ if isinstance(error, ParplanError) else ""
        why = _Why(name, str(error) if name else f"process {rank} failed:\n{traceback.format_exc()}")
        (Path(folder) / f"{rank}.why").write_bytes(pickle.dumps(why))
        os._exit(1)  # at once: the others notice, and nothing here waits for them


@dataclass(frozen=True)
class _Why:
    """The error that ended a process: the name of parplan's class, empty for any other, and the text."""

    kind: str
    text: str


def _reason(folder: Path, ranks: int) -> ParplanError:
    """Why processes failed: the first error that is not merely about another process."""
    found = [pickle.loads(path.read_bytes()) for r in range(ranks) if (path := folder / f"{r}.why").exists()]
    if not found:
        return RuntimeFailure("a process ended without a word; it may have run out of memory")
    why = min(found, key=lambda one: one.kind == "RuntimeFailure")
    kind = getattr(errors, why.kind, RuntimeFailure)
    return RuntimeFailure(why.text) if kind is errors.RuleError else kind(why.text)
