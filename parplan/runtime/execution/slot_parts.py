"""The parts of a program's values that are in this process, on their way to it, or gathered again for a backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from parplan.errors import RuntimeFailure
from parplan.lowering.program import Transfer
from parplan.runtime.compat import writes
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.timeline import Recorder, Span
from parplan.runtime.transport.base import Held, Pending, Transport

__all__ = ["FreedWeights", "SlotParts", "memory", "start_together"]

TOGETHER = 1 << 20
"""Bytes up to which messages of one step go as one: smaller ones cost their handling, and larger ones would be copied,
and hold up the first micro-batch until those of all have arrived."""


class SlotParts:
    """The parts of every slot that are in this process, and those that are on their way to it."""

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport = transport
        self._recorder = recorder
        self._parts: dict[str, Held] = defaultdict(dict)
        self._coming: dict[str, list[tuple[Pending, Span]]] = defaultdict(list)  # waiting is recorded under the span

    def add(self, slot: str, device: int, tensor: Tensor) -> None:
        """Put a part, or add to it; never in place, as it may be shared."""
        with self._transport.on(device):
            self.put(slot, device, tensor)

    def put(self, slot: str, device: int, tensor: Tensor) -> None:
        """The same on the current stream."""
        known = self._parts[slot].get(device)
        self._parts[slot][device] = tensor if known is None else known + tensor

    def start(self, transfer: Transfer, tensors: Held, backward: bool = False) -> None:
        """Start a transfer, or that of its gradient, whose results are added to the slot it fills when that is read."""
        slot, exchange = (transfer.source, transfer.transposed) if backward else (transfer.target, transfer.exchange)
        span = self._recorder.moving(transfer, backward)
        with span:
            sent = {device: self._cast(tensor, exchange.dtype, device) for device, tensor in tensors.items()}
            self._coming[slot].append((self._transport.start(exchange, sent), span))

    def _cast(self, tensor: Tensor, dtype: torch.dtype, device: int) -> Tensor:
        """A tensor in the type in which it is sent: weights that autocast reads in another one, and their gradients."""
        if tensor.dtype == dtype:
            return tensor
        with self._transport.on(device):
            return tensor.to(dtype)

    def expect(self, transfer: Transfer, pending: Pending) -> None:
        """Add what was started for a transfer to the slot it fills, when that is read."""
        self._coming[transfer.target].append((pending, self._recorder.moving(transfer, False)))

    def get(self, slot: str) -> Held:
        """The parts of a slot, after those on their way have arrived."""
        for pending, span in self._coming.pop(slot, ()):
            with span:
                arrived = pending.wait()
            for device, tensor in arrived.items():
                self.add(slot, device, tensor)
        return self._parts[slot]

    def drop(self, slot: str) -> None:
        """Forget a slot."""
        self._parts.pop(slot, None)

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for slot in list(self._coming):
            self.get(slot)


def start_together(moves: Sequence[tuple[SlotParts, Transfer]], transport: Transport) -> None:
    """Start transfers of several runs of a program, such as a step's micro-batches; between processes small ones of a
    value together.

    All processes give them in one order, so that they agree on what goes together.
    """
    groups: dict[str, list[list[tuple[SlotParts, Transfer]]]] = defaultdict(list)
    room: dict[str, int] = defaultdict(int)  # in the last group of a value
    for parts, transfer in moves:
        nbytes = transfer.exchange.nbytes
        if nbytes > room[transfer.target] or transfer.target not in groups or transport.processes == 1:
            groups[transfer.target].append([])
            room[transfer.target] = TOGETHER
        groups[transfer.target][-1].append((parts, transfer))
        room[transfer.target] -= nbytes
    for group in (group for own in groups.values() for group in own):
        if len(group) == 1:
            parts, transfer = group[0]
            parts.start(transfer, parts.get(transfer.source))
            continue
        started = transport.start_together([(t.exchange, parts.get(t.source)) for parts, t in group])
        for (parts, transfer), pending in zip(group, started, strict=True):
            parts.expect(transfer, pending)


class FreedWeights:
    """Gathered weights of one call that are freed behind their forward, in the tensors that autograd's graphs hold, and
    gathered again into those for the backward.

    Args:
        store: whose slices they are gathered from.
        transport: moves them.
        recorder: told of it.
    """

    def __init__(self, store: Store, transport: Transport, recorder: Recorder) -> None:
        self._store, self._transport = store, transport
        self._parts = SlotParts(transport, recorder)
        self._writes: dict[str, int] = {}  # of the parameters, when the forward began

    def begin(self, parameters: Iterable[str]) -> None:
        """A forward begins; of the parameters whose weights will be gathered again."""
        self._writes = {name: writes(self._store.original(name)) for name in parameters}

    def free(self, device: int, weights: Iterable[Tensor]) -> None:
        """Free the memory of weights."""
        with self._transport.on(device):
            for tensor in weights:
                tensor.untyped_storage().resize_(0)

    def gather(self, transfer: Transfer) -> None:
        """Start to gather weights for their backward.

        Raises:
            RuntimeFailure: they were written since the forward.
        """
        name, given = transfer.given.value, transfer.given
        if writes(self._store.original(name)) != self._writes[name]:
            raise RuntimeFailure(
                f"{self._store.label(name)} was written between a forward and its backward, for which its weights are "
                'gathered again; call backward before the optimizer steps, or plan its layer with state "sharded"'
            )
        owned = [device for device in given.devices if device in self._transport.owned]
        self._parts.drop(transfer.target)  # of a backward before, where a step did not go back on some device
        slices = dict[int, Tensor]()
        for device in owned:
            with self._transport.on(device):  # which is past waiting for the caller's stream, unlike in a forward
                slices[device] = self._store.slice(name, device)
        self._parts.start(transfer, slices)

    def refill(self, device: int, weights: Mapping[str, Tensor]) -> None:
        """Put gathered weights into a graph's tensors, by slot."""
        for slot, tensor in weights.items():
            if tensor.untyped_storage().size() == 0 and (found := self._parts.get(slot).pop(device, None)) is not None:
                with self._transport.on(device):
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                    tensor.data.copy_(found)  # a write that autograd need not know of: the same values


def memory(tensor: Tensor) -> int:
    """The address of a tensor's storage: the same for views of one another."""
    return tensor.untyped_storage().data_ptr()
