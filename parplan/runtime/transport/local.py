"""The transport of one process that owns every device: copies and sums between its own tensors.

Several logical devices may share a physical one, and all may be the CPU: then nothing is copied that need not be.
Between accelerators a copy runs on the receiver's copy stream, directly where the devices can reach each other and
through pinned host memory where they cannot.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parplan.accelerators import reach_each_other
from parplan.layout import Piece
from parplan.lowering.program import Exchange
from parplan.runtime.transport.base import Held, Transport, assemble, block
from parplan.runtime.transport.streams import Streams, sent

__all__ = ["LocalTransport"]


@dataclass(frozen=True)
class _Arrived:
    """Copies that were enqueued; only the receiving streams still have to wait."""

    parts: Held
    marks: Mapping[int, torch.Event | None]
    streams: Streams

    def wait(self) -> Held:
        for device, tensor in self.parts.items():
            self.streams.compute_after_copy(device, tensor, self.marks[device])
        return self.parts


class LocalTransport(Transport):
    """Moves tensors between logical devices that live in this process.

    Args:
        devices: where each logical device lives; the same physical device may appear several times.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.owned = tuple(range(len(devices)))
        self._devices = tuple(devices)
        self._streams = Streams(devices)
        self._reachable: dict[tuple[torch.device, torch.device], bool] = {}

    def physical(self, device: int) -> torch.device:
        """The physical device of a logical device."""
        return self._devices[device]

    def on(self, device: int) -> AbstractContextManager[object]:
        """The device's compute stream as a context."""
        return self._streams.computing(device)

    def begin(self) -> None:
        """The devices' streams wait for the caller's."""
        self._streams.begin()

    def show(self) -> None:
        """The caller's streams wait for the devices'."""
        self._streams.end()

    def used_here(self, tensor: Tensor) -> None:
        """Told to the allocator."""
        self._streams.used_here(tensor)

    def ready_on(self, device: int) -> None:
        """The device's current stream waits for those of the other devices."""
        self._streams.ready_on(self._devices[device])

    def start(self, exchange: Exchange, tensors: Held) -> _Arrived:
        """Copy and add pieces; targets on the source's device share its memory where a piece is whole."""
        parts: Held = {}
        for device, plan in exchange.assemblies.items():
            for piece in plan.pieces:
                self._streams.copy_after_compute(piece.source, device)
            with self._streams.copying(device):
                like = torch.empty(exchange.shapes[device], dtype=exchange.dtype, device=self._devices[device])
                parts[device] = assemble(plan, partial(self._fetch, tensors), like)
        return self._arrived(parts)

    def message(self, name: Hashable, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors behind each other."""
        return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])

    def reduce(self, name: str, group: Sequence[int], flats: Held) -> _Arrived:
        """Sum on the group's first device, in the order of the group."""
        first, *others = group
        for device in group:
            self._streams.copy_after_compute(device, first)
        with self._streams.copying(first):
            total = self._moved(flats[first], first, first).clone()
            for device in others:
                total.add_(self._moved(flats[device], device, first))
        return self._arrived({first: total})

    def _arrived(self, parts: Held) -> _Arrived:
        return _Arrived(parts, {device: self._streams.copied(device) for device in parts}, self._streams)

    def _fetch(self, tensors: Held, piece: Piece) -> Tensor:
        return self._moved(block(tensors[piece.source], piece.source_region), piece.source, piece.target)

    def _moved(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """`tensor` where `target` lives, for the stream that it copies on."""
        place = self._devices[target]
        if tensor.device.type != "cpu" and place.type == "cpu":
            with self._streams.computing(source):
                return sent(tensor, place)
        # Also on one accelerator: devices that share it have streams of their own.
        self._streams.used_here(tensor)
        if tensor.device == place:
            return tensor
        if tensor.device.type == place.type:
            pair = (tensor.device, place)
            if pair not in self._reachable:
                self._reachable[pair] = reach_each_other(*pair)
            if not self._reachable[pair]:
                # By way of pinned host memory: the host waits for the first half of the way.
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                with self._streams.computing(source):
                    host.copy_(tensor)
                return host.to(place, non_blocking=True)
        return sent(tensor, place)
