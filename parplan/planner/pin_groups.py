"""Pins that are priced together: a layer file pins every layer, and a person asks what its towers cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parplan.pins import Pin

__all__ = ["MANY", "PinGroup", "grouped"]

MANY = 8
"""More pins than this are priced together where they come from one place and spread layers alike."""


@dataclass(frozen=True)
class PinGroup:
    """Pins that are priced together: one, or those of one origin that ask for as many replicas and shards."""

    pins: tuple[Pin, ...]

    def describe(self) -> str:
        """The pin, or what all of them say: `replicas:1 shards:1 gpu:0/1/2/3`."""
        if len(self.pins) == 1:
            return self.pins[0].describe()
        every = [dict(word.split(":", 1) for word in pin.words.split()) for pin in self.pins]
        said = {word: list(dict.fromkeys(own[word] for own in every if word in own)) for one in every for word in one}
        return " ".join(f"{word}:{'/'.join(values)}" for word, values in said.items())

    @property
    def origin(self) -> str:
        """Where they were given; of several, without the place in the file."""
        return self.pins[0].origin if len(self.pins) == 1 else _place(self.pins[0])


def grouped(pins: Sequence[Pin]) -> tuple[PinGroup, ...]:
    """Every pin by itself, or where there are many those of one origin that spread layers alike together."""
    if len(pins) <= MANY:
        return tuple(PinGroup((pin,)) for pin in pins)
    found: dict[tuple[object, ...], list[Pin]] = {}
    for pin in pins:
        found.setdefault((_place(pin), pin.replicas, pin.shards, pin.axis), []).append(pin)
    return tuple(PinGroup(tuple(own)) for own in found.values())


def _place(pin: Pin) -> str:
    return pin.origin.partition(" [")[0]
