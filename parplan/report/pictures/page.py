"""HTML pages of a decision and of a measured step: each is a file that loads nothing, runs no script but its own, and
has its figures in tables.

Jinja2 escapes all text; drawings are trees of elements (svg.py); data for the script is JSON without markup. A content
security policy names the script and the style sheet by their digests, so that nothing else could run or load.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from parplan.planner.decision import Decision
from parplan.planner.simulation.timeline import Timeline
from parplan.report import units
from parplan.report.page import printed
from parplan.report.pictures.bars import draw_bars
from parplan.report.pictures.figures import layer_table, sources, step_parts
from parplan.report.pictures.lanes import device_lanes, drawn_lanes, predicted_timeline, span_lanes
from parplan.report.pictures.memory import draw_memory, memory_over_step
from parplan.report.pictures.net import draw_net
from parplan.report.pictures.rows import Row, inside, net_rows
from parplan.report.pictures.svg import BROAD, NARROW, Drawing, theme
from parplan.report.pictures.text import visible
from parplan.report.pictures.timeline import CHARACTER, LIGHT, Drawn, block_words, draw_timeline, predicted_title
from parplan.report.sections.proof import baseline_remark, claim, compared_plans, heading, lacking_rows, seconds_text
from parplan.report.sections.verdict import verdict_lines
from parplan.report.terminal import render
from parplan.runtime.measurement.measured_spans import by_device
from parplan.runtime.measurement.measured_step import ComparedLine, MeasuredStep, StepPart, notes, title
from parplan.runtime.measurement.predicted import BothTimes

__all__ = ["html", "measured_html"]

TEMPLATES = Path(__file__).resolve().parent / "templates"
MOST_BLOCKS = 3000
"""Blocks of a timeline: more would make a page of megabytes, and blocks narrower than a pixel."""
TEXT_COLUMNS, MOST_TEXT = 100, 200_000


@cache
def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def html(decision: Decision, command: str = "", target: str = "MODEL") -> str:
    """The page.

    Args:
        command: what repeats this report, if it was a command.
        target: the model on a command line.
    """
    plan, cluster = decision.plan, decision.cluster
    timeline = predicted_timeline(decision)
    memory = memory_over_step(decision, timeline)
    model, step_s = visible(plan.model), decision.prediction.step_s

    numbered, (net, zooms) = list[Drawn](), _net(decision, net_rows(decision), "net")
    pictures = {
        "net": net,
        "zooms": zooms,
        "bars": _picture("plans", partial(draw_bars, decision)),
        "memory": memory and _picture("memory", partial(draw_memory, memory, plan.model)),
        "timeline": timeline and _picture("step", partial(_draw_step, timeline, plan.model, numbered)),
    }
    sections = {
        "plan-net": "Net", "plan-step": "Step", "plan-memory": "Memory", "plan-others": "Other plans",
        "plan-layers": "Layers", "plan-sources": "Proof and sources", "plan-again": "Repeat",
    }  # fmt: skip
    several = f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    facts = [
        f"{decision.parameters:,} parameters",
        f"batch {plan.batch:,}{several}",
        decision.precision,
        decision.optimizer,
    ]
    facts += [] if plan.rules == "default" else [f"{plan.rules} rules"]
    if decision.passes is not None and decision.passes.count > 1:
        facts.append(f"{plan.scheme.value}, {decision.passes.count} passes")
    simulated = " of the device that is done last" if decision.prediction.simulated else ""
    return _rendered(
        "page.html",
        **pictures,
        model=model,
        devices=f"{plan.devices} device{'s' if plan.devices > 1 else ''}",
        cluster=visible(cluster.describe()),
        facts=" · ".join(facts),
        sections=sections.items(),
        verdict=[
            replace(line, value=visible(line.value, 600), detail=units.together(visible(line.detail, 600)))
            for line in verdict_lines(decision)
        ],
        notes=[visible(note, 1200) for note in decision.notes],
        no_timeline=f"it is not simulated for {plan.devices} devices" if decision.priced else "no graph is known",
        parts=step_parts(decision, timeline),
        parts_of=f", {units.step(step_s).text(step_s)}{simulated}",
        peaks=_peaks(decision),
        baselines=_baselines(decision),
        layers=layer_table(decision.layers),
        proof_status=heading(decision.proof),
        proof=claim(decision),
        covered="; ".join(decision.proof.covered),
        sources=sources(decision),
        command=visible(command, 4000),
        target=visible(target),
        plan=plan.to_json(),
        text=_text(decision),
        took=seconds_text(decision.seconds) if decision.seconds.total > 0 else "",  # not with --as-profiled
        blocks=_blocks(numbered, timeline.step_s if timeline is not None else 0.0),
    )


def measured_html(step: MeasuredStep) -> str:
    """The page of a measured step: predicted lanes above measured ones by device, and its parts."""
    tracks = span_lanes(by_device(step.expected.spans if step.expected is not None else (), step.spans))
    end_s = max((block.end_s for one in tracks for lane in one.lanes for block in lane.blocks), default=0.0)
    numbered, lanes, named = list[Drawn](), drawn_lanes(tracks, MOST_BLOCKS), f"{visible(step.model, 60)}: the step"
    draw = partial(draw_timeline, lanes, end_s, named, numbered)
    lines = step.lines
    whole = next(line for line in lines if line.part is StepPart.STEP)
    predicted_s, measured_s = whole.predicted.total_s if whole.predicted is not None else None, whole.measured.total_s
    times = units.step(measured_s)
    return _rendered(
        "measured.html",
        model=visible(step.model),
        facts=visible(title(step), 400),
        figures=[
            ("Predicted step", times.text(predicted_s) or "none", ""),
            ("Measured step", times.text(measured_s), f"{whole.ratio:.2f} of the prediction" if whole.ratio else ""),
        ],
        notes=[visible(note, 1200) for note in notes(step)],
        timeline=_picture("step", draw) if tracks and end_s > 0 else None,
        how="Every device's predicted lanes stand above its measured ones, of the recorded step of median length.",
        steps=f"{step.steps} step{'s' if step.steps > 1 else ''}",
        heads=["part", "forward", "measured", "backward", "measured", "ratio"],
        rows=_compared(lines),
        blocks=_blocks(numbered, end_s),
    )


def _compared(lines: Sequence[ComparedLine]) -> list[tuple[str, ...]]:
    """Predicted and measured times of both directions and their ratio, by part; parts without directions have one."""
    known = [(line, line.predicted or BothTimes(), line.measured) for line in lines]
    scale = units.time_column(own.total_s for _, *both in known for own in both)
    found = []
    for line, predicted, measured in known:
        seconds = [predicted.forward_s, measured.forward_s, predicted.backward_s, measured.backward_s]
        cells = [scale.text(value) if value else "-" for value in seconds]
        ratio = f"{line.ratio:.2f}" if line.ratio is not None else "-"
        found.append((visible(line.label, 120), *cells, ratio))
    return found


def _rendered(template: str, **given: Any) -> str:
    """A page from a template, with the style sheet and the script in it."""
    import jinja2
    from markupsafe import Markup

    style, script = f"{theme()}\n{_template('page.css')}", _template("page.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_template(template)).render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_digest(style),
        script_hash=_digest(script),
        **given,
    )


@dataclass(frozen=True)
class _Picture:
    """The markup of a drawing for a wide and for a narrow screen, and how it is read."""

    how: str
    broad: str
    narrow: str


def _picture(name: str, draw: Callable[[float, str], Drawing]) -> _Picture:
    from markupsafe import Markup

    broad, narrow = draw(BROAD, name), draw(NARROW, f"{name}-narrow")
    return _Picture(broad.how, Markup(broad.inline()), Markup(narrow.inline()))


def _draw_step(timeline: Timeline, model: str, numbered: list[Drawn], width: float, name: str) -> Drawing:
    lanes = drawn_lanes(device_lanes(timeline), MOST_BLOCKS)
    return draw_timeline(lanes, timeline.step_s, predicted_title(model, timeline.step_s), numbered, width, name)


@dataclass(frozen=True)
class _Zoom:
    """Inside of a row of the net: its own rows as a picture, and the inside of each of these that stands for more."""

    name: str
    label: str
    words: str
    picture: _Picture
    zooms: list[_Zoom]


def _net(decision: Decision, rows: Sequence[Row], name: str) -> tuple[_Picture, list[_Zoom]]:
    """The picture of these rows, and what is inside of them, down to the layers."""
    found, graph = dict[int, _Zoom](), decision.priced.graph if decision.priced is not None else None
    for number, row in enumerate(rows):
        if not (own := inside(row, graph)):
            continue
        label, took_s = f"{visible(row.label)}{row.count and f', {row.count}'}", sum(row.seconds)
        first = "; below, the first of them" if row.repeats > 1 else ""
        words = f"{visible(row.words)}, {units.time(took_s).text(took_s)}{first}"
        found[number] = _Zoom(f"{name}-in-{number}", label, words, *_net(decision, own, f"{name}-{number}"))
    zooms = {number: zoom.name for number, zoom in found.items()}
    return _picture(name, partial(draw_net, decision, rows, zooms)), list(found.values())


def _peaks(decision: Decision) -> list[tuple[str, str, str, str]]:
    """Every device's predicted peak, equal ones on one line."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, key in enumerate(zip(decision.prediction.memory_bytes, decision.cluster.memory_bytes, strict=True)):
        alike.setdefault(key, []).append(number)
    return [
        (
            units.devices(devices),
            units.size(peak).text(peak),
            units.size(limit).text(limit),
            f"{'fits' if peak <= limit else 'does not fit'}, {units.percent(peak / limit)}",
        )
        for (peak, limit), devices in alike.items()
    ]


def _baselines(decision: Decision) -> list[tuple[str, ...]]:
    """This plan, those made by hand and those that lack something of it: name, step, times this plan's step, memory,
    remarks."""
    step_s = decision.prediction.step_s
    times, found = units.step(step_s), list[tuple[str, ...]]()
    for one in compared_plans(decision):
        known_s = one.step_s
        found.append(
            (
                f"{visible(one.name)}{f' ({visible(one.on)})' if one.on else ''}",
                times.text(known_s),
                "" if known_s is None or step_s <= 0 else f"{known_s / step_s:.2f} x",
                units.size([one.memory_bytes]).text(one.memory_bytes),
                visible(baseline_remark(decision, one).text, 400),
            )
        )
    return [*found, *((*figures, remark.text) for *figures, remark in lacking_rows(decision))]


def _text(decision: Decision) -> str:
    """The terminal's report; names of thousands of characters would make it megabytes, so it has an end."""
    text = printed(lambda console: render(decision, console), TEXT_COLUMNS)
    lines = [visible(line, TEXT_COLUMNS) for line in text[:MOST_TEXT].splitlines()]
    ended = len(text) > MOST_TEXT
    return "\n".join([*lines, "... the rest is left out: run the command above"] if ended else lines)


def _blocks(drawn: Sequence[Drawn], step_s: float) -> dict[str, Any]:
    """The blocks of the timelines for the script, in the order of their numbers: names and words by their place."""
    names: dict[str, int] = {}
    blocks = []
    for block, label, y in drawn:
        named = (names.setdefault(text, len(names)) for text in (label, block_words(block)))
        times = (float(f"{block.start_s:.7g}"), float(f"{block.end_s:.7g}"))
        blocks.append([*named, *times, y if label else 0, int(block.kind in LIGHT)])
    return {"names": list(names), "blocks": blocks, "step": step_s, "character": CHARACTER}
