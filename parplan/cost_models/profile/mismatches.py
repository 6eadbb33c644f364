"""Notes on stored measurements that are not used: which of their conditions differ, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parplan.cost_models.profile.records import Conditions, EntryGroup
from parplan.fields import counted

__all__ = ["mismatches"]


def mismatches(stored: Sequence[EntryGroup], conditions: Conditions) -> list[str]:
    """Notes on stored measurements that are ignored because device, torch, CUDA or flags differ from `conditions`.

    Those of the same device one by one, `212 parts of this device were measured with torch 2.11.0, here is 2.13.0:
    stale, not used; run parplan profile again`; other devices are only named, and only where this one is missing.
    """
    same_device = [group for group in stored if group.conditions.device == conditions.device]
    others = sorted({group.conditions.device for group in stored} - {conditions.device})
    if others and not same_device:
        return [f"only profiles of other devices ({', '.join(others)}) are here, none of {conditions.device}"]
    return [_note(group, conditions) for group in same_device if group.conditions != conditions]


def _note(group: EntryGroup, now: Conditions) -> str:
    then, usual = group.conditions, "torch's default switches"
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
    were = "was" if len(group.entries) == 1 else "were"
    return f"{group.describe()} of this device {were} measured {differences}: {verdict}"
