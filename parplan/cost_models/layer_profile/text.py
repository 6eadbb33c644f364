"""Reads the text of a layer profile (docs/profile-graph.md): one statement a line, in any order.

Every refusal names the line, the layer or edge, the field, what was found and what would fix it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import networkx as nx

from parplan.cost_models.layer_profile.records import (
    AXIS_EFFECTS,
    AxisCut,
    Effect,
    LayerProfile,
    ProfiledLayer,
    ProfileEdge,
    Samples,
    Times,
)
from parplan.errors import ProfileError
from parplan.fields import (
    Field,
    FieldError,
    choice,
    count,
    did_you_mean,
    number,
    read_field,
    read_fields,
    read_file,
    shown,
    text,
)

__all__ = ["FORMAT", "VERSION", "load_layer_profile", "parse_layer_profile"]

FORMAT, VERSION = "parplan-layer-profile", "1"
_HEAD = f"a layer profile is text that begins with `{FORMAT} {VERSION}`"

# Beyond these a number is a typing error or another unit: eleven days, a pebibyte, two thousand million.
_MOST_SECONDS, _MOST_BYTES, _MOST_COUNT = 1e6, 2**50, 2**31


def _seconds(name: str) -> Field:
    seconds = number(name, 0, _MOST_SECONDS, "seconds")
    return Field(name, seconds.expected, lambda word: seconds.read(float(word)))


def _whole(name: str, least: int, limit: int, meaning: str) -> Field:
    whole = count(name, least, limit, meaning)

    def read(word: str) -> int:
        value = float(word)
        return int(whole.read(int(value) if value == int(value) else value))

    return Field(name, whole.expected, read)


_bytes = partial(_whole, least=0, limit=_MOST_BYTES, meaning="a whole number of bytes")
_count = partial(_whole, least=1, limit=_MOST_COUNT, meaning="a whole number")


def _read_cuts(words: str) -> tuple[AxisCut, ...]:
    cuts = tuple(_read_cut(word) for word in words.split(","))
    axes = [cut.axis for cut in cuts]
    if twice := next((axis for axis in axes if axes.count(axis) > 1), None):
        raise FieldError(f"{twice} is given twice; keep one")
    return cuts


def _read_cut(word: str) -> AxisCut:
    axis, *rest = word.split(":")
    if not axis or not axis.isprintable() or not 1 <= len(rest) <= 2:
        raise ValueError
    named = AXIS_EFFECTS.get(axis)
    if len(rest) == 1 and named is None:
        remedy = f"say {axis}:{rest[0]}:output (or input, or both)"
        raise FieldError(f"{axis}: the effect of cutting it is not known; {remedy}")

    def checked(field: Field, value: str) -> Any:
        try:
            return field.read(value)
        except (ValueError, OverflowError):
            raise FieldError(f"{axis}: {field.name} is {shown(value)}; expected {field.expected}") from None

    units = checked(_count("units"), rest[0])
    if len(rest) == 1:
        return AxisCut(axis, units, AXIS_EFFECTS[axis])
    effect_word, at, dims = rest[1].partition("@")
    effect = checked(choice("effect", Effect), effect_word)
    takes, arrow, gives = dims.partition(">") if at else ("1", "", "")
    if arrow and effect is not Effect.BOTH:
        raise FieldError(f"{axis}: {effect.value} cuts one dimension, found {shown(dims)}; write {effect.value}@1")
    first = checked(_count("dimension"), takes)
    second = checked(_count("dimension"), gives) if arrow else first
    return AxisCut(
        axis, units, effect, 1 if effect is Effect.OUTPUT else first, 1 if effect is Effect.INPUT else second
    )


_CUTS = "axes as AXIS:UNITS or AXIS:UNITS:EFFECT@DIMENSION, such as out-features:4096 or experts:8:output@2"


def _read_word(word: str) -> str:
    if not word.isprintable():
        raise ValueError
    return word


_WORD = "a word without characters that cannot be shown, such as conv"


@dataclass(frozen=True)
class _Form:
    """A statement: how many names follow its keyword, the fields after them, and how it is written."""

    names: int
    fields: Sequence[Field]
    written: str


_SECONDS = (_seconds("forward-s"), _seconds("backward-s"))
_FORMS = {
    "layer": _Form(
        1,
        (
            *_SECONDS,
            _bytes("activation-bytes"),
            _bytes("parameter-bytes"),
            _bytes("saved-bytes").optional(),
            _seconds("update-s").optional(),
            Field("kind", _WORD, _read_word, required=False),
            choice("samples", Samples).optional(),
            Field("cut", _CUTS, _read_cuts, required=False),
        ),
        "layer NAME forward-s=... backward-s=... activation-bytes=... parameter-bytes=...",
    ),
    "times": _Form(1, (_count("batch"), *_SECONDS), "times NAME batch=64 forward-s=... backward-s=..."),
    "edge": _Form(2, (_bytes("activation-bytes").optional(),), "edge FROM TO"),
}
# One line each: the field, and how it is written.
_HEADER: dict[str, tuple[Field, str]] = {
    "model": (text("model"), "NAME"),
    "batch": (_count("batch"), "256"),
    "device": (text("device"), "WHAT IT WAS MEASURED ON"),
    "precision": (text("precision"), "fp32"),
    "per": (choice("per", ("batch", "sample")), "batch"),
}


@dataclass(frozen=True)
class _Statement:
    """A `layer`, `times` or `edge` line; `where` is file:line."""

    where: str
    names: tuple[str, ...]
    fields: dict[str, Any]


def load_layer_profile(path: str | Path) -> LayerProfile:
    """Read a profile from a file.

    Raises:
        ProfileError: no such file, a folder, not text, or text that is not a profile.
    """
    return parse_layer_profile(read_file(path, "profile", ProfileError, _HEAD), str(path))


def parse_layer_profile(source: str, where: str = "profile") -> LayerProfile:
    """The profile that text describes; `where` names it in errors.

    Raises:
        ProfileError: the first thing wrong, with its line, field and what would fix it.
    """
    lines = []  # those that have words before a comment: place and words
    for index, line in enumerate(source.split("\n"), start=1):
        words = [*takewhile(lambda word: not word.startswith("#"), line.split())]
        lines += [(f"{where}:{index}", words)] * bool(words)
    if not lines:
        raise ProfileError(f"{where}: empty; {_HEAD}")
    first, (name, *version) = lines[0]
    if name != FORMAT:
        raise ProfileError(f"{first}: begins with {shown(name)}; {_HEAD}")
    if version != [VERSION]:
        found = " ".join(version) or "none"
        raise ProfileError(f"{first}: version {shown(found)}; this parplan reads version {VERSION}")
    header: dict[str, Any] = {}
    entries: dict[str, dict[Any, _Statement]] = {keyword: {} for keyword in _FORMS}
    for line, words in lines[1:]:
        if words[0] in _HEADER:
            name = words[0]
            field, written = _HEADER[name]
            if name in header:
                raise ProfileError(f"{line}: a second {name}; keep one")
            if len(words) < 2:
                raise ProfileError(f"{line}: {name} is empty; write `{name} {written}`")
            header[name] = read_field(field, " ".join(words[1:]), line, ProfileError)
        elif words[0] in _FORMS:
            _add_entry(entries[words[0]], line, words)
        else:
            raise ProfileError(
                f"{line}: {shown(words[0])} begins no line; {did_you_mean(words[0], [*_HEADER, *_FORMS])}"
            )
    for name in ("batch", "device", "per"):
        if name not in header:
            raise ProfileError(f"{where}: no line for {name}; add `{name} {_HEADER[name][1]}` above the layers")
    if not entries["layer"]:
        raise ProfileError(f"{where}: no layers; add lines `layer NAME forward-s=... ...`")
    layers = [name for (name,) in entries["layer"]]
    for entry in (*entries["times"].values(), *entries["edge"].values()):
        if unknown := next((name for name in entry.names if (name,) not in entries["layer"]), None):
            raise ProfileError(f"{entry.where}: no layer is called {shown(unknown)}; {did_you_mean(unknown, layers)}")
    _check_edges(entries["edge"], entries["layer"])
    return _profile(header, entries, Path(where).name.partition(".")[0] or "profile")


def _add_entry(entries: dict[Any, _Statement], line: str, words: Sequence[str]) -> None:
    keyword, form = words[0], _FORMS[words[0]]
    names = tuple(words[1 : 1 + form.names])
    known = {field.name for other in _FORMS.values() for field in other.fields}
    if len(names) < form.names or any("=" in name and name.partition("=")[0] in known for name in names):
        raise ProfileError(f"{line}: a name is missing; write `{form.written}`")
    if wrong := next((name for name in names if not name.isprintable()), None):
        raise ProfileError(f"{line}: name {shown(wrong)} has characters that cannot be shown; rename it")
    where = f"{line}: {keyword} {' '.join(names)}"
    given: dict[str, str] = {}
    for word in words[1 + form.names :]:
        name, _, value = word.partition("=")
        if name in given:
            raise ProfileError(f"{where}: {name} is given twice; keep one")
        given[name] = value
        if not value and name in known:
            raise ProfileError(f"{where}: {name} has no value; write {name}=VALUE, without blanks")
    fields = read_fields(given, form.fields, where, ProfileError)
    key: tuple[Any, ...] = names
    if keyword == "times":
        key, where = (*names, fields["batch"]), f"{where} batch={fields['batch']}"
    if key in entries:
        raise ProfileError(f"{where} is there already ({entries[key].where}); keep one")
    entries[key] = _Statement(line, names, fields)


def _check_edges(edges: dict[Any, _Statement], layers: dict[Any, _Statement]) -> None:
    for (source, target), entry in edges.items():
        edge = f"{entry.where}: edge {source} {target}"
        if source == target:
            raise ProfileError(f"{edge}: a layer cannot feed itself; remove the edge")
        most, nbytes = layers[source,].fields["activation-bytes"], entry.fields.get("activation-bytes", 0)
        if nbytes > most:
            how = "lower the one or raise the other"
            raise ProfileError(f"{edge}: activation-bytes is {nbytes}, and {source} hands on {most}; {how}")
    graph = nx.DiGraph(list(edges))
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [source for source, _ in nx.find_cycle(graph)]
        last = edges[cycle[-1], cycle[0]].where
        around = " -> ".join([*cycle[:6], *["..."] * (len(cycle) > 6), cycle[0]])
        raise ProfileError(f"{last}: edge {cycle[-1]} {cycle[0]} closes a cycle, {around}; remove one of its edges")


def _profile(header: dict[str, Any], entries: dict[str, dict[Any, _Statement]], default_name: str) -> LayerProfile:
    batch: int = header["batch"]

    def factor(name: str, size: int) -> int:
        """Figures per sample become those of a batch of `size`, but for what no sample reaches."""
        samples = entries["layer"][name,].fields.get("samples")
        return size if header["per"] == "sample" and samples is not Samples.NONE else 1

    def scaled(name: str, nbytes: int | None) -> int | None:
        return None if nbytes is None else nbytes * factor(name, batch)

    def seconds(name: str, size: int, entry: _Statement) -> Times:
        forward_s, backward_s = (entry.fields[field.name] * factor(name, size) for field in _SECONDS)
        return Times(size, forward_s, backward_s)

    times: dict[str, dict[int, _Statement]] = {name: {} for (name,) in entries["layer"]}
    for (name, size), entry in entries["times"].items():
        times[name][size] = entry

    def layer(name: str) -> ProfiledLayer:
        own, measured = entries["layer"][name,], times[name]
        if batch in measured:
            there = f"are there already ({own.where}), as that is the profile's batch; keep one"
            raise ProfileError(f"{measured[batch].where}: times of {name} at batch {batch} {there}")
        measured[batch] = own
        return ProfiledLayer(
            name=name,
            times=tuple(seconds(name, size, measured[size]) for size in sorted(measured)),
            activation_bytes=own.fields["activation-bytes"] * factor(name, batch),
            parameter_bytes=own.fields["parameter-bytes"],
            saved_bytes=scaled(name, own.fields.get("saved-bytes")),
            kind=own.fields.get("kind", "other"),
            samples=own.fields.get("samples", Samples.SPLIT),
            cuts=own.fields.get("cut", ()),
            update_s=own.fields.get("update-s", 0.0),
        )

    return LayerProfile(
        model=header.get("model", default_name),
        batch=batch,
        device=header["device"],
        layers=tuple(layer(name) for (name,) in entries["layer"]),
        edges=tuple(
            ProfileEdge(source, target, scaled(source, entry.fields.get("activation-bytes")))
            for (source, target), entry in entries["edge"].items()
        ),
        precision=header.get("precision", ""),
    )
