"""The report's figures as JSON, for programs: the same records the terminal prints, seconds and bytes unrounded."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parplan.cluster import Device
    from parplan.planner.decision import Decision, Pins

__all__ = ["SCHEMA", "to_dict", "to_json"]

SCHEMA = "parplan.report/1"


def to_dict(decision: Decision) -> dict[str, Any]:
    """The figures as plain dictionaries, lists, strings and numbers; times in seconds, sizes in bytes.

    An unknown figure (a bound no solver gave, the time of a plan that is not legal) is None.
    """
    passes, pins, cluster = decision.passes, decision.pins, decision.cluster
    layers = []
    for layer in decision.layers:
        figures = _record(layer, "name", "kind", "strategy", "bends", "copies", "pinned", "stage")
        figures["alternatives"] = [
            {**_record(other.strategy, "update_period"), **_record(other, "strategy"), "total_s": other.total_s}
            for other in layer.alternatives
        ]
        layers.append({"name": layer.name, "kind": layer.kind, **_record(layer.strategy, "update_period"), **figures})
    return {
        "schema": SCHEMA,
        "model": decision.plan.model,
        "parameters": decision.parameters,
        "cluster": {
            "name": cluster.describe(),
            "count": cluster.count,
            "home": cluster.home,
            **({} if cluster.mixed else _device(cluster.device)),
            "devices": [
                {**_device(group.device), "count": len(group.members), "numbers": list(group.members)}
                for group in cluster.groups
            ],
            "links": _plain(cluster.links),
        },
        "batch": decision.plan.batch,
        "micro_batches": decision.plan.micro_batches,
        "precision": decision.precision,
        "optimizer": decision.optimizer,
        "notes": list(decision.notes),
        "plan": json.loads(decision.plan.to_json()),
        "layers": layers,
        "bends": {layer.name: list(layer.bends) for layer in decision.layers if layer.bends},
        "copies": {layer.name: _plain(layer.copies) for layer in decision.layers if layer.copies},
        "pins": None if pins is None else _pins(decision, pins),
        "passes": 1 if passes is None else passes.count,
        "schemes": [] if passes is None else _plain(passes.schemes),
        "predicted": {**_record(decision.prediction), "speedup": _plain(decision.speedup)},
        "baselines": [_record(baseline, "plan", "limit_bytes") for baseline in decision.baselines],
        "without": _plain(decision.without),
        "batches": [{**_record(one), "samples_per_s": one.samples_per_s or None} for one in decision.batches],
        "micro_batches_tried": _plain(decision.micro_batches),
        "beside": _plain(decision.branches),
        "advice": decision.advice,
        "advised": decision.advised,
        "loss_outside": _plain(decision.loss_outside),
        "proof": _record(decision.proof, "given", "equal_parts"),
        "seconds": _record(decision.seconds),
    }


def to_json(decision: Decision) -> str:
    """The figures as JSON text, indented, ending in a newline."""
    return json.dumps(to_dict(decision), indent=2, allow_nan=False) + "\n"


def _record(record: Any, *left_out: str) -> dict[str, Any]:
    """A dataclass by the names of its fields."""
    names = (field.name for field in fields(record))
    return {name: _plain(getattr(record, name)) for name in names if name not in left_out}


def _plain(value: Any) -> Any:
    """A value in JSON's types; a float that is not finite is None."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return _record(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _device(device: Device) -> dict[str, Any]:
    return {
        "device": device.kind,
        "memory_bytes": device.memory_bytes,
        "source": device.source,
        "estimated": device.estimated,
    }


def _pins(decision: Decision, pins: Pins) -> dict[str, Any]:
    def share(price_s: float | None, without_s: float | None) -> float | None:
        return price_s / without_s if price_s is not None and without_s else None

    return {
        **_record(pins, "each"),
        "price_s": pins.price_s,
        "share": share(pins.price_s, pins.free_s),
        "each": [
            {**_record(one, "step_s"), "price_s": one.price_s, "share": share(one.price_s, one.without_s)}
            for one in pins.each
        ],
        "layers": {layer.name: layer.pinned for layer in decision.layers if layer.pinned},
    }
