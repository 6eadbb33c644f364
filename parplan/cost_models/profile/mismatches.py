"""Notes on stored measurements that are not used: which of their conditions differ, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.cost_models.profile.records import Conditions, EntryGroup
from parplan.fields import counted

__all__ = ["EntryCounts", "mismatches"]


@dataclass(frozen=True)
class EntryCounts:
    """Numbers of parts and links measured under some conditions, and the last time (UTC, ISO 8601; "" unknown)."""

    conditions: Conditions
    parts: int
    links: int
    last_when: str

    @classmethod
    def of(cls, group: EntryGroup) -> EntryCounts:
        """The counts of a group's entries."""
        times = [*(part.measurement.when for part in group.parts), *(link.when for link in group.links)]
        return cls(group.conditions, len(group.parts), len(group.links), max(times, default=""))

    def describe(self) -> str:
        """Words for a report: `212 parts and 1 link`."""
        return " and ".join(counted(n, word) for n, word in ((self.parts, "part"), (self.links, "link")) if n)


def mismatches(stored: Sequence[EntryCounts], conditions: Conditions) -> list[str]:
    """Notes on stored measurements that are ignored because device, torch, CUDA or flags differ from `conditions`.

    Those of the same device one by one, `212 parts of this device were measured with torch 2.11.0, here is 2.13.0:
    stale, not used; run parplan profile again`; other devices are only named, and only where this one is missing.
    """
    same_device = [counts for counts in stored if counts.conditions.device == conditions.device]
    others = sorted({counts.conditions.device for counts in stored} - {conditions.device})
    if others and not same_device:
        return [f"only profiles of other devices ({', '.join(others)}) are here, none of {conditions.device}"]
    return [_note(counts, conditions) for counts in same_device if counts.conditions != conditions]


def _note(counts: EntryCounts, now: Conditions) -> str:
    then, usual = counts.conditions, "torch's default switches"
    pairs = (
        (then.torch, now.torch, f"with torch {then.torch}, here is {now.torch}"),
        (then.cuda, now.cuda, f"with {f'cuda {then.cuda}' if then.cuda else 'no cuda'}, here is {now.cuda or 'none'}"),
        (
            then.busy,
            now.busy,
            f"with {counted(then.busy, 'device')} at once, here {'is' if now.busy == 1 else 'are'} {now.busy}",
        ),
        (then.flags, now.flags, f"with {then.flags or usual}, here with {now.flags or usual}"),
    )
    differences = "; ".join(words for old, new, words in pairs if old != new)
    stale = replace(then, torch=now.torch, cuda=now.cuda) != then
    verdict = "stale, not used; run parplan profile again" if stale else "not used; run parplan profile as you run now"
    were = "was" if counts.parts + counts.links == 1 else "were"
    return f"{counts.describe()} of this device {were} measured {differences}: {verdict}"
