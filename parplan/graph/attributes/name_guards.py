"""Global and closure variables that the code of a forward names: numbers, flags and texts, which a graph has frozen."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parplan.graph.attributes.guards import Entry
from parplan.graph.user_line import is_users

__all__ = ["names_of"]

_WATCHED = (bool, int, float, complex, str, bytes, type(None))


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
            if isinstance(value, _WATCHED):
                yield Entry(f"{function.__module__}.{name}", place, name, value)
            elif isinstance(value, types.FunctionType):
                waiting.append(value)


def _names(code: types.CodeType) -> set[str]:
    """All that it names, and what functions within it name."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
