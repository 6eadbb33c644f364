"""A call that says what it does: the run and the transport of `Executor.recorded`.

They are kinds of their own, so that a call that is not recorded does not even ask.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parplan.lowering.holdings import Bucket
from parplan.lowering.program import Exchange, Program
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.parameter_store import Store
from parplan.runtime.execution.run import Run
from parplan.runtime.execution.timeline import REST, Activity, Kind, Timeline
from parplan.runtime.transport.base import Held, Pending, Transport

if TYPE_CHECKING:
    from parplan.runtime.execution.executor import Executor

__all__ = ["RecordedRun", "RecordedTransport"]

_SUMS = Activity(Kind.REDUCTION, backward=True)
_SENDS = Activity(Kind.TRANSFER)


class RecordedRun(Run):
    """A run that tells its timeline when it computes and when it sums gradients."""

    def __init__(self, executor: Executor, inputs: tuple[str, ...], parameters: tuple[str, ...]) -> None:
        super().__init__(executor, inputs, parameters)
        assert executor.timeline is not None
        self._timeline = executor.timeline

    def forward(self, tensors: list[Tensor], record: bool) -> list[Tensor]:
        """As `Run.forward`."""
        self._timeline.enter(REST)
        return super().forward(tensors, record)

    def backward(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `Run.backward`."""
        self._timeline.enter(REST)
        return super().backward(outputs)

    def _sums(self) -> Gradients:
        return _RecordedGradients(self._executor.store, self._transport, self._timeline)

    def _through(
        self, ends: Sequence[Tensor], leaves: Sequence[Tensor], pulls: Sequence[Tensor | None], device: int
    ) -> Sequence[Tensor | None]:
        found = super()._through(ends, leaves, pulls, device)
        self._timeline.enter(REST, (device,))
        return found


class _RecordedGradients(Gradients):
    """Gradients whose sums are recorded: starting them, waiting for them at the end, and putting slices together."""

    def __init__(self, store: Store, transport: Transport, timeline: Timeline) -> None:
        super().__init__(store, transport)
        self._timeline = timeline
        self._devices = transport.owned

    def launch(self, bucket: Bucket) -> None:
        """As `Gradients.launch`."""
        self._timeline.enter(_SUMS, self._devices)
        super().launch(bucket)
        self._timeline.enter(REST, self._devices)

    def arrive(self) -> None:
        """As `Gradients.arrive`."""
        self._timeline.enter(_SUMS, self._devices)
        super().arrive()
        self._timeline.enter(REST, self._devices)

    def totals(self, names: Iterable[str], own: bool = False) -> dict[str, Tensor | None]:
        """As `Gradients.totals`."""
        self._timeline.enter(_SUMS)
        found = super().totals(names, own)
        self._timeline.enter(REST)
        return found


@dataclass(frozen=True)
class _RecordedPending:
    """A movement on its way; waiting for it counts to it."""

    inner: Pending
    timeline: Timeline
    activity: Activity
    devices: tuple[int, ...]

    def wait(self) -> Held:
        self.timeline.enter(self.activity, self.devices)
        parts = self.inner.wait()
        self.timeline.enter(REST, self.devices)
        return parts


@dataclass(slots=True)
class _Computing:
    """A device computes, and the timeline knows which."""

    timeline: Timeline
    device: int
    inner: AbstractContextManager[object]

    def __enter__(self) -> None:
        self.timeline.device, self.device = self.device, self.timeline.device
        self.inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.timeline.device = self.device
        self.inner.__exit__(kind, error, trace)


class RecordedTransport:
    """A transport that records the movements of one program: starting them, and waiting where they are first read.

    Args:
        inner: what moves the tensors.
        timeline: what is told.
        program: whose transfers are recorded, by the slot they fill.
    """

    def __init__(self, inner: Transport, timeline: Timeline, program: Program) -> None:
        self.owned = inner.owned
        self.processes = inner.processes
        self._inner = inner
        self._timeline = timeline
        self._activities: dict[int, Activity] = {}
        for transfer in program.transfers:
            self._activities[id(transfer.exchange)] = Activity(Kind.TRANSFER, transfer.target)
            self._activities[id(transfer.transposed)] = Activity(Kind.TRANSFER, transfer.target, backward=True)

    def physical(self, device: int) -> torch.device:
        """Where an owned logical device lives."""
        return self._inner.physical(device)

    def on(self, device: int) -> AbstractContextManager[object]:
        """The context in which an owned device computes."""
        return _Computing(self._timeline, device, self._inner.on(device))

    def begin(self) -> None:
        """As the transport's."""
        self._inner.begin()

    def show(self) -> None:
        """As the transport's."""
        self._inner.show()

    def end(self) -> None:
        """As the transport's; what is waited for are sends that have not left."""
        self._timeline.enter(_SENDS, self.owned)
        self._inner.end()
        self._timeline.enter(REST, self.owned)

    def used_here(self, tensor: Tensor) -> None:
        """As the transport's."""
        self._inner.used_here(tensor)

    def ready_on(self, device: int) -> None:
        """As the transport's."""
        self._inner.ready_on(device)

    def start(self, exchange: Exchange, tensors: Held) -> _RecordedPending:
        """Start a movement."""
        activity = self._activities[id(exchange)]
        here = tuple(device for device in self.owned if device in exchange.shapes or device in tensors)
        self._timeline.enter(activity, here)
        pending = self._inner.start(exchange, tensors)
        self._timeline.enter(REST, here)
        return _RecordedPending(pending, self._timeline, activity, here)

    def message(self, name: Hashable, tensors: Sequence[Tensor]) -> Tensor:
        """As the transport's."""
        return self._inner.message(name, tensors)

    def reduce(self, name: str, group: Sequence[int], flats: Held) -> Pending:
        """As the transport's."""
        return self._inner.reduce(name, group, flats)

    def any(self, flags: Iterable[bool]) -> list[bool]:
        """As the transport."""
        return self._inner.any(flags)

    def group(self, devices: Sequence[int]) -> None:
        """As the transport's."""
        self._inner.group(devices)
