"""Figures and sentences of the page: the verdict, the parts of the step, the layers, and where figures come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parplan.cost_models.costs import Source
from parplan.planner.decision import Decision, LayerReport
from parplan.planner.explain.reasons import time_text
from parplan.planner.simulation.timeline import Timeline
from parplan.report import units
from parplan.report.pictures.text import visible

__all__ = ["Cell", "Figure", "layer_table", "proof_words", "sources", "step_parts", "verdict"]


MOST_OTHERS = 4
"""Alternatives of a layer that its line names, the best one in its reason."""


@dataclass(frozen=True)
class Figure:
    """One figure of the verdict: its name, value and a line below; `good` is None where it is neither good nor bad."""

    name: str
    value: str
    below: str
    good: bool | None = None


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, and the number it is sorted by (None: by its text)."""

    text: str
    value: float | None = None


def verdict(decision: Decision) -> tuple[Figure, ...]:
    """Step, speed, memory and proof, each with what it is compared with."""
    step, proof = decision.prediction, decision.proof
    times = units.step(step.step_s)
    doubt = f"between {times.text(step.low_s)} and {times.text(step.high_s)}" if step.high_s > step.low_s else ""
    rate = f"{decision.plan.batch / step.step_s:,.0f} samples/s" if step.step_s > 0 else ""
    found = [Figure("Predicted step", times.text(step.step_s), doubt or rate)]
    legal = [one for one in decision.baselines if one.step_s is not None and one.name != "one device"]
    baselines = sorted((one for one in legal if one.fits), key=lambda one: one.step_s or math.inf)
    against = "no plan by hand fits"
    if baselines and baselines[0].step_s and step.step_s > 0:
        against = f"{baselines[0].step_s / step.step_s:.2f} x {visible(baselines[0].name, 40)}, the best by hand"
    if decision.speedup is not None:
        found.append(Figure("Speed", f"{decision.speedup:.2f} x one device", against))
    pairs = zip(step.memory_bytes, (device.memory_bytes for device in decision.cluster.devices), strict=False)
    used, limit = max(pairs, key=lambda pair: pair[0] / pair[1], default=(0, 1))
    fits = used <= limit
    share = f"{'fits' if fits else 'does not fit'}: {units.percent(used / limit)} of {units.size(limit).text(limit)}"
    found.append(Figure("Memory", units.size(used).text(used), f"{share} on the fullest device", fits))
    proven, value = proof.status == "OPTIMAL", "given plan" if proof.given else "not proven"
    if proof.simpler is not None and proof.fastest_proven:
        more = units.percent(proof.objective / proof.simpler.fastest_s - 1)
        proven, value = True, f"within {more} of the optimum"
    elif proven:
        value = "proven optimal"
    return (*found, Figure("Proof", value, proof_words(decision), proven))


def proof_words(decision: Decision) -> str:
    """The solver's claim in one sentence; the text report has all that it covers."""
    proof = decision.proof
    if proof.status == "OPTIMAL":
        return "no covered plan is faster under these costs"
    if not math.isfinite(proof.gap):
        return "how much faster another plan could be is not known"
    more = units.percent(proof.gap)
    if proof.given:
        return f"another plan is or could be faster by up to {more}"
    if proof.simpler is not None:
        fastest = units.step(proof.simpler.fastest_s).text(proof.simpler.fastest_s)
        proven = "proven optimum" if proof.fastest_proven else "fastest plan found"
        return f"the {proven} takes {fastest} and changes layout more often: {proof.simpler.changes} times"
    return f"another plan could be faster by up to {more}"


def step_parts(decision: Decision, timeline: Timeline | None) -> tuple[tuple[str, str, str], ...]:
    """The parts of the step: name, seconds, share; they add up to it."""
    step = decision.prediction
    parts = {
        "forward": step.forward_s,
        "backward": step.backward_s,
        "transfers": step.transfer_s,
        "gradient sums the backward does not hide": step.exposed_reduce_s,
        "optimizer's update": step.update_s,
        "runtime": step.overhead_s,
    }
    times = units.step(step.step_s)
    rows = [
        (name, times.text(seconds), units.percent(seconds / step.step_s if step.step_s > 0 else 0.0))
        for name, seconds in parts.items()
        if seconds > 0
    ]
    rows.append(("step", times.text(step.step_s), ""))
    if timeline is not None and abs(timeline.step_s - step.step_s) > 1e-3 * step.step_s:
        rows.append(("the simulated step, as drawn", times.text(timeline.step_s), ""))
    return tuple(rows)


HEADS = ("#", "layer", "kind", "strategy", "devices", "forward", "backward", "transfer", "gradient sum", "memory",
         "source", "why, and the best alternatives")  # fmt: skip


def layer_table(layers: Sequence[LayerReport]) -> dict[str, Any]:
    """The layers' figures as rows of cells, and the heads of the columns with their units."""
    seconds = [(one.forward_s, one.backward_s, one.transfer_s, one.reduce_s) for one in layers]
    times = units.time_column(value for own in seconds for value in own)
    sizes = units.size_column(one.memory_bytes for one in layers)
    rows = []
    for number, (one, own) in enumerate(zip(layers, seconds, strict=True), start=1):
        others = (
            f"{other.strategy.describe()} {time_text(other.total_s)}" for other in one.alternatives[1:MOST_OTHERS]
        )
        remarks = [one.why, *others, one.pinned and f"pinned: {one.pinned}", *(f"bends {text}" for text in one.bends)]
        remarks += [f"copies {copy.layer} from {units.devices(copy.devices)}" for copy in one.copies]
        rows.append(
            (
                Cell(str(number)),
                Cell(visible(one.name)),
                Cell(visible(one.kind)),
                Cell(visible(one.strategy.describe()), one.strategy.replicas * one.strategy.shards),
                Cell(units.number_ranges(one.strategy.devices), one.strategy.devices[0]),
                *(_number(times, value) for value in own),
                _number(sizes, one.memory_bytes),
                Cell(one.source.value),
                Cell(visible("; ".join(filter(None, remarks)), 600)),
            )
        )
    named = {head: f"{head} ({times.unit})" for head in HEADS[5:9]} | {"memory": f"memory ({sizes.unit})"}
    return {"heads": [named.get(head, head) for head in HEADS], "rows": rows, "number": range(5, 10)}


def _number(scale: units.Scale, value: float) -> Cell:
    """A figure; it is sorted by its text where that is a number."""
    text = scale.figure(value)
    return Cell(text, value / scale.size if text[0] in "-<u" else None)


def sources(decision: Decision) -> tuple[tuple[str, str], ...]:
    """Where times of layers, devices' rates, links and memory come from."""
    counts = {source: sum(one.source is source for one in decision.layers) for source in Source}
    file = f" (times of {visible(decision.times_from)})" if decision.times_from else ""
    found = [(f"layers' times, {source.value}{file}", f"{count} layers") for source, count in counts.items() if count]
    for group in decision.cluster.groups:
        device = group.device
        doubt = " (unverified)" if device.estimated else ""
        found.append((f"{len(group.members)} x {visible(device.kind)}", f"{visible(device.source, 400)}{doubt}"))
    if decision.cluster.count > 1:
        for link in decision.cluster.links:
            doubt = " (unverified)" if link.estimated else ""
            rate = f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, up to {link.size} devices"
            found.append((f"{visible(link.name)}, {rate}", f"{visible(link.source, 400)}{doubt}"))
        found.append(("transfers and gradient sums", decision.links.value))
    return tuple(found)
