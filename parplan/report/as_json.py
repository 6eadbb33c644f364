"""The report's facts as JSON, for programs: the same records the terminal prints, seconds and bytes unrounded."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parplan.cluster import Cluster, Device
    from parplan.planner.decision import (
        Arrival,
        Baseline,
        BatchTried,
        Beside,
        Decision,
        LayerFacts,
        PinPrice,
        Pins,
        Prediction,
        Proof,
        SchemePrice,
    )

__all__ = ["SCHEMA", "to_dict", "to_json"]

SCHEMA = "parplan.report/1"


def to_dict(decision: Decision) -> dict[str, Any]:
    """The facts as plain dictionaries, lists, strings and numbers; times in seconds, sizes in bytes.

    What is not known (a bound no solver gave, the time of a plan that is not legal) is None.
    """
    return {
        "schema": SCHEMA,
        "model": decision.plan.model,
        "parameters": decision.parameters,
        "cluster": _cluster(decision.cluster),
        "batch": decision.plan.batch,
        "precision": decision.precision,
        "optimizer": decision.optimizer,
        "notes": list(decision.notes),
        "plan": json.loads(decision.plan.to_json()),
        "layers": [_layer(layer) for layer in decision.layers],
        "bends": {layer.name: list(layer.bends) for layer in decision.layers if layer.bends},
        "copies": {layer.name: [_copy(one) for one in layer.copies] for layer in decision.layers if layer.copies},
        "pins": None if decision.pins is None else _pins(decision, decision.pins),
        "passes": 1 if decision.passes is None else decision.passes.count,
        "schemes": [] if decision.passes is None else [_scheme(one) for one in decision.passes.schemes],
        "predicted": {**_prediction(decision.prediction), "speedup": _known(decision.speedup)},
        "baselines": [_baseline(baseline) for baseline in decision.baselines],
        "batches": [_batch(one) for one in decision.batches],
        "beside": None if decision.beside is None else _beside(decision.beside),
        "advice": decision.advice,
        "proof": _proof(decision.proof),
        "seconds": {part: getattr(decision.seconds, part) for part in ("capture", "costs", "solve", "total")},
    }


def to_json(decision: Decision) -> str:
    """The facts as JSON text, indented, ending in a newline."""
    return json.dumps(to_dict(decision), indent=2, allow_nan=False) + "\n"


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _cluster(cluster: Cluster) -> dict[str, Any]:
    links = [
        {
            "name": link.name,
            "size": link.size,
            "latency_s": link.latency_s,
            "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            "contention": link.contention,
            "overlap": link.overlap,
            "source": link.source,
            "estimated": link.estimated,
        }
        for link in cluster.links
    ]
    return {
        "name": cluster.describe(),
        "count": cluster.count,
        **({} if cluster.mixed else _device(cluster.device)),
        "devices": [
            {**_device(group.device), "count": len(group.members), "numbers": list(group.members)}
            for group in cluster.groups
        ],
        "links": links,
    }


def _device(device: Device) -> dict[str, Any]:
    return {
        "device": device.kind,
        "memory_bytes": device.memory_bytes,
        "source": device.source,
        "estimated": device.estimated,
    }


def _layer(facts: LayerFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "kind": facts.kind,
        "replicas": facts.strategy.replicas,
        "shards": facts.strategy.shards,
        "axis": facts.strategy.axis,
        "devices": list(facts.strategy.devices),
        "forward_s": facts.forward_s,
        "backward_s": facts.backward_s,
        "transfer_s": facts.transfer_s,
        "reduce_s": facts.reduce_s,
        "memory_bytes": facts.memory_bytes,
        "source": facts.source.value,
        "why": facts.why,
    }


def _beside(beside: Beside) -> dict[str, Any]:
    """What runs at the same time, a list of tracks per stretch."""
    return {
        "without_s": _known(beside.without_s),
        "tried": beside.tried,
        "phases": [
            {
                "saved_s": phase.saved_s,
                "tracks": [
                    {"layers": list(track.layers), "devices": list(track.devices), "compute_s": track.compute_s}
                    for track in phase.tracks
                ],
            }
            for phase in beside.phases
        ],
    }


def _copy(copy: Arrival) -> dict[str, Any]:
    return {"layer": copy.layer, "devices": list(copy.devices)}


def _pins(decision: Decision, pins: Pins) -> dict[str, Any]:
    return {
        "step_s": pins.step_s,
        "free_s": pins.free_s,
        "price_s": pins.price_s,
        "share": _share(pins.price_s, pins.free_s),
        "proven": pins.proven,
        "each": [_pin(one) for one in pins.each],
        "layers": {layer.name: layer.pinned for layer in decision.layers if layer.pinned},
    }


def _pin(price: PinPrice) -> dict[str, Any]:
    return {
        "pin": price.pin,
        "patterns": list(price.patterns),
        "origin": price.origin,
        "layers": price.layers,
        "without_s": price.without_s,
        "price_s": price.price_s,
        "share": _share(price.price_s, price.without_s),
        "proven": price.proven,
        "why_not": price.why_not,
    }


def _share(price_s: float | None, without_s: float | None) -> float | None:
    """A price as a share of the step without what it is the price of."""
    return price_s / without_s if price_s is not None and without_s else None


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "step_s": prediction.step_s,
        "forward_s": prediction.forward_s,
        "backward_s": prediction.backward_s,
        "transfer_s": prediction.transfer_s,
        "reduce_s": prediction.reduce_s,
        "exposed_reduce_s": prediction.exposed_reduce_s,
        "most_hidden": prediction.most_hidden,
        "update_s": prediction.update_s,
        "overhead_s": prediction.overhead_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "memory_bytes": list(prediction.memory_bytes),
    }


def _baseline(baseline: Baseline) -> dict[str, Any]:
    return {
        "name": baseline.name,
        "step_s": _known(baseline.step_s),
        "memory_bytes": baseline.memory_bytes,
        "fits": baseline.fits,
        "why_not": baseline.why_not,
        "on": baseline.on,
    }


def _scheme(price: SchemePrice) -> dict[str, Any]:
    return {
        "scheme": price.scheme.value,
        "passes": price.passes,
        "step_s": price.step_s,
        "exposed_transfer_s": price.exposed_transfer_s,
        "memory_bytes": price.memory_bytes,
        "samples": price.samples,
        "why_not": price.why_not,
    }


def _batch(tried: BatchTried) -> dict[str, Any]:
    return {
        "batch": tried.batch,
        "step_s": tried.step_s,
        "samples_per_s": tried.samples_per_s or None,
        "memory_bytes": tried.memory_bytes,
        "limit_bytes": tried.limit_bytes,
        "fits": tried.fits,
    }


def _proof(proof: Proof) -> dict[str, Any]:
    return {
        "status": proof.status,
        "objective": _known(proof.objective),
        "bound": _known(proof.bound),
        "gap": _known(proof.gap),
        "seconds": proof.seconds,
        "one_pass": proof.one_pass,
    }
