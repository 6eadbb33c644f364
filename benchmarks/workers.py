"""Processes that run one task after another, alone or as the ranks of a group, and are replaced when one hangs.

Starting a process and importing torch takes seconds, so that the same processes serve many tasks; each task has a
process group of its own, so that one that fails leaves nothing behind for the next.
"""

from __future__ import annotations

import gc
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


class Workers:
    """`ranks` processes.

    Args:
        ranks: number of processes; one process runs its tasks without a group.
        limit_s: a task that takes longer has hung: its processes are killed and replaced.
        collective_s: timeout of one collective: of a rank that waits for another one which has failed.
    """

    def __init__(self, ranks: int, limit_s: float = 120.0, collective_s: float = 30.0) -> None:
        self.ranks = ranks
        self._limit_s = limit_s
        self._collective_s = collective_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: object | None = None
        self._tasks = 0

    def run(self, task: Task, *args: Any) -> Outcome:
        """Call `task(rank, ranks, *args)` in every process; the worst of the outcomes."""
        outcomes = self.outcomes(task, *args)
        return replace(worst(outcomes), cpu_s=sum(outcome.cpu_s for outcome in outcomes))

    def outcomes(self, task: Task, *args: Any) -> list[Outcome]:
        """Call `task(rank, ranks, *args)` in every process, in this process's environment; the outcomes by rank."""
        if not self._processes:
            self._start()
        self._tasks += 1
        try:
            for pipe in self._pipes:
                pipe.send((task, args, self._tasks, dict(os.environ)))
            found = self._received()
        except BaseException:  # an interruption, a test's timeout: the processes are still at it
            self.close()
            raise
        if any(outcome is None or outcome.text == "the process ended" for outcome in found.values()):
            self.close()
        return [found[rank] or Outcome(Verdict.HUNG, f"no result within {self._limit_s:.0f} s") for rank in found]

    def _received(self) -> dict[int, Outcome | None]:
        """The outcomes by rank; None for the ranks that have not answered when nobody did for `limit_s`."""
        found: dict[int, Outcome | None] = dict.fromkeys(range(self.ranks))
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while ready := wait(list(waiting), self._limit_s) if waiting else []:
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    found[rank] = Outcome(Verdict.CRASHED, "the process ended")
        return found

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
            given = (rank, self.ranks, port, theirs, self._collective_s)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, ranks: int, port: int, pipe: Connection, collective_s: float) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: garbage is looked for in what tasks make
    store = dist.TCPStore("localhost", port, is_master=False) if ranks > 1 else None  # type: ignore[attr-defined]
    folder = os.getcwd()
    while True:
        try:
            task, args, number, environment = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        began = time.process_time()
        if store is not None:
            # Outside of the try: a rank without its group counts groups differently from then on and must be replaced.
            own = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
            patience = timedelta(seconds=collective_s)
            dist.init_process_group("gloo", store=own, timeout=patience, rank=rank, world_size=ranks)
            dist.barrier()  # a task that ends at once would close connections that others are still making
        try:
            outcome = task(rank, ranks, *args)
        except Exception:
            outcome = Outcome(Verdict.CRASHED, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(replace(outcome, cpu_s=time.process_time() - began))
