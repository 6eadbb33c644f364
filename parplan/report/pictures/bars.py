"""Drawing of the plan's step beside those of the plans that people write by hand."""

from __future__ import annotations

from parplan.planner.decision import Baseline, Decision
from parplan.report import units
from parplan.report.pictures.svg import Drawing, add, fill
from parplan.report.pictures.text import shortened, visible
from parplan.report.sections.proof import baseline_remark

__all__ = ["draw_bars"]

ROW, LABEL, BAR, WIDTH = 28.0, 210.0, 430.0, 1000.0


def draw_bars(decision: Decision) -> Drawing:
    """The picture of all plans' steps, the shortest bar the fastest."""
    plan_s = decision.prediction.step_s
    rows = (Baseline("this plan", plan_s, None, True), *decision.baselines)
    longest = max((one.step_s for one in rows if one.step_s is not None), default=0.0) or 1.0
    scale = units.step(plan_s)
    texts = [scale.text(one.step_s) if one.step_s is not None else "" for one in rows]
    said = "; ".join(
        ", ".join(filter(None, (visible(one.name), text, visible(baseline_remark(decision, one).text))))
        for one, text in zip(rows, texts, strict=True)
    )
    drawing = Drawing("plans", WIDTH, ROW * len(rows) + 4, "Predicted step against other plans", f"{said}.")
    for index, (one, text) in enumerate(zip(rows, texts, strict=True)):
        y = ROW * index
        own = index == 0
        name = add(drawing.root, "text", shortened(visible(one.name), 32), x=LABEL - 10, y=y + 18,
                   text_anchor="end", font_weight=600 if own else 400, **fill("ink"))  # fmt: skip
        if one.on:
            add(name, "title", f"on {visible(one.on)}")
        x = LABEL
        if one.step_s is not None:
            wide = max(1.0, BAR * one.step_s / longest)
            bar = add(drawing.root, "rect", x=LABEL, y=y + 5, width=wide, height=18, rx=2,
                      **fill("replicas" if own else "alone"))  # fmt: skip
            if not one.fits:
                bar.set("opacity", "0.35")
            times = f" · {one.step_s / plan_s:.2f} x" if not own and plan_s > 0 else ""
            add(drawing.root, "text", f"{text}{times}", x=LABEL + wide + 8, y=y + 18, font_weight=600 if own else 400,
                **fill("ink"))  # fmt: skip
            x = LABEL + wide + 18 + 7.2 * len(text + times)
        words = shortened(visible(baseline_remark(decision, one).text), max(12, int((WIDTH - x) / 6.2)))
        if words:
            add(drawing.root, "text", words, x=x, y=y + 18, font_size=11, **fill("limit" if not one.fits else "soft"))
    return drawing
