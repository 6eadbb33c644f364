"""One process per device, started and ended here: what each brings back, or one error that says why nothing came."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
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


def in_processes(
    ranks: int,
    run: Callable[[int, int], T],
    *,
    backend: str = "gloo",
    timeout_s: float = TIMEOUT_S,
    ended: str = "a process ended without a word ({how}); it may have run out of memory",
) -> list[T]:
    """`run(rank, ranks)` in so many processes of one thread each, joined by a process group; none is left afterwards.

    Args:
        run: can be pickled, and so can what it returns.
        backend: of the group; with another one than "gloo" each process has the accelerator of its rank.
        timeout_s: how long a rank waits for another one.
        ended: the error's text where a process ended without telling why; `{how}` stands for its signal or exit code.

    Raises:
        ParplanError: of a process; whatever else ends one is a RuntimeFailure.
    """
    with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
        given = (run, ranks, folder, backend, timeout_s)
        started = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _work, given, ranks, join=False, daemon=True, start_method="spawn"
        )
        running, code = {process.sentinel: process for process in started.processes}, 0
        try:
            while running and not code:
                for sentinel in connection.wait(list(running)):
                    process = running.pop(sentinel)
                    process.join()
                    code = code or process.exitcode
            files = [Path(folder) / f"{rank}.why" for rank in range(ranks)]
            found: list[_Why] = [pickle.loads(file.read_bytes()) for file in files if file.exists()]
            if code and not found:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise RuntimeFailure(ended.format(how=how))
            if code:
                why = min(found, key=lambda one: one.kind == "RuntimeFailure")  # not merely about another process
                kind = getattr(errors, why.kind, RuntimeFailure)
                raise RuntimeFailure(why.text) if kind is errors.RuleError else kind(why.text)
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


def _work(rank: int, run: Callable[[int, int], Any], ranks: int, folder: str, backend: str, timeout_s: float) -> None:
    """One process: leave what was found (or why nothing was) in a file."""
    parent = os.getppid()
    # An interrupt of the whole group is the parent's to handle; when the parent itself is gone, torch sends one too.
    signal.signal(signal.SIGINT, lambda *_: os._exit(1) if os.getppid() != parent else None)
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere the interface has other names
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend != "gloo":
        torch.accelerator.set_device_index(rank)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            rendezvous = f"file://{folder}/rendezvous"
            dist.init_process_group(backend, rendezvous, timedelta(seconds=timeout_s), rank=rank, world_size=ranks)
            found = pickle.dumps(run(rank, ranks))
            dist.destroy_process_group()
        (Path(folder) / f"{rank}.ran").write_bytes(found)
    except Exception as error:
        name = type(error).__name__ if isinstance(error, ParplanError) else ""
        why = _Why(name, str(error) if name else f"process {rank} failed:\n{traceback.format_exc()}")
        (Path(folder) / f"{rank}.why").write_bytes(pickle.dumps(why))
        os._exit(1)  # at once: the others notice, and nothing here waits for them
    # Taking down gloo with the interpreter now and then aborts a process that is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True)
class _Why:
    """The error that ended a process: its name if it is one of parplan's, else empty, and its text."""

    kind: str
    text: str
