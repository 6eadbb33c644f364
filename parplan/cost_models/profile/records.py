"""Records of a profile: measured parts of layers and measured messages, by the conditions they were measured under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from parplan.cost_models.sampling import Measurement
from parplan.fields import counted

__all__ = ["Conditions", "Entry", "EntryGroup", "LinkEntry", "PartEntry", "SessionProfile", "scale_to_now"]


@dataclass(frozen=True)
class Conditions:
    """Conditions that make measurements comparable; entries made under different ones are never mixed.

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
        signature: equal for parts that do the same work (runnable_parts.part_signature).
        family: its op class, equal for parts that run the same ops at any sizes.
        flops: arithmetic of its forward.
        nbytes: memory traffic of its forward, in bytes.
        measurement: the figures.
        origin: name of the file it was imported from; "" where it was measured on this machine.
        gradients: which operands of its ops need a gradient, op after op, inputs before outputs.
    """

    signature: str
    family: str
    flops: float
    nbytes: float
    measurement: Measurement
    origin: str = ""
    gradients: tuple[bool, ...] = ()

    @property
    def key(self) -> tuple[str]:
        """Fields that identify the entry under its conditions."""
        return (self.signature,)


@dataclass(frozen=True)
class LinkEntry:
    """A measured communication.

    Args:
        backend: what carries it: "gloo", "nccl", or "local" (one process).
        kind: "copy", "all-gather", "reduce-scatter", "all-to-all", "all-reduce", or "all-reduce beside compute": what
            that takes from compute that goes on meanwhile.
        group: devices that take part.
        nbytes: bytes that one device receives (all-reduce: bytes of its tensor).
        seconds: mean time, until the last device is done.
        spread: relative, as Measurement.spread.
        runs: how many.
        reference_s: what the reference kernel took in the same second.
        when: UTC, ISO 8601, to the second.
        origin: as PartEntry.origin.
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
    origin: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Fields that identify the entry under its conditions."""
        return self.backend, self.kind, self.group, self.nbytes


def scale_to_now(measured: Measurement | LinkEntry, reference_s: float) -> float:
    """The reference kernel's time now, `reference_s`, over that when something was measured; 1 where one is unknown."""
    return reference_s / measured.reference_s if reference_s > 0 and measured.reference_s > 0 else 1.0


Entry = TypeVar("Entry", PartEntry, LinkEntry)


@dataclass(frozen=True)
class EntryGroup:
    """All entries that were measured under one set of conditions."""

    conditions: Conditions
    parts: tuple[PartEntry, ...] = ()
    links: tuple[LinkEntry, ...] = ()

    @property
    def entries(self) -> Sequence[PartEntry | LinkEntry]:
        """Parts, then links."""
        return [*self.parts, *self.links]

    @property
    def last_when(self) -> str:
        """When the last of them was measured (UTC, ISO 8601; "" unknown)."""
        times = [*(part.measurement.when for part in self.parts), *(link.when for link in self.links)]
        return max(times, default="")

    def describe(self) -> str:
        """Words for a report: `212 parts and 1 link`."""
        numbers = ((len(self.parts), "part"), (len(self.links), "link"))
        return " and ".join(counted(number, word) for number, word in numbers if number)


class SessionProfile:
    """The entries that this process knows, which prices are read from; it begins with those of `group`."""

    def __init__(self, group: EntryGroup | None = None) -> None:
        self._entries = {entry.key: entry for entry in (group.entries if group is not None else ())}

    def get(self, signature: str) -> PartEntry | None:
        """The entry of a part, or None."""
        found = self._entries.get((signature,))
        return found if isinstance(found, PartEntry) else None

    def family(self, family: str) -> Sequence[PartEntry]:
        """All entries of an op class."""
        return [entry for entry in self.all() if entry.family == family]

    def all(self) -> Sequence[PartEntry]:
        """All entries of parts."""
        return [entry for entry in self._entries.values() if isinstance(entry, PartEntry)]

    def links(self, backend: str) -> Sequence[LinkEntry]:
        """All communications measured with `backend`."""
        links = (entry for entry in self._entries.values() if isinstance(entry, LinkEntry))
        return [entry for entry in links if entry.backend == backend]

    def put(self, *entries: PartEntry | LinkEntry) -> None:
        """Add entries, or replace those with the same keys: all of them or none."""
        self._entries |= {entry.key: entry for entry in entries}
