"""A machine with CUDA devices that only records: tensors stay in CPU memory, marked with a device.

Every operation is attributed to the stream that it would be queued on. Copies, allocations, frees, events, waits and
host reads follow torch's rules, and `Order` finds what they leave unordered.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.runtime.stream_order.order import Clock, Memory, Order, Timeline

__all__ = ["CPU", "Edge", "Machine", "Role"]

CPU = torch.device("cpu")
_PRODUCT = str(Path(__file__).parents[3] / "parplan")
_PROGRAMS = ("training.py", "programs.py", "test_fakes.py")
_USERS = ("train_step.py:_update",)  # it calls the user's optimizer
_TRANSPORT = ("streams.py", "local.py")  # a call site reaches up to the first function that is in neither


@dataclass(frozen=True)
class Edge:
    """A wait or a record_stream, with its call site: functions up to the first one outside the transport."""

    kind: str
    site: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} in {' < '.join(self.site)}"


@dataclass(frozen=True)
class Role:
    """A stream's name in edges, and the logical device that it is of, if it is parplan's."""

    name: str
    device: int | None = None


@dataclass
class _Storage:
    """A storage that is alive: where it would be, and its accesses."""

    alive: StorageWeakRef
    device: torch.device
    memory: Memory
    pinned: bool


class _Local(threading.local):
    """The state that torch keeps per host thread."""

    def __init__(self) -> None:
        self.streams: dict[int, Timeline] = {}
        self.device = 0
        self.host: Timeline | None = None
        self.birth: torch.device | None = None  # of what a factory function makes
        self.pinned = False
        self.paused = False
        self.in_handler = False  # a torch function's handler is running, which devices' mode is off in
        self.node_place: torch.device | None = None  # of the built-in autograd node that runs
        self.accumulations: list[Timeline | None] = []  # where autograd adds the gradients it is about to add


class Machine:
    """CUDA devices without a GPU.

    Args:
        devices: how many.
        peers: whether they reach each other's memory.
        muted: a wait or record_stream that is left out.

    Attributes:
        edges: the waits and record_streams seen so far that parplan called for.
        roles: names for streams, in edges.
        astray: operations of parplan on a device that was not the current one.
    """

    def __init__(self, devices: int = 2, peers: bool = True, muted: Edge | None = None) -> None:
        self.devices = devices
        self.peers = peers
        self.order = Order()
        self.edges: dict[Edge, None] = {}
        self.roles: dict[Timeline, Role] = {}
        self.astray: dict[str, None] = {}
        self.local = _Local()
        self._muted = muted
        self._lock = threading.RLock()
        self._storages: dict[int, _Storage] = {}
        self._hosts = 0

    # -- where --

    @property
    def host(self) -> Timeline:
        """This thread."""
        found: Timeline | None = self.local.host
        if found is None:
            with self._lock:
                found = self.local.host = Timeline(None, self._hosts)
                self._hosts += 1
        return found

    def stream(self, device: int) -> Timeline:
        """This thread's current stream of a device."""
        return self.local.streams.get(device, Timeline(device, 0))

    def timeline(self, place: torch.device) -> Timeline:
        """Where an operation on `place` is queued now."""
        return self.host if place.type == "cpu" else self.stream(self.index(place))

    def index(self, place: torch.device) -> int:
        number: int | None = place.index
        return self.local.device if number is None else number

    def named(self, place: torch.device | str | int) -> torch.device:
        """A device with its number."""
        found = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        return torch.device("cuda", self.index(found)) if found.type == "cuda" else found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded, and there is no CUDA device (while a model is captured)."""
        before, self.local.paused = self.local.paused, True
        try:
            yield
        finally:
            self.local.paused = before

    # -- tensors --

    def place(self, tensor: Tensor) -> torch.device:
        """Where a tensor would be."""
        return self._storage(tensor).device

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._storage(tensor).pinned

    def born(self, tensor: Tensor, place: torch.device, pinned: bool = False) -> None:
        """A new storage, allocated on the current stream."""
        storage = tensor.untyped_storage()
        memory = self.order.allocate(self.timeline(place), f"the allocation in {_where()}")
        self._storages[storage._cdata] = _Storage(StorageWeakRef(storage), place, memory, pinned)

    def known(self, tensor: Tensor) -> bool:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.alive.expired()

    def _storage(self, tensor: Tensor) -> _Storage:
        with self._lock:
            if not self.known(tensor):
                self.born(tensor, CPU)  # made while nothing was recorded
            return self._storages[tensor.untyped_storage()._cdata]

    def sweep(self) -> None:
        """Free what has died; before every wait, so that a death is not ordered by a later one."""
        with self._lock:
            for key, storage in list(self._storages.items()):
                if storage.alive.expired():
                    del self._storages[key]
                    if storage.device.type == "cuda":  # pinned memory is freed behind the copies that use it
                        self.order.free(storage.memory, self.host)

    # -- operations --

    def run(self, timeline: Timeline, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        """Queue an operation."""
        with self._lock:
            self.order.enqueue(timeline, self.host)
            where = f"{what} in {_where()}"
            for tensor in reads:
                self.order.read(self._storage(tensor).memory, timeline, where)
            for tensor in writes:
                self.order.write(self._storage(tensor).memory, timeline, where)

    def guarded(self, places: Iterable[torch.device], what: str) -> None:
        """Note an operation that parplan runs on other devices than the current one.

        CUDA's kernels switch to the device of their tensors by themselves; those of other accelerators need not.
        """
        numbers, site = {self.index(place) for place in places if place.type == "cuda"}, _site()
        if numbers and self.local.device not in numbers and site and site[0] not in _USERS:
            self.astray[f"{what} on {numbers} while {self.local.device} is current, in {_where()}"] = None

    def move(self, tensor: Tensor, place: torch.device, non_blocking: bool) -> Tensor:
        """A copy on another device."""
        with self.paused():
            moved = tensor.detach().clone()
        self.born(moved, place, pinned=non_blocking and place.type == "cpu")
        self.copy(tensor, moved, non_blocking)
        return moved

    def copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        """A copy, queued on the source's stream; between devices that and the target's stream wait for each other.

        The host waits for it unless it is told not to and the host's memory is pinned.
        """
        here, there = self.place(source), self.place(target)
        self.guarded([here, there], "copy")
        if here == there:
            self.run(self.timeline(here), [source], [target], "copy")
        elif here.type == there.type:
            reading, writing = self.timeline(here), self.timeline(there)
            self.wait(reading, self.mark(writing))
            self.run(reading, [source], [target], "copy")
            self.wait(writing, self.mark(reading))
        else:
            on_host, on_device = (source, there) if here.type == "cpu" else (target, here)
            stream = self.timeline(on_device)
            late = non_blocking and self.is_pinned(on_host)
            if on_host is source and not late:
                self.run(self.host, [source], [], "copy")
                self.run(stream, [], [target], "copy")
            else:
                self.run(stream, [source], [target], "copy")
            if not (non_blocking and (late or on_host is source)):
                self.wait(self.host, self.mark(stream))

    # -- waits --

    def mark(self, timeline: Timeline) -> Clock:
        """An event recorded now; the host's own past is part of it."""
        with self._lock:
            if timeline.device is not None:
                self.order.join(timeline, self.order.clock(self.host))
            return self.order.clock(timeline)

    def wait(self, timeline: Timeline, mark: Clock) -> None:
        """What `timeline` runs from here on comes after `mark`."""
        with self._lock:
            self.sweep()
            self.order.join(timeline, mark)

    def record(self, tensor: Tensor, stream: Timeline) -> None:
        """`record_stream`."""
        self._storage(tensor).memory.recorded.add(stream)

    def left_out(self, kind: str, streams: Sequence[Timeline]) -> bool:
        """Note a wait or record_stream that parplan calls for, and whether it is the one to be left out."""
        site = _site()
        if not site:
            return False
        roles = [self.roles.get(stream, Role("the caller's stream")) for stream in streams]
        devices = {role.device for role in roles}
        whose = (
            "" if len(roles) < 2 or None in devices else " of its device" if len(devices) == 1 else " of another device"
        )
        edge = Edge(kind.format(*(role.name for role in roles)) + whose, site)
        self.edges[edge] = None
        return edge == self._muted


def _site() -> tuple[str, ...]:
    """The functions of parplan that the current call comes from; none if a user's."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = _file(frame.f_code.co_filename)
        if file in _PROGRAMS and not found:
            break
        if file is not None:
            found.append(f"{file}:{frame.f_code.co_name}")
            if file not in _TRANSPORT:
                break
        frame = frame.f_back
    return tuple(found)


def _where() -> str:
    """The innermost line of parplan or of a test program."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = _file(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


@cache
def _file(path: str) -> str | None:
    """The name of a file of parplan or of the test programs; None for all others."""
    found = Path(path)
    return found.name if path.startswith(_PRODUCT) or found.name in _PROGRAMS else None
