"""The tensors of a running program: parts that are here, and parts that are on their way."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from parplan.runtime.transport import Held, Pending, Transport

__all__ = ["Parts"]


class Parts:
    """The parts of every slot that are here, and what is on its way to it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._parts: dict[str, Held] = defaultdict(dict)
        self._coming: dict[str, list[Pending]] = defaultdict(list)

    def add(self, slot: str, device: int, tensor: Tensor) -> None:
        """Put a part, or add to it; never in place, as it may be shared."""
        with self._transport.on(device):
            self.put(slot, device, tensor)

    def put(self, slot: str, device: int, tensor: Tensor) -> None:
        """The same on the current stream."""
        known = self._parts[slot].get(device)
        self._parts[slot][device] = tensor if known is None else known + tensor

    def expect(self, slot: str, pending: Pending) -> None:
        """More for this slot is on its way."""
        self._coming[slot].append(pending)

    def get(self, slot: str) -> Held:
        """What is here of a slot, after what is on its way has arrived."""
        for pending in self._coming.pop(slot, ()):
            for device, tensor in pending.wait().items():
                self.add(slot, device, tensor)
        return self._parts[slot]

    def drop(self, slot: str) -> None:
        """Forget a slot."""
        self._parts.pop(slot, None)

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for slot in list(self._coming):
            self.get(slot)
