"""Reads the text of a layer profile; whatever is wrong with it becomes one error that names line, field and remedy.

Lines stand for themselves until the end of the file: only then layers, their further times and edges meet, so that
they may come in any order. docs/profile-graph.md describes the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx

from parplan.cost_models.layer_profile import (
    FORMAT,
    VERSION,
    LayerProfile,
    ProfiledLayer,
    ProfileEdge,
    Samples,
    Times,
)
from parplan.cost_models.layer_profile_fields import (
    EDGE,
    LAYER,
    TIMES,
    Entry,
    Line,
    count,
    entry,
    expected,
    names,
    shown,
)
from parplan.errors import ProfileError

__all__ = ["load_layer_profile", "parse_layer_profile"]

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
