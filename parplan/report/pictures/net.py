"""Drawing of the net against the devices: a row per layer or module, a column per device, strategies as colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from parplan.plan import Strategy
from parplan.planner.decision import Decision
from parplan.report import units
from parplan.report.pictures.rows import MOST_ROWS, Connections, Row, connections, net_rows
from parplan.report.pictures.svg import MONOSPACE, Drawing, Element, add, fill, line
from parplan.report.pictures.text import shortened, visible

__all__ = ["draw_net", "strategy_roles"]

ROW, TOP = 20.0, 58.0
ARC = 9.0  # between the lines of skip connections
MOST_ARCS = 14  # side by side
CHARACTER, BARS = 7.0, 150.0
NARROWEST, WIDEST = 20, 40  # columns of names and of strategies, in characters
MOST_COLUMNS = 16
DARK = frozenset(["replicas", "both", "alone"])
"""Roles that a white text can be read on."""
FAMILIES: Mapping[tuple[bool, bool], tuple[str, ...]] = {
    (False, False): ("alone",),
    (True, False): ("replicas", "replicas-2"),
    (False, True): ("shards", "shards-2"),
    (True, True): ("both", "both-2"),
}


def strategy_roles(rows: Sequence[Row]) -> dict[tuple[int, int], str]:
    """A colour for every number of replicas and shards: a hue by family, the lighter one for fewer devices."""
    found: dict[tuple[int, int], str] = {}
    used = {(row.strategy.replicas, row.strategy.shards) for row in rows}
    for replicas, shards in sorted(used, key=lambda pair: -pair[0] * pair[1]):
        family = FAMILIES[replicas > 1, shards > 1]
        taken = sum(role in family for role in found.values())
        found[replicas, shards] = family[min(taken, len(family) - 1)]
    return found


def draw_net(decision: Decision, limit: int = MOST_ROWS) -> Drawing:
    """The picture of a plan: where each layer runs, which connections skip layers, and what takes the time.

    Args:
        limit: rows at most; above it modules are rows.
    """
    rows = net_rows(decision, limit)
    joined = Connections(frozenset(range(1, len(rows))), (), frozenset())
    if decision.priced is not None:
        joined = connections(rows, decision.priced.graph)
    arcs, left_out = _arc_places(joined.skips)
    gutter = 14 + ARC * (1 + max(arcs.values(), default=-1))
    count = decision.plan.devices
    size = -(-count // MOST_COLUMNS)
    columns = [tuple(range(start, min(start + size, count))) for start in range(0, count, size)]
    wide = max(30.0 if size == 1 else 52.0, min(84.0, 380 / len(columns)))
    longest = max((len(row.label) + len(row.count) + 2 for row in rows), default=0)
    room = max(NARROWEST, min(WIDEST, longest))
    cells = gutter + 24 + CHARACTER * room
    words = cells + wide * len(columns) + 16
    described = max((len(row.strategy.describe()) for row in rows), default=0)
    bars = words + 30 + 6.4 * max(NARROWEST, min(WIDEST, described))
    width, height = bars + BARS + 16, TOP + ROW * len(rows) + 50
    model = visible(decision.plan.model, 60)
    title = f"{model} on {count} device{'s' if count > 1 else ''}"
    drawing = Drawing("net", width, height, f"{title}: the plan, layer by layer", _description(rows))
    root = drawing.root
    add(root, "text", title, x=4, y=18, font_weight=600, font_size=14, **fill("ink"))
    small = add(root, "g", font_size=11, **fill("soft"))
    heads = (
        (gutter, "start", "layers"),
        (cells - 8, "end", "on device"),
        (words, "start", "strategy"),
        (bars, "start", "time per step"),
    )
    for x, anchor, text in heads:
        add(small, "text", text, x=x, y=TOP - 8, text_anchor=anchor)
    for place, column in enumerate(columns):
        x, kinds = cells + wide * (place + 0.5), {decision.cluster.devices[device].kind for device in column}
        add(small, "text", units.number_ranges(column), x=x, y=TOP - 8, text_anchor="middle")
        if decision.cluster.mixed:
            kind = visible(", ".join(sorted(kinds)))
            named = add(small, "text", shortened(kind, int(wide / 6)), x=x, y=TOP - 22, text_anchor="middle")
            add(named, "title", kind)
    _draw_names(root, rows, gutter, room)
    _draw_connections(root, len(rows), joined, arcs, gutter)
    roles = strategy_roles(rows)
    for index, row in enumerate(rows):
        _draw_cells(root, row, columns, (cells, TOP + ROW * index, wide), roles)
    _draw_words(root, rows, words, width, roles)
    _draw_times(root, rows, bars)
    _draw_targets(drawing, rows, width)
    _legend(root, height - 12, _notes(rows, joined, left_out, size), width)
    return drawing


def _description(rows: Sequence[Row]) -> str:
    """The runs of rows with one strategy, in words."""
    said = []
    for strategy, own in groupby(rows, key=attrgetter("strategy")):
        layers = [layer for row in own for layer in row.layers]
        ends = dict.fromkeys((layers[0].name, layers[-1].name))
        where = units.devices(strategy.devices)
        said.append(f"{' to '.join(visible(name, 60) for name in ends)}: {strategy.describe()} on {where}")
    return f"{'; '.join(said[:40])}{'; and so on' * (len(said) > 40)}."


def _arc_places(others: Sequence[tuple[int, int]]) -> tuple[dict[tuple[int, int], int], int]:
    """A place for every connection that skips rows, so that none lie on each other; and how many had none."""
    taken: list[list[tuple[int, int]]] = []
    found: dict[tuple[int, int], int] = {}
    for start, end in others:
        free = (all(end <= first or last <= start for first, last in own) for own in taken)
        place = next((number for number, is_free in enumerate(free) if is_free), len(taken))
        if place == len(taken):
            if place == MOST_ARCS:
                continue
            taken.append([])
        taken[place].append((start, end))
        found[start, end] = place
    return found, len(others) - len(found)


def _draw_names(root: Element, rows: Sequence[Row], x: float, room: int) -> None:
    names = add(root, "g", font_family=MONOSPACE, font_size=11.5, **fill("ink"))
    counts = add(root, "g", font_size=10.5, text_anchor="end", **fill("soft"))
    for index, row in enumerate(rows):
        y = TOP + ROW * index + 14
        left = room - len(row.count) - 1 if row.count else room
        add(names, "text", shortened(visible(row.label), left), x=x + 14, y=y)
        if row.count:
            add(counts, "text", row.count, x=x + 14 + CHARACTER * room, y=y)


def _draw_connections(
    root: Element, rows: int, joined: Connections, arcs: Mapping[tuple[int, int], int], x: float
) -> None:
    """A line from row to row where one feeds the next, and arcs around the rows that a connection skips."""
    spine = "".join(f"M{x + 4:g} {TOP + ROW * (i - 0.5):g}v{ROW:g}" for i in sorted(joined.direct) if i)
    add(root, "path", d=spine or "M0 0", **line("soft", 1.5))
    drawn = []
    for (start, end), place in arcs.items():
        out, top, bottom = x - 6 - ARC * place, TOP + ROW * (start + 0.62), TOP + ROW * (end + 0.38)
        drawn.append(f"M{x + 2:g} {top:g}H{out + 6:g}Q{out:g} {top:g} {out:g} {top + 6:g}V{bottom - 6:g}")
        drawn.append(f"Q{out:g} {bottom:g} {out + 6:g} {bottom:g}H{x + 2:g}m-4 -3l4 3l-4 3")
    add(root, "path", d="".join(drawn) or "M0 0", **line("soft"))
    dots = add(root, "g", **fill("soft"))
    for index in range(rows):
        add(dots, "circle", cx=x + 4, cy=TOP + ROW * (index + 0.5), r=2.5)
    loops = "".join(f"M{x + 4:g} {TOP + ROW * index + 4:g}c-9 0 -9 12 0 12" for index in sorted(joined.inside))
    add(root, "path", d=loops or "M0 0", **line("soft"))


def _draw_cells(
    root: Element,
    row: Row,
    columns: Sequence[tuple[int, ...]],
    at: tuple[float, float, float],
    roles: Mapping[tuple[int, int], str],
) -> None:
    """One row: a device's part of the layer, its place among the shards as its place in the cell."""
    x, y, wide = at
    strategy = row.strategy
    role = roles[strategy.replicas, strategy.shards]
    used = set(strategy.devices)
    if strategy.shards > 1 or len(columns[0]) > 1 or not all(used & set(own) for own in columns):
        frames = (
            f"M{x + wide * place + 1.5:g} {y + 2:g}h{wide - 3:g}v{ROW - 4:g}h{3 - wide:g}z"
            for place in range(len(columns))
        )
        add(root, "path", d="".join(frames), **fill("hollow"))
    drawn = add(root, "g", **fill(role))
    said = add(root, "g", font_size=10, text_anchor="middle", **{"class": f"on-{role}"})
    said.set("fill", "#ffffff" if role in DARK else "#10151b")
    for place, column in enumerate(columns):
        left, inner = x + wide * place + 1.5, wide - 3
        own = [strategy.devices.index(device) for device in column if device in strategy.devices]
        if not own:
            continue
        if len(column) > 1:  # the share of these devices that it uses
            add(drawn, "rect", x=left, y=y + 2, width=inner * len(own) / len(column), height=ROW - 4, rx=2)
            continue
        replica, shard = divmod(own[0], strategy.shards)
        part = inner / strategy.shards
        add(drawn, "rect", x=left + part * shard, y=y + 2, width=max(part, 3.0), height=ROW - 4, rx=2)
        if strategy.shards == 1:
            text = f"{replica + 1}/{strategy.replicas}" if strategy.replicas > 1 else "all"
            text = text if 6.2 * len(text) < inner else str(replica + 1)
            add(said, "text", text, x=left + inner / 2, y=y + 14)


def _draw_words(
    root: Element, rows: Sequence[Row], x: float, width: float, roles: Mapping[tuple[int, int], str]
) -> None:
    """Each strategy once, where it begins, with a line above it across the picture."""
    before: Strategy | None = None
    for index, row in enumerate(rows):
        own, y = row.strategy, TOP + ROW * index
        if own == before:
            continue
        before = own
        add(root, "path", d=f"M0 {y:g}H{width:g}", **line("rule"))
        add(root, "rect", x=x, y=y + 5, width=10, height=10, rx=2, **fill(roles[own.replicas, own.shards]))
        add(root, "text", shortened(visible(own.describe()), WIDEST), x=x + 16, y=y + 14, **fill("ink"))
    add(root, "path", d=f"M0 {TOP + ROW * len(rows):g}H{width:g}", **line("rule"))


BAR_ROLES = (("backward", "compute"), ("transfer", "transfers"), ("reduction", "gradient sums"))


def _draw_times(root: Element, rows: Sequence[Row], x: float) -> None:
    """Seconds per step of every row: compute, transfers to it, and its gradient sums beside the backward."""
    longest = max((sum(row.seconds) for row in rows), default=0.0)
    if longest <= 0:
        return
    scale, room = units.time_column(sum(row.seconds) for row in rows), BARS - 62
    groups = [add(root, "g", **fill(role)) for role, _ in BAR_ROLES]
    figures = add(root, "g", font_size=10.5, text_anchor="end", **fill("soft"))
    for index, row in enumerate(rows):
        y, left = TOP + ROW * index, x
        for group, seconds in zip(groups, row.seconds, strict=True):
            wide = room * seconds / longest
            if wide > 0.05:
                add(group, "rect", x=left, y=y + 6, width=wide, height=ROW - 12)
            left += wide
        add(figures, "text", scale.text(sum(row.seconds)), x=x + BARS, y=y + 14)


def row_words(row: Row) -> str:
    """All that a row of the picture says: its layers, their strategy, each device's part, and its times."""
    strategy, names = row.strategy, ", ".join(layer.name for layer in row.layers)
    words = [f"{strategy.describe()} on {units.devices(strategy.devices)}"]
    if strategy.shards > 1:
        for position, device in enumerate(strategy.devices[:MOST_COLUMNS]):
            replica, shard = divmod(position, strategy.shards)
            of = f" of replica {replica + 1}" if strategy.replicas > 1 else ""
            words.append(f"device {device}: shard {shard + 1} of {strategy.shards}{of}")
        words += ["and so on"] * (len(strategy.devices) > MOST_COLUMNS)
    scale = units.time(sum(row.seconds))
    words += [f"{word} {scale.text(s)}" for (_, word), s in zip(BAR_ROLES, row.seconds, strict=True) if s > 0]
    return f"{visible(names, 400)}: {visible('; '.join(words), 800)}"


def _draw_targets(drawing: Drawing, rows: Sequence[Row], width: float) -> None:
    """A transparent target over each row, whose words are shown where it is pointed at or has the focus."""
    drawing.root.set("role", "group")  # the parts of an image could not be reached
    targets = add(drawing.root, "g", fill="none", pointer_events="all")
    for index, row in enumerate(rows):
        words, y = row_words(row), TOP + ROW * index
        place = {"x": 0, "y": y, "width": width, "height": ROW}
        target = add(targets, "rect", tabindex=0, role="img", aria_label=words, **place)
        add(target, "title", words)


def _notes(rows: Sequence[Row], joined: Connections, left_out: int, size: int) -> str:
    """How cells and lines are read, as far as the picture has them."""
    replicas = next((row.strategy.replicas for row in rows if row.strategy.replicas > row.strategy.shards == 1), 0)
    said = [f"1/{replicas}: the first of {replicas} replicas"] * (size == 1 and replicas > 1)
    said += ["a part of a cell: that shard"] * (size == 1 and any(row.strategy.shards > 1 for row in rows))
    said += ["a part of a cell: that share of its devices"] * (size > 1)
    said += ["arc: a connection that skips rows"] * bool(joined.skips)
    said += ["small loop: skips inside"] * bool(joined.inside)
    said += [f"{left_out} more that skip rows are not drawn"] * (left_out > 0)
    return "; ".join(said)


def _legend(root: Element, y: float, notes: str, width: float) -> None:
    words = add(root, "g", font_size=11, **fill("soft"))
    add(words, "text", notes, x=4, y=y)
    y, x = y - 18, width - sum(30 + CHARACTER * len(text) for _, text in BAR_ROLES)
    for role, text in BAR_ROLES:
        add(root, "rect", x=x, y=y - 9, width=10, height=10, rx=2, **fill(role))
        add(words, "text", text, x=x + 14, y=y)
        x += 30 + CHARACTER * len(text)
