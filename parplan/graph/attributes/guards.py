"""Whether the attributes that a captured forward has read are still what they were: looked at before every call.

Nearly always nothing has changed, and each of them is the very object it was: that takes one pass over flat tables, in
microseconds. Only where an object is another one are values compared.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import repeat
from operator import is_, xor
from typing import Any, Protocol

import torch
from torch import Tensor

from parplan.graph.attributes.held_values import MISSING, PLAIN, Held, Written, contents, name_of, same, walk
from parplan.graph.attributes.number_inputs import Number, is_number
from parplan.graph.user_line import is_users

__all__ = ["ClassPlace", "Entry", "Guards", "ValuesPlace", "VersionPlace", "names_of"]


# Containers within containers around a number.
DEEPEST = 20


# Values that an error shows.
TOLD_VALUES = 12
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
class VersionPlace:
    """How often a tensor was written in place."""

    tensor: Tensor

    def get(self, key: str, default: Any, /) -> Any:
        """The count."""
        return self.tensor._version


@dataclass(frozen=True)
class ValuesPlace:
    """Whether a tensor has the values that it had: written through `.data`, a view or NumPy, no count tells of it."""

    tensor: Tensor
    values: Tensor

    def get(self, key: str, default: Any, /) -> Any:
        """Whether it has."""
        return torch.equal(self.tensor, self.values)


@dataclass(frozen=True)
class Entry:
    """An attribute: where it is kept, and its value.

    Args:
        path: what users call it.
        place: the attributes of a module, or of a class.
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
        self._others = [entry for entry in entries if type(entry.place) is not dict]
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
        return (*self._own, *self._others)

    @property
    def hold(self) -> bool:
        """Whether nothing has changed."""
        found = map(dict.get, self._places, self._keys, repeat(MISSING))  # type: ignore[arg-type]
        if not all(type(number.value) is number.kind for number in self._numbers):
            return False
        others = all(entry.place.get(entry.key, MISSING) is entry.value for entry in self._others)
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
    def text(self) -> str:
        """The first plain values among them."""
        values = [f"{e.path}={e.value!r}" for e in self._own if isinstance(e.value, PLAIN)]
        values += [f"{number.path}={number.value!r}" for number in self._numbers]
        return ", ".join(values[:TOLD_VALUES])

    @property
    def digest(self) -> int:
        """The same for the same plain values, in every process."""
        if self._told is None:
            entries = [(entry.path, entry.value) for entry in self._own]
            for held in self._held.values():
                items = held.items.items()
                entries += [(name_of(held.path, held.container, k), v) for k, v in items if k not in held.written]
            self._told = _digest((path, value) for path, value in entries if isinstance(value, _TOLD))
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
        if held is None or holds is None or isinstance(now, (tuple, set, frozenset)) or len(keys) > DEEPEST:
            return
        for key, value in held.items.items():
            if key in holds and key not in held.written and not same(holds[key], value, self._held):
                inner = name_of(path, now, key)
                yield from self._numbers_in(place, (*keys, key), inner, path, holds[key], value)


@dataclass(frozen=True)
class CellPlace:
    """A variable of a function around."""

    cell: types.CellType

    def get(self, key: str, default: Any, /) -> Any:
        """Its value."""
        try:
            return self.cell.cell_contents
        except ValueError:  # not assigned yet
            return default


def names_of(function: Any, seen: set[int]) -> Iterator[Entry]:
    """Global and closure variables of a user's function and of those it calls; `seen` functions are left out."""
    waiting = [function]
    while waiting:
        code = getattr(waiting[-1], "__code__", None)
        function = waiting.pop()
        if code is None or id(code) in seen or not is_users(code.co_filename):
            continue
        seen.add(id(code))
        home = function.__globals__
        outside = {name: (home, home[name]) for name in _names(code) if name in home}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            outside[name] = (CellPlace(cell), CellPlace(cell).get("", None))
        for name, (place, value) in outside.items():
            if isinstance(value, _TOLD):
                yield Entry(f"{function.__module__}.{name}", place, name, value)
            elif isinstance(value, types.FunctionType):
                waiting.append(value)


def _names(code: types.CodeType) -> set[str]:
    """All that it names, and what functions within it name."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
