"""What orders copies and computing on accelerators, checked without one: what is told to whom, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.accelerators import is_started
from parplan.layout import Grid, Layout, pieces
from parplan.lowering.program import Exchange
from parplan.runtime import dispatch
from parplan.runtime.dispatch import CallersModes
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.local import LocalTransport
from parplan.runtime.transport.streams import Streams, sent
from tests.runtime.helpers import planner, spread

CPU = torch.device("cpu")


class ToldStreams(Streams):
    """Streams that note what they are told."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(devices)
        self.read: set[int] = set()
        self.marks: list[object] = []
        self.waits: list[object] = []

    def used_here(self, tensor: Tensor) -> None:
        self.read.add(tensor.untyped_storage().data_ptr())

    def copied(self, device: int) -> Any:
        self.marks.append(object())
        return self.marks[-1]

    def compute_after_copy(self, device: int, tensor: Tensor, mark: Any) -> None:
        self.waits.append(mark)


def told(devices: int) -> tuple[LocalTransport, ToldStreams]:
    places = [CPU] * devices
    transport, streams = LocalTransport(places), ToldStreams(places)
    transport._streams = streams
    return transport, streams


def exchange(source: Layout, target: Layout, shape: tuple[int, ...]) -> Exchange:
    moving = tuple(pieces(shape, source, target, None, None))
    return Exchange("a test", moving, dict.fromkeys(target.grid.devices, shape), torch.float64)


def rows(devices: int) -> Layout:
    return Layout(Grid(tuple(range(devices)), devices, 1), 0)


def whole(*devices: int) -> Layout:
    return Layout(Grid(devices, len(devices), 1), None)


def test_memory_that_a_copy_reads_is_told_to_the_allocator_on_one_gpu_too() -> None:
    """Two devices that share a GPU: the copying one reads what the computing one may free at once."""
    transport, streams = told(2)
    parts = {device: torch.full((2, 3), float(device), dtype=torch.float64) for device in (0, 1)}
    found = transport.start(exchange(rows(2), whole(1), (4, 3)), parts).wait()
    assert found[1].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert streams.read == {part.untyped_storage().data_ptr() for part in parts.values()}


def test_memory_that_a_sum_reads_is_told_to_the_allocator() -> None:
    transport, streams = told(3)
    flats = {device: torch.full((4,), 1.0 + device) for device in range(3)}
    assert transport.reduce("a sum", (0, 1, 2), flats).wait()[0].tolist() == [6.0] * 4
    assert streams.read == {flat.untyped_storage().data_ptr() for flat in flats.values()}


def test_waiting_for_a_copy_is_not_waiting_for_the_next_one() -> None:
    """The next pass's samples travel while this pass computes."""
    transport, streams = told(2)
    parts = {device: torch.ones(2, 3, dtype=torch.float64) for device in (0, 1)}
    first, second = (transport.start(exchange(rows(2), whole(1), (4, 3)), parts) for _ in range(2))
    first.wait()
    assert streams.waits == streams.marks[:1]
    second.wait()
    assert streams.waits == streams.marks


@dataclass
class FakeStream:
    """A stream that notes what it is asked to wait for."""

    device: torch.device
    stream_id: int = 1
    waits: list[object] = field(default_factory=list)

    def record_event(self) -> str:
        return f"mark of {self.device}"

    def wait_event(self, mark: object) -> None:
        self.waits.append(mark)


class Recorded:
    """Stands in for a tensor on a GPU."""

    device = CPU

    def __init__(self) -> None:
        self.streams: list[object] = []
        self.moves: list[tuple[str, bool]] = []

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)

    def is_pinned(self) -> bool:
        return False

    def to(self, place: torch.device, non_blocking: bool = False) -> Recorded:
        self.moves.append((place.type, non_blocking))
        return self


def test_a_compute_stream_waits_for_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", FakeStream)
    streams, tensor = Streams([torch.device("cuda:0"), CPU]), Recorded()
    streams.compute_after_copy(0, tensor, streams.copied(0))  # type: ignore[arg-type]
    streams.compute_after_copy(1, tensor, streams.copied(1))  # type: ignore[arg-type]
    compute = streams._compute[0]
    assert compute.waits == ["mark of cuda:0"]  # type: ignore[attr-defined]
    assert tensor.streams == [compute]


@pytest.mark.parametrize(("place", "beside"), [("cuda:0", True), ("cpu", False)])
def test_the_host_waits_for_what_it_reads(place: str, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the CPU that nobody waits for is pinned memory without its values yet."""
    tensor = Recorded()
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    sent(tensor, torch.device(place))  # type: ignore[arg-type]
    assert tensor.moves == [(torch.device(place).type, beside)]


class Counts(nn.Module):
    """A buffer that a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.largest: Tensor
        self.register_buffer("largest", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.largest.copy_(y.detach().amax(0))
        return y


@pytest.mark.full
def test_a_buffer_is_written_when_its_value_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream waits for the devices' before it copies what they computed."""
    model = Compiled(Counts(), planner(spread(2, "data"), 2), devices=["cpu"] * 2)
    seen: list[float] = []
    largest = model.get_buffer("largest")
    monkeypatch.setattr(LocalTransport, "show", lambda self: seen.append(float(largest.abs().sum())))
    x = torch.randn(4, 6, dtype=torch.float64)
    y = model(x)
    assert seen[0] == 0
    torch.testing.assert_close(largest, y.detach().amax(0))


def test_a_device_thread_works_on_the_callers_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {index: FakeStream(torch.device("cuda", index), index) for index in range(3)}
    entered: list[object] = []

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        entered.append(one)
        yield

    assert CallersModes.current().streams == () or is_started()
    monkeypatch.setattr(dispatch, "is_started", lambda: True)
    monkeypatch.setattr(dispatch, "accelerator_count", lambda: 3)
    monkeypatch.setattr(dispatch, "StreamContext", stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_stream", current.__getitem__)
    with CallersModes.current().set():
        assert entered == [current[2], current[1]]  # not the default stream of 0; the current device comes last
