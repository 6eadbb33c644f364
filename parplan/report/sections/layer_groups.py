"""The lines of the layer table. A deep network has hundreds of layers and a person reads a few dozen lines.

Adjacent layers of one strategy share a heading. Layers without weights share the line of the layer that feeds them, and
repeated blocks are listed once (blocks.py). Where that leaves too many lines, groups of the fewest repeated blocks
become one line each. Where that is not enough, the layers of a module become one line with the sum of their figures,
and equal modules in a row one line too; names say where to cut.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter

from parplan.plan import Strategy
from parplan.planner.decision import LayerReport
from parplan.report.sections.blocks import name_inside, name_span, repeated_blocks
from parplan.report.units import counted, devices, number_ranges

__all__ = ["LIMIT", "StrategyGroup", "TableLine", "block_groups", "group_layers"]

LIMIT = 50  # lines of layers that a person still reads
MOST_PLACES = 8  # of equal blocks that are listed with their devices
WORTH_A_LINE = 0.1  # of the step: alternatives of layers without weights that cost less are shown
_RULE = re.compile(r"\bR[1-8]\b")


@dataclass(frozen=True)
class TableLine:
    """One line: a layer, or the layers of a module, or those of `repeats` equal modules in a row.

    `prefix` is what the names in the (first) module have in common; `head` the layer that the others of the (first)
    block follow.
    """

    label: str
    layers: tuple[LayerReport, ...]
    repeats: int = 1
    prefix: str = ""
    head: LayerReport | None = None

    def total(self, figure: str, each: bool = False) -> float:
        """The sum of one figure over the layers, by the name of its field; of `each` repeated block, or of all."""
        return float(sum(getattr(layer, figure) for layer in self.layers)) / (self.repeats if each else 1)

    @property
    def apart(self) -> bool:
        """Tell whether its layers are on different devices: a sum over them would be of no device."""
        return len({layer.strategy.devices for layer in self.layers}) > 1

    @property
    def stages(self) -> str:
        """Its pipeline stages, `stages 1-3, 8`; nothing where there are none."""
        found = sorted({layer.stage for layer in self.layers} - {0})
        return f"stage{'s' * (len(found) > 1)} {number_ranges(found)}" if found else ""

    @property
    def count(self) -> str:
        """How many layers: `10`; of repeated blocks `2 x 10`, or `2 x` where each has one; nothing for one."""
        count, each = len(self.layers), len(self.layers) // self.repeats
        if count == 1:
            return ""
        if self.repeats > 1:
            return f"{self.repeats} x {each}" if each > 1 else f"{self.repeats} x"
        return str(count)

    @property
    def why(self) -> str:
        """The head's reason, the layers' common one, or that of the layer that takes longest, with its name."""
        if self.head is not None:
            return self.head.why
        module = self.layers[: len(self.layers) // self.repeats]
        heaviest = max(module, key=lambda f: f.forward_s + f.backward_s + f.transfer_s + f.reduce_s)
        shared = len({layer.why for layer in self.layers}) == 1
        return heaviest.why if shared else f"{heaviest.name.removeprefix(f'{self.prefix}.')}: {heaviest.why}"

    def has_reason(self, step_s: float) -> bool:
        """Tell whether to print the reason: a layer with weights, no alternative, or one below a tenth of the step."""
        if self.head is None or self.head.parameters or not self.head.alternatives:
            return True
        return min(other.total_s for other in self.head.alternatives) < WORTH_A_LINE * step_s

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
        """Text on pins: that of all layers, or of all with weights, if it is the same; else how many are pinned."""
        every = {layer.pinned for layer in self.layers}
        weighted = {layer.pinned for layer in self.layers if layer.parameters}
        if len(every) == 1 or (len(weighted) == 1 and weighted != {""}):
            return (every if len(every) == 1 else weighted).pop()
        return f"{counted(sum(bool(layer.pinned) for layer in self.layers), 'layer')} pinned"

    @property
    def copies(self) -> str:
        """Which inputs come from other devices: the text for a few, else how many."""
        found = [copy for layer in self.layers for copy in layer.copies]
        if len(self.layers) > 1 and len(found) > 1:
            each = " each" if self.repeats > 1 else ""
            return f"{counted(len(found) // self.repeats, 'input')}{each} from other devices"
        return " and ".join(f"{copy.layer} from {devices(copy.devices)}" for copy in found)


@dataclass(frozen=True)
class StrategyGroup:
    """Adjacent layers of one strategy on the same devices, or in repeated blocks.

    Args:
        modules: names of the blocks where they are not in a row or not on the same devices.
        again: the blocks and their devices are those of the group in front.
    """

    strategy: Strategy
    rows: tuple[TableLine, ...]
    repeats: int = 1
    modules: tuple[str, ...] = ()
    again: bool = False

    @property
    def words(self) -> str:
        """The strategy in words, with the axes of all layers that have weights."""
        axis = " and ".join(self.axes) if len(self.axes) < 3 else "several axes"
        return replace(self.strategy, axis=axis).describe("whole")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that layers with weights are cut along, else those of all layers."""
        layers = [layer for row in self.rows for layer in row.layers]
        found = [layer for layer in layers if layer.parameters] or layers
        return tuple(dict.fromkeys(layer.strategy.axis for layer in found if layer.strategy.axis is not None))

    @property
    def pinned(self) -> str:
        """Text on pins that all its layers share; empty where they differ."""
        said = {layer.pinned for row in self.rows for layer in row.layers}
        return said.pop() if len(said) == 1 else ""

    @property
    def label(self) -> str:
        """Which layers, `: conv1 .. pool5 (13 layers)`; nothing for one, its line says it."""
        return f": {self.ends} ({self.count} layers)" if self.count > 1 else ""

    @property
    def ends(self) -> str:
        """Its first and last layer, `conv1 .. pool5`; of repeated blocks `12 x h.0-11.ln .. h.0-11.fc`."""
        return f"{self.repeats} x {self.span}" if self.repeats > 1 else self.span

    @property
    def span(self) -> str:
        """Its first and last layer."""
        first, last = self.rows[0].layers, self.rows[-1].layers
        heads = name_inside([layer.name for layer in first[:: len(first) // self.repeats]], self.modules)
        each = len(last) // self.repeats
        tails = name_inside([layer.name for layer in last[each - 1 :: each]], self.modules)
        return " .. ".join(dict.fromkeys((heads, tails)))

    def places(self, words: Callable[[Sequence[int]], str] = number_ranges) -> str:
        """Which blocks are on which devices, `h.0-2 on 0, 1; 3-5 on 2, 3`; of very many the devices of all.

        Args:
            words: for the first devices.
        """
        first = self.rows[0].layers
        each = len(first) // self.repeats
        pairs = zip(self.modules, (layer.strategy.devices for layer in first[::each]), strict=True)
        runs = [(where, [name for name, _ in run]) for where, run in groupby(pairs, key=itemgetter(1))]
        if len(runs) > MOST_PLACES:
            every = words(sorted({number for where, _ in runs for number in where}))
            return f"{name_span(self.modules)} on {len(runs[0][0])} each of {every}"
        places = [words(where) if not index else number_ranges(where) for index, (where, _) in enumerate(runs)]
        shared = self.modules[0].rstrip("0123456789")
        spans = [name_span(names) for _, names in runs]
        spans[1:] = [span.removeprefix(shared) for span in spans[1:]]
        return "; ".join(f"{span} on {where}" for span, where in zip(spans, places, strict=True))

    @property
    def whole(self) -> TableLine:
        """All its layers as one line."""
        each = [len(row.layers) // self.repeats for row in self.rows]
        layers = (
            layer
            for index in range(self.repeats)
            for row, size in zip(self.rows, each, strict=True)
            for layer in row.layers[index * size : (index + 1) * size]
        )
        return TableLine(self.span, tuple(layers), self.repeats, self.modules[0] if self.modules else "")

    @property
    def count(self) -> int:
        """How many layers."""
        return sum(len(row.layers) for row in self.rows)


def group_layers(layers: Sequence[LayerReport], limit: int | None = LIMIT) -> tuple[StrategyGroup, ...]:
    """The table's lines, as detailed as `limit` lines allow; None gives every layer its own line."""
    few: tuple[StrategyGroup, ...] = ()
    if limit is not None:
        few = _fewest_repeats_joined(block_groups(layers), limit)
        if _lines_of(few) <= limit:
            return few
    runs = [tuple(run) for _, run in groupby(layers, key=lambda layer: layer.strategy)]
    if limit is None:
        return tuple(
            StrategyGroup(run[0].strategy, tuple(TableLine(layer.name, (layer,)) for layer in run)) for run in runs
        )
    deepest = max(layer.name.count(".") + 1 for layer in layers)
    finer: tuple[StrategyGroup, ...] = ()
    for depth in range(deepest, -1, -1):
        groups = tuple(StrategyGroup(run[0].strategy, tuple(_lines(run, depth))) for run in runs)
        if _lines_of(groups) <= limit:
            break
        finer = groups
    if finer and any(row.repeats == 1 and 2 * len(row.layers) > len(layers) for group in groups for row in group.rows):
        groups = _joined(finer, limit)
    if _lines_of(few) < _lines_of(groups):
        return few
    labels = Counter(row.label for group in groups for row in group.rows)
    # A module whose layers fall on several lines is named by the first and last layer of each.
    named = {
        row.layers[0].name: replace(row, label=name_span([layer.name for layer in row.layers]))
        for group in groups
        for row in group.rows
        if labels[row.label] > 1 < len(row.layers)
    }
    return tuple(replace(g, rows=tuple(named.get(row.layers[0].name, row) for row in g.rows)) for g in groups)


def block_groups(layers: Sequence[LayerReport], figures: bool = True) -> tuple[StrategyGroup, ...]:
    """Adjacent layers of one placement, those without weights folded, repeated blocks once.

    Args:
        figures: blocks of other figures are others; else only those of other strategies.
    """
    groups = list[StrategyGroup]()
    before = ""
    for (_, run), same in groupby(
        repeated_blocks(layers, figures=figures), key=lambda block: (block.head.strategy.placement, block.run)
    ):
        blocks = list(same)
        rows = tuple(TableLine(block.label, block.layers, block.repeats, head=block.head) for block in blocks)
        repeats = blocks[0].repeats if run else 1
        group = StrategyGroup(blocks[0].head.strategy, rows, repeats, blocks[0].modules)
        again = bool(group.modules) and run == before and group.places() == groups[-1].places()
        groups.append(replace(group, again=again))
        before = run
    return tuple(groups)


def _lines_of(groups: Sequence[StrategyGroup]) -> int:
    """How many lines the groups have."""
    return sum(len(group.rows) for group in groups)


def _fewest_repeats_joined(groups: tuple[StrategyGroup, ...], limit: int) -> tuple[StrategyGroup, ...]:
    """The groups; where they have too many lines, those of the fewest repeated blocks have one each."""
    if all(group.repeats == 1 for group in groups):  # of what is not repeated, modules tell more
        return groups
    found = list(groups)
    for index in sorted(range(len(found)), key=lambda index: (found[index].repeats, -len(found[index].rows))):
        if _lines_of(found) > limit:
            found[index] = replace(found[index], rows=(found[index].whole,))
    return tuple(found)


def _joined(groups: Sequence[StrategyGroup], limit: int) -> tuple[StrategyGroup, ...]:
    """Adjacent lines made one, so many that about `limit` are left: names gave no place to cut."""
    size = math.ceil(_lines_of(groups) / limit)

    def join(rows: Sequence[TableLine]) -> TableLine:
        layers = tuple(layer for row in rows for layer in row.layers)
        return rows[0] if len(rows) == 1 else TableLine(name_span([layer.name for layer in layers]), layers)

    def joined(rows: Sequence[TableLine]) -> tuple[TableLine, ...]:
        return tuple(join(rows[start : start + size]) for start in range(0, len(rows), size))

    return tuple(replace(group, rows=joined(group.rows)) for group in groups)


def _lines(run: Sequence[LayerReport], depth: int) -> Iterator[TableLine]:
    """A line for each module of so many name parts, or for equal modules in a row."""
    by_prefix = groupby(run, key=lambda layer: ".".join(layer.name.split(".")[:depth]))
    modules = [(prefix, tuple(layers)) for prefix, layers in by_prefix]
    for _, equal in groupby(modules, key=lambda module: _signature(*module)):
        same = list(equal)
        first, layers = same[0]
        named = [prefix for prefix, _ in same] if len(same) > 1 else [layer.name for layer in layers]
        label = first if first and len(same) == 1 < len(layers) else name_span(named)
        yield TableLine(label, tuple(layer for _, own in same for layer in own), len(same), first)


def _signature(prefix: str, layers: Sequence[LayerReport]) -> tuple[object, ...]:
    """Equal for modules that a reader would call equal: kinds, names inside, sources, figures to three digits."""
    figures = attrgetter("forward_s", "backward_s", "transfer_s", "reduce_s", "memory_bytes")
    return tuple(
        (
            layer.name.removeprefix(prefix), layer.kind, layer.source, len(layer.copies),
            *(f"{value:.2e}" for value in figures(layer)),
        )
        for layer in layers
    )  # fmt: skip
