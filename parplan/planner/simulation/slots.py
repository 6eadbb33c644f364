"""Slots of a program as the tasks are listed after which they are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

__all__ = ["Slots", "Tasks"]

Tasks = tuple[int, ...]


class Slots:
    """Tasks after which the slots of a program, or their gradients, are there: per slot, those of every giver."""

    def __init__(self) -> None:
        self._tasks: dict[str, list[Mapping[int, int]]] = defaultdict(list)

    def add(self, slot: str, given: Mapping[int, int]) -> None:
        """A giver's tasks by device."""
        self._tasks[slot].append(given)

    def alias(self, slot: str, other: str) -> None:
        """One slot is there when the other is."""
        self._tasks[slot] += self._tasks[other]

    def at(self, slot: str, device: int) -> Tasks:
        """Tasks of a device; all of a giver that has none there."""
        return tuple(
            task
            for given in self._tasks[slot]
            for task in ((given[device],) if device in given else dict.fromkeys(given.values()))
        )

    def whole(self, slot: str) -> Tasks:
        """The tasks of all devices."""
        return tuple(task for given in self._tasks[slot] for task in dict.fromkeys(given.values()))
