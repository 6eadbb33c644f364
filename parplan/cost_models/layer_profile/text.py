"""Reads the text of a layer profile; whatever is wrong with it becomes one error that names line, field and remedy.

Lines stand for themselves until the end of the file: only then layers, their further times and edges meet, so that
they may come in any order. docs/profile-graph.md describes the text. Every refusal names the line, the
field, what was found and what would fix it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from parplan.cost_models.layer_profile.records import (
    FORMAT,
    VERSION,
    Cut,
    Effect,
    LayerProfile,
    ProfiledLayer,
    ProfileEdge,
    Samples,
    Times,
    default_effect,
)
from parplan.errors import ProfileError

__all__ = [
    "EDGE",
    "LAYER",
    "TIMES",
    "Entry",
    "Line",
    "count",
    "entry",
    "expected",
    "load_layer_profile",
    "names",
    "parse_layer_profile",
    "shown",
]

# Beyond these a number is a typing error or another unit: eleven days, a pebibyte, two thousand million.
MOST_SECONDS, MOST_BYTES, MOST_COUNT = 1e6, 2**50, 2**31


@dataclass(frozen=True)
class Line:
    """The words of a line, without its comment; `where` is file:line."""

    where: str
    words: tuple[str, ...]

    def error(self, message: str) -> ProfileError:
        """What is wrong with this line."""
        return ProfileError(f"{self.where}: {message}")


@dataclass(frozen=True)
class Entry:
    """A line with its fields read."""

    line: Line
    fields: Mapping[str, Any]


# ---- words of a line -------------------------------------------------------------------------------------------------


def shown(word: str) -> str:
    """A word of the text in quotes, shortened."""
    return repr(word if len(word) <= 40 else f"{word[:37]}...")


def expected(word: str, known: tuple[str, ...]) -> str:
    """What may have been meant by `word`."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def names(line: Line, wanted: int, form: str) -> tuple[str, ...]:
    """The `wanted` names of layers behind the line's first word; `form` is what such a line looks like."""
    found = line.words[1 : 1 + wanted]
    if len(found) < wanted or any("=" in name and name.partition("=")[0] in _FIELDS for name in found):
        raise line.error(f"a name is missing; write `{form}`")
    if wrong := next((name for name in found if not name.isprintable()), None):
        raise line.error(f"name {shown(wrong)} has characters that cannot be shown; rename it")
    return found


def entry(line: Line, start: int, known: Mapping[str, _Field], what: str) -> Entry:
    """The fields `key=value` from word `start` on; `what` names the line in errors."""
    found: dict[str, Any] = {}
    for word in line.words[start:]:
        key, equals, text = word.partition("=")
        if key not in known:
            raise line.error(f"{what}: {shown(word)} is no field of it; {expected(key, tuple(known))}")
        if not equals or not text:
            raise line.error(f"{what}: {key} has no value; write {key}=VALUE, without blanks")
        if key in found:
            raise line.error(f"{what}: {key} is given twice; keep one")
        found[key] = known[key].read(line, key, text)
    for key, rule in known.items():
        if rule.required and key not in found:
            raise line.error(f"{what}: {key} is missing; add {key}=VALUE")
    return Entry(line, found)


# ---- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """How a field is read, given line, key and text, and whether it has to be there."""

    read: Callable[[Line, str, str], Any]
    required: bool = True


def _seconds(line: Line, key: str, text: str) -> float:
    value = _number(line, key, text)
    if not 0 <= value <= MOST_SECONDS:
        raise line.error(f"{key} is {shown(text)}; give seconds, from 0 to {MOST_SECONDS:,.0f}")
    return value


def _bytes(line: Line, key: str, text: str) -> int:
    value = _number(line, key, text)
    if not (0 <= value <= MOST_BYTES and value == int(value)):
        raise line.error(f"{key} is {shown(text)}; give a whole number of bytes, from 0 to {MOST_BYTES:,}")
    return int(value)


def count(line: Line, key: str, text: str) -> int:
    """A whole number from 1 on."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else 0
    if not 1 <= value <= MOST_COUNT:
        raise line.error(f"{key} is {shown(text)}; give a whole number from 1 to {MOST_COUNT:,}")
    return value


def _number(line: Line, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise line.error(f"{key} is {shown(text)}, not a number; write digits, such as 0.0125 or 1.25e-2") from None
    if not math.isfinite(value):
        raise line.error(f"{key} is {shown(text)}; give what was measured, a finite number")
    return value


def _kind(line: Line, key: str, text: str) -> str:
    if not text.isprintable():
        raise line.error(f"{key} {shown(text)} has characters that cannot be shown; write a word such as conv")
    return text


def _samples(line: Line, key: str, text: str) -> Samples:
    known = {samples.value: samples for samples in Samples}
    if text not in known:
        raise line.error(f"{key} is {shown(text)}; use one of {', '.join(known)}")
    return known[text]


def _cuts(line: Line, key: str, text: str) -> tuple[Cut, ...]:
    cuts = tuple(_one_cut(line, part) for part in text.split(","))
    names = [cut.axis for cut in cuts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise line.error(f"{key}: axis {shown(twice)} is given twice; keep one")
    return cuts


def _one_cut(line: Line, text: str) -> Cut:
    axis, *rest = text.split(":")
    if not axis or not axis.isprintable() or not 1 <= len(rest) <= 2:
        raise line.error(
            f"cut is {shown(text)}; write AXIS:UNITS or AXIS:UNITS:EFFECT@DIMENSION, such as out-features:4096 or "
            "experts:8:output@2"
        )
    units = count(line, f"cut {axis}: units", rest[0])
    if len(rest) == 2:
        return _effect(line, axis, units, rest[1])
    effect = default_effect(axis)
    if effect is None:
        raise line.error(
            f"cut {axis}: what cutting it does is not known; say {axis}:{units}:output (or input, or both)"
        )
    return Cut(axis, units, effect)


def _effect(line: Line, axis: str, units: int, text: str) -> Cut:
    word, at, dims = text.partition("@")
    effects = {effect.value: effect for effect in Effect}
    if word not in effects:
        raise line.error(f"cut {axis}: effect is {shown(word)}; use one of {', '.join(effects)}")
    takes, arrow, gives = dims.partition(">") if at else ("1", "", "")
    if arrow and effects[word] is not Effect.BOTH:
        raise line.error(f"cut {axis}: {word} cuts one dimension, found {shown(dims)}; write {word}@1")
    first = count(line, f"cut {axis}: dimension", takes)
    second = count(line, f"cut {axis}: dimension", gives) if arrow else first
    return {
        Effect.OUTPUT: Cut(axis, units, Effect.OUTPUT, gives=first),
        Effect.INPUT: Cut(axis, units, Effect.INPUT, takes=first),
        Effect.BOTH: Cut(axis, units, Effect.BOTH, first, second),
    }[effects[word]]


TIMES = {"batch": _Field(count), "forward-s": _Field(_seconds), "backward-s": _Field(_seconds)}
EDGE = {"activation-bytes": _Field(_bytes, required=False)}
LAYER = {
    "forward-s": _Field(_seconds),
    "backward-s": _Field(_seconds),
    "activation-bytes": _Field(_bytes),
    "parameter-bytes": _Field(_bytes),
    "saved-bytes": _Field(_bytes, required=False),
    "update-s": _Field(_seconds, required=False),
    "kind": _Field(_kind, required=False),
    "samples": _Field(_samples, required=False),
    "cut": _Field(_cuts, required=False),
}
_FIELDS = frozenset({*LAYER, *TIMES, *EDGE})


MOST_TEXT_BYTES = 64 * 2**20


def load_layer_profile(path: str | Path) -> LayerProfile:
    """Read a profile from a file.

    Raises:
        ProfileError: no such file, a folder, not text, or text that is not a profile.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_TEXT_BYTES + 1)
    except IsADirectoryError:
        raise ProfileError(f"cannot read the profile {path}: that is a folder; name a file in it") from None
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror or error}") from error
    if len(data) > MOST_TEXT_BYTES:
        raise ProfileError(f"{path}: longer than {MOST_TEXT_BYTES >> 20} MiB, which no layer profile is; name another")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not text in UTF-8 (byte {error.start}); {_HEAD}") from error
    if "\0" in text:
        raise ProfileError(f"{path}: a binary file, not text; {_HEAD}")
    return parse_layer_profile(text, str(path))


_HEAD = f"a layer profile is text that begins with `{FORMAT} {VERSION}`"


def parse_layer_profile(text: str, where: str = "profile") -> LayerProfile:
    """The profile that `text` describes; `where` names it in errors.

    Raises:
        ProfileError: the first thing wrong, with its line, field and what would fix it.
    """
    lines = [Line(f"{where}:{number}", words) for number, words in _statements(text)]
    if not lines:
        raise ProfileError(f"{where}: empty; {_HEAD}")
    if lines[0].words[0] != FORMAT:
        raise ProfileError(f"{lines[0].where}: begins with {shown(lines[0].words[0])}; {_HEAD}")
    if lines[0].words[1:] != (VERSION,):
        found = " ".join(lines[0].words[1:]) or "none"
        raise ProfileError(f"{lines[0].where}: version {shown(found)}; this parplan reads version {VERSION}")
    draft = _Draft(where)
    for line in lines[1:]:
        draft.take(line)
    return draft.finish()


def _statements(text: str) -> Iterable[tuple[int, tuple[str, ...]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        comment = next((place for place, word in enumerate(words) if word.startswith("#")), len(words))
        if words[:comment]:
            yield number, tuple(words[:comment])


@dataclass
class _Draft:
    """What has been read so far."""

    where: str
    header: dict[str, str] = field(default_factory=dict)
    layers: dict[str, Entry] = field(default_factory=dict)
    times: dict[str, dict[int, Entry]] = field(default_factory=dict)
    edges: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def take(self, line: Line) -> None:
        """One more line."""
        keyword = line.words[0]
        if keyword in _HEADER:
            self._header(line)
        elif keyword == "layer":
            self._layer_line(line)
        elif keyword == "times":
            self._times(line)
        elif keyword == "edge":
            self._edge(line)
        else:
            known = (*_HEADER, "layer", "times", "edge")
            raise line.error(f"{shown(keyword)} begins no line; {expected(keyword, known)}")

    def _header(self, line: Line) -> None:
        name = line.words[0]
        if name in self.header:
            raise line.error(f"a second {name}; keep one")
        if len(line.words) < 2:
            raise line.error(f"{name} is empty; write `{name} {_HEADER[name]}`")
        self.header[name] = " ".join(line.words[1:])
        if name == "batch":
            count(line, "batch", self.header[name])
        if name == "per" and self.header[name] not in ("batch", "sample"):
            raise line.error(f"per is {shown(self.header[name])}; write `per batch` or `per sample`")

    def _layer_line(self, line: Line) -> None:
        name = names(line, 1, "layer NAME forward-s=... backward-s=... activation-bytes=... parameter-bytes=...")[0]
        if name in self.layers:
            first = self.layers[name].line.where
            raise line.error(f"layer {name} is there already ({first}); names are unique, rename one")
        self.layers[name] = entry(line, 2, LAYER, f"layer {name}")

    def _times(self, line: Line) -> None:
        name = names(line, 1, "times NAME batch=64 forward-s=... backward-s=...")[0]
        found = entry(line, 2, TIMES, f"times of {name}")
        known = self.times.setdefault(name, {})
        batch = found.fields["batch"]
        if batch in known:
            first = known[batch].line.where
            raise line.error(f"times of {name} at batch {batch} are there already ({first}); keep one")
        known[batch] = found

    def _edge(self, line: Line) -> None:
        source, target = names(line, 2, "edge FROM TO")
        if (source, target) in self.edges:
            first = self.edges[source, target].line.where
            raise line.error(f"edge {source} {target} is there already ({first}); keep one, with the bytes of both")
        if source == target:
            raise line.error(f"edge {source} {target}: a layer cannot feed itself; remove the edge")
        self.edges[source, target] = entry(line, 3, EDGE, f"edge {source} {target}")

    def finish(self) -> LayerProfile:
        """The profile, when all lines are there."""
        for name in ("batch", "device", "per"):
            if name not in self.header:
                raise ProfileError(f"{self.where}: no line for {name}; add `{name} {_HEADER[name]}` above the layers")
        if not self.layers:
            raise ProfileError(f"{self.where}: no layers; add lines `layer NAME forward-s=... ...`")
        self._check_names()
        self._check_edges()
        self._check_cycle()
        batch, default_name = int(self.header["batch"]), Path(self.where).name.partition(".")[0] or "profile"
        return LayerProfile(
            model=self.header.get("model", default_name),
            batch=batch,
            device=self.header["device"],
            layers=tuple(self._layer(name, batch) for name in self.layers),
            edges=tuple(
                ProfileEdge(source, target, self._scaled(source, found.fields.get("activation-bytes"), batch))
                for (source, target), found in self.edges.items()
            ),
            precision=self.header.get("precision", ""),
        )

    def _check_names(self) -> None:
        used = [(name, found.line) for name, batches in self.times.items() for found in batches.values()]
        used += [(name, found.line) for ends, found in self.edges.items() for name in ends]
        for name, line in used:
            if name not in self.layers:
                raise line.error(f"no layer is called {shown(name)}; {expected(name, tuple(self.layers))}")

    def _check_cycle(self) -> None:
        graph = nx.DiGraph(list(self.edges))
        if nx.is_directed_acyclic_graph(graph):
            return
        cycle = [source for source, _ in nx.find_cycle(graph)]
        line = self.edges[cycle[-1], cycle[0]].line
        around = " -> ".join([*cycle[:6], *["..."] * (len(cycle) > 6), cycle[0]])
        raise line.error(f"edge {cycle[-1]} {cycle[0]} closes a cycle, {around}; remove one of its edges")

    def _check_edges(self) -> None:
        for (source, target), found in self.edges.items():
            most, nbytes = self.layers[source].fields["activation-bytes"], found.fields.get("activation-bytes", 0)
            if nbytes > most:
                raise found.line.error(
                    f"edge {source} {target}: activation-bytes is {nbytes}, and {source} hands on {most}; "
                    "lower the one or raise the other"
                )

    def _scaled(self, name: str, nbytes: int | None, batch: int) -> int | None:
        """Bytes of the whole batch; what no sample reaches has a size of its own."""
        return None if nbytes is None else nbytes * self._factor(name, batch)

    def _factor(self, name: str, batch: int) -> int:
        per_sample = self.header["per"] == "sample"
        return batch if per_sample and self.layers[name].fields.get("samples") is not Samples.NONE else 1

    def _layer(self, name: str, batch: int) -> ProfiledLayer:
        line, fields, more = self.layers[name].line, self.layers[name].fields, self.times.get(name, {})
        if batch in more:
            raise more[batch].line.error(
                f"times of {name} at batch {batch} are there already ({line.where}), as that is the profile's batch; "
                "keep one"
            )
        found = {batch: fields, **{size: known.fields for size, known in more.items()}}
        return ProfiledLayer(
            name=name,
            times=tuple(self._seconds(name, size, found[size]) for size in sorted(found)),
            activation_bytes=fields["activation-bytes"] * self._factor(name, batch),
            parameter_bytes=fields["parameter-bytes"],
            saved_bytes=self._scaled(name, fields.get("saved-bytes"), batch),
            kind=fields.get("kind", "other"),
            samples=fields.get("samples", Samples.SPLIT),
            cuts=fields.get("cut", ()),
            update_s=fields.get("update-s", 0.0),
        )

    def _seconds(self, name: str, batch: int, fields: Mapping[str, Any]) -> Times:
        factor = self._factor(name, batch)
        return Times(batch, fields["forward-s"] * factor, fields["backward-s"] * factor)


_HEADER: Mapping[str, str] = {
    "model": "NAME",
    "batch": "256",
    "device": "WHAT IT WAS MEASURED ON",
    "precision": "fp32",
    "per": "batch",
}
