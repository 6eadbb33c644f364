"""The plan: plain data that people review, edit, diff and keep.

A plan is versioned JSON keyed by dotted layer names. Equal plans print equal text: no ids, no
clocks, keys in forward order. Reading refuses what it does not know, so a typo is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from parplan.errors import PlanError
from parplan.fields import (
    Field,
    choice,
    count,
    counted,
    numbers,
    parse_json,
    ranges,
    read_fields,
    read_file,
    table,
    text,
)

if TYPE_CHECKING:
    from parplan.layout import Grid

__all__ = ["LISTED_DEVICES", "SAVED", "SCHEDULES", "SCHEMA", "STATES", "Plan", "Scheme", "Strategy"]

SCHEMA = "parplan.plan/1"
RULES = ("default", "strict")
STATES = ("replicated", "sharded", "gathered")
SAVED = ("keep", "replay")
SCHEDULES = ("serial", "gpipe", "1f1b")

LISTED_DEVICES = 8
"""Up to so many devices a strategy's text lists each; either way, "0-3" or [0, 1, 2, 3], is read."""


class Scheme(Enum):
    """The order in which the samples of many replicas reach layers with fewer (Krizhevsky 2014, section 4).

    gather: all at once, and the layers run once. broadcast: one replica's samples at a time. interleave: an equal share
    of every replica's samples at a time. With the last two the layers with fewer replicas run in passes.
    """

    GATHER = "gather"
    BROADCAST = "broadcast"
    INTERLEAVE = "interleave"


# Fields of a strategy that its words tell, or that stand beside them in a report; any other is told by its name.
_DESCRIBED = frozenset({"replicas", "shards", "axis", "devices", "update_period", "state", "saved"})


@dataclass(frozen=True)
class Strategy:
    """Placement of one layer: `replicas` x `shards` along `axis`, on `devices` (row by row).

    Args:
        replicas: copies that work on different samples.
        shards: slices along `axis`; `axis` is None when there is one.
        axis: name of the cut axis, such as "out-features".
        devices: logical devices, replica by replica, the shards of a replica side by side.
        update_period: update the weights every so many passes; None means once, after the last.
        state: of weights, gradients and optimizer between steps: "replicated", on every device that uses it; "sharded",
            in slices over those devices, of which the weights are gathered for each forward and kept for its backward
            (ZeRO's second stage); "gathered", the same with weights freed behind the forward and gathered again for the
            backward (its third).
        saved: of what the backward needs of the forward: "keep", it is kept; "replay", it is dropped behind the forward
            and made again before the backward of the layer's unit (activation checkpointing; graph/repeated.py: units).
    """

    replicas: int = 1
    shards: int = 1
    axis: str | None = None
    devices: tuple[int, ...] = (0,)
    update_period: int | None = None
    state: str = "replicated"
    saved: str = "keep"

    @cached_property
    def grid(self) -> Grid:
        """The devices arranged as replicas x shards."""
        from parplan.layout import Grid  # it needs numpy, which reading a plan does not

        return Grid(self.devices, self.replicas, self.shards)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The strategy wherever its devices are, and whenever it updates: a key of what one of them has to do.

        A tuple, whose hash takes a quarter of a dataclass's: costs are looked up by it, per layer, strategy and shape.
        """
        return tuple(getattr(self, one.name) for one in fields(self) if one.name not in ("devices", "update_period"))

    @property
    def arrangement(self) -> tuple[int, int, tuple[int, ...]]:
        """Replicas, shards and devices: layers that have them in common leave values where they are."""
        return self.replicas, self.shards, self.devices

    @property
    def placement(self) -> Strategy:
        """The strategy whatever its axis: a key of layers that a report tells of together."""
        return replace(self, axis=None)

    @property
    def ways(self) -> str:
        """Words for replicas and shards, whatever the axis: `4 replicas`, `2 replicas x 4 shards`, `one device`."""
        counts = (self.replicas, "replica"), (self.shards, "shard")
        return " x ".join(counted(count, word) for count, word in counts if count > 1) or "one device"

    def describe(self, alone: str = "1 device") -> str:
        """Words for a report: `4 replicas`, `2 replicas x 2 shards of out-features`, or `alone` on one device."""
        replicas = f"{self.replicas} replicas" if self.replicas > 1 else ""
        shards = f"{self.shards} shards of {self.axis}" if self.shards > 1 else ""
        more = [f"{one.name} {getattr(self, one.name)}" for one in fields(self) if one.name not in _DESCRIBED]
        state = [] if self.state == "replicated" else [f"{self.state} state"]
        again = [] if self.saved == "keep" else ["replayed"]
        return ", ".join([" x ".join(part for part in (replicas, shards) if part) or alone, *state, *again, *more])


@dataclass(frozen=True)
class Plan:
    """One strategy per layer for one model, batch and number of devices.

    Args:
        model: a name for people: that of its class, or of the target it was loaded from.
        fingerprint: digest of the model's layers and parameter shapes (not of batch or weights), which with the layers'
            names tells whether a plan is for a model.
        batch: samples in one step, over all devices, that times and memory were planned for; others may be run.
        devices: how many logical devices there are.
        rules: "default" or "strict" reading of the divisibility rules.
        layers: strategy per layer name, in forward order.
        scheme: how samples get from many replicas to layers with fewer.
        micro_batches: equal parts of the batch that go forward and backward one after another, their gradients added up
            for one update (gradient accumulation).
        schedule: in which order groups of devices take micro-batches: "serial", each goes forward and backward before
            the next one; "gpipe" and "1f1b", as pipeline stages (lowering/pipeline), which layers that have no devices
            in common make.
        note: a remark of a person's, kept with the plan.
        notes: remarks by layer name.

    Raises:
        PlanError: a note on something that is no layer.
    """

    model: str
    fingerprint: str
    batch: int
    devices: int
    layers: Mapping[str, Strategy]
    rules: str = "default"
    scheme: Scheme = Scheme.GATHER
    micro_batches: int = 1
    schedule: str = SCHEDULES[0]
    note: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))
        object.__setattr__(self, "notes", MappingProxyType({name: text for name, text in self.notes.items() if text}))
        if unknown := [name for name in self.notes if name not in self.layers]:
            raise PlanError(f"the plan has a note on {unknown[0]!r} and no such layer; leave out the note")

    def __reduce__(self) -> tuple[Callable[[str], Plan], tuple[str]]:
        """Pickled as its JSON: a view of a dictionary cannot be pickled."""
        return Plan.from_json, (self.to_json(),)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The layers whose state is in slices."""
        return tuple(name for name, own in self.layers.items() if own.state != "replicated")

    @property
    def replayed(self) -> tuple[str, ...]:
        """The layers that run forward again for their backward."""
        return tuple(name for name, own in self.layers.items() if own.saved == "replay")

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch: of some one more, where they do not divide the batch."""
        return self.batch // self.micro_batches

    def with_layers(self, layers: Mapping[str, Strategy]) -> Plan:
        """The same plan with some layers' strategies replaced."""
        return replace(self, layers={**self.layers, **layers})

    def to_json(self) -> str:
        """The plan as text; equal plans give equal text."""
        head = {
            "schema": SCHEMA,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "batch": self.batch,
            "devices": self.devices,
            "rules": self.rules,
            **({} if self.scheme is Scheme.GATHER else {"scheme": self.scheme.value}),
            **({} if self.micro_batches == 1 else {"micro_batches": self.micro_batches}),
            **({} if self.schedule == SCHEDULES[0] else {"schedule": self.schedule}),
            **({"note": self.note} if self.note else {}),
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        layers = {name: _to_dict(strategy) for name, strategy in self.layers.items()}
        for name in self.notes:
            layers[name]["note"] = self.notes[name]
        rows = [f"    {json.dumps(name)}: {json.dumps(layer)}" for name, layer in layers.items()]
        return "\n".join(["{", *lines, '  "layers": {', ",\n".join(rows), "  }", "}", ""])

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """Read a plan; `where` names the source in errors.

        Raises:
            PlanError: not JSON, another schema, an unknown or missing field, a wrong type.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise _no_plan(where, f"it is not JSON ({error})" if text.strip() else "it is empty") from error
        if not isinstance(data, dict) or "schema" not in data:
            raise _no_plan(where, 'it has no "schema"' if isinstance(data, dict) else "it is no object of JSON")
        if data["schema"] != SCHEMA:
            raise PlanError(f"{where} has schema {data['schema']!r}; this version of parplan reads {SCHEMA!r}")
        found = read_fields(data, _PLAN, where, PlanError)
        layers = {
            name: read_fields(entry, (*_STRATEGY, _NOTE), f"{where}: {name}", PlanError)
            for name, entry in found.pop("layers").items()
        }
        notes = {name: layer.pop("note", "") for name, layer in layers.items()}
        del found["schema"]
        return Plan(**found, layers={name: Strategy(**layer) for name, layer in layers.items()}, notes=notes)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: the file is missing or not a plan.
        """
        text = read_file(path, "plan", PlanError, "name a file that `parplan analyze --out` wrote")
        return Plan.from_json(text, str(path))


def _no_plan(where: str, why: str) -> PlanError:
    return PlanError(f"{where} is not a plan: {why}; write one with `parplan analyze --out`")


def _to_dict(strategy: Strategy) -> dict[str, Any]:
    """The fields in their order; no update period means the default. Many devices are written as ranges, "0-127"."""
    found = {one.name: getattr(strategy, one.name) for one in fields(strategy)}
    if len(strategy.devices) > LISTED_DEVICES:
        found["devices"] = ranges(strategy.devices)
    left_out = {"update_period": None, "state": "replicated", "saved": "keep"}
    return {name: value for name, value in found.items() if name not in left_out or value != left_out[name]}


_AXIS = text("axis")
_NOTE = text("note").optional()
_PLAN = (
    text("schema"),
    text("model"),
    text("fingerprint"),
    count("batch"),
    count("devices"),
    choice("rules", RULES),
    choice("scheme", Scheme).optional(),
    count("micro_batches").optional(),
    choice("schedule", SCHEDULES).optional(),
    _NOTE,
    table("layers", "an object with a strategy for every layer"),
)
_STRATEGY = (
    count("replicas"),
    count("shards"),
    Field("axis", "text or null", lambda value: None if value is None else _AXIS.read(value)),
    numbers("devices", "logical device numbers, from 0 on"),
    count("update_period").optional(),
    choice("state", STATES).optional(),
    choice("saved", SAVED).optional(),
)
