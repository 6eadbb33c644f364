"""Variables that the code of a forward names without a module in front: global ones, those of functions around it, of
the user's other files, and of classes. Each is an entry for a guard.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, TypeGuard

from torch import Tensor, nn

from parplan.compat import pytree
from parplan.graph.attributes.constant_values import constant_value
from parplan.graph.attributes.first_call import short
from parplan.graph.attributes.guards import ClassPlace, Entry, Place
from parplan.graph.attributes.held_values import MISSING, PLAIN, Held, same, walk
from parplan.graph.user_line import is_users

__all__ = ["NamedValues", "attributes_named", "class_values", "named_values"]

# Containers in one variable, and entries of one, beyond which it is not compared.
_CONTAINERS, _ENTRIES = 100, 1000
_METHODS = (types.FunctionType, property, classmethod, staticmethod)


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


class NamedValues:
    """Variables that the code of one forward names.

    Args:
        held: snapshots of the containers in them are added here.
    """

    def __init__(self, held: dict[int, Held]) -> None:
        self._held = held
        self._seen: set[Hashable] = set()
        self._entries: list[Entry] = []
        self._caches: list[tuple[Any, int]] = []

    def of(self, function: Any, owner: type | None = None) -> Iterator[Entry]:
        """Those of a function or method that were not named before.

        Args:
            owner: the class of the module whose method it is.
        """
        for entry in named_values(function, owner, self._seen):
            self._entries.append(entry)
            list(walk(entry.path, entry.value, self._held))
            self._watch_cache(entry.value)
            yield entry
        self._watch_cache(function)

    def _watch_cache(self, function: Any) -> None:
        if hasattr(function, "cache_clear") and hasattr(function, "cache_info"):
            self._caches.append((function, function.cache_info().misses))

    def changes(self) -> Iterator[tuple[str, str]]:
        """Variables that are another value now, and their changes in words; new entries of a memo are none."""
        for entry in self._entries:
            now = entry.place.get(entry.key, MISSING)
            if now is not entry.value:
                yield entry.path, f"changes it from {short(entry.value)} to {short(now)}"
            elif not same(now, now, self._held) and not self._remembers(now):
                yield entry.path, "changes the values in it"

    def _remembers(self, value: Any) -> bool:
        """Whether a dictionary has the entries that it had, and new ones that are the same at every call."""
        held = self._held.get(id(value))
        if held is None or not isinstance(value, dict) or not all(value.get(k) is v for k, v in held.items.items()):
            return False
        leaves = pytree.tree_leaves([value[key] for key in value.keys() - set(held.keys)])
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        made = all(constant_value(tensor, lambda tensor: True) is not None for tensor in tensors)
        return made and all(isinstance(leaf, (*PLAIN, Tensor)) for leaf in leaves)

    def restore(self) -> None:
        """Put the variables back, and forget what cached functions have returned since."""
        for entry in self._entries:
            if isinstance(entry.place, dict) and entry.place.get(entry.key, MISSING) is not entry.value:
                entry.place[entry.key] = entry.value
        for function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()


def named_values(function: Any, owner: type | None, seen: set[Hashable]) -> Iterator[Entry]:
    """Variables that a user's function names, and those that it calls; what is in `seen` is left out.

    Args:
        function: or a property or method.
        owner: the class of the module whose method it is: attributes of it that code names, `type(self).rate`, count.
    """
    waiting = [function]
    while waiting:
        function = _plain(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is None or (code, owner) in seen or not is_users(code.co_filename):
            continue
        seen.add((code, owner))
        home, (globals_, attributes) = function.__globals__, _names(code)
        found: list[tuple[str, Place, str]] = [(str(function.__module__), home, name) for name in globals_]
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found += [(str(function.__module__), CellPlace(cell), name) for name, cell in cells]
        if owner is not None:
            found += [(owner.__name__, ClassPlace(owner), name) for name in attributes if _is_set_by_users(owner, name)]
        for imported in filter(_is_users, map(sys.modules.get, attributes)):  # inside of the function
            found += [(imported.__name__, vars(imported), name) for name in attributes]
        for path, place, name in found:
            value = place.get(name, MISSING)
            if isinstance(value, types.ModuleType) and _is_users(value):
                found += [(value.__name__, vars(value), inner) for inner in attributes]
            elif isinstance(value, type) and _is_users(sys.modules.get(value.__module__)):
                found += [(value.__name__, ClassPlace(value), n) for n in attributes if _is_set_by_users(value, n)]
            elif isinstance(_plain(value), types.FunctionType):
                waiting.append(value)
                yield Entry(f"{path}.{name}", place, name, value)
            elif _is_compared(value):
                yield Entry(f"{path}.{name}", place, name, value)


def attributes_named(function: Any) -> frozenset[str] | None:
    """Attributes that a user's function or method names; None for one that is no user's."""
    code = getattr(_plain(function), "__code__", None)
    return _names(code)[1] if code is not None and is_users(code.co_filename) else None


def class_values(kind: type) -> Iterator[Entry]:
    """The attributes and methods of a user's class, of which a forward has an object."""
    for base in kind.__mro__:
        if _is_users(sys.modules.get(base.__module__)):
            for name in vars(base):
                if not name.startswith("__") and _is_set_by_users(kind, name):
                    place = ClassPlace(kind)
                    yield Entry(f"{kind.__name__}.{name}", place, name, place.get(name, MISSING))


def _plain(function: Any) -> Any:
    """The function of a property, a method or a decorated function."""
    function = getattr(function, "fget", getattr(function, "func", getattr(function, "__func__", function)))
    return inspect.unwrap(function) if callable(function) else function


@cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Global variables and attributes that code names, and functions within it."""
    ops = [(op.opname, op.argval) for op in dis.get_instructions(code)]
    globals_ = {name for op, name in ops if op.endswith(("_GLOBAL", "_GLOBALS")) and isinstance(name, str)}
    attributes = set(code.co_names) - globals_
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        globals_ |= _names(inner)[0]
        attributes |= _names(inner)[1]
    return frozenset(globals_), frozenset(attributes)


def _is_users(module: types.ModuleType | None) -> TypeGuard[types.ModuleType]:
    """Whether a Python module is in a user's file."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_users(file)


def _is_set_by_users(kind: type, name: str) -> bool:
    """Whether the class of a user's has such an attribute."""
    kinds = [one for one in kind.__mro__ if name in vars(one)]
    value = vars(kinds[0])[name] if kinds else None
    return bool(kinds) and _is_users(sys.modules.get(kinds[0].__module__)) and (
        isinstance(value, _METHODS) or _is_compared(value)
    )  # fmt: skip


def _is_compared(value: Any) -> bool:
    """Whether a variable is a plain value, a tensor, or a container or an object of the user's that is not large."""
    if isinstance(value, (*PLAIN, Tensor)):
        return True
    kinds = (list, tuple, dict, set, frozenset, deque, types.SimpleNamespace, Namespace, types.MethodType, Random)
    own, numpy = isinstance(value, kinds), type(value).__module__.split(".")[0] == "numpy"
    if isinstance(value, (nn.Module, type)) or not (own or numpy or _is_users(sys.modules.get(type(value).__module__))):
        return False
    found: dict[int, Held] = {}
    for _ in walk("", value, found):
        if len(found) > _CONTAINERS or any(len(held.keys) > _ENTRIES for held in found.values()):
            return False
    return len(found) <= _CONTAINERS
