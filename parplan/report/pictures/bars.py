"""Drawing of the plan's step beside those of the plans that people write by hand."""

from __future__ import annotations

from parplan.planner.decision import Decision
from parplan.report import units
from parplan.report.pictures.svg import BROAD, NARROW, Drawing, add, fill
from parplan.report.pictures.text import shortened, visible
from parplan.report.sections.proof import baseline_remark, compared_plans

__all__ = ["draw_bars"]

HOW = "The shorter the bar, the faster the plan; a pale one does not fit in memory."
SMALL, LARGE = 5.8, 7.2  # widths of characters


def draw_bars(decision: Decision, width: float = BROAD, name: str = "plans") -> Drawing:
    """The picture of all plans' steps, the shortest bar the fastest.

    Args:
        width: BROAD, or NARROW with the names above the bars.
        name: prefix of its ids, unique on a page.
    """
    plan_s, narrow = decision.prediction.step_s, width <= NARROW
    left, row = (0.0, 42.0) if narrow else (210.0, 28.0)
    rows = compared_plans(decision)
    longest = max((one.step_s for one in rows if one.step_s is not None), default=0.0) or 1.0
    scale = units.step(plan_s)
    texts = [scale.text(one.step_s) for one in rows]
    remarks = [visible(baseline_remark(decision, one).text) for one in rows]
    said = "; ".join(
        ", ".join(filter(None, (visible(one.name), text, remark)))
        for one, text, remark in zip(rows, texts, remarks, strict=True)
    )
    size = (width, row * len(rows) + 4)
    drawing = Drawing(name, size, "Predicted step against other plans", f"{said}.", HOW)
    for index, (one, text, remark) in enumerate(zip(rows, texts, remarks, strict=True)):
        y, weight = row * index, 600 if index == 0 else 400
        place = {"x": 0} if narrow else {"x": left - 10, "text_anchor": "end"}
        label = shortened(visible(one.name), 32)
        named = add(
            drawing.root, "text", label, y=y + (14 if narrow else 18), font_weight=weight, **place, **fill("ink")
        )
        if one.on:
            add(named, "title", f"on {visible(one.on)}")
        x, y = left, y + (19 if narrow else 5)
        if one.step_s is not None:
            wide = max(1.0, (width - left - (150 if narrow else 360)) * one.step_s / longest)
            bar = add(drawing.root, "rect", x=left, y=y, width=wide, height=18, rx=2,
                      **fill("alone" if index else "replicas"))  # fmt: skip
            if not one.fits:
                bar.set("opacity", "0.35")
            text += f" · {one.step_s / plan_s:.2f} x" if index and plan_s > 0 else ""
            add(drawing.root, "text", text, x=left + wide + 8, y=y + 13, font_weight=weight, **fill("ink"))
            x = left + wide + 18 + LARGE * len(text)
        if narrow and one.step_s is not None:
            x, y = LARGE * len(label) + 12, y - 18
        words = shortened(remark, max(12, int((width - x) / SMALL)))
        if words:
            role = "limit" if not one.fits else "soft"
            add(drawing.root, "text", words, x=x, y=y + 13, font_size=11, **fill(role))
    return drawing
