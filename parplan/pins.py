"""Pins: what a person decides by hand before the solver decides the rest, as data and as text.

`fc6=shards:4` names layers by a pattern and gives words: `replicas:4`, `shards:4`, `axis:out-features`, `gpu:0,1`
(logical devices, in that order), `update:2` (update the weights every 2 passes), `state:sharded`, `state:gathered`,
`saved:replay`. Command line, code and TOML speak the same words. What pins mean for a model's layers is the planner's
part (planner/search_space/pin_constraints.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from parplan.errors import PinError
from parplan.fields import Field, choice, count, parse_toml, read_fields, read_file, text
from parplan.plan import SAVED, STATES

__all__ = ["WORDS", "Pin", "PinsLike", "parse_pin", "pins_from", "pins_from_toml", "read_pins"]

GRAMMAR = (
    "words are replicas:4, shards:4, axis:out-features, gpu:0,1, update:2, state:sharded, state:gathered and "
    "saved:replay"
)
MOST = 10**6  # more replicas, shards, devices or passes are a slip


@dataclass(frozen=True)
class Pin:
    """A decision for the layers that `pattern` names; None leaves it to the solver (or to an earlier pin).

    Args:
        pattern: dotted layer names, with *, ? and [...]; the name of a module stands for all layers in it.
        devices: logical devices, replica by replica, the shards of a replica side by side.
        update_period: passes between updates of the weights.
        state: "replicated", "sharded" or "gathered" (plan.Strategy).
        saved: "keep" or "replay".
        origin: where it was given, for messages ("--pin", a file's name).
    """

    pattern: str
    replicas: int | None = None
    shards: int | None = None
    axis: str | None = None
    devices: tuple[int, ...] | None = None
    update_period: int | None = None
    state: str | None = None
    saved: str | None = None
    origin: str = "pins"

    def matches(self, layer: str) -> bool:
        """Whether it names this layer, a module that the layer is in, or the module of which this is another call.

        >>> [Pin("block1").matches(name) for name in ("block1", "block1.conv", "block1@1", "block10")]
        [True, True, True, False]
        """
        inside = accumulate(re.split(r"(?=[.@])", layer))
        return any(fnmatchcase(name, self.pattern) for name in inside)

    @property
    def words(self) -> str:
        """The right side in the pins' own grammar."""
        found = {
            "replicas": self.replicas,
            "shards": self.shards,
            "axis": self.axis,
            "gpu": None if self.devices is None else ",".join(map(str, self.devices)),
            "update": self.update_period,
            "state": self.state,
            "saved": self.saved,
        }
        return " ".join(f"{word}:{value}" for word, value in found.items() if value is not None)

    def describe(self) -> str:
        """The pin as text that `parse_pin` reads: `fc6=shards:4`."""
        return f"{self.pattern}={self.words}"


PinsLike = Mapping[str, Any] | Sequence[str | Pin] | str | Path


def parse_pin(text: str, origin: str = "--pin") -> Pin:
    """One pin from text.

    >>> parse_pin("fc6=shards:4 axis:out-features").words
    'shards:4 axis:out-features'

    Raises:
        PinError: no pattern, no words, an unknown word or a value that makes no sense.
    """
    pattern, given, words = text.partition("=")
    if not given:
        raise PinError(f"{origin} {text!r}: there is no '='; write PATTERN=WORDS, such as 'fc6=shards:4'")
    return _pin(pattern, words, origin, f"{origin} {text!r}")


def pins_from(pins: Mapping[str, Any] | Sequence[str | Pin], origin: str = "pins") -> tuple[Pin, ...]:
    """Pins given in code, in their order.

    Args:
        pins: pattern -> words as text (`{"fc6": "shards:4"}`) or as a dict (`{"fc6": {"shards": 4, "gpu": [0, 1]}}`);
            or a sequence of texts as on the command line and of Pin.

    Raises:
        PinError: as `parse_pin`.
    """
    if isinstance(pins, Mapping):
        return tuple(_pin(pattern, words, origin, f"{origin}: {pattern!r}") for pattern, words in pins.items())
    return tuple(pin if isinstance(pin, Pin) else parse_pin(_as_text(pin, origin), origin) for pin in pins)


def pins_from_toml(path: str | Path) -> tuple[Pin, ...]:
    """The pins of a TOML file: a table [pins] of patterns (in quotes where they have dots) and words.

        [pins]
        "features.*" = "replicas:4"
        fc6 = { shards = 4, gpu = [0, 1, 2, 3] }

    Raises:
        PinError: the file cannot be read, is not TOML, has no [pins] or anything else; or as `parse_pin`.
    """
    data = parse_toml(read_file(path, "pins", PinError, "name a TOML file with a table [pins]"), str(path), PinError)
    other = sorted(set(data) - {"pins"})
    if other:
        raise PinError(f"{path}: {other[0]!r} is not known here; a file of pins has one table, [pins]")
    if not isinstance(data.get("pins"), dict):
        raise PinError(f'{path} has no table [pins]; begin with [pins] and write lines such as fc6 = "shards:4"')
    return pins_from(data["pins"], str(path))


def read_pins(pins: PinsLike | None, *, with_plan: bool = False) -> tuple[Pin, ...]:
    """Pins however a caller has them: a mapping, a sequence of texts, the path of a TOML file, or None.

    Args:
        with_plan: a plan is given as well, which decides everything already.

    Raises:
        PinError: as `pins_from` and `pins_from_toml`; pins beside a plan.
    """
    if pins is None or (not isinstance(pins, Path) and not pins):
        return ()
    if with_plan:
        raise PinError("a plan decides every layer, so there is nothing left to pin; leave out the plan or the pins")
    if isinstance(pins, str) and "=" in pins:
        raise PinError(f"pins={pins!r} is one text, which names a file; put pins in a list: [{pins!r}]")
    return pins_from_toml(pins) if isinstance(pins, (str, Path)) else pins_from(pins)


def _as_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise PinError(f"{where}: {value!r} is no pin; write a text such as 'fc6=shards:4'")


def _pin(pattern: Any, words: Any, origin: str, where: str) -> Pin:
    pattern = _as_text(pattern, where).strip()
    if not pattern:
        raise PinError(f"{where}: it names no layer; put a name or a pattern before the words: 'fc6=shards:4'")
    found = dict(words) if isinstance(words, Mapping) else _split(_as_text(words, where), where)
    if not found:
        raise PinError(f"{where}: it decides nothing; {GRAMMAR}")
    for word, value in found.items():
        if word not in WORDS:
            if isinstance(value, Mapping) or (isinstance(value, str) and ":" in value):
                quotes = 'a name with dots needs quotes: "features.0" = ...'
                raise PinError(f"{where}: {word!r} has words of its own; {quotes}")
            near = difflib.get_close_matches(str(word), WORDS, 1)
            raise PinError(f"{where}: {word!r} is not known{f', did you mean {near[0]}' if near else ''}; {GRAMMAR}")
    read = read_fields(found, _FIELDS, where, PinError)
    return Pin(
        pattern=pattern,
        replicas=read.get("replicas"),
        shards=read.get("shards"),
        axis=read.get("axis"),
        devices=read.get("gpu"),
        update_period=read.get("update"),
        state=read.get("state"),
        saved=read.get("saved"),
        origin=origin,
    )


def _split(text: str, where: str) -> dict[str, str]:
    """`replicas:4; gpu:0,1` as a dict of texts."""
    found: dict[str, str] = {}
    for part in re.split(r"[\s;]+", text.strip(" \t\r\n;")):
        word, colon, value = part.partition(":")
        if part and not colon:
            word, equals, value = part.partition("=")
            hint = f"write {word}:{value}" if word in WORDS and equals and value else GRAMMAR
            raise PinError(f"{where}: {part!r} is not a word and a value; {hint}")
        if word in found:
            raise PinError(f"{where}: {word} is given twice; give it once")
        if part:
            found[word] = value
    return found


# ---- values, as numbers and lists in code and TOML or as text --------------------------------------------------------


def _counted(word: str) -> Field:
    whole = count(word, 1, MOST)
    expected = f"a whole number from 1 to {MOST}, such as {word}:2"
    return Field(word, expected, lambda value: whole.read(_whole(value)), required=False)


def _whole(value: Any) -> Any:
    """The whole number that a text is; any other value as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


def _read_devices(value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    if not parts:
        raise ValueError
    return tuple(_DEVICE.read(_whole(part)) for part in parts)


_DEVICE = count("gpu", 0, MOST - 1)
_FIELDS = (
    _counted("replicas"),
    _counted("shards"),
    text("axis", ".+", "an axis of the layer, such as axis:out-features").optional(),
    Field("gpu", "numbers of logical devices, such as gpu:0,1", _read_devices, required=False),
    _counted("update"),
    choice("state", STATES).optional(),
    choice("saved", SAVED).optional(),
)
WORDS = tuple(field.name for field in _FIELDS)
