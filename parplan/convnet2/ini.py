"""The text of cuda-convnet2's files: sections in order, keys without case, values read with one message per mistake.

Layer files and layer-parameter files have the same form. Every refusal names the file, the section, the key, the value
and what would make it right; a key that nobody reads is refused too, so that a typo does not pass for a default.
"""

from __future__ import annotations

import configparser
import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from parplan.errors import LayerFileError

__all__ = ["IniSection", "read_sections"]

T = TypeVar("T", int, float)
MOST = 2**31
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class IniSection:
    """One section: `values` by lower-case key, as cuda-convnet2 reads them."""

    file: str
    name: str
    values: Mapping[str, str]

    @property
    def where(self) -> str:
        """For messages: `layers.cfg [conv1]`."""
        return f"{self.file} [{self.name}]"

    def error(self, key: str, why: str) -> LayerFileError:
        """An error about one key, with the value it has."""
        value = self.values.get(key.lower())
        return LayerFileError(f"{self.where} {key}: {why}" if value is None else f"{self.where} {key}={value}: {why}")

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return key.lower() in self.values

    def text(self, key: str, default: str | None = None) -> str:
        """A value as it stands; without a default it has to be there."""
        value = self.values.get(key.lower(), default)
        if value is None or not value.strip():
            raise self.error(key, f"it is missing; add a line {key}=...")
        return value.strip()

    def names(self, key: str) -> tuple[str, ...]:
        """Names with commas between them."""
        found = tuple(part.strip() for part in self.text(key).split(","))
        if not all(found):
            raise self.error(key, "a name is empty; put one comma between two names")
        return found

    def one_of(self, key: str, known: Collection[str]) -> str:
        """A word out of a few."""
        found = self.text(key)
        if found not in known:
            raise self.error(key, f"it must be {' or '.join(known)}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """1, true, yes, on, or 0, false, no, off."""
        if not self.has(key):
            return default
        found = _FLAGS.get(self.text(key).lower())
        if found is None:
            raise self.error(key, "it must be 0 or 1")
        return found

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        if default is not None and not self.has(key):
            return default
        return self._number(key, self.text(key), int, "a whole number", least)

    def integers(self, key: str, count: int, default: int | None = None, least: int = 1) -> tuple[int, ...]:
        """One whole number for each of `count` inputs; a single one stands for all."""
        return self._one_each(key, count, default, int, "a whole number", least)

    def number(self, key: str, default: float | None = None, least: float = -math.inf) -> float:
        """A number of at least `least`."""
        if default is not None and not self.has(key):
            return default
        return self._number(key, self.text(key), float, "a number", least)

    def numbers(self, key: str, count: int, default: float | None = None) -> tuple[float, ...]:
        """One number for each of `count` inputs; a single one stands for all."""
        return self._one_each(key, count, default, float, "a number", -math.inf)

    def refuse_unknown(self, known: Collection[str], what: str) -> None:
        """Every key is one of `known`; `what` says whose they are ("a layer of type conv")."""
        spelled = {key.lower(): key for key in known}
        for key in self.values:
            if key not in spelled:
                close = difflib.get_close_matches(key, spelled, n=1)
                hint = f"; did you mean {spelled[close[0]]}?" if close else f"; it has {', '.join(sorted(known))}"
                raise self.error(key, f"this key of {what} is not known here{hint}")

    def _number(self, key: str, text: str, kind: Callable[[str], T], word: str, least: float) -> T:
        try:
            found = kind(text)
        except ValueError:
            raise self.error(key, f"{text!r} is not {word}") from None
        if not math.isfinite(found) or abs(found) > MOST:
            raise self.error(key, f"{text!r} is not {word} of a plausible size")
        if found < least:
            raise self.error(key, f"it must be at least {least}")
        return found

    def _one_each(
        self, key: str, count: int, default: T | None, kind: Callable[[str], T], word: str, least: float
    ) -> tuple[T, ...]:
        if default is not None and not self.has(key):
            return (default,) * count
        found = tuple(self._number(key, part, kind, word, least) for part in self.names(key))
        if len(found) not in (1, count):
            raise self.error(key, f"{len(found)} values for {count} inputs; give one for each input, or one for all")
        return found if len(found) == count else found * count


def read_sections(path: Path) -> dict[str, IniSection]:
    """The sections of a file, in order.

    Raises:
        LayerFileError: the file cannot be read, is no such text, or names a section or a key twice.
    """
    parser = configparser.RawConfigParser(strict=True, inline_comment_prefixes=(";",))
    try:
        parser.read_string(path.read_text(encoding="utf-8-sig"), path.name)  # Windows editors begin with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LayerFileError(f"cannot read {path}: {reason}") from error
    except configparser.DuplicateSectionError as error:
        raise LayerFileError(f"{path.name} [{error.section}]: it stands there twice (line {error.lineno}); "
                             "give every layer a name of its own") from error  # fmt: skip
    except configparser.DuplicateOptionError as error:
        raise LayerFileError(f"{path.name} [{error.section}] {error.option}: it is given twice (line {error.lineno}); "
                             "leave one") from error  # fmt: skip
    except configparser.MissingSectionHeaderError as error:
        raise LayerFileError(f"{path.name} is no layer file: line {error.lineno}, {error.line.strip()[:40]!r}, stands "
                             "before any section; it has sections [name] and lines key=value") from error  # fmt: skip
    except configparser.Error as error:
        raise LayerFileError(f"{path.name} is no layer file: {' '.join(str(error).split())}; it has sections [name] "
                             "and lines key=value") from error  # fmt: skip
    return {name: IniSection(path.name, name, MappingProxyType(dict(parser.items(name)))) for name in parser.sections()}
