"""Whether the attributes that a captured forward has read are still what they were: looked at before every call.

Nearly always nothing has changed, and each of them is the very object it was: that takes one pass over flat tables, in
microseconds. Only where an object is another one are values compared.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import repeat
from operator import is_, xor
from types import MethodType
from typing import Any, Protocol

from parplan.graph.attributes.held_values import MISSING, Held, Written, contents, name_of, same, walk
from parplan.graph.attributes.number_inputs import Number, is_number

__all__ = ["ClassPlace", "Computed", "Entry", "Guards", "Place"]


# Containers within containers around a number.
DEEPEST = 20


# Values whose text is the same in every process.
_TOLD = (bool, int, float, complex, str, bytes, type(None))


def _digest(values: Iterable[tuple[str, Any]]) -> int:
    """In any order."""
    return reduce(xor, (zlib.crc32(repr(value).encode()) for value in values), 0)


class Place(Protocol):
    """Where attributes are kept: of a module, or of a class."""

    def get(self, key: Any, default: Any, /) -> Any:
        """An attribute, or `default`."""


@dataclass(frozen=True)
class ClassPlace:
    """The attributes of a class and of its bases."""

    kind: type

    def get(self, key: str, default: Any, /) -> Any:
        """The first class's that has it."""
        return next((vars(kind)[key] for kind in self.kind.__mro__ if key in vars(kind)), default)


@dataclass(frozen=True)
class Computed:
    """A value that is computed whenever it is looked at, under any name."""

    value: Callable[[], Any]

    def get(self, key: Any, default: Any, /) -> Any:
        """The value of now."""
        return self.value()


@dataclass(frozen=True)
class Entry:
    """An attribute: where it is kept, and its value.

    Args:
        path: what users call it.
        place: the attributes of a module, or of a class, or how it is computed.
        key: its name there.
        value: MISSING where it was not there.
    """

    path: str
    place: Place
    key: Hashable
    value: Any


class Guards:
    """The attributes that one captured forward has read.

    Args:
        entries: one each.
        written: keys of containers, by path, that the forward writes: they are not compared.
        numbers: inputs of the graph, which are only compared by type.
    """

    def __init__(
        self, entries: Sequence[Entry] = (), written: Written | None = None, numbers: Sequence[Number] = ()
    ) -> None:
        held: dict[int, Held] = {}
        for entry in entries:
            list(walk(entry.path, entry.value, held, written))
        self._written = written
        self._numbers = numbers
        own = [entry for entry in entries if type(entry.place) is dict]
        # A class's own table is quicker than a look through its bases, where it hands values out as they are.
        others = [(entry, _of_class(entry)) for entry in entries if type(entry.place) is not dict]
        self._others = [entry for entry, kind in others if kind is None]
        self._of_classes = [entry for entry, kind in others if kind is not None]
        self._kinds = [kind for _, kind in others if kind is not None]
        self._class_keys = [str(entry.key) for entry in self._of_classes]
        self._class_values = [entry.value for entry in self._of_classes]
        self._own = own
        self._places = [entry.place for entry in own]
        self._keys = [entry.key for entry in own]
        self._values = [entry.value for entry in own]
        self._held = held
        self._told: int | None = None
        self._mutable = [h for h in held.values() if not isinstance(h.container, (tuple, frozenset))]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All attributes, with the values that the graph was captured with."""
        return (*self._own, *self._others, *self._of_classes)

    @property
    def hold(self) -> bool:
        """Whether nothing has changed."""
        found = map(dict.get, self._places, self._keys, repeat(MISSING))  # type: ignore[arg-type]
        if not all(type(number.value) is number.kind for number in self._numbers):
            return False
        others = all(entry.place.get(entry.key, MISSING) is entry.value for entry in self._others)
        of_classes = map(getattr, self._kinds, self._class_keys, repeat(MISSING))
        others = others and all(map(is_, of_classes, self._class_values))
        stale = [held.container for held in self._mutable if not held.unchanged]
        if not all(same(container, container, self._held) for container in stale):
            return False
        if all(map(is_, found, self._values)) and others:
            return True
        if next(self.changed(), None) is not None:
            return False
        # Equal values, other objects: from here on these are the ones to see again.
        entries = [replace(entry, value=entry.place.get(entry.key, MISSING)) for entry in self.entries]
        self.__init__(entries, self._written, self._numbers)  # type: ignore[misc]
        return True

    def changed(self) -> Iterator[Entry]:
        """The attributes that are another value now."""
        for entry in self.entries:
            if not same(entry.place.get(entry.key, MISSING), entry.value, self._held):
                yield entry

    @property
    def told(self) -> list[tuple[str, Any]]:
        """The plain values among them by path, which processes can compare."""
        return [*self._plain(), *((number.path, number.value) for number in self._numbers)]

    def _plain(self) -> list[tuple[str, Any]]:
        entries = [(entry.path, entry.value) for entry in self._own]
        for held in self._held.values():
            items = held.items.items()
            entries += [(name_of(held.path, held.container, k), v) for k, v in items if k not in held.written]
        return [(path, value) for path, value in entries if isinstance(value, _TOLD)]

    @property
    def digest(self) -> int:
        """The same for the same plain values, in every process."""
        if self._told is None:
            self._told = _digest(self._plain())
        return self._told ^ _digest((number.path, number.value) for number in self._numbers)

    def changed_numbers(self) -> Iterator[tuple[Number, Any]]:
        """Numbers that have changed, with what they were; other changes beside them do not count."""
        for entry in self.changed():
            if type(entry.place) is dict and entry.value is not MISSING:
                now = entry.place.get(entry.key, MISSING)
                yield from self._numbers_in(entry.place, (entry.key,), entry.path, "", now, entry.value)

    def _numbers_in(
        self, place: dict[Any, Any], keys: tuple[Hashable, ...], path: str, holder: str, now: Any, before: Any
    ) -> Iterator[tuple[Number, Any]]:
        if is_number(before):
            if type(now) is type(before):
                yield Number(path, holder, place, keys, type(now)), before
            return
        held, holds = self._held.get(id(before)), contents(now)
        if held is None or holds is None or isinstance(now, (tuple, set, frozenset, MethodType)) or len(keys) > DEEPEST:
            return
        if not isinstance(now, (dict, list, deque)) and not hasattr(now, "__dict__"):
            return  # `__slots__`
        for key, value in held.items.items():
            if key in holds and key not in held.written and not same(holds[key], value, self._held):
                inner = name_of(path, now, key)
                yield from self._numbers_in(place, (*keys, key), inner, path, holds[key], value)


def _of_class(entry: Entry) -> type | None:
    """The class that has the value of an entry as an attribute."""
    kind = entry.place.kind if isinstance(entry.place, ClassPlace) else None
    return kind if kind is not None and getattr(kind, str(entry.key), MISSING) is entry.value else None
