"""Says why measurements that are kept were not used: what of the conditions differs, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.cost_models.profile.records import Conditions

__all__ = ["Summary", "strangers"]


@dataclass(frozen=True)
class Summary:
    """How much was measured under some conditions, and between which times (UTC, ISO 8601; "" where unknown)."""

    conditions: Conditions
    parts: int
    links: int
    first_when: str
    last_when: str

    def describe(self) -> str:
        """Words for a report: `212 parts and 1 link`."""
        return " and ".join(_counted(n, word) for n, word in ((self.parts, "part"), (self.links, "link")) if n)


def strangers(kept: Sequence[Summary], conditions: Conditions, whose: str = "here") -> list[str]:
    """Sentences on entries that are kept but were not made under `conditions`; empty when there are none.

    Those of the same device one by one, `212 parts of this device were measured with torch 2.11.0, here is 2.13.0:
    stale, not used; run parplan profile again`; other devices are only named, and only where this one is missing.

    Args:
        whose: where they are kept, as in "only profiles of other devices (h200-sxm) are here".
    """
    mine = [summary for summary in kept if summary.conditions.device == conditions.device]
    others = sorted({summary.conditions.device for summary in kept} - {conditions.device})
    if others and not mine:
        return [f"only profiles of other devices ({', '.join(others)}) are {whose}, none of {conditions.device}"]
    return [_note(summary, conditions) for summary in mine if summary.conditions != conditions]


def _note(summary: Summary, here: Conditions) -> str:
    there = summary.conditions
    stale = replace(there, torch=here.torch, cuda=here.cuda) != there
    verdict = "stale, not used; run parplan profile again" if stale else "not used; run parplan profile as you run now"
    were = "was" if summary.parts + summary.links == 1 else "were"
    return f"{summary.describe()} of this device {were} measured {'; '.join(_differences(there, here))}: {verdict}"


def _differences(there: Conditions, here: Conditions) -> list[str]:
    pairs = (
        (there.torch, here.torch, f"with torch {there.torch}, here is {here.torch}"),
        (there.cuda, here.cuda, f"with {_cuda(there)}, here is {here.cuda or 'none'}"),
        (
            there.busy,
            here.busy,
            f"with {_devices(there)} at once, here {'is' if here.busy == 1 else 'are'} {here.busy}",
        ),
        (there.flags, here.flags, f"with {_flags(there)}, here with {_flags(here)}"),
    )
    return [words for old, new, words in pairs if old != new]


def _cuda(conditions: Conditions) -> str:
    return f"cuda {conditions.cuda}" if conditions.cuda else "no cuda"


def _devices(conditions: Conditions) -> str:
    return _counted(conditions.busy, "device")


def _flags(conditions: Conditions) -> str:
    return conditions.flags or "torch's default switches"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
