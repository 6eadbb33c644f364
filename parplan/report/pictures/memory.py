"""Drawing of the memory that every device holds in the course of the step, with its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from parplan.cost_models.costs import Moments
from parplan.planner.decision import Decision
from parplan.planner.simulation.timeline import Kind, Timeline
from parplan.report import units
from parplan.report.pictures.svg import BROAD, COLOURS, Drawing, Element, add, fill, line
from parplan.report.pictures.text import shortened, visible
from parplan.report.pictures.timeline import APART, edges, ticks

__all__ = ["MemoryCurve", "MemoryOverStep", "draw_memory", "memory_over_step"]

TOP, PANEL = 22.0, 190.0
HOW = ("The line is what a device holds in the course of the step, {axis}; its highest point is the predicted peak, "
       "which has to stay below the limit.")  # fmt: skip
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
        MemoryCurve(devices, nbytes, limit, moments.text(nbytes.index(max(nbytes)), names))
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
        point = None
        if part.kind is Kind.FORWARD:
            point = moments.forward(index[part.what])
            last_s = max(last_s, span.end_s)
        elif part.kind is Kind.BACKWARD:
            point = moments.backward(index[part.what])
        elif part.kind is Kind.UPDATE:
            point = moments.update()
        if point is not None:
            found[point] = min(found.get(point, span.start_s), span.start_s)
    found[moments.delivery] = found[moments.loss] = last_s
    listed = sorted(found.items())
    if any(later_s < earlier_s for (_, earlier_s), (_, later_s) in pairwise(listed)):
        return None
    starts, now_s = list[float](), 0.0
    for phase in range(phases):
        now_s = found.get(phase, now_s)
        starts.append(now_s)
    return tuple(starts)


def draw_memory(found: MemoryOverStep, model: str, width: float = BROAD, name: str = "memory") -> Drawing:
    """The picture of memory over the step.

    Args:
        width: BROAD or NARROW.
        name: prefix of its ids, unique on a page.
    """
    curves, (left, long) = found.curves[:MOST_LINES], edges(width)
    peak, limit = max(curve.peak_bytes for curve in curves), max(curve.limit_bytes for curve in curves)
    far = limit > ROOM * peak
    top = 1.25 * peak if far else 1.08 * max(limit, peak)
    hidden = len(found.curves) - len(curves)
    height = TOP + PANEL + 28 + 16 * (len(curves) + (hidden > 0))
    said = [
        f"{units.devices(c.devices)}: at most {_size(c.peak_bytes)} of {_size(c.limit_bytes)}, {visible(c.peak, 80)}"
        for c in curves
    ]
    title = f"{visible(model, 60)}: memory over the step"
    axis = "from left to right" if found.starts_s is not None else "phase by phase and not to scale in time"
    drawing = Drawing(name, (width, height), title, f"{'; '.join(said)}.", HOW.format(axis=axis))
    root = drawing.root
    words = add(root, "g", font_size=10.5, **fill("soft"))
    unit = next((2**power for power in (30, 20) if top >= 2**power), 2**10)
    apart = unit * next(step for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500) if
                        step * unit * 5.5 >= top)  # fmt: skip
    for number in range(int(top / apart) + 1):
        y = TOP + PANEL * (1 - number * apart / top)
        add(root, "path", d=f"M{left:g} {y:.2f}h{long:g}", **line("rule"))
        text = f"{number * apart / unit:.10g} {_size(unit).split()[-1]}" if number else "0"
        add(words, "text", text, x=left - 8, y=y + 3.5, text_anchor="end")
    _draw_axis(words, found, (left, long))
    if far:
        text = f"limit {_size(limit)}, above the picture"
        add(words, "text", text, x=left + long, y=TOP - 8, text_anchor="end")
    else:
        _draw_limit(root, curves, top, (left, long))
    for number, curve in enumerate(curves, start=1):
        add(root, "path", d=_path(curve, found, top, (left, long)), stroke_linejoin="round",
            **line(f"device-{number}", 2))  # fmt: skip
        y = TOP + PANEL + 24 + 16 * number
        add(root, "path", d=f"M4 {y - 4:g}h18", **line(f"device-{number}", 3))
        text = shortened(said[number - 1], int((width - 30) / 5.9))
        add(words, "text", text, x=28, y=y, font_size=11)
    if hidden:
        more = f"{hidden} more rows of devices with more room left are not drawn"
        add(words, "text", more, x=28, y=height - 4)
    return drawing


def _size(nbytes: float) -> str:
    return units.size(nbytes).text(nbytes)


def _draw_limit(root: Element, curves: Sequence[MemoryCurve], top: float, at: tuple[float, float]) -> None:
    left, long = at
    for limit in sorted({curve.limit_bytes for curve in curves}):
        y = TOP + PANEL * (1 - limit / top)
        add(root, "path", d=f"M{left:g} {y:.2f}h{long:g}", stroke_dasharray="6 4", **line("limit", 1.5))
        text = f"limit {_size(limit)}"
        words = add(root, "text", text, x=left + long, y=y - 5, font_size=11, text_anchor="end", paint_order="stroke")
        words.attrib.update(fill("limit") | {"stroke": COLOURS["paper"].light, "stroke-width": "4"})
        words.set("class", "limit line-paper")  # readable where a line of the grid is behind it


def _draw_axis(words: Element, found: MemoryOverStep, at: tuple[float, float]) -> None:
    left, long = at
    if found.starts_s is None:
        text = "forward, loss, backward, update: not to scale in time"
        add(words, "text", text, x=left, y=TOP + PANEL + 18)
        return
    for at_s, text in ticks(found.end_s, int(long / APART)):
        x = left + (long * at_s / found.end_s if found.end_s > 0 else 0)
        add(words, "text", text, x=x, y=TOP + PANEL + 18, text_anchor="middle")


def _path(curve: MemoryCurve, found: MemoryOverStep, top: float, at: tuple[float, float]) -> str:
    """Steps from phase to phase; phases without a duration show the most of them."""
    left, long = at
    phases = len(curve.nbytes)
    if found.starts_s is None:
        bounds = [left + long * phase / phases for phase in range(phases + 1)]
    else:
        bounds = [left + long * start_s / found.end_s for start_s in found.starts_s] + [left + long]
    columns: dict[float, list[int]] = {}
    for phase, nbytes in enumerate(curve.nbytes):
        columns.setdefault(round(bounds[phase], 1), []).append(nbytes)
    drawn, before = [], None
    for x, held in columns.items():
        most, last = (TOP + PANEL * (1 - n / top) for n in (max(held), held[-1]))
        drawn.append(f"M{x:g} {most:.1f}" if before is None else f"H{x:g}V{most:.1f}")
        if last != most:
            drawn.append(f"V{last:.1f}")
        before = last
    return f"{''.join(drawn)}H{left + long:g}"
