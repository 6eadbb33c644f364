"""Runs a program under torchrun that kills itself at given moments: `torchrun ... killed_run.py PROGRAM ARGUMENTS`.

`KILLS` is JSON, one entry [rank, moment, count] per start of the processes: that rank ends by SIGKILL where it comes to
the moment for the count-th time. `PINS` is JSON that `parplan.compile` gets as its pins, and a step takes `STEP_S`
seconds longer.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import parplan

__all__ = ["MOMENTS", "WRITING"]

# The function in front of which a rank is killed, by moment.
MOMENTS: dict[str, tuple[Any, str]] = {
    "join": (dist, "init_process_group"),
    "compile": (parplan, "compile"),
    "loss": (torch.nn.functional, "mse_loss"),
    "layer's backward": (torch.autograd, "grad"),
    "update": (torch.optim.AdamW, "step"),
    "save": (parplan, "save_checkpoint"),
    "write": (torch, "save"),
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
}
WRITING = ("write", "fsync", "replace")
"""Moments that only rank 0, which writes the file, comes to."""


def kill_in_front_of(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function, which ends the process in place of its count-th call."""
    left = count

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The function, which first sleeps."""

    @functools.wraps(function)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


def main() -> None:
    """Set the kill of this start, and run the program as if it had been started itself."""
    kills = json.loads(os.environ.get("KILLS", "[]"))
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(kills):
        rank, moment, count = kills[start]
        if rank == int(os.environ["RANK"]):
            place, name = MOMENTS[moment]
            setattr(place, name, kill_in_front_of(getattr(place, name), count))
    pins = json.loads(os.environ.get("PINS", "null"))
    if pins is not None:
        parplan.compile = functools.partial(parplan.compile, pins=pins)
    torch.nn.functional.mse_loss = slowed(torch.nn.functional.mse_loss, float(os.environ.get("STEP_S", "0")))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
