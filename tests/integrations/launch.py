"""Runs of the trainers' examples in two processes, as torchrun starts them, and what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Found", "launch"]

LIMIT_S = 240
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Found:
    """The numbers that a run reports by name, and the weights that it saved."""

    numbers: dict[str, Any]
    weights: dict[str, Tensor]


def launch(example: str, folder: Path, *arguments: str, processes: int = 2) -> Found:
    """Run an example of examples/trainers.

    What counts is what the first process wrote last: taking down gloo now and then aborts or holds a process that is
    done.
    """
    out = folder / "found.json"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, f"examples/trainers/{example}.py", "--out", str(out), *arguments]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    joined = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    started = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
        agent = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        environment = {**common, **joined, **own, **agent} if processes > 1 else common
        with (folder / f"{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends and not out.exists() and not any(process.poll() for process in started):
            time.sleep(0.2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started[0].wait(10)
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-4000:] for rank in range(processes))
    assert "Traceback" not in logs, logs
    assert out.exists(), logs
    return Found(json.loads(out.read_text()), torch.load(out.with_suffix(".pt"), weights_only=True))
