"""Processes that run one task after another, alone or as the ranks of a group, and are replaced when one hangs.

Starting a process and importing torch takes seconds, so that the same processes serve many tasks; each task has a
process group of its own, so that one that fails leaves nothing behind for the next.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training import Outcome, Verdict, worst

__all__ = ["Task", "Workers"]

Task = Callable[..., Outcome]

TIMEOUT_S = 30.0  # of one collective: a rank that waits for another one which has failed


class Workers:
    """`ranks` processes.

    Args:
        ranks: how many; one process runs its tasks without a group.
        limit_s: a task that takes longer has hung: its processes are killed and replaced.
    """

    def __init__(self, ranks: int, limit_s: float = 120.0) -> None:
        self.ranks = ranks
        self._limit_s = limit_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: object | None = None
        self._tasks = 0

    def run(self, task: Task, *args: Any) -> Outcome:
        """Call `task(rank, ranks, *args)` in every process; the worst of the outcomes."""
        if not self._processes:
            self._start()
        self._tasks += 1
        waiting = dict(zip(self._pipes, self._processes, strict=True))
        for pipe in waiting:
            pipe.send((task, args, self._tasks))
        outcomes: list[Outcome] = []
        while waiting:
            ready = wait(list(waiting), self._limit_s)
            if not ready:
                outcomes.append(Outcome(Verdict.HUNG, f"no result within {self._limit_s:.0f} s"))
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                del waiting[pipe]
                try:
                    outcomes.append(pipe.recv())
                except EOFError:
                    outcomes.append(Outcome(Verdict.CRASHED, "the process ended"))
        if waiting or any(outcome.text == "the process ended" for outcome in outcomes):
            self.close()
        return replace(worst(outcomes), cpu_s=sum(outcome.cpu_s for outcome in outcomes))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def __enter__(self) -> Workers:
        """Themselves; the processes start with the first task."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the processes."""
        self.close()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.workers", "parplan.runtime.module.compiled", "torch.export._trace"])
        port = 0
        if self.ranks > 1:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            port, self._store = store.port, store
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            given = (rank, self.ranks, port, theirs, dict(os.environ))
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, ranks: int, port: int, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False) if ranks > 1 else None  # type: ignore[attr-defined]
    while True:
        try:
            task, args, number = pipe.recv()
        except EOFError:
            return
        began = time.process_time()
        try:
            if store is not None:
                own = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
                patience = timedelta(seconds=TIMEOUT_S)
                dist.init_process_group("gloo", store=own, timeout=patience, rank=rank, world_size=ranks)
            outcome = task(rank, ranks, *args)
        except Exception:
            outcome = Outcome(Verdict.CRASHED, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(replace(outcome, cpu_s=time.process_time() - began))
