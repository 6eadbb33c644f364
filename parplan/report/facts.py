"""The report's facts as JSON, for programs: the same records the terminal prints, seconds and bytes unrounded."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parplan.cluster import Cluster, Device
    from parplan.planner.decision import Baseline, Decision, LayerFacts, Prediction, Proof

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
        "passes": decision.plan.passes,
        "predicted": {**_prediction(decision.prediction), "speedup": _known(decision.speedup)},
        "baselines": [_baseline(baseline) for baseline in decision.baselines],
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


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "step_s": prediction.step_s,
        "forward_s": prediction.forward_s,
        "backward_s": prediction.backward_s,
        "transfer_s": prediction.transfer_s,
        "reduce_s": prediction.reduce_s,
        "exposed_reduce_s": prediction.exposed_reduce_s,
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


def _proof(proof: Proof) -> dict[str, Any]:
    return {
        "status": proof.status,
        "objective": _known(proof.objective),
        "bound": _known(proof.bound),
        "gap": _known(proof.gap),
        "seconds": proof.seconds,
    }
