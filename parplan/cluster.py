"""The devices a plan is for and the links between them.

Links come in levels: devices 0..size-1 share the innermost level's switch, groups of those share
the next level, and so on. A cluster says nothing of models; presets live in cost_models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parplan.errors import ClusterError

__all__ = ["Cluster", "Device", "Link"]


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
    """

    kind: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    bandwidth_bytes_per_s: float
    launch_s: float
    source: str
    estimated: bool = True


@dataclass(frozen=True)
class Link:
    """One level of links, one direction per device.

    Args:
        name: "nvlink 3", "pcie 4.0 x16", ...
        size: how many consecutive devices hang on one switch of this level.
        latency_s: time before the first byte arrives.
        bandwidth_bytes_per_s: per device and direction when only one pair talks.
        contention: factor on bandwidth (<= 1) when all devices talk across this level at once.
        source: where these numbers come from.
        estimated: True when any of them is unverified.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    contention: float = 1.0
    source: str = ""
    estimated: bool = True


@dataclass(frozen=True)
class Cluster:
    """`count` equal devices and the levels of links between them, innermost first.

    Raises:
        ClusterError: no device, or the outermost level does not join all devices.
    """

    device: Device
    count: int
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ClusterError(f"{self.count} devices: a plan needs at least 1; ask for --gpus 1 or more")
        if self.count > 1 and (not self.links or self.links[-1].size < self.count):
            reach = self.links[-1].size if self.links else 1
            raise ClusterError(f"the outermost link joins {reach} devices of {self.count}; add a level that joins all")

    def link(self, devices: Sequence[int]) -> Link:
        """The innermost level that joins all of `devices`."""
        for level in self.links:
            if len({device // level.size for device in devices}) == 1:
                return level
        return self.links[-1]

    def describe(self) -> str:
        """Words for a report: `4 x a100-80g-sxm, nvlink 3`."""
        names = ", ".join(link.name for link in self.links) if self.count > 1 else ""
        return f"{self.count} x {self.device.kind}" + (f", {names}" if names else "")
