"""Entries of profiles to test with, made by hand or drawn."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from parplan.cost_models.profile.records import Conditions, EntryGroup, LinkEntry, PartEntry
from parplan.cost_models.sampling import Measurement

__all__ = ["CPU", "H200", "group", "groups", "link", "part"]

CPU = Conditions("AMD EPYC, 1 thread", 1, "2.13.0")
H200 = Conditions("h200-sxm", 1, "2.11.0", "12.8", "tf32 matmul")


def part(signature: str, forward_s: float = 1e-3, when: str = "2025-06-01T12:00:00+00:00") -> PartEntry:
    """A part of the family that its signature starts with."""
    measurement = Measurement(forward_s, 2e-3, 0.01, 7, 5e-4, when)
    return PartEntry(signature, signature.split()[0], 2e9, 3e6, measurement)


def link(nbytes: int, seconds: float = 1e-4, when: str = "2025-06-01T12:00:00Z") -> LinkEntry:
    """An all-reduce of gloo over two devices."""
    return LinkEntry("gloo", "all-reduce", 2, nbytes, seconds, 0.02, 9, 5e-4, when)


def group(conditions: Conditions, *entries: PartEntry | LinkEntry, origin: str = "") -> EntryGroup:
    """What was measured under `conditions`."""
    parts = tuple(replace(entry, origin=origin) for entry in entries if isinstance(entry, PartEntry))
    links = tuple(replace(entry, origin=origin) for entry in entries if isinstance(entry, LinkEntry))
    return EntryGroup(conditions, parts, links)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
_SECONDS = st.floats(0, 1e6)
_WHEN = st.one_of(st.just(""), st.datetimes().map(lambda at: at.isoformat(timespec="seconds") + "+00:00"))
_WHOLE = st.integers(0, 2**62)
_SOME = st.integers(1, 2**62)
_SPREAD = st.floats(0, 10)

_MEASUREMENTS = st.builds(Measurement, _SECONDS, _SECONDS, _SPREAD, _SOME, _SECONDS, _WHEN)
_SIGNATURE = st.lists(_TEXT, min_size=1, max_size=3).map("\n".join)
_AMOUNT, _GRADIENTS = st.floats(0, 1e30), st.lists(st.booleans(), max_size=3).map(tuple)
_PARTS = st.builds(PartEntry, _SIGNATURE, _TEXT, _AMOUNT, _AMOUNT, _MEASUREMENTS, _NAME, _GRADIENTS)
_LINKS = st.builds(LinkEntry, _NAME, _NAME, _SOME, _WHOLE, _SECONDS, _SPREAD, _SOME, _SECONDS, _WHEN, _NAME)
_CONDITIONS = st.builds(Conditions, _NAME, st.integers(1, 99), _NAME, _TEXT, _TEXT)
_GROUPS = st.builds(
    EntryGroup,
    _CONDITIONS,
    st.lists(_PARTS, min_size=1, max_size=3, unique_by=lambda entry: entry.signature).map(tuple),
    st.lists(_LINKS, max_size=3, unique_by=lambda entry: entry.nbytes).map(tuple),
)

# Groups as `ProfileStore.groups` gives them: sorted, each under conditions of its own.
groups = st.lists(_GROUPS, max_size=3, unique_by=lambda group: group.conditions).map(
    lambda found: [_sorted(group) for group in sorted(found, key=lambda group: tuple(vars(group.conditions).values()))]
)


def _sorted(group: EntryGroup) -> EntryGroup:
    parts = tuple(sorted(group.parts, key=lambda entry: entry.key))
    links = sorted(group.links, key=lambda entry: entry.key)
    return EntryGroup(group.conditions, parts, tuple(links))
