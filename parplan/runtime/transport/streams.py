"""Streams of accelerators for logical devices: one that computes and one that copies, ordered by events.

On the CPU there is nothing to order and every call here does nothing. Work is never waited for on the host: a stream
waits for an event of another one. Memory that one stream allocated and another one uses is told to the allocator
(`record_stream`), so that it is not handed out again too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from parplan.accelerators import StreamContext, as_current, is_accelerator

__all__ = ["Streams", "sent"]


class Streams:
    """One compute and one copy stream per logical device that lives on an accelerator."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._compute = {i: torch.Stream(d) for i, d in enumerate(devices) if is_accelerator(d)}
        self._copy = {i: torch.Stream(d) for i, d in enumerate(devices) if is_accelerator(d)}

    def computing(self, device: int) -> AbstractContextManager[object]:
        """The context in which `device` computes."""
        stream = self._compute.get(device)
        return StreamContext(stream) if stream is not None else nullcontext()

    def copying(self, device: int) -> AbstractContextManager[object]:
        """The context in which `device` receives copies."""
        stream = self._copy.get(device)
        return StreamContext(stream) if stream is not None else nullcontext()

    def begin(self) -> None:
        """Devices compute after what the caller's current streams hold; copies wait for what devices compute."""
        for stream in self._compute.values():
            stream.wait_stream(torch.accelerator.current_stream(stream.device))

    def end(self) -> None:
        """The caller's current streams wait for what devices have computed, and so for copies that this used."""
        for stream in self._compute.values():
            torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def ready_on(self, place: torch.device) -> None:
        """The current stream of `place` waits for those of all devices: autograd takes what a node gives from there."""
        if is_accelerator(place):
            current = torch.accelerator.current_stream
            for device in {stream.device for stream in self._compute.values()} - {place}:
                current(place).wait_stream(current(device))

    def copy_after_compute(self, source: int, target: int) -> None:
        """Order the next copies of `target` after everything that `source` and `target` have computed so far."""
        for device in (source, target):
            if target in self._copy and device in self._compute:
                self._copy[target].wait_stream(self._compute[device])

    def copied(self, device: int) -> torch.Event | None:
        """A mark behind what `device` was told to copy so far; those who wait for it need not wait for later copies."""
        return self._copy[device].record_event() if device in self._copy else None

    def compute_after_copy(self, device: int, tensor: Tensor, mark: torch.Event | None) -> None:
        """Order the next work of `device` after its copies up to `mark`; `tensor` came with them."""
        if mark is not None:
            self._compute[device].wait_event(mark)
            tensor.record_stream(self._compute[device])

    def used_here(self, tensor: Tensor) -> None:
        """`tensor` is read by the current stream of its device (that of a copy between devices, too)."""
        if is_accelerator(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def sent(tensor: Tensor, place: torch.device) -> Tensor:
    """`tensor` on `place`; the host waits for copies to its own memory, and from pinned memory, which may change."""
    with as_current(place if is_accelerator(place) else tensor.device):
        return tensor.to(place, non_blocking=is_accelerator(place) and not tensor.is_pinned())
