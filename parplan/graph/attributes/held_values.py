"""Snapshots of Python objects: numbers, containers and settings in depth, for a later comparison.

A captured graph has such values as constants, so it serves only while they are the same.
"""

from __future__ import annotations

import enum
import logging
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from parplan.compat import without_modes
from parplan.graph.user_line import is_users

__all__ = [
    "LIMIT", "MISSING", "PLAIN", "Held", "PlainTensor", "contents", "is_watched", "name_of", "same", "walk",
]  # fmt: skip

# Containers that are looked into, over all attributes of one model; what lies beyond is not compared.
LIMIT = 2000
# Longest NumPy array that is compared by value.
_ARRAY_BYTES = 1 << 16
# Largest plain tensor whose values are put back when the forward has written them.
_COPIED_ELEMENTS = 1 << 20


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()

# Values that are compared by type and value. A captured graph holds them as constants.
PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    enum.Enum, range, slice,
)  # fmt: skip
_OPAQUE = (
    Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    torch.Generator, torch.ScriptObject, torch.ScriptFunction, logging.Logger,
)  # fmt: skip


def contents(value: Any) -> Mapping[Hashable, Any] | None:
    """The contents of a container by key, of an object by attribute; None for values that are not looked into."""
    if isinstance(value, (*PLAIN, *_OPAQUE)):
        return None
    if isinstance(value, (dict, types.MappingProxyType)):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    if isinstance(value, (bytearray, array)) and len(value) <= _ARRAY_BYTES:
        return {"values": bytes(value)}
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, random.Random):
        return {"getstate()": str(value.getstate())}
    if type(value).__module__.split(".")[0] == "numpy":
        if hasattr(value, "tobytes") and value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject:
            return {"dtype": str(value.dtype), "shape": value.shape, "values": value.tobytes()}
        generator = getattr(value, "bit_generator", None)
        if generator is not None:
            return {"bit_generator.state": str(generator.state)}
        return {"get_state()": str(value.get_state())} if hasattr(value, "get_state") else None
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        found |= {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
    # One without attributes may get some; types that are not Python's have contents that nobody sees.
    plain = all(kind is object or is_users(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")
                for kind in type(value).__mro__)  # fmt: skip
    return found if found or plain else None


@dataclass(frozen=True)
class Held:
    """The snapshot of one container.

    Args:
        path: as users write it, such as "encoder.scales".
        container: the container itself.
        keys, values: its contents.
        written: keys that the forward itself writes, which are not compared.
    """

    path: str
    container: Any
    keys: tuple[Hashable, ...]
    values: tuple[Any, ...]
    written: frozenset[Hashable] = frozenset()

    @property
    def unchanged(self) -> bool:
        """Whether it holds the very same objects; False also where that takes a closer look."""
        place = self.container
        if isinstance(place, (tuple, frozenset)):
            return True
        if self.written:
            return False
        if isinstance(place, set):
            return place == set(self.keys)
        if isinstance(place, list):
            return len(place) == len(self.values) and all(map(is_, place, self.values))
        if not isinstance(place, dict):
            place = getattr(place, "__dict__", {})
        same_size = len(place) == len(self.values)
        return same_size and all(map(is_, place, self.keys)) and all(map(is_, place.values(), self.values))

    @property
    def items(self) -> dict[Hashable, Any]:
        """The contents at the time of the snapshot, by key."""
        return dict(zip(self.keys, self.values, strict=True))

    def restore(self) -> None:
        """Give the container the contents of the snapshot again."""
        place = self.container
        if isinstance(place, (list, deque)):
            place.clear()
            place.extend(self.values)
        elif isinstance(place, dict):
            place.clear()
            place.update(self.items)
        elif isinstance(place, set):
            place.clear()
            place.update(self.keys)
        elif hasattr(place, "__dict__") and not isinstance(place, types.MethodType):
            place.__dict__.clear()
            place.__dict__.update(self.items)


def name_of(path: str, container: Any, key: Hashable) -> str:
    """The path of an entry of a container, as users write it."""
    indexed = isinstance(container, (dict, list, tuple, deque, set, frozenset))
    return f"{path}[{key!r}]" if indexed else f"{path}.{key}"


Written = Mapping[str, frozenset[Hashable]]


def walk(path: str, value: Any, found: dict[int, Held], written: Written | None = None) -> Iterator[tuple[str, Any]]:
    """Add what `value` holds, in depth, to `found`; yields what is not a container, with its path.

    `written` says, by path, which keys of a container the forward writes.
    """
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in found:
            continue
        holds = contents(value)
        if holds is None:
            yield path, value
        elif len(found) < LIMIT:
            ignored = (written or {}).get(path, frozenset())
            found[id(value)] = Held(path, value, tuple(holds), tuple(holds.values()), ignored)
            waiting += [(name_of(path, value, key), held) for key, held in holds.items() if key not in ignored]


def same(now: Any, before: Any, found: Mapping[int, Held], depth: int = 50) -> bool:
    """Whether `now` has the value that `before` had when `found` was taken."""
    if isinstance(before, PLAIN) or isinstance(now, PLAIN):
        return type(now) is type(before) and (now is before or now == before or (now != now and before != before))
    held = found.get(id(before))
    if held is None:
        return now is before
    holds, values = contents(now), held.items
    if type(now) is not type(before) or holds is None or depth == 0:
        return False
    if (holds.keys() ^ values.keys()) - held.written:
        return False
    return all(key in held.written or same(now, values[key], found, depth - 1) for key, now in holds.items())


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is neither parameter nor buffer, as it was.

    Args:
        path: as users write it.
        tensor: the tensor itself.
        version: how often it had been written in place.
        values: a copy, of one that is not large.
    """

    path: str
    tensor: Tensor
    version: int
    values: Tensor | None

    @staticmethod
    def of(path: str, tensor: Tensor) -> PlainTensor:
        """A snapshot of `tensor`."""
        small = tensor.numel() <= _COPIED_ELEMENTS
        with without_modes():
            return PlainTensor(path, tensor, tensor._version, tensor.detach().clone() if small else None)


def is_watched(known: Mapping[int, PlainTensor], decides: set[int], tensor: Tensor) -> bool:
    """Whether a branch may depend on a tensor from outside of the forward: its values are compared from now on."""
    decides.add(id(tensor))
    one = known.get(id(tensor))
    return one is not None and one.values is not None
