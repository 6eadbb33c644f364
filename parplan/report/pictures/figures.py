"""Figures and sentences of the page: the parts of the step, the layers, and where figures come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parplan.cost_models.costs import Source
from parplan.planner.decision import Decision, LayerReport
from parplan.planner.explain.reasons import time_text
from parplan.planner.simulation.timeline import Timeline
from parplan.report import units
from parplan.report.pictures.text import visible
from parplan.report.sections.blocks import LEAST, name_span, repeated_blocks
from parplan.report.sections.layer_groups import TableLine

__all__ = ["Cell", "layer_table", "sources", "step_parts"]


TIMES = ("forward", "backward", "transfer", "reduce")
MOST_OPEN = 40
"""Rows up to which the table is open from the start."""
MOST_OTHERS = 4
"""Alternatives of a layer that its line names, the best one in its reason."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, the number it is sorted by (None: by its text), and text that paper leaves out."""

    text: str
    value: float | None = None
    more: str = ""


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
SHARED = ("devices", "source")
"""Columns that are left out where all layers say the same."""


def layer_table(layers: Sequence[LayerReport]) -> dict[str, Any]:
    """The layers' figures as rows of cells, the heads of the columns with their units, and what all layers share.

    Layers of repeated blocks are one row, with the sums of their figures, or with those of each where they are on
    different devices.
    """
    blocks = repeated_blocks(layers, LEAST, fold=False)
    shown = [TableLine(block.label, block.layers, block.repeats, head=block.head) for block in blocks]
    each = any(row.apart for row in shown)
    seconds = [[row.total(f"{name}_s", each) for name in TIMES] for row in shown]
    nbytes = [row.total("memory_bytes", each) for row in shown]
    times, sizes = units.time_column(value for own in seconds for value in own), units.size_column(nbytes)
    number = {layer.name: index for index, layer in enumerate(layers, start=1)}
    rows = []
    for row, own, held in zip(shown, seconds, nbytes, strict=True):
        one, name = row.layers[0], visible(name_span([layer.name for layer in row.layers]))
        places = dict.fromkeys(layer.strategy.devices for layer in row.layers)
        others = (
            f"{other.strategy.describe()} {time_text(other.total_s)}" for other in one.alternatives[1:MOST_OTHERS]
        )
        remarks = [
            row.stages or one.why,
            one.pinned and f"pinned: {one.pinned}",
            *(f"bends {text}" for text in one.bends),
        ]
        remarks += [f"copies {row.copies}" * bool(row.copies)]
        cells = (
            Cell(str(number[one.name])),
            Cell(f"{name}, {row.repeats} x" if row.repeats > 1 else name),
            Cell(visible(one.kind)),
            Cell(visible(one.strategy.describe()), one.strategy.replicas * one.strategy.shards),
            Cell("; ".join(map(units.number_ranges, places)), one.strategy.devices[0]),
            *(_number(times, value) for value in own),
            _number(sizes, held),
            Cell(one.source.value),
            Cell(_remarks(remarks), more=_remarks(others)),
        )
        rows.append(cells)
    alike = {head: rows[0][HEADS.index(head)].text for head in SHARED if rows}
    alike = {head: text for head, text in alike.items() if all(row[HEADS.index(head)].text == text for row in rows[1:])}
    columns = [column for column, head in enumerate(HEADS) if head not in alike]
    named = {head: f"{head} ({times.unit})" for head in HEADS[5:9]} | {"memory": f"memory ({sizes.unit})"}
    return {
        "classes": [HEADS[column].split(",")[0].split()[-1].replace("#", "place") for column in columns],
        "heads": [named.get(HEADS[column], HEADS[column]) for column in columns],
        "rows": [[row[column] for column in columns] for row in rows],
        "alike": " and ".join(f"{head} {text}" for head, text in alike.items()),
        "count": units.counted(len(layers), "layer") + f" on {len(shown)} rows" * (len(shown) < len(layers)),
        "figures": ("the figures of each" if each else "the sums of their figures") * (len(shown) < len(layers)),
        "few": len(shown) <= MOST_OPEN,
    }


def _remarks(texts: Iterable[str]) -> str:
    return units.together(visible("; ".join(filter(None, texts)), 600))


def _number(scale: units.Scale, value: float) -> Cell:
    """A figure; it is sorted by its text where that is a number."""
    text = scale.figure(value)
    return Cell(text, value / scale.size if text[0] in "-<u" else None)


def sources(decision: Decision) -> tuple[tuple[str, str], ...]:
    """Where times of layers, devices' rates, links and memory come from."""
    counts = {source: sum(one.source is source for one in decision.layers) for source in Source}
    file = f" (times of {visible(decision.times_from)})" if decision.times_from else ""
    found = [
        (f"layers' times, {source.value}{file}", units.counted(count, "layer"))
        for source, count in counts.items()
        if count
    ]
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
