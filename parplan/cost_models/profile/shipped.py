"""Profiles that come with parplan, in `cost_models/profiles/`: read only, and behind what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parplan.cost_models.profile.fields import LINKS, Group, Kept
from parplan.cost_models.profile.mismatches import Summary, strangers
from parplan.cost_models.profile.records import Conditions, LinkEntry, PartEntry, Profile
from parplan.cost_models.profile.text import read_profile
from parplan.cost_models.sampling import Measurement

__all__ = ["FOLDER", "WithShipped", "shipped", "shipped_strangers", "with_shipped"]

FOLDER = Path(__file__).parents[1] / "profiles"


def shipped(folder: Path = FOLDER) -> list[Group]:
    """All shipped entries; their origin names the file, such as "h200-sxm (shipped)".

    Raises:
        ProfileError: a file there is no profile.
    """
    return [group for file in sorted(folder.glob("*.json")) for group in read_profile(file, f"{file.stem} (shipped)")]


def with_shipped(own: Profile, conditions: Conditions, folder: Path = FOLDER) -> Profile:
    """`own`, and behind it what was shipped under exactly these conditions; `own` itself where that is nothing.

    Raises:
        ProfileError: a file in `folder` is no profile.
    """
    groups = [group for group in shipped(folder) if group.conditions == conditions]
    return WithShipped(own, groups) if groups else own


def shipped_strangers(conditions: Conditions, folder: Path = FOLDER) -> list[str]:
    """Sentences on shipped entries that were made under other conditions, and so are not used.

    Raises:
        ProfileError: a file in `folder` is no profile.
    """
    return strangers([_summary(group) for group in shipped(folder)], conditions, "shipped")


class WithShipped:
    """A profile that finds in shipped entries what it does not have itself; they are never written."""

    def __init__(self, own: Profile, groups: Sequence[Group]) -> None:
        self._own = own
        # reversed: of two files with the same entry the first counts
        self._parts: dict[str, Kept[PartEntry]] = {
            kept.entry.signature: kept for group in reversed(groups) for kept in group.parts
        }
        self._links = {LINKS.key_of(kept.entry): kept.entry for group in reversed(groups) for kept in group.links}

    def get(self, signature: str) -> Measurement | None:
        """The entry of a part, or None."""
        own, kept = self._own.get(signature), self._parts.get(signature)
        return own if own is not None or kept is None else kept.entry.measurement

    def origin(self, signature: str) -> str | None:
        """Where the entry came from: "" when it was measured here, else a name; None where there is no entry."""
        own, kept = self._own.origin(signature), self._parts.get(signature)
        return own if own is not None or kept is None else kept.origin

    def put(self, entry: PartEntry) -> None:
        """Add or replace an entry of one's own."""
        self._own.put(entry)

    def family(self, family: str) -> Sequence[PartEntry]:
        """All entries of an op class, one's own first."""
        own = self._own.family(family)
        return [*own, *(entry for entry in self._not_among(own) if entry.family == family)]

    def all(self) -> Sequence[PartEntry]:
        """All entries of parts, one's own first."""
        own = self._own.all()
        return [*own, *self._not_among(own)]

    def put_link(self, entry: LinkEntry) -> None:
        """Add or replace a measured communication of one's own."""
        self._own.put_link(entry)

    def links(self, backend: str) -> Sequence[LinkEntry]:
        """All communications measured with `backend`, one's own first."""
        own = list(self._own.links(backend))
        known = {LINKS.key_of(entry) for entry in own}
        more = (entry for key, entry in self._links.items() if key not in known)
        return own + [entry for entry in more if entry.backend == backend]

    def _not_among(self, own: Sequence[PartEntry]) -> list[PartEntry]:
        known = {entry.signature for entry in own}
        return [kept.entry for signature, kept in self._parts.items() if signature not in known]


def _summary(group: Group) -> Summary:
    times = sorted(
        when
        for when in (
            *(part.entry.measurement.when for part in group.parts),
            *(link.entry.when for link in group.links),
        )
        if when
    )
    first, last = (times[0], times[-1]) if times else ("", "")
    return Summary(group.conditions, len(group.parts), len(group.links), first, last)
