"""Threads that run the work of each device within a step: the caller's, one device after another, or one for each.

torch computes without Python's lock, so threads let CPU devices compute at the same time, and launch kernels on several
GPUs side by side. All else that a run does stays as if there were one thread: a thread holds the one lock whatever
it does, and releases it only while it computes (`apart`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from parplan.accelerators import StreamContext, accelerator_count, autocast_types, is_started
from parplan.errors import PlanError
from parplan.runtime.transport.base import Transport

__all__ = ["CallersModes", "Dispatch", "Inline", "Threads", "ThreadsOption", "dispatch_for"]

T = TypeVar("T")

# False: the caller's thread. True: a thread per logical device. A function: the same, and every thread begins with it.
ThreadsOption = bool | Callable[[int], object]


class Inline:
    """The caller's thread does everything, in the order of the devices."""

    def each(self, devices: Sequence[int], work: Callable[[int], object], ordered: bool = False) -> None:
        """Call `work` with every device, `ordered` if order matters; raises the first device's error, noting others."""
        for device in devices:
            work(device)

    def apart(self, compute: Callable[..., T], *args: object) -> T:
        """Called inside of `work`: the result of `compute` for `args`; other devices may work meanwhile."""
        return compute(*args)


class Threads:
    """One thread per logical device; they end when this object is dropped.

    Args:
        devices: the logical devices of this process.
        begin: called first in every thread, with the number of its device; its errors are raised here.
    """

    def __init__(self, devices: Iterable[int], begin: Callable[[int], object] | None = None) -> None:
        self._turn = threading.RLock()
        self._pools = {d: ThreadPoolExecutor(1, thread_name_prefix=f"parplan-device-{d}") for d in devices}
        for job in [pool.submit(begin, device) for device, pool in self._pools.items() if begin is not None]:
            job.result()

    def each(self, devices: Sequence[int], work: Callable[[int], object], ordered: bool = False) -> None:
        """As `Inline.each`; an error keeps the traceback of the thread it comes from."""
        modes = CallersModes.current()
        if ordered:
            for device in devices:
                self._pools[device].submit(self._work, modes, work, device).result()
            return
        jobs = [self._pools[device].submit(self._work, modes, work, device) for device in devices]
        failed = [(d, e) for d, job in zip(devices, jobs, strict=True) if (e := job.exception()) is not None]  # waits
        if failed:
            (_, first), *others = failed
            note: Callable[[str], None] = getattr(first, "add_note", lambda text: None)  # Python 3.10 has no notes
            for device, error in others:
                note(f"device {device} failed as well: {type(error).__name__}: {error}")
            raise first

    def _work(self, modes: CallersModes, work: Callable[[int], object], device: int) -> None:
        with self._turn, modes.set():
            work(device)

    def apart(self, compute: Callable[..., T], *args: object) -> T:
        """As `Inline.apart`."""
        self._turn.release()
        try:
            return compute(*args)
        finally:
            self._turn.acquire()


Dispatch = Inline | Threads


def dispatch_for(threads: ThreadsOption, transport: Transport) -> Dispatch:
    """The dispatch of the option `threads`; a process with one device needs no thread unless a function is to begin it.

    Raises:
        PlanError: neither a truth value nor a function.
    """
    if not isinstance(threads, bool) and not callable(threads):
        raise PlanError(f"threads is {threads!r}; it is True, False, or a function that every thread calls first")
    if threads is False or (threads is True and len(transport.owned) == 1):
        return Inline()
    return Threads(transport.owned, None if threads is True else threads)


@dataclass(frozen=True)
class CallersModes:
    """The modes that torch keeps per thread, for a device's thread: gradients, inference, autocast, streams."""

    gradients: bool
    inference: bool
    autocast: Mapping[str, torch.dtype]
    streams: tuple[torch.Stream, ...]

    @staticmethod
    def current() -> CallersModes:
        """Those of this thread."""
        # A thread starts without autocast.
        casts = {k: torch.get_autocast_dtype(k) for k in autocast_types() if torch.is_autocast_enabled(k)}
        streams: list[torch.Stream] = []  # that a new thread would not have: last that of the current device
        if is_started():
            here, current = torch.accelerator.current_device_index(), torch.accelerator.current_stream
            others = [current(index) for index in range(accelerator_count()) if index != here]
            # A device's default stream has the number 0; to set it again would start the driver on that device.
            streams += [*(stream for stream in others if stream.stream_id != 0), current(here)]
        return CallersModes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, tuple(streams))

    @contextmanager
    def set(self) -> Iterator[None]:
        """The same modes in this thread."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            for stream in self.streams:
                stack.enter_context(StreamContext(stream))
            yield
