"""What a profile keeps: measured parts of layers and measured messages, under the conditions they were measured in.

`Profile` is what every store can do; `SessionProfile` forgets when the process ends, `store.ProfileStore` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from parplan.cost_models.sampling import Measurement

__all__ = ["Conditions", "LinkEntry", "PartEntry", "Profile", "SessionProfile"]


@dataclass(frozen=True)
class Conditions:
    """What makes measurements comparable; entries made under other conditions are never mixed with these.

    Args:
        device: kind of device: a preset's name where it is one, else the device's own ("AMD EPYC, 1 thread").
        busy: how many logical devices of the machine worked at once.
        torch: version, without build ("2.13.0").
        cuda: version, empty on CPUs.
        flags: switches that change kernels, such as "tf32 matmul" (empty: torch's defaults).
    """

    device: str
    busy: int
    torch: str
    cuda: str = ""
    flags: str = ""

    def describe(self) -> str:
        """Words for a report: `h200-sxm, torch 2.11.0, cuda 12.8`."""
        words = [self.device, f"torch {self.torch}"]
        words += [f"cuda {self.cuda}"] if self.cuda else []
        words += [f"{self.busy} at once"] if self.busy > 1 else []
        return ", ".join(words + ([self.flags] if self.flags else []))


@dataclass(frozen=True)
class PartEntry:
    """A measured part of a layer.

    Args:
        signature: equal for parts that do the same work (trials.part_signature).
        family: its op class, equal for parts that run the same ops at any sizes.
        flops: arithmetic of its forward.
        nbytes: memory traffic of its forward, in bytes.
        measurement: the figures.
    """

    signature: str
    family: str
    flops: float
    nbytes: float
    measurement: Measurement


@dataclass(frozen=True)
class LinkEntry:
    """A measured communication.

    Args:
        backend: what carries it: "gloo", "nccl", or "local" (one process).
        kind: "copy", "all-gather", "reduce-scatter", "all-to-all", "all-reduce", or "all-reduce beside compute": what
            that takes from compute that goes on meanwhile.
        group: devices that take part.
        nbytes: bytes that one device receives (all-reduce: bytes of its tensor).
        seconds: median time, until the last device is done.
        spread: relative, as Measurement.spread.
        runs: how many.
        reference_s: what the reference kernel took in the same second.
        when: UTC, ISO 8601, to the second.
    """

    backend: str
    kind: str
    group: int
    nbytes: int
    seconds: float
    spread: float
    runs: int
    reference_s: float = 0.0
    when: str = ""


class Profile(Protocol):
    """Where measurements made under one set of conditions are kept."""

    def get(self, signature: str) -> Measurement | None:
        """The entry of a part, or None."""
        ...

    def origin(self, signature: str) -> str | None:
        """Where the entry came from: "" when it was measured here, else a name; None where there is no entry."""
        ...

    def put(self, entry: PartEntry) -> None:
        """Add or replace an entry."""
        ...

    def family(self, family: str) -> Sequence[PartEntry]:
        """All entries of an op class."""
        ...

    def all(self) -> Sequence[PartEntry]:
        """All entries of parts."""
        ...

    def put_link(self, entry: LinkEntry) -> None:
        """Add or replace a measured communication (same backend, kind, group and bytes)."""
        ...

    def links(self, backend: str) -> Sequence[LinkEntry]:
        """All communications measured with `backend`."""
        ...


class SessionProfile:
    """A profile that lasts as long as this process."""

    def __init__(self) -> None:
        self._entries: dict[str, PartEntry] = {}
        self._links: dict[tuple[str, str, int, int], LinkEntry] = {}

    def get(self, signature: str) -> Measurement | None:
        """The entry of a part, or None."""
        entry = self._entries.get(signature)
        return entry.measurement if entry is not None else None

    def origin(self, signature: str) -> str | None:
        """All entries were measured here."""
        return "" if signature in self._entries else None

    def put(self, entry: PartEntry) -> None:
        """Add or replace an entry."""
        self._entries[entry.signature] = entry

    def family(self, family: str) -> Sequence[PartEntry]:
        """All entries of an op class."""
        return [entry for entry in self._entries.values() if entry.family == family]

    def all(self) -> Sequence[PartEntry]:
        """All entries of parts."""
        return list(self._entries.values())

    def put_link(self, entry: LinkEntry) -> None:
        """Add or replace a measured communication."""
        self._links[entry.backend, entry.kind, entry.group, entry.nbytes] = entry

    def links(self, backend: str) -> Sequence[LinkEntry]:
        """All communications measured with `backend`."""
        return [entry for entry in self._links.values() if entry.backend == backend]
