"""Single keys of a cluster file: their types, their units and what is beyond reason."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parplan.errors import ClusterError

__all__ = ["Entry", "Quantity"]

T = TypeVar("T")

_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}


@dataclass(frozen=True)
class Quantity:
    """What a number means, with its unit, and the least and the most that anything real has."""

    meaning: str
    least: float
    most: float


@dataclass(frozen=True)
class Entry:
    """One table of the file.

    Args:
        where: file and table, for errors.
        data: its keys.
    """

    where: str
    data: Mapping[str, Any]

    def check_keys(self, known: Sequence[str]) -> None:
        """Refuse keys that are not `known`, with the closest that is.

        Raises:
            ClusterError: there is one.
        """
        for key, value in self.data.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}? Known" if close else "known"
                raise ClusterError(f"{self.where}: unknown key {key} = {_shown(value)}; {hint} are {', '.join(known)}")

    def check_present(self, keys: Sequence[str], instead: str = "") -> None:
        """Refuse an entry without all of `keys`; `instead` says what would make up for them.

        Raises:
            ClusterError: some are missing.
        """
        missing = [key for key in keys if key not in self.data]
        if missing:
            raise ClusterError(
                f"{self.where} lacks {', '.join(missing)}; add {_them(missing)}{f' {instead}' * bool(instead)}"
            )

    def text(self, key: str) -> str | None:
        """A text that says something; None where the key is not there.

        Raises:
            ClusterError: not a text, or an empty one.
        """
        value = self._typed(key, (str,), _TYPES[str])
        if value is not None and not value.strip():
            raise ClusterError(f'{self.where}: {key} = "{value}" is empty; say something or leave it out')
        return None if value is None else str(value)

    def flag(self, key: str) -> bool | None:
        """True or false; None where the key is not there.

        Raises:
            ClusterError: neither.
        """
        value = self._typed(key, (bool,), _TYPES[bool])
        return None if value is None else bool(value)

    def whole(self, key: str, least: int, most: int | None = None) -> int:
        """A whole number of at least `least` and at most `most`.

        Raises:
            ClusterError: it is not there, no whole number, or out of range.
        """
        value = self._typed(key, (int,), _TYPES[int])
        if value is None or value < least or (most is not None and value > most):
            upper = "" if most is None else f" and at most {most}"
            raise ClusterError(f"{self.where}: {key} = {value}: it has to be at least {least}{upper}")
        return int(value)

    def number(self, key: str, quantity: Quantity) -> float | None:
        """A number within what `quantity` has; None where the key is not there.

        Raises:
            ClusterError: no number, or beyond reason; the text says the unit.
        """
        value = self._typed(key, (int, float), _TYPES[float])
        if value is None:
            return None
        if not quantity.least <= value <= quantity.most or not math.isfinite(value):
            raise ClusterError(
                f"{self.where}: {key} = {_shown(value)} is not plausible: it is {quantity.meaning}, from "
                f"{quantity.least:,.10g} to {quantity.most:,.10g}"
            )
        return float(value)

    def preset(self, find: Callable[[str], T], name: str) -> T:
        """What `find` knows under the preset's name.

        Raises:
            ClusterError: nothing; the text says where it is asked for.
        """
        try:
            return find(name)
        except ClusterError as error:
            raise ClusterError(f"{self.where}: {error}") from error

    def _typed(self, key: str, types: tuple[type, ...], words: str) -> Any:
        value = self.data.get(key)
        if value is not None and type(value) not in types:
            raise ClusterError(f"{self.where}: {key} = {_shown(value)} has to be {words}")
        return value


def _shown(value: Any) -> str:
    """A value as the file has it, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _them(keys: Sequence[str]) -> str:
    return "it" if len(keys) == 1 else "them"
