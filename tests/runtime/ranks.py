"""Start a few gloo processes, run cases in each, and bring back what failed.

Starting processes takes time, so one start runs many cases; each case is a test of its own in the report.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from tests.processes import forkserver

__all__ = ["run_cases"]

TIMEOUT_S = 60

Case = Callable[[int, int], object]


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run_cases(cases: Mapping[str, Case], ranks: int, folder: Path) -> dict[str, str]:
    """Run every case on `ranks` processes; what went wrong by case and rank, empty when nothing did."""
    forkserver()
    given = (dict(cases), ranks, free_port(), str(folder), dict(os.environ))
    mp.start_processes(_work, given, ranks, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: "\n".join(f"rank {r}: {e[name]}" for r, e in enumerate(reports) if e.get(name)) for name in cases}


def _work(rank: int, cases: dict[str, Case], ranks: int, port: int, folder: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", address, timedelta(seconds=TIMEOUT_S), rank=rank, world_size=ranks)
    errors = dict.fromkeys(cases, "not run, as a case before it failed")
    for name, case in cases.items():
        torch.manual_seed(1)
        try:
            case(rank, ranks)
            del errors[name]
        except Exception:
            errors[name] = traceback.format_exc()
            break  # ranks may now be out of step
    (Path(folder) / f"{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()
