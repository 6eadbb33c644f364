"""Drawing of the memory that every device holds in the course of the step, with its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from parplan.cost_models.costs import Moments
from parplan.planner.decision import Decision
from parplan.planner.simulation.timeline import Kind, Timeline
from parplan.report import units
from parplan.report.pictures.svg import Drawing, Element, add, fill, line
from parplan.report.pictures.text import visible
from parplan.report.pictures.timeline import LEFT, PLOT, ticks

__all__ = ["MemoryCurve", "MemoryOverStep", "draw_memory", "memory_over_step"]

TOP, PANEL = 44.0, 190.0
MOST_LINES = 4
ROOM = 4  # a limit this many times the peak is named and not drawn


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes that these devices hold from phase to phase, and when most: in which layer's forward or backward."""

    devices: tuple[int, ...]
    nbytes: tuple[int, ...]
    limit_bytes: int
    peak: str

    @property
    def peak_bytes(self) -> int:
        """The most they hold."""
        return max(self.nbytes)


@dataclass(frozen=True)
class MemoryOverStep:
    """Curves over the phases of a step, the one with the least room first.

    Args:
        starts_s: when each phase begins; None where layers do not run one after another, so that phases have an order
            and no moments.
    """

    curves: tuple[MemoryCurve, ...]
    starts_s: tuple[float, ...] | None
    end_s: float


def memory_over_step(decision: Decision, timeline: Timeline | None) -> MemoryOverStep | None:
    """Memory by phase of the plan in one pass; None where a cost model knows peaks only."""
    priced, plan = decision.priced, decision.plan
    if priced is None or (held := priced.costs.memory_over_step(plan.layers)) is None:
        return None
    names, moments = list(priced.graph.layers), Moments(len(priced.graph.layers))
    alike: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    for number, device in enumerate(decision.cluster.devices):
        key = device.memory_bytes, tuple(held[:, number].tolist())
        alike[key] = (*alike.get(key, ()), number)
    if timeline is None or (starts_s := _starts(timeline, names, len(held))) is None:
        # Phases in which nothing changes any more would take much of a picture that is not in time.
        changes = [phase for phase in range(1, len(held)) if (held[phase] != held[phase - 1]).any()]
        same = max(changes, default=0) + 4
        alike = {(limit, nbytes[:same]): devices for (limit, nbytes), devices in alike.items()}
        starts_s = None
    curves = [
        MemoryCurve(devices, nbytes, limit, moments.text(nbytes.index(max(nbytes)) // 2, names))
        for (limit, nbytes), devices in alike.items()
    ]
    curves.sort(key=lambda curve: -curve.peak_bytes / curve.limit_bytes)
    return MemoryOverStep(tuple(curves), starts_s, 0.0 if timeline is None else timeline.step_s)


def _starts(timeline: Timeline, names: Sequence[str], phases: int) -> tuple[float, ...] | None:
    """When each phase begins; None where layers run in passes, or not in their order."""
    moments = Moments(len(names))
    index = {name: number for number, name in enumerate(names)}
    found: dict[int, float] = {}
    last_s = 0.0
    for part, span in zip(timeline.parts, timeline.spans, strict=True):
        if part.number is not None:
            return None
        moment = None
        if part.kind is Kind.FORWARD:
            moment = index[part.what]
            last_s = max(last_s, span.end_s)
        elif part.kind is Kind.BACKWARD:
            moment = moments.backward(index[part.what])
        elif part.kind is Kind.UPDATE:
            moment = moments.update()
        if moment is not None:
            phase = 2 * moment + 1
            found[phase] = min(found.get(phase, span.start_s), span.start_s)
    found[2 * moments.layers + 1] = found[2 * moments.loss + 1] = last_s
    listed = sorted(found.items())
    if any(later_s < earlier_s for (_, earlier_s), (_, later_s) in pairwise(listed)):
        return None
    starts, now_s = list[float](), 0.0
    for phase in range(phases):
        now_s = found.get(phase, now_s)
        starts.append(now_s)
    return tuple(starts)


def draw_memory(found: MemoryOverStep, model: str) -> Drawing:
    """The picture of memory over the step."""
    curves = found.curves[:MOST_LINES]
    peak, limit = max(curve.peak_bytes for curve in curves), max(curve.limit_bytes for curve in curves)
    far = limit > ROOM * peak
    top = 1.25 * peak if far else 1.08 * max(limit, peak)
    height = TOP + PANEL + 40 + 16 * len(curves)
    said = [
        f"{units.devices(c.devices)}: at most {_size(c.peak_bytes)} of {_size(c.limit_bytes)}, {visible(c.peak, 80)}"
        for c in curves
    ]
    title = f"{visible(model, 60)}: memory over the step"
    drawing = Drawing("memory", LEFT + PLOT + 20, height, title, f"{'; '.join(said)}.")
    root = drawing.root
    add(root, "text", title, x=4, y=18, font_weight=600, font_size=14, **fill("ink"))
    words = add(root, "g", font_size=10.5, **fill("soft"))
    unit = next((2**power for power in (30, 20, 10) if top >= 2**power), 1)
    apart = unit * next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500) if
                        step * unit * 5.5 >= top)  # fmt: skip
    for number in range(int(top / apart) + 1):
        y = TOP + PANEL * (1 - number * apart / top)
        add(root, "path", d=f"M{LEFT:g} {y:.2f}h{PLOT:g}", **line("rule"))
        text = _size(number * apart) if number else "0"
        add(words, "text", text, x=LEFT - 8, y=y + 3.5, text_anchor="end")
    _draw_axis(words, found)
    if far:
        add(words, "text", f"limit {_size(limit)}, above the picture", x=LEFT + PLOT, y=TOP - 8,
            text_anchor="end")  # fmt: skip
    else:
        _draw_limit(root, curves, top)
    for number, curve in enumerate(curves, start=1):
        add(root, "path", d=_path(curve, found, top), stroke_linejoin="round", **line(f"device-{number}", 2))
        y = TOP + PANEL + 34 + 16 * number
        add(root, "path", d=f"M{LEFT:g} {y - 4:g}h18", **line(f"device-{number}", 3))
        add(words, "text", said[number - 1], x=LEFT + 26, y=y, font_size=11)
    if len(found.curves) > len(curves):
        more = f"{len(found.curves) - len(curves)} more rows of devices with more room left are not drawn"
        add(words, "text", more, x=4, y=height - 4)
    return drawing


def _size(nbytes: float) -> str:
    return units.size(nbytes).text(nbytes)


def _draw_limit(root: Element, curves: Sequence[MemoryCurve], top: float) -> None:
    for limit in sorted({curve.limit_bytes for curve in curves}):
        y = TOP + PANEL * (1 - limit / top)
        add(root, "path", d=f"M{LEFT:g} {y:.2f}h{PLOT:g}", stroke_dasharray="6 4", **line("limit", 1.5))
        text = f"limit {_size(limit)}"
        add(root, "text", text, x=LEFT + PLOT, y=y - 5, font_size=11, text_anchor="end", **fill("limit"))


def _draw_axis(words: Element, found: MemoryOverStep) -> None:
    if found.starts_s is None:
        text = "forward, loss, backward and update, in the order of the layers (not to scale in time)"
        add(words, "text", text, x=LEFT, y=TOP + PANEL + 18)
        return
    for at_s, text in ticks(0.0, found.end_s):
        x = LEFT + (PLOT * at_s / found.end_s if found.end_s > 0 else 0)
        add(words, "text", text, x=x, y=TOP + PANEL + 18, text_anchor="middle")


def _path(curve: MemoryCurve, found: MemoryOverStep, top: float) -> str:
    """Steps from phase to phase; phases without a duration show the most of them."""
    phases = len(curve.nbytes)
    if found.starts_s is None:
        edges = [LEFT + PLOT * phase / phases for phase in range(phases + 1)]
    else:
        edges = [LEFT + PLOT * start_s / found.end_s for start_s in found.starts_s] + [LEFT + PLOT]
    columns: dict[float, list[int]] = {}
    for phase, nbytes in enumerate(curve.nbytes):
        columns.setdefault(round(edges[phase], 1), []).append(nbytes)
    drawn, before = [], None
    for x, held in columns.items():
        most, last = (TOP + PANEL * (1 - n / top) for n in (max(held), held[-1]))
        drawn.append(f"M{x:g} {most:.1f}" if before is None else f"H{x:g}V{most:.1f}")
        if last != most:
            drawn.append(f"V{last:.1f}")
        before = last
    return f"{''.join(drawn)}H{LEFT + PLOT:g}"
