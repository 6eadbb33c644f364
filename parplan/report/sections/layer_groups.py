"""The lines of the layer table. A deep network has hundreds of layers and a person reads a few dozen lines.

Adjacent layers of one strategy share a heading. Where there would be too many lines, the layers of a module become one
line with the sum of their figures, and equal modules in a row one line too; names say where to cut.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from parplan.plan import Strategy
from parplan.planner.decision import LayerReport
from parplan.report.units import devices

__all__ = ["LIMIT", "StrategyGroup", "TableLine", "group_layers"]

LIMIT = 50  # lines of layers that a person still reads; AlexNet has 21, the two-tower net 48
_RULE = re.compile(r"\bR[1-8]\b")


@dataclass(frozen=True)
class TableLine:
    """One line: a layer, or the layers of a module, or those of `repeats` equal modules in a row.

    `prefix` is what the names in the (first) module have in common.
    """

    label: str
    layers: tuple[LayerReport, ...]
    repeats: int = 1
    prefix: str = ""

    def total(self, figure: Callable[[LayerReport], float]) -> float:
        """The sum of one figure over the layers."""
        return sum(figure(layer) for layer in self.layers)

    @property
    def count(self) -> str:
        """How many layers: `10`, `2 x 10`, nothing for one."""
        count, each = len(self.layers), len(self.layers) // self.repeats
        if count == 1:
            return ""
        return f"{self.repeats} x {each}" if 1 < each < count else str(count)

    @property
    def why(self) -> str:
        """The layers' common reason, else that of the one that takes longest, with its name."""
        module = self.layers[: len(self.layers) // self.repeats]
        heaviest = max(module, key=lambda f: f.forward_s + f.backward_s + f.transfer_s + f.reduce_s)
        shared = len({layer.why for layer in self.layers}) == 1
        return heaviest.why if shared else f"{heaviest.name.removeprefix(f'{self.prefix}.')}: {heaviest.why}"

    @property
    def bends(self) -> str:
        """The strict rules bent here: the text for one layer, names and counts for several."""
        texts = [text for layer in self.layers for text in layer.bends]
        if len(self.layers) == 1 or len(texts) == 1:
            return "; ".join(texts)
        rules = [found.group() if (found := _RULE.search(text)) else text for text in texts]
        return ", ".join(f"{rule} x {rules.count(rule)}" for rule in sorted(set(rules)))

    @property
    def pinned(self) -> str:
        """Text on pins: that of all layers where it is the same, else how many layers are pinned."""
        said = {layer.pinned for layer in self.layers}
        if len(said) == 1:
            return said.pop()
        return f"{sum(bool(layer.pinned) for layer in self.layers)} layers pinned"

    @property
    def copies(self) -> str:
        """Which inputs come from other devices: the text for a few, else how many."""
        found = [copy for layer in self.layers for copy in layer.copies]
        if len(self.layers) > 1 and len(found) > 1:
            return f"{len(found)} inputs from other devices"
        return " and ".join(f"{copy.layer} from {devices(copy.devices)}" for copy in found)


@dataclass(frozen=True)
class StrategyGroup:
    """Adjacent layers of one strategy on the same devices."""

    strategy: Strategy
    rows: tuple[TableLine, ...]

    @property
    def pinned(self) -> str:
        """Text on pins that all its layers share; empty where they differ."""
        said = {layer.pinned for row in self.rows for layer in row.layers}
        return said.pop() if len(said) == 1 else ""

    @property
    def label(self) -> str:
        """Which layers, `conv1 .. pool5 (13 layers)`; nothing for one, its line says it."""
        layers = [layer for row in self.rows for layer in row.layers]
        if len(layers) == 1:
            return ""
        return f": {layers[0].name} .. {layers[-1].name} ({len(layers)} layers)"


def group_layers(layers: Sequence[LayerReport], limit: int | None = LIMIT) -> tuple[StrategyGroup, ...]:
    """The table's lines, as detailed as `limit` lines allow; None gives every layer its own line."""
    runs = [tuple(run) for _, run in groupby(layers, key=lambda layer: layer.strategy)]
    if limit is None or len(layers) <= limit:
        return tuple(
            StrategyGroup(run[0].strategy, tuple(TableLine(layer.name, (layer,)) for layer in run)) for run in runs
        )
    deepest = max(layer.name.count(".") + 1 for layer in layers)
    finer: tuple[StrategyGroup, ...] = ()
    for depth in range(deepest, -1, -1):
        groups = tuple(StrategyGroup(run[0].strategy, tuple(_lines(run, depth))) for run in runs)
        if sum(len(group.rows) for group in groups) <= limit:
            break
        finer = groups
    if finer and any(row.repeats == 1 and 2 * len(row.layers) > len(layers) for group in groups for row in group.rows):
        groups = _joined(finer, limit)
    labels = Counter(row.label for group in groups for row in group.rows)
    # A module whose layers fall on several lines is named by the first and last layer of each.
    named = {
        row.layers[0].name: replace(row, label=_span(row.layers[0].name, row.layers[-1].name))
        for group in groups
        for row in group.rows
        if labels[row.label] > 1 < len(row.layers)
    }
    return tuple(replace(g, rows=tuple(named.get(row.layers[0].name, row) for row in g.rows)) for g in groups)


def _joined(groups: Sequence[StrategyGroup], limit: int) -> tuple[StrategyGroup, ...]:
    """Adjacent lines made one, so many that about `limit` are left: names gave no place to cut."""
    size = math.ceil(sum(len(group.rows) for group in groups) / limit)

    def join(rows: Sequence[TableLine]) -> TableLine:
        layers = tuple(layer for row in rows for layer in row.layers)
        return rows[0] if len(rows) == 1 else TableLine(_span(layers[0].name, layers[-1].name), layers)

    def joined(rows: Sequence[TableLine]) -> tuple[TableLine, ...]:
        return tuple(join(rows[start : start + size]) for start in range(0, len(rows), size))

    return tuple(replace(group, rows=joined(group.rows)) for group in groups)


def _lines(run: Sequence[LayerReport], depth: int) -> Iterator[TableLine]:
    """A line for each module of so many name parts, or for equal modules in a row."""
    by_prefix = groupby(run, key=lambda layer: ".".join(layer.name.split(".")[:depth]))
    modules = [(prefix, tuple(layers)) for prefix, layers in by_prefix]
    for _, equal in groupby(modules, key=lambda module: _signature(*module)):
        same = list(equal)
        (first, layers), (last, _) = same[0], same[-1]
        if len(same) > 1:
            label = _span(first, last)
        elif len(layers) == 1:
            label = layers[0].name
        else:
            label = first or _span(layers[0].name, layers[-1].name)
        yield TableLine(label, tuple(layer for _, own in same for layer in own), len(same), first)


def _signature(prefix: str, layers: Sequence[LayerReport]) -> tuple[object, ...]:
    """Equal for modules that a reader would call equal: kinds, names inside, sources, figures to three digits."""
    figures = attrgetter("forward_s", "backward_s", "transfer_s", "reduce_s", "memory_bytes")
    return tuple(
        (layer.name.removeprefix(prefix), layer.kind, layer.source, *(f"{value:.2e}" for value in figures(layer)))
        for layer in layers
    )


def _span(first: str, last: str) -> str:
    """`h.0` and `h.11` are `h.0-11`, other names `first .. last`."""
    head, _, start = first.rpartition(".")
    same, _, stop = last.rpartition(".")
    if head == same and start.isdigit() and stop.isdigit():
        return f"{first}-{stop}"
    return f"{first} .. {last}"
