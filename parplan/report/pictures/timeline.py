"""Drawing of the predicted step: time from left to right, the lanes of every device below each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from parplan.planner.simulation.step_tasks import Kind, Lane
from parplan.report import units
from parplan.report.pictures.lanes import LANE_WORDS, Block, DeviceLanes, LaneBlocks
from parplan.report.pictures.svg import BROAD, COLOURS, MONOSPACE, NARROW, Drawing, Element, add, fill, line
from parplan.report.pictures.text import shortened, visible

__all__ = ["APART", "CHARACTER", "Drawn", "block_words", "draw_timeline", "edges", "predicted_title", "ticks"]

TOP, TALL, FLAT, GAP = 22.0, 24.0, 14.0, 14.0
HOW = ("Time goes from left to right, and each band is a device: a block is a layer's forward or backward, a transfer "
       "or a gradient sum, in the colours of the legend; a pale one is a wait for what has that colour.")  # fmt: skip
CHARACTER = 6.1  # of a label, in units of the drawing
MOST_SHOWN = 24
APART = 80  # between the moments of an axis
LIGHT = (Kind.FORWARD, Kind.TRANSFER)
"""Kinds in a colour that a dark text can be read on."""

Drawn = tuple[Block, str, float]
"""A block of the picture, the label that it has where there is room (empty: none ever), and that one's y."""


def edges(width: float) -> tuple[float, float]:
    """Where time begins, right of the lanes' names, and how wide it is drawn."""
    left = 84.0 if width <= NARROW else 168.0
    return left, width - left - 14


def draw_timeline(
    drawn: Sequence[DeviceLanes],
    step_s: float,
    title: str,
    numbered: list[Drawn] | None = None,
    width: float = BROAD,
    name: str = "step",
) -> Drawing:
    """The picture of a step.

    Args:
        drawn: devices on which everything happens at the same times are one entry (lanes.drawn_lanes).
        step_s: the length of the step.
        title: of the picture, and the name that a reader of screens says.
        numbered: if given, the blocks are added in the order of the numbers that they carry then, for a script that
            zooms and explains them.
        width: BROAD, or NARROW with the names of devices above their lanes.
        name: prefix of its ids, unique on a page.
    """
    (left, long), shown = edges(width), drawn[:MOST_SHOWN]
    above = 18.0 if width <= NARROW else 0.0
    tall = sum(GAP + above + sum(lane_height(lane) for lane in one.lanes) for one in shown)
    keys = _legend_rows(shown, left, width)
    more = f"{len(drawn) - len(shown)} more rows of devices are not drawn; the trace has them all"
    height = TOP + tall + 8 + 18 * (len(keys) + (len(drawn) > len(shown)))
    drawing = Drawing(name, (width, height), title, _description(shown, step_s), HOW)
    root, bottom = drawing.root, TOP + tall - 6
    axis = add(root, "g", font_size=10.5, text_anchor="middle", id=f"{name}-axis", **fill("soft"))
    for at_s, words in ticks(step_s, int(long / APART)):
        x = left + long * at_s / step_s if step_s > 0 else left
        add(axis, "path", d=f"M{x:.2f} {TOP - 6:g}V{bottom:g}", **line("rule"))
        add(axis, "text", words, x=x, y=TOP - 10)
    plot = add(
        root, "svg", x=left, y=TOP, width=long, height=bottom - TOP, viewBox=f"0 0 {long:g} {bottom - TOP:g}",
        preserveAspectRatio="none", id=f"{name}-plot", overflow="hidden",
    )  # fmt: skip
    heads = add(root, "g", **fill("ink"))
    lanes = add(root, "g", font_size=10, text_anchor="end", **fill("soft"))
    labels = add(root, "g", font_family=MONOSPACE, font_size=10, id=f"{name}-labels")
    y = 0.0
    for one in shown:
        said = shortened(one.words, 22 if not above else 60)
        text = add(heads, "text", said, x=4, y=TOP + y + (12 if above else 16), font_weight=600)
        add(text, "title", one.words)
        y += above
        for lane in one.lanes:
            high = lane_height(lane)
            words = (lane.words or LANE_WORDS[lane.lane]) if not lane.place else ""
            add(lanes, "text", words, x=left - 8, y=TOP + y + high / 2 + 3.5)
            add(plot, "rect", x=0, y=y + 1, width=long, height=high - 2, **fill("hollow"))
            _draw_blocks((plot, labels), lane, y, (left, long / step_s if step_s > 0 else 0.0), numbered)
            y += high
        y += GAP
    for number, row in enumerate(keys):
        _draw_legend(root, row, bottom + 22 + 18 * number)
    if len(drawn) > len(shown):
        add(root, "text", more, x=left, y=height - 6, font_size=11, **fill("soft"))
    return drawing


def predicted_title(model: str, step_s: float) -> str:
    """The title of a predicted step's picture."""
    return f"{visible(model, 60)}: the predicted step, {units.step(step_s).text(step_s)}"


def lane_height(lane: LaneBlocks) -> float:
    """Height of a lane in the drawing."""
    return TALL if lane.lane is Lane.COMPUTE else FLAT


def _description(shown: Sequence[DeviceLanes], step_s: float) -> str:
    """Seconds by kind of each row's compute lane, its waits aside."""
    said = []
    for one in shown:
        blocks = [block for lane in one.lanes if lane.lane is Lane.COMPUTE for block in lane.blocks]
        spent = {kind: sum(b.seconds for b in blocks if b.kind is kind and not b.waiting) for kind in Kind}
        waits_s = sum(block.seconds for block in blocks if block.waiting)
        named = ((COLOURS[kind.value].words, own_s) for kind, own_s in spent.items() if own_s > 0)
        parts = [f"{words} {units.step(step_s).text(own_s)}" for words, own_s in named]
        parts += [f"waiting {units.step(step_s).text(waits_s)}"] * (waits_s > 0)
        said.append(f"{one.words}: {', '.join(parts)}")
    return f"{'; '.join(said)}."


def _draw_blocks(
    at: tuple[Element, Element], lane: LaneBlocks, y: float, scaled: tuple[float, float], numbered: list[Drawn] | None
) -> None:
    """The blocks of one lane, grouped by colour, and labels where there is room."""
    groups: dict[tuple[Kind, bool], Element] = {}
    (plot, labels), (left, scale), tall = at, scaled, lane_height(lane)
    for block in lane.blocks:
        key = (block.kind, block.waiting)
        if key not in groups:
            groups[key] = add(plot, "g", **fill(block.kind.value))
            if block.waiting:
                groups[key].set("opacity", "0.35")
        x, wide = block.start_s * scale, max(block.seconds * scale, 0.05)
        inset = tall / 3 if block.waiting else 1.0
        cell = add(groups[key], "path", d=f"M{x:.2f} {y + inset:g}h{wide:.2f}v{tall - 2 * inset:g}h-{wide:.2f}z")
        label = visible(block.what, 40) if lane.lane is Lane.COMPUTE and not block.waiting else ""
        if numbered is not None:
            cell.set("data-n", str(len(numbered)))
            numbered.append((block, label, TOP + y + 15.5))
        if label and wide > CHARACTER * len(label) + 6:
            light = block.kind in LIGHT
            said = add(labels, "text", label, x=left + x + 3, y=TOP + y + 15.5)
            said.attrib.update({"class": "on-light" if light else "on-dark", "fill": "#10151b" if light else "#ffffff"})


Key = tuple[float, str, str]
"""One entry of a legend: its x, colour and words."""


def _legend_rows(shown: Sequence[DeviceLanes], left: float, width: float) -> list[list[Key]]:
    """The kinds of work that appear, in as many rows as they need."""
    blocks = [block for one in shown for lane in one.lanes for block in lane.blocks]
    found = {block.kind for block in blocks}
    named = [(kind.value, COLOURS[kind.value].words) for kind in Kind if kind in found]
    named += [("wait", "pale: waiting for it")] * any(block.waiting for block in blocks)
    left = left if width > NARROW else 4.0
    rows, x = [list[Key]()], left
    for role, words in named:
        long = 34 + 6.2 * len(words)
        if x + long - 12 > width and rows[-1]:
            rows.append([])
            x = left
        rows[-1].append((x, role, words))
        x += long
    return rows


def _draw_legend(root: Element, keys: Sequence[Key], y: float) -> None:
    words = add(root, "g", font_size=11, **fill("soft"))
    for x, role, text in keys:
        if role == "wait":
            add(root, "rect", x=x - 4, y=y - 5, width=15, height=4, opacity=0.35, **fill("transfer"))
        else:
            add(root, "rect", x=x, y=y - 9, width=11, height=11, rx=2, **fill(role))
        add(words, "text", text, x=x + 16, y=y)


def block_words(block: Block) -> str:
    """The name of an activity: layer or value, kind, and micro-batch (of passes, the samples of one)."""
    what = visible(block.what) or (f"{block.count} activities" if block.count > 1 else "")
    number = f"micro-batch {block.number + 1}" if block.number is not None else ""
    kind = f"{'waits for ' * block.waiting}{COLOURS[block.kind.value].words}"
    return " · ".join(filter(None, (what, kind, number)))


def ticks(end_s: float, wanted: int) -> list[tuple[float, str]]:
    """Round moments from 0 to the end with their texts.

    >>> ticks(0.0021, 4)
    [(0.0, '0'), (0.001, '1 ms'), (0.002, '2 ms')]
    """
    if end_s <= 0:
        return [(0.0, "0")]
    rough = end_s / wanted
    power = 10.0 ** floor(log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    name, size = next(((n, s) for n, s in (("s", 1.0), ("ms", 1e-3)) if end_s >= s), ("µs", 1e-6))
    moments = (apart * number for number in range(2 * wanted) if apart * number <= end_s)
    return [(at_s, f"{at_s / size:.10g} {name}" if at_s else "0") for at_s in moments]
