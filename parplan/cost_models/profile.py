"""Where measurements are kept: what every store can do, and the one that forgets when the process ends."""

from __future__ import annotations

from typing import Protocol

from parplan.cost_models.sampling import Measurement

__all__ = ["Profile", "SessionProfile"]


class Profile(Protocol):
    """Where measurements are kept, by the signature of the part (see trials.part_signature)."""

    def get(self, signature: str) -> Measurement | None:
        """The entry, or None."""
        ...

    def put(self, signature: str, measurement: Measurement) -> None:
        """Add or replace an entry."""
        ...


class SessionProfile:
    """A profile that lasts as long as this process."""

    def __init__(self) -> None:
        self._entries: dict[str, Measurement] = {}

    def get(self, signature: str) -> Measurement | None:
        """The entry, or None."""
        return self._entries.get(signature)

    def put(self, signature: str, measurement: Measurement) -> None:
        """Add or replace an entry."""
        self._entries[signature] = measurement
