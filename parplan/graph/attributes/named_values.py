"""Variables that the code of a forward names without a module in front: global ones, those of functions around it, of
the user's other files, and of classes. Each is an entry for a guard.
"""

from __future__ import annotations

import dis
import os
import sys
import types
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import _lru_cache_wrapper, cache, cached_property, partial
from random import Random
from typing import Any, TypeGuard

from torch import Tensor, nn

from parplan.compat import FakeTensor, pytree
from parplan.graph.attributes.constant_values import constant_value
from parplan.graph.attributes.first_call import short
from parplan.graph.attributes.guards import ClassPlace, Computed, Entry, Place
from parplan.graph.attributes.held_values import MISSING, PLAIN, Held, same, walk
from parplan.graph.user_line import is_users

__all__ = ["NamedValues", "attributes_named", "class_values", "named_values", "outside_values"]

# Containers in one variable, and entries of one, beyond which it is not compared.
_CONTAINERS, _ENTRIES = 100, 1000
_HOLDERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType, bytearray, array)
_FUNCTIONS = (types.FunctionType, _lru_cache_wrapper)
_ENVIRONMENT = (os, os.environ, os.getenv)
_METHODS = (*_FUNCTIONS, property, cached_property, classmethod, staticmethod)


def _cell_value(cell: types.CellType) -> Any:
    """The value of a variable of a function around."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


class NamedValues:
    """Variables that the code of one forward names.

    Args:
        held: snapshots of the containers in them are added here.
    """

    def __init__(self, held: dict[int, Held]) -> None:
        self._held = held
        self._written_later: dict[int, Held] = {}
        self._seen: set[Hashable] = set()
        self._entries: list[Entry] = []
        self._caches: list[tuple[Any, int]] = []

    def of(self, function: Any, owner: type | None = None) -> Iterator[Entry]:
        """Those of a function or method that were not named before.

        Args:
            owner: the class of the module whose method it is.
        """
        for entry, is_later in named_values(function, owner, self._seen):
            self._entries.append(entry)
            if is_later:
                list(walk(entry.path, entry.value, self._written_later))
                continue
            list(walk(entry.path, entry.value, self._held))
            self._watch_cache(entry.value)
            yield entry
        self._watch_cache(function)

    def _watch_cache(self, function: Any) -> None:
        if isinstance(function, _lru_cache_wrapper):
            self._caches.append((function, function.cache_info().misses))

    def changes(self) -> Iterator[tuple[str, str]]:
        """Variables that are another value now, and their changes in words; new entries of a memo are none."""
        for entry in self._entries:
            now = entry.place.get(entry.key, MISSING)
            if now is not entry.value:
                yield entry.path, f"changes it from {short(entry.value)} to {short(now)}"
            elif not (same(now, now, self._held) and same(now, now, self._written_later)) and not self._remembers(now):
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
        for held in self._written_later.values():
            if not held.unchanged and not same(held.container, held.container, self._written_later):
                held.restore()
        for function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()


def named_values(function: Any, owner: type | None, seen: set[Hashable]) -> Iterator[tuple[Entry, bool]]:
    """Variables that a user's function names, and those that it calls; what is in `seen` is left out.

    With each whether other functions than this one write it, as hooks do after the forward: nobody waits for what a
    list of theirs has in it.

    Args:
        function: or a property or method.
        owner: the class of the module whose method it is: attributes of it that code names, `type(self).rate`, count.
    """
    waiting: list[tuple[Any, list[_Home]]] = [(function, [] if owner is None else _homes_of(owner))]
    first = getattr(_plain(function), "__code__", None)
    while waiting:
        function, homes = waiting.pop()
        function = _plain(function)
        waiting += [(function.__wrapped__, homes)] if hasattr(function, "__wrapped__") else []
        code = getattr(function, "__code__", None)
        scope = code, *(id(home.thing) for home in homes)
        if code is None or scope in seen or not is_users(code.co_filename):
            continue
        seen.add(scope)
        outside, attributes = _names(code)
        later = _written_later(code, is_called=code is first)
        file = _Home(str(function.__module__), function.__globals__, None)
        found = [(file, name) for name in outside]
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found += [(_Home(file.path, Computed(partial(_cell_value, cell)), None), name) for name, cell in cells]
        imported = filter(_is_users, map(sys.modules.get, attributes))  # inside of the function
        homes = [*homes, *(home for module in imported for home in _homes_of(module))]
        for name in ("__defaults__", "__kwdefaults__"):
            found.append((_Home(str(function.__qualname__), Computed(partial(getattr, function, name)), None), name))
        found += [(home, name) for home in homes for name in attributes]
        for home, name in found:
            value = home.place.get(name, MISSING)
            entry = Entry(f"{home.path}.{name}", home.place, name, value)
            inner = value.__self__ if isinstance(value, types.MethodType) else value
            if any(value is one for one in _ENVIRONMENT):
                words = [word for word in code.co_consts if isinstance(word, str)]
                found += [(_Home("os.environ", os.environ, None), word) for word in words]
                continue
            is_later = name in later and (isinstance(value, _HOLDERS) or _is_object(value))
            if is_later and _is_compared(value):
                yield entry, True
                continue
            if isinstance(_plain(value), _FUNCTIONS):
                if isinstance(home.thing, type) and not _is_set_by_users(home.thing, name):
                    continue
                settings = vars(value) if isinstance(value, types.FunctionType) else {}
                found += [(_Home(entry.path, settings, None), n) for n in settings if n in attributes]
                waiting.append((value, _homes_of(inner) if _is_object(inner) else home.methods or homes))
                yield entry, False
            elif _is_users(value) or _is_users_class(value) or _is_object(value):
                known = {(id(home.thing), name) for home, name in found}
                parts = ((part, n) for part in _homes_of(value, entry.path) for n in attributes)
                found += [(part, n) for part, n in parts if (id(part.thing), n) not in known]
                # An object is compared as a whole where it is not large, else by the attributes that code names.
                whole = _is_object(value) and _is_compared(value)
                still = Computed(partial(_is_still, home.place, name, value))
                yield entry if whole else replace(entry, place=still, value=True), False
            elif _is_compared(value) or (
                value is MISSING and _is_object(home.thing) and hasattr(type(home.thing), name)
            ):
                yield entry, False


def _is_still(place: Place, name: str, value: Any) -> bool:
    """Whether a variable is the very object that it was."""
    return place.get(name, MISSING) is value


@dataclass(frozen=True)
class _Home:
    """A file, a class or an object, whose attributes are variables.

    Args:
        path: as users write it.
        place: the attributes.
        thing: the file, class or object itself.
        methods: the homes of attributes that its methods name; none for functions of a file.
    """

    path: str
    place: Place
    thing: Any
    methods: list[_Home] = field(default_factory=list)


def _homes_of(thing: Any, path: str = "") -> list[_Home]:
    """A file, a class, or an object and its class."""
    if isinstance(thing, types.ModuleType):
        return [_Home(thing.__name__, vars(thing), thing)]
    methods: list[_Home] = []
    kind = thing if isinstance(thing, type) else type(thing)
    if kind is not thing:
        methods.append(_Home(path or kind.__name__, vars(thing), thing, methods))
    methods.append(_Home(kind.__name__, ClassPlace(kind), kind, methods))
    return methods


def _is_object(value: Any) -> bool:
    """Whether the attributes that code names are looked at, of an object, and not all of them."""
    own = _is_users(sys.modules.get(type(value).__module__)) or isinstance(value, (types.SimpleNamespace, Namespace))
    return (
        own and type(getattr(value, "__dict__", None)) is dict and not isinstance(value, (nn.Module, type, *_HOLDERS))
    )


def _is_users_class(value: Any) -> bool:
    return isinstance(value, type) and _is_users(sys.modules.get(value.__module__))


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


def outside_values(module: nn.Module, key: str, value: Any) -> Iterator[Entry]:
    """A value, tensor or layer of a module that is no part of the model; none of one that the forward has made."""
    made = any(isinstance(tensor, FakeTensor) for tensor in (*module._parameters.values(), value))
    home = type(module).__module__
    if made or type(module) is nn.Module or home.startswith(("torch._", "torch.fx")):
        return
    path, place = f"{type(module).__name__}.{key}", module.__dict__
    for holder in (place, place["_parameters"], place["_buffers"], place["_modules"]):
        if key in holder and isinstance(value, (*PLAIN, Tensor, nn.Module)):
            yield Entry(path, holder, key, value)
            if isinstance(value, Tensor):
                yield Entry(path, Computed(partial(_has_memory, value, value.data_ptr())), "data", True)


def _has_memory(tensor: Tensor, address: int) -> bool:
    """Whether a tensor has the memory that it had, and not another one's (`weight.data = ...`)."""
    return tensor.data_ptr() == address


def _plain(function: Any) -> Any:
    """The function of a property or a method."""
    if isinstance(function, property):
        return function.fget
    if isinstance(function, cached_property):
        return function.func
    return function.__func__ if isinstance(function, (types.MethodType, classmethod, staticmethod)) else function


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


# Methods of containers, and ops, that change one.
_WRITES = frozenset((
    "append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "popitem", "remove",
    "discard", "clear", "write", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_ATTR",
))  # fmt: skip


@cache
def _written_later(code: types.CodeType, is_called: bool) -> frozenset[str]:
    """Variables that only functions name which write containers or objects, of code and of functions within it.

    Args:
        is_called: the code is the forward's own, not that of a function which may be called later.
    """
    ops = [(op.opname, op.argval) for op in dis.get_instructions(code)]
    own = {name for op, name in ops if op.endswith(("_GLOBAL", "_GLOBALS", "_DEREF")) and isinstance(name, str)}
    writes = not is_called and not _WRITES.isdisjoint([*code.co_names, *(op for op, _ in ops)])
    later, now = (own, set[str]()) if writes else (set[str](), own)
    for inner in (constant for constant in code.co_consts if isinstance(constant, types.CodeType)):
        # A comprehension runs where it stands.
        names = _written_later(inner, is_called and inner.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"))
        later |= names
        now |= (_names(inner)[0] | set(inner.co_freevars)) - names
    return frozenset(later - now)


def _is_users(module: Any) -> TypeGuard[types.ModuleType]:
    """Whether a value is a Python module in a user's file."""
    file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
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
    numpy = type(value).__module__.split(".")[0] == "numpy"
    own = numpy or isinstance(value, (*_HOLDERS, Random)) or _is_users(sys.modules.get(type(value).__module__))
    if isinstance(value, (nn.Module, type)) or not own:
        return False
    found: dict[int, Held] = {}
    for _ in walk("", value, found):
        if len(found) > _CONTAINERS or any(len(held.keys) > _ENTRIES for held in found.values()):
            return False
    return len(found) <= _CONTAINERS
