"""The devices a plan is for and the links between them.

Devices are numbered; they may be of several kinds. Links come in levels: devices 0..size-1 share the innermost
level's switch, groups of those share the next level, and so on. A cluster says nothing of models; presets live in
cost_models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from parplan.errors import ClusterError

__all__ = ["MOST_DEVICES", "AllReduces", "Cluster", "Device", "DeviceGroup", "Link"]

# Every layer has a strategy for each divisor of each number of devices: a minute for 64, hours far beyond.
MOST_DEVICES = 1024


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Args:
        kind: name such as "a100-80g-sxm" or "cpu".
        memory_bytes: memory a plan may use.
        flops_per_s: peak dense rate by precision ("fp32", "tf32", "fp16", "bf16", "fp64").
        bandwidth_bytes_per_s: memory bandwidth.
        launch_s: the least time one kernel or op takes.
        source: where these numbers come from.
        estimated: True when any of them is unverified.
        like: the preset whose share of peak its kernels reach; None is `kind`, empty is none of them.
    """

    kind: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    bandwidth_bytes_per_s: float
    launch_s: float
    source: str
    estimated: bool = True
    like: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, or like one."""
        return "cpu" in (self.kind, self.like)


@dataclass(frozen=True)
class AllReduces:
    """Measured all-reduces over all devices of so many hosts.

    Args:
        hosts: how many, at least 2.
        nbytes: of each device's tensor, ascending.
        bytes_per_s: bus bandwidth of each: 2 (n - 1) / n of the bytes, for n devices, over the seconds.
    """

    hosts: int
    nbytes: tuple[int, ...]
    bytes_per_s: tuple[float, ...]

    def line(self, devices: int) -> tuple[float, float]:
        """Seconds that every message takes, and bytes per second beside those, through the smallest and the largest."""
        moved = [2 * (devices - 1) / devices * nbytes for nbytes in (self.nbytes[0], self.nbytes[-1])]
        least_s, most_s = moved[0] / self.bytes_per_s[0], moved[1] / self.bytes_per_s[-1]
        if len(self.nbytes) == 1 or most_s <= least_s:
            return 0.0, self.bytes_per_s[-1]
        rate = (moved[1] - moved[0]) / (most_s - least_s)
        return max(0.0, least_s - moved[0] / rate), rate


@dataclass(frozen=True)
class Link:
    """One level of links, one direction per device.

    Args:
        name: "nvlink 3", "pcie 4.0 x16", ...
        size: how many consecutive devices hang on one switch of this level.
        latency_s: time before the first byte arrives.
        bandwidth_bytes_per_s: per device and direction when only one device talks to all others.
        contention: factor on bandwidth (<= 1) when all devices talk across this level at once.
        source: where these numbers come from.
        estimated: True when any of them is unverified.
        overlap: the most of a gradient reduction that can run beside the backward pass, where devices joined by this
            level sum gradients: 1 where collectives run on their own; 0.5 where one process sums them on a device and
            sends new weights back, as that half comes after the update.
        pair: share of the bandwidth that one pair gets: 1 behind a switch, less in a mesh, where each has own wires.
        slowdown: of the seconds that a gradient reduction runs beside the backward pass, the share that this loses.
        measured: all-reduces over all devices of so many hosts (domains of the level below), which sums and gathers of
            weights are priced by, in place of latency and bandwidth.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    contention: float = 1.0
    source: str = ""
    estimated: bool = True
    overlap: float = 1.0
    pair: float = 1.0
    slowdown: float = 0.0
    measured: tuple[AllReduces, ...] = ()


@dataclass(frozen=True)
class DeviceGroup:
    """All devices of one kind: what they are and their logical numbers, ascending."""

    device: Device
    members: tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """Devices by logical number and the levels of links between them, innermost first.

    Args:
        name: what to call it; empty for none.
        home: the device where inputs arrive and results go, where one process runs all devices; None: one process per
            device (torchrun), each of which brings its own samples.

    Raises:
        ClusterError: no device, levels that do not nest, the outermost level does not join all devices, or there is no
            such `home`.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    name: str = ""
    home: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ClusterError(f"{self.count} devices: a plan needs at least 1; ask for --gpus 1 or more")
        if self.count > 1 and (not self.links or self.links[-1].size < self.count):
            reach = self.links[-1].size if self.links else 1
            raise ClusterError(f"the outermost link joins {reach} devices of {self.count}; add a level that joins all")
        if self.home is not None and not 0 <= self.home < self.count:
            raise ClusterError(f"inputs arrive on device {self.home}, and there are devices 0 to {self.count - 1}")
        for inner, outer in pairwise(self.links):
            if outer.size <= inner.size or (outer.size < self.count and outer.size % inner.size):
                raise ClusterError(
                    f"{outer.name} joins {outer.size} devices, {inner.name} below it {inner.size}; levels come "
                    "innermost first, each joining a multiple of what the one below joins"
                )

    @classmethod
    def of(cls, device: Device, count: int, links: tuple[Link, ...]) -> Cluster:
        """`count` equal devices."""
        return cls((device,) * count, links)

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def device(self) -> Device:
        """The device, where all are alike.

        Raises:
            ClusterError: there are several kinds.
        """
        if len(self.groups) > 1:
            raise ClusterError(f"{self.describe()} has devices of several kinds; this is for equal ones")
        return self.devices[0]

    @property
    def of_cpus(self) -> bool:
        """Whether all devices are CPUs, or like them."""
        return all(group.device.is_cpu for group in self.groups)

    @cached_property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The kinds of devices there are, in the order of their first devices."""
        members: list[tuple[Device, list[int]]] = []
        for number, device in enumerate(self.devices):
            known = next((own for kind, own in members if kind is device or kind == device), None)
            if known is None:
                members.append((device, [number]))
            else:
                known.append(number)
        return tuple(DeviceGroup(device, tuple(own)) for device, own in members)

    @property
    def mixed(self) -> bool:
        """Whether there are several kinds of devices."""
        return len(self.groups) > 1

    def first(self, count: int) -> Cluster:
        """The first devices, with the levels that it takes to join them."""
        joining = next((number for number, link in enumerate(self.links) if link.size >= count), 0)
        return replace(self, devices=self.devices[:count], links=self.links[: joining + 1])

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same cluster with so much memory on every device."""
        changed = {id(group.device): replace(group.device, memory_bytes=memory_bytes) for group in self.groups}
        kinds = {number: changed[id(group.device)] for group in self.groups for number in group.members}
        return replace(self, devices=tuple(kinds[number] for number in range(self.count)))

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """The memory of every device."""
        return tuple(device.memory_bytes for device in self.devices)

    def has_room(self, peaks: Sequence[float]) -> bool:
        """Whether no peak, of one for every device, is above the device's memory."""
        return all(peak <= limit for peak, limit in zip(peaks, self.memory_bytes, strict=True))

    def fullest(self, peaks: Sequence[int]) -> tuple[int, int]:
        """Of one peak for every device the one that leaves the least room, and the memory of its device."""
        return max(zip(peaks, self.memory_bytes, strict=True), key=lambda pair: pair[0] / pair[1])

    @property
    def overlap(self) -> float:
        """The most of a gradient reduction that can run beside the backward pass: of the level that hides least."""
        return min((link.overlap for link in self.links), default=1.0)

    @property
    def slowdown(self) -> float:
        """Of a gradient reduction's seconds beside the backward pass, the share that this loses: of the worst level."""
        return max((link.slowdown for link in self.links), default=0.0)

    def link(self, devices: Sequence[int]) -> Link:
        """The innermost level that joins all of `devices`."""
        for level in self.links:
            if len({device // level.size for device in devices}) == 1:
                return level
        return self.links[-1]

    def describe(self) -> str:
        """Words for a report: `4 x a100-80g-sxm, nvlink3`, `desk: 2 x rtx4090 + 1 x cpu, pcie4`."""
        kinds = " + ".join(f"{len(group.members)} x {group.device.kind}" for group in self.groups)
        names = [link.name for link in self.links] if self.count > 1 else []
        return (f"{self.name}: " if self.name else "") + ", ".join((kinds, *names))
