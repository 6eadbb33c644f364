"""The plan: plain data that people review, edit, diff and keep.

A plan is versioned JSON keyed by dotted layer names. Equal plans print equal text: no ids, no
clocks, keys in forward order. Reading refuses what it does not know, so a typo is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parplan.errors import PlanError
from parplan.layout import Grid

__all__ = ["SCHEMA", "Plan", "Scheme", "Strategy"]

SCHEMA = "parplan.plan/1"
RULES = ("default", "strict")


class Scheme(Enum):
    """In which order the samples of many replicas reach layers with fewer (Krizhevsky 2014, section 4).

    gather: all at once, and the layers run once. broadcast: one replica's samples at a time. interleave: an equal share
    of every replica's samples at a time. With the last two the layers with fewer replicas run in passes.
    """

    GATHER = "gather"
    BROADCAST = "broadcast"
    INTERLEAVE = "interleave"


@dataclass(frozen=True)
class Strategy:
    """How one layer is spread: `replicas` x `shards` along `axis`, on `devices` (row by row).

    Args:
        replicas: copies that work on different samples.
        shards: slices along `axis`; `axis` is None when there is one.
        axis: name of the cut axis, such as "out-features".
        devices: logical devices, replica by replica, the shards of a replica side by side.
        update_period: update the weights every so many passes; None means once, after the last.
    """

    replicas: int = 1
    shards: int = 1
    axis: str | None = None
    devices: tuple[int, ...] = (0,)
    update_period: int | None = None

    @property
    def grid(self) -> Grid:
        """The devices arranged as replicas x shards."""
        return Grid(self.devices, self.replicas, self.shards)

    def describe(self) -> str:
        """Words for a report: `4 replicas`, `2 replicas x 2 shards of out-features`, `1 device`."""
        replicas = f"{self.replicas} replicas" if self.replicas > 1 else ""
        shards = f"{self.shards} shards of {self.axis}" if self.shards > 1 else ""
        return " x ".join(part for part in (replicas, shards) if part) or "1 device"


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
    """

    model: str
    fingerprint: str
    batch: int
    devices: int
    layers: Mapping[str, Strategy]
    rules: str = "default"
    scheme: Scheme = Scheme.GATHER

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))

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
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        rows = [f"    {json.dumps(name)}: {json.dumps(_to_dict(s))}" for name, s in self.layers.items()]
        return "\n".join(["{", *lines, '  "layers": {', ",\n".join(rows), "  }", "}", ""])

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """Read a plan; `where` names the source in errors.

        Raises:
            PlanError: not JSON, another schema, an unknown or missing field, a wrong type.
        """
        try:
            data = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise _no_plan(where, f"it is not JSON ({error})" if text.strip() else "it is empty") from error
        return _plan_from(data, where)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: the file is missing or not a plan.
        """
        if not str(path):
            raise PlanError("the name of the plan is empty; name a file that `parplan analyze --out` wrote")
        if Path(path).is_dir():
            raise PlanError(f"cannot read the plan {path}: that is a folder; name a file in it")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise _no_plan(str(path), "it is not text in UTF-8") from error
        return Plan.from_json(text, str(path))


def _no_plan(where: str, why: str) -> PlanError:
    return PlanError(f"{where} is not a plan: {why}; write one with `parplan analyze --out`")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{key!r} appears twice")
        seen[key] = value
    return seen


def _to_dict(strategy: Strategy) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "replicas": strategy.replicas,
        "shards": strategy.shards,
        "axis": strategy.axis,
        "devices": list(strategy.devices),
    }
    return fields if strategy.update_period is None else {**fields, "update_period": strategy.update_period}


_PLAN_FIELDS = {"schema": str, "model": str, "fingerprint": str, "batch": int, "devices": int, "rules": str}


def _plan_from(data: Any, where: str) -> Plan:
    if not isinstance(data, dict) or "schema" not in data:
        raise _no_plan(where, 'it has no "schema"' if isinstance(data, dict) else "it is no object of JSON")
    if data["schema"] != SCHEMA:
        raise PlanError(f"{where} has schema {data['schema']!r}; this version of parplan reads {SCHEMA!r}")
    _check_fields(data, {**_PLAN_FIELDS, "layers": dict, "scheme": str}, {"scheme"}, where)
    if data["rules"] not in RULES:
        raise PlanError(f"{where}: rules {data['rules']!r} is not one of {', '.join(RULES)}")
    schemes = [scheme.value for scheme in Scheme]
    if data.get("scheme", "gather") not in schemes:
        raise PlanError(f"{where}: scheme {data['scheme']!r} is not one of {', '.join(schemes)}")
    for key in ("batch", "devices"):
        if data[key] < 1:
            raise PlanError(f"{where}: {key} is {data[key]}; it must be at least 1")
    layers = {name: _strategy_from(entry, f"{where}: {name}") for name, entry in data["layers"].items()}
    return Plan(
        data["model"],
        data["fingerprint"],
        data["batch"],
        data["devices"],
        layers,
        data["rules"],
        Scheme(data.get("scheme", "gather")),
    )


def _strategy_from(entry: Any, where: str) -> Strategy:
    if not isinstance(entry, dict):
        raise PlanError(f"{where}: expected replicas, shards, axis and devices, found {type(entry).__name__}")
    kinds = {"replicas": int, "shards": int, "axis": (str, type(None)), "devices": list, "update_period": int}
    _check_fields(entry, kinds, {"update_period"}, where)
    for key in ("replicas", "shards", "update_period"):
        if entry.get(key, 1) < 1:
            raise PlanError(f"{where}: {key} is {entry[key]}; it must be at least 1")
    if not all(type(device) is int and device >= 0 for device in entry["devices"]):
        raise PlanError(f"{where}: devices must be logical device numbers, found {entry['devices']}")
    return Strategy(**{**entry, "devices": tuple(entry["devices"])})


def _check_fields(data: dict[str, Any], kinds: Mapping[str, Any], optional: set[str], where: str) -> None:
    unknown = sorted(set(data) - set(kinds))
    missing = sorted(set(kinds) - optional - set(data))
    if unknown or missing:
        parts = [f"unknown field {name!r}" for name in unknown] + [f"missing field {name!r}" for name in missing]
        raise PlanError(f"{where}: {', '.join(parts)}")
    for key, value in data.items():
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            raise PlanError(f"{where}: {key} is {value!r}; expected {_kind_name(kinds[key])}")


def _kind_name(kind: Any) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
