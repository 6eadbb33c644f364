"""Drawing of the net against the devices: a row per layer or module, a column per device, strategies as colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from parplan.planner.decision import Decision
from parplan.report import units
from parplan.report.pictures.rows import Connections, Row, connections, net_rows
from parplan.report.pictures.svg import BROAD, MONOSPACE, NARROW, Drawing, Element, add, fill, line
from parplan.report.pictures.text import shortened, visible

__all__ = ["draw_net", "row_words", "strategy_roles"]

CELL = 18.0
ARC = 9.0  # between the lines of skip connections
MOST_ARCS = 8  # side by side
CHARACTER, LETTER = 7.0, 6.4  # of names and of words
MOST_COLUMNS = 16
NONE: Mapping[int, str] = {}
DARK = frozenset(["replicas", "both", "alone"])
"""Roles that a white text can be read on."""
FAMILIES: Mapping[tuple[bool, bool], tuple[str, ...]] = {
    (False, False): ("alone",),
    (True, False): ("replicas", "replicas-2"),
    (False, True): ("shards", "shards-2"),
    (True, True): ("both", "both-2"),
}
BAR_ROLES = (("backward", "compute"), ("transfer", "transfers"), ("reduction", "gradient sums"))


def strategy_roles(rows: Sequence[Row]) -> dict[tuple[int, int], str]:
    """A colour for every number of replicas and shards: a hue by family, the lighter one for fewer devices."""
    found: dict[tuple[int, int], str] = {}
    used = {(row.strategy.replicas, row.strategy.shards) for row in rows}
    for replicas, shards in sorted(used, key=lambda pair: -pair[0] * pair[1]):
        family = FAMILIES[replicas > 1, shards > 1]
        taken = sum(role in family for role in found.values())
        found[replicas, shards] = family[min(taken, len(family) - 1)]
    return found


@dataclass(frozen=True)
class _Places:
    """Where a drawing has what: names, strategies and cells beside each other, or the cells below on a narrow one.

    Args:
        head: height of the heads.
        row: height of a row.
        names, words, cells, bars: left edges.
        room, described: characters of a name with its count, and of a strategy.
        wide: of a cell.
    """

    width: float
    head: float
    row: float
    names: float
    room: int
    words: float
    described: int
    cells: float
    wide: float
    bars: float

    @property
    def below(self) -> float:
        """How far cells and bars are below the top of a row."""
        return self.row - CELL - 3

    @property
    def narrow(self) -> bool:
        """Whether cells are below the names."""
        return self.width <= NARROW

    def top(self, index: float) -> float:
        """The upper edge of a row, below the heads."""
        return self.head + self.row * index


def _places(rows: Sequence[Row], columns: int, gutter: float, width: float, head: float) -> _Places:
    longest = max((len(row.label) + len(row.count) + 2 for row in rows), default=0)
    names, narrow = gutter + 14, width <= NARROW
    limit = 26 if narrow else 30 if columns > MOST_COLUMNS / 2 else 42
    described = max((len(_described(row, limit)) for row in rows), default=0)
    if narrow:
        bars = width - 108
        words = min(names + CHARACTER * longest + 6, width - LETTER * described - 16)
        room = int((words - names) / CHARACTER)
        return _Places(width, head, 42, names, room, words, described, names, (bars - 10 - names) / columns, bars)
    room, bars = max(14, min(40, longest)), width - 150
    words = names + CHARACTER * room + 12
    cells = words + 16 + LETTER * described + 10
    return _Places(
        width, head, 23, names, room, words, described, cells, min(140.0, (bars - 16 - cells) / columns), bars
    )


def draw_net(
    decision: Decision,
    rows: Sequence[Row] | None = None,
    zooms: Mapping[int, str] = NONE,
    width: float = BROAD,
    name: str = "net",
) -> Drawing:
    """The picture of a plan: where each layer runs, which connections skip layers, and what takes the time.

    Args:
        rows: those of the whole net, if not given.
        zooms: by row, the element of the page that shows what is inside of it.
        width: BROAD, or NARROW with the cells of a row below its name.
        name: prefix of its ids, unique on a page.
    """
    rows = net_rows(decision) if rows is None else rows
    joined = Connections(frozenset(range(1, len(rows))), (), frozenset())
    if decision.priced is not None:
        joined = connections(rows, decision.priced.graph)
    arcs, left_out = _arc_places(joined.skips, 3 if width <= NARROW else MOST_ARCS)
    gutter = 14 + ARC * (1 + max(arcs.values(), default=-1))
    count = decision.plan.devices
    size = -(-count // MOST_COLUMNS)
    columns = [tuple(range(start, min(start + size, count))) for start in range(0, count, size)]
    at = _places(rows, len(columns), gutter, width, 38 if decision.cluster.mixed else 26)
    title = f"{visible(decision.plan.model, 60)} on {count} device{'s' if count > 1 else ''}: the plan"
    how = _how(rows, joined, left_out, size)
    drawing = Drawing(name, (width, at.top(len(rows)) + 24), title, _description(rows), how)
    root = drawing.root
    _draw_heads(root, decision, columns, at)
    _draw_names(root, rows, at)
    _draw_connections(root, len(rows), joined, arcs, gutter, at)
    roles = strategy_roles(rows)
    for index, row in enumerate(rows):
        _draw_cells(root, row, columns, at, at.top(index) + at.below, roles)
    _draw_words(root, rows, at, roles)
    _draw_times(root, rows, at)
    _draw_targets(drawing, rows, at, zooms)
    _legend(root, at.top(len(rows)) + 18, width)
    return drawing


def _description(rows: Sequence[Row]) -> str:
    """The runs of rows with one strategy, in words."""
    said = []
    for (words, devices), own in groupby(rows, key=lambda row: (row.words, row.strategy.devices)):
        layers = [layer for row in own for layer in row.layers]
        ends = dict.fromkeys((layers[0].name, layers[-1].name))
        said.append(f"{' to '.join(visible(name, 60) for name in ends)}: {words} on {units.devices(devices)}")
    return f"{'; '.join(said[:40])}{'; and so on' * (len(said) > 40)}."


def _described(row: Row, limit: int) -> str:
    """The strategy in so many characters, if need be without the axis, which the words of the row have."""
    words = visible(row.words)
    return shortened(words if len(words) <= limit else words.partition(" of ")[0], limit)


def _arc_places(others: Sequence[tuple[int, int]], limit: int) -> tuple[dict[tuple[int, int], int], int]:
    """A place for every connection that skips rows, so that none lie on each other; and how many had none."""
    taken: list[list[tuple[int, int]]] = []
    found: dict[tuple[int, int], int] = {}
    for start, end in others:
        free = (all(end <= first or last <= start for first, last in own) for own in taken)
        place = next((number for number, is_free in enumerate(free) if is_free), len(taken))
        if place == len(taken):
            if place == limit:
                continue
            taken.append([])
        taken[place].append((start, end))
        found[start, end] = place
    return found, len(others) - len(found)


def _draw_heads(root: Element, decision: Decision, columns: Sequence[tuple[int, ...]], at: _Places) -> None:
    """Heads of the columns; on a narrow drawing of the devices and times alone, as strategies are beside the names."""
    small, y = add(root, "g", font_size=11, **fill("soft")), at.head - 8
    if not at.narrow:
        add(small, "text", "layers", x=at.names, y=y)
        add(small, "text", "strategy", x=at.words, y=y)
    add(small, "text", "time per step", x=at.width, y=y, text_anchor="end")
    for place, column in enumerate(columns):
        x, text = at.cells + at.wide * (place + 0.5), units.number_ranges(column)
        text = f"device {text}" if at.wide > 60 and len(column) == 1 else text
        add(small, "text", text, x=x, y=y, text_anchor="middle")
        if decision.cluster.mixed:
            kind = visible(", ".join(sorted({decision.cluster.devices[device].kind for device in column})))
            named = add(small, "text", shortened(kind, int(at.wide / 6)), x=x, y=y - 13, text_anchor="middle")
            add(named, "title", kind)


def _draw_names(root: Element, rows: Sequence[Row], at: _Places) -> None:
    names = add(root, "g", font_family=MONOSPACE, font_size=11.5, **fill("ink"))
    counts = add(root, "g", font_size=10.5, **fill("soft"))
    for index, row in enumerate(rows):
        count = row.count if len(row.label) + len(row.count) + 1 < at.room else row.count.partition(" x")[0] + " x"
        count = count if row.repeats > 1 or not at.narrow else ""
        text = shortened(visible(row.label), max(8, at.room - len(count) - 1))
        y = at.top(index) + 15
        add(names, "text", text, x=at.names, y=y)
        if row.count:
            add(counts, "text", count, x=at.names + CHARACTER * len(text) + 8, y=y)
    for run, own in groupby(range(len(rows)), key=lambda index: rows[index].run):
        first, *more = own
        if run is not None and more:  # a bracket around the rows of a repeated sequence
            last = more[-1]
            top, high = at.top(first) + 4, at.top(last) - at.top(first) + at.row - 8
            add(root, "path", d=f"M{at.names - 2:g} {top:g}h-4v{high:g}h4", **line("soft", 1.5))


def _draw_connections(
    root: Element, rows: int, joined: Connections, arcs: Mapping[tuple[int, int], int], x: float, at: _Places
) -> None:
    """A line from row to row where one feeds the next, and arcs around the rows that a connection skips."""
    middle = [at.top(index) + 11 for index in range(rows)]
    spine = "".join(
        f"M{x:g} {one:g}V{other:g}" for i, (one, other) in enumerate(pairwise(middle)) if i + 1 in joined.direct
    )
    add(root, "path", d=spine or "M0 0", **line("soft", 1.5))
    drawn = []
    for (start, end), place in arcs.items():
        out, top, bottom = x - 10 - ARC * place, middle[start] + 2, middle[end] - 2
        drawn.append(f"M{x - 2:g} {top:g}H{out + 6:g}Q{out:g} {top:g} {out:g} {top + 6:g}V{bottom - 6:g}")
        drawn.append(f"Q{out:g} {bottom:g} {out + 6:g} {bottom:g}H{x - 2:g}m-4 -3l4 3l-4 3")
    add(root, "path", d="".join(drawn) or "M0 0", **line("soft"))
    dots = add(root, "g", **fill("soft"))
    for y in middle:
        add(dots, "circle", cx=x, cy=y, r=2.5)
    loops = "".join(f"M{x:g} {middle[index] - 6:g}c-9 0 -9 12 0 12" for index in sorted(joined.inside))
    add(root, "path", d=loops or "M0 0", **line("soft"))


def _draw_cells(
    root: Element,
    row: Row,
    columns: Sequence[tuple[int, ...]],
    at: _Places,
    y: float,
    roles: Mapping[tuple[int, int], str],
) -> None:
    """One row: a device's part of the layer, its place among the shards as its place in the cell."""
    strategy, wide = row.strategy, at.wide
    role = roles[strategy.replicas, strategy.shards]
    frames = (
        f"M{at.cells + wide * place + 1.5:g} {y + 1:g}h{wide - 3:g}v{CELL - 2:g}h{3 - wide:g}z"
        for place in range(len(columns))
    )
    add(root, "path", d="".join(frames), **fill("hollow"))
    drawn = add(root, "g", **fill(role))
    said = add(root, "g", font_size=10, text_anchor="middle", **{"class": f"on-{role}"})
    said.set("fill", "#ffffff" if role in DARK else "#10151b")
    for place, column in enumerate(columns):
        left, inner = at.cells + wide * place + 1.5, wide - 3
        own = [strategy.devices.index(device) for device in column if device in strategy.devices]
        if not own:
            continue
        if len(column) > 1:  # the share of these devices that it uses
            add(drawn, "rect", x=left, y=y + 1, width=inner * len(own) / len(column), height=CELL - 2, rx=2)
            continue
        replica, shard = divmod(own[0], strategy.shards)
        part = inner / strategy.shards
        add(drawn, "rect", x=left + part * shard, y=y + 1, width=max(part, 3.0), height=CELL - 2, rx=2)
        if strategy.shards == 1:
            text = f"{replica + 1}/{strategy.replicas}" if strategy.replicas > 1 else "all"
            text = text if LETTER * len(text) < inner else str(replica + 1)
            add(said, "text", text, x=left + inner / 2, y=y + 13)


def _draw_words(root: Element, rows: Sequence[Row], at: _Places, roles: Mapping[tuple[int, int], str]) -> None:
    """Each row's strategy beside its name, and a line above it across the picture where another one begins."""
    before = None
    for index, row in enumerate(rows):
        own, y = row.strategy.arrangement, at.top(index)
        if own != before or at.narrow:
            add(root, "path", d=f"M0 {y:g}H{at.width:g}", **line("rule"))
        before = own
        words = _described(row, at.described)
        add(root, "rect", x=at.words, y=y + 6, width=10, height=10, rx=2, **fill(roles[own[:2]]))
        add(root, "text", words, x=at.words + 16, y=y + 15, font_size=11.5, **fill("ink"))
    add(root, "path", d=f"M0 {at.top(len(rows)):g}H{at.width:g}", **line("rule"))


def _draw_times(root: Element, rows: Sequence[Row], at: _Places) -> None:
    """Seconds per step of every row: compute, transfers to it, and its gradient sums beside the backward."""
    longest = max((sum(row.seconds) for row in rows), default=0.0)
    if longest <= 0:
        return
    scale, room = units.time(longest), at.width - at.bars - 62
    groups = [add(root, "g", **fill(role)) for role, _ in BAR_ROLES]
    figures = add(root, "g", font_size=10.5, text_anchor="end", **fill("soft"))
    for index, row in enumerate(rows):
        y, left = at.top(index) + at.below, at.bars
        for group, seconds in zip(groups, row.seconds, strict=True):
            wide = room * seconds / longest
            if wide > 0.05:
                add(group, "rect", x=left, y=y + 5, width=wide, height=CELL - 10)
            left += wide
        text = scale.text(sum(row.seconds))
        text = units.time(sum(row.seconds)).text(sum(row.seconds)) if text.startswith("<") else text
        add(figures, "text", text, x=at.width, y=y + 13)


def row_words(row: Row) -> str:
    """All that a row of the picture says: its layers, their strategy, each device's part, and its times."""
    strategy, names = row.strategy, ", ".join(layer.name for layer in row.layers)
    words = [f"{row.words} on {units.devices(strategy.devices)}"]
    if strategy.shards > 1:
        for position, device in enumerate(strategy.devices[:MOST_COLUMNS]):
            replica, shard = divmod(position, strategy.shards)
            of = f" of replica {replica + 1}" if strategy.replicas > 1 else ""
            words.append(f"device {device}: shard {shard + 1} of {strategy.shards}{of}")
        words += ["and so on"] * (len(strategy.devices) > MOST_COLUMNS)
    scale = units.time(sum(row.seconds))
    words += [f"{word} {scale.text(s)}" for (_, word), s in zip(BAR_ROLES, row.seconds, strict=True) if s > 0]
    return f"{visible(names, 400)}: {visible('; '.join(words), 800)}"


def _draw_targets(drawing: Drawing, rows: Sequence[Row], at: _Places, zooms: Mapping[int, str]) -> None:
    """A transparent target over each row, whose words are shown where it is pointed at or has the focus."""
    drawing.root.set("role", "group")  # the parts of an image could not be reached
    targets = add(drawing.root, "g", fill="none", pointer_events="all")
    for index, row in enumerate(rows):
        words = row_words(row)
        place = {"x": 0, "y": at.top(index), "width": at.width, "height": at.row}
        target = add(targets, "rect", tabindex=0, role="img", aria_label=words, **place)
        if index in zooms:
            target.set("data-zoom", zooms[index])
        add(target, "title", words)


def _how(rows: Sequence[Row], joined: Connections, left_out: int, size: int) -> str:
    """How rows, cells and lines are read, as far as the picture has them."""
    replicas = next((row.strategy.replicas for row in rows if row.strategy.replicas > row.strategy.shards == 1), 0)
    cut, grouped = any(row.strategy.shards > 1 for row in rows), any(len(row.layers) > 1 for row in rows)
    several, one, most = size > 1, size == 1, max((row.repeats for row in rows), default=1)
    found = {
        f"a row is a layer{', with those that follow it, or a module' * grouped}": True,
        f"a column is {'several devices' if several else 'a device'}": True,
        f"{most} x stands for as many equal neighbours": most > 1,
        f"1/{replicas} is the first of {replicas} replicas, each with its own samples": one and replicas > 1,
        "a part of a cell is the shard of the layer that the device has": one and cut,
        "a part of a cell is the share of its devices that is used": several,
        "an arc is a connection that skips rows": bool(joined.skips),
        "a small loop is one that skips layers inside of a row": bool(joined.inside),
        f"{left_out} more that skip rows are not drawn": left_out > 0,
    }
    text = "; ".join(words for words, is_so in found.items() if is_so)
    return f"{text[0].upper()}{text[1:]}."


def _legend(root: Element, y: float, width: float) -> None:
    words, x = add(root, "g", font_size=11, **fill("soft")), width
    for role, text in reversed(BAR_ROLES):
        x -= LETTER * len(text)
        add(words, "text", text, x=x, y=y)
        add(root, "rect", x=x - 15, y=y - 9, width=10, height=10, rx=2, **fill(role))
        x -= 30
