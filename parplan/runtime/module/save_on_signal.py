"""A checkpoint on SIGTERM or SIGINT, at a step boundary that all processes agree on: for jobs that are preempted.

A signal comes to one process at any moment of a step. Its handler notes it and does nothing else; at the end of every
step the processes exchange whether one of them has noted one, in a group of gloo's own, so that no accelerator waits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parplan.errors import RuntimeFailure
from parplan.runtime.compat import WeakGroup, group_timeout
from parplan.runtime.module.checkpoints import PathLike, group_of, save_checkpoint
from parplan.runtime.transport.distributed import explained

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SaveOnSignal", "save_on_signal"]

# A signal that comes again within so many seconds is the same request: torchrun hands on to its processes what they,
# in one group with it, have got already.
AGAIN_S = 2.0


def save_on_signal(
    path: PathLike, /, *, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT), **parts: Any
) -> SaveOnSignal:
    """A context in which a signal to any process ends the training with a checkpoint, at the end of a step.

        with parplan.save_on_signal("run.pt", model=model, optimizer=optimizer) as saving:
            for step in range(first, last):
                ...
                saving.step(step=step + 1)

    Under torchrun every rank enters it, and calls `step` equally often.

    Args:
        path, parts: as for `save_checkpoint`.
        signals: those to save on. A second one, two seconds after the first or later, ends the process at once.

    Raises:
        RuntimeFailure: not in the main thread, where alone Python handles signals.
    """
    return SaveOnSignal(path, tuple(signals), parts)


class SaveOnSignal:
    """The handlers of `save_on_signal`, and the exchange between processes.

    Args:
        path, parts: as for `save_checkpoint`.
        signals: those to save on.

    Attributes:
        noted: the first signal that has come to this process, None before.
    """

    def __init__(self, path: PathLike, signals: tuple[signal.Signals, ...], parts: dict[str, Any]) -> None:
        self._path, self._signals, self._parts = path, signals, parts
        self._handlers: dict[signal.Signals, Any] = {}
        self._group: WeakGroup | None = None
        self._noted_at = 0.0
        self.noted: signal.Signals | None = None

    def __enter__(self) -> Self:
        """Set the handlers, and make the processes' group."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeFailure("save_on_signal handles signals, which Python does in the main thread; enter it there")
        several, group = group_of(self._parts.values())
        if several:
            ranks, timeout = dist.get_process_group_ranks(group), group_timeout(group)
            with explained("making a group of processes that save together", dist.get_rank(group)):
                part = len(ranks) < dist.get_world_size()  # the others are not here
                self._group = WeakGroup(dist.new_group(ranks, timeout, "gloo", use_local_synchronization=part))
        self._handlers = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def step(self, **data: Any) -> None:
        """Tell that a step has ended; where a signal has come to any process, save and exit.

        Args:
            data: saved beside the parts, as `save_checkpoint` does.

        Raises:
            SystemExit: on every rank, with 128 and the signal's number, once the checkpoint is on the disk.
            CheckpointError: on every rank; it could not be written.
        """
        if not self._handlers:
            raise RuntimeFailure("step() belongs inside of `with parplan.save_on_signal(...) as saving:`")
        number = self._agreed()
        if number:
            save_checkpoint(self._path, **self._parts, **data)
            self.noted = None  # it is answered
            raise SystemExit(128 + number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Set the handlers that were there before; a signal that no step has answered is theirs."""
        self._restore()
        if self._group is not None:
            with suppress(RuntimeError, ValueError, AssertionError):  # it is destroyed
                dist.destroy_process_group(self._group())
        if self.noted is not None and kind is None:
            signal.raise_signal(self.noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal is noted, one that comes later than again ends the process."""
        now = time.monotonic()
        if self.noted is None:
            self.noted, self._noted_at = signal.Signals(number), now
        elif now - self._noted_at >= AGAIN_S:
            os._exit(128 + number)

    def _agreed(self) -> int:
        """The largest number of a signal that a process has noted, 0 without any; every process calls this."""
        own = torch.tensor([self.noted or 0])
        if self._group is not None:
            group = self._group()
            with explained("asking whether a signal has come to any process", dist.get_rank(group)):
                dist.all_reduce(own, dist.ReduceOp.MAX, group)
        return int(own.item())

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._handlers = {}
