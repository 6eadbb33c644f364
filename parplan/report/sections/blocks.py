"""Lines of layers, each said once: layers without weights with the one that feeds them, repeated blocks as one.

A line is a layer with the layers without weights behind it. Lines of equal structure in a row (ops, sizes, and names up
to their numbers) are repeated blocks. Those that are planned alike, on whichever devices and in whichever pipeline
stage, and whose lines read alike, are listed once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from operator import attrgetter

from parplan.fields import ranges, runs
from parplan.planner.decision import LayerReport

__all__ = ["LEAST", "NUMBER", "Block", "Repeat", "folded", "name_inside", "name_span", "repeated_blocks", "repeats"]

NUMBER = re.compile(r"\d+")
LEAST = 3
"""Equal neighbours from which on a page shows one: two are read as fast as said."""


@dataclass(frozen=True)
class Block:
    """One line of `repeats` equal blocks.

    Args:
        layers: of all blocks, block by block.
        run: names the blocks that it is part of, where they have a place of their own on a page: they are not in a row,
            or their layers have several placements.
        modules: the blocks' names where they are not in a row or not on the same devices.
    """

    layers: tuple[LayerReport, ...]
    repeats: int = 1
    run: str = ""
    modules: tuple[str, ...] = ()

    @property
    def head(self) -> LayerReport:
        """The layer that the others of its (first) block follow."""
        return self.layers[0]

    @property
    def label(self) -> str:
        """Its first layer in all blocks; of one block with several layers, the first and the last."""
        each = len(self.layers) // self.repeats
        heads = [layer.name for layer in self.layers[::each]]
        if self.repeats == 1 < each:
            return f"{heads[0]} .. {self.layers[-1].name}"
        return name_inside(heads, self.modules)


@dataclass(frozen=True)
class Repeat:
    """`count` equal stretches of `period` items each, from `start` on."""

    start: int
    period: int
    count: int


def folded(
    layers: Sequence[LayerReport], of: Callable[[LayerReport], Hashable] = attrgetter("strategy.placement")
) -> list[tuple[LayerReport, ...]]:
    """The layers in order, those without weights together with the line in front of them if that feeds them.

    Args:
        of: only layers of which this is equal are together.
    """
    lines: list[list[LayerReport]] = []
    for layer in layers:
        before = lines[-1] if lines else []
        fed = any(one.name in layer.inputs for one in before)
        if fed and not layer.parameters and of(layer) == of(before[0]):
            before.append(layer)
        else:
            lines.append([layer])
    return [tuple(line) for line in lines]


def repeated_blocks(
    layers: Sequence[LayerReport], least: int = 2, fold: bool = True, figures: bool = True
) -> list[Block]:
    """The layers' lines in order, those of `least` and more equal blocks once, where the first of them is.

    Args:
        fold: layers without weights on the line that feeds them; else every layer has a line.
        figures: blocks of other figures are others; else only those of other strategies.
    """
    # Where a block begins must not depend on the plan, nor on whether its first layer has weights.
    lines, found, at = folded(layers, _module_numbers), list[Block](), 0
    for run in repeats([tuple(map(_structure, line)) for line in lines]):
        if run.count < least:
            continue
        found += _blocks([list(chain(*lines[at : run.start]))], fold)
        at = run.start + run.period * run.count
        blocks = [list(chain(*lines[start : start + run.period])) for start in range(run.start, at, run.period)]
        for numbers in _classes(blocks, figures):
            alike = [blocks[number] for number in numbers]
            if len(alike) >= least:
                found += _blocks(alike, fold, numbers[-1] - numbers[0] == len(numbers) - 1)
            else:
                found += chain(*(repeated_blocks(block, least, fold, figures) for block in alike))
    return found + _blocks([list(chain(*lines[at:]))], fold)


def _classes(blocks: Sequence[Sequence[LayerReport]], figures: bool) -> list[list[int]]:
    """Numbers of blocks that are one entry, by the first of each."""
    classes = dict[Hashable, list[int]]()
    for number, block in enumerate(blocks):
        classes.setdefault(_key(block, figures), []).append(number)
    found = list[list[int]]()
    for numbers in classes.values():
        names = _modules([blocks[number] for number in numbers])
        # Only a list of numbers says which blocks these are where others stand between them.
        found += runs(numbers) if name_span(names) == f"{names[0]} .. {names[-1]}" else [numbers]
    return sorted(found)


def _blocks(alike: Sequence[Sequence[LayerReport]], fold: bool, in_a_row: bool = True) -> list[Block]:
    """The lines of equal blocks."""
    first, run, modules, found, at = alike[0], "", tuple[str, ...](), list[Block](), 0
    if len(alike) > 1:
        in_a_row = in_a_row and len({tuple(layer.strategy.devices for layer in block) for block in alike}) == 1
        modules = () if in_a_row else _modules(alike)
        run = first[0].name if modules or len({layer.strategy.placement for layer in first}) > 1 else ""
    for line in folded(first) if fold else [(layer,) for layer in first]:
        layers = tuple(chain(*(block[at : at + len(line)] for block in alike)))
        found.append(Block(layers, len(alike), run, modules))
        at += len(line)
    return found


def _modules(blocks: Sequence[Sequence[LayerReport]]) -> tuple[str, ...]:
    """Names of blocks: the modules that have all their layers, else their first layers."""
    paths = (zip(*(layer.name.split(".")[:-1] for layer in block), strict=False) for block in blocks)
    modules = tuple(".".join(own[0] for own in takewhile(lambda own: len({*own}) == 1, path)) for path in paths)
    return modules if all(modules) and len(set(modules)) == len(modules) else tuple(own[0].name for own in blocks)


def repeats(keys: Sequence[Hashable]) -> list[Repeat]:
    """Equal stretches in a row, from the left: at each place those that cover most, of these the shortest.

    >>> repeats("abcabcabcdd")
    [Repeat(start=0, period=3, count=3), Repeat(start=9, period=1, count=2)]
    """
    found, start = list[Repeat](), 0
    while start < len(keys):
        best = Repeat(start, 1, 1)
        for period in range(1, (len(keys) - start) // 2 + 1):
            if keys[start] != keys[start + period]:
                continue
            count = 1
            first = keys[start : start + period]
            while keys[start + count * period : start + (count + 1) * period] == first:
                count += 1
            if count > 1 and count * period > best.count * best.period:
                best = Repeat(start, period, count)
        if best.count > 1:
            found.append(best)
        start += best.count * best.period
    return found


def name_span(names: Sequence[str]) -> str:
    """Names of equal layers in order, their numbers as ranges where only one differs and ascends.

    >>> name_span(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp"]), name_span(["a", "b"]), name_span(["a"])
    ('h.0-2, 5.mlp', 'a .. b', 'a')
    """
    first, last = names[0], names[-1]
    if len(names) == 1:
        return first
    parts = [NUMBER.split(name) for name in names]
    numbers = [[int(number) for number in NUMBER.findall(name)] for name in names]
    if all(part == parts[0] for part in parts):
        places = [place for place in range(len(numbers[0])) if len({own[place] for own in numbers}) > 1]
        values = [own[places[0]] for own in numbers] if len(places) == 1 else []
        if values and values == sorted(set(values)):
            found = list(NUMBER.finditer(first))[places[0]]
            return f"{first[: found.start()]}{ranges(values).replace(',', ', ')}{first[found.end() :]}"
    return f"{first} .. {last}"


def name_inside(names: Sequence[str], modules: Sequence[str]) -> str:
    """The name of a layer of equal blocks within its module, where these are known and have it; else all its names.

    >>> name_inside(["h.0.mlp", "h.4.mlp"], ["h.0", "h.4"]), name_inside(["h.0.mlp", "h.4.mlp"], [])
    ('mlp', 'h.0, 4.mlp')
    """
    own = names[0].removeprefix(f"{modules[0]}.") if modules else names[0]
    return own if own != names[0] else name_span(names)


def _module_numbers(layer: LayerReport) -> tuple[str, ...]:
    """Different for modules that their numbers tell apart."""
    return tuple(NUMBER.findall(layer.name.rpartition(".")[0]))


def _structure(layer: LayerReport) -> Hashable:
    """Equal for layers that are the same in two blocks, however they are planned."""
    return NUMBER.sub("#", layer.name), layer.kind, layer.parameters


def _key(block: Sequence[LayerReport], figures: bool) -> Hashable:
    """Equal for blocks of one structure that are planned alike on some devices and, with figures, read alike."""
    places = list(dict.fromkeys(layer.strategy.devices for layer in block))
    names = ("forward_s", "backward_s", "transfer_s", "reduce_s", "memory_bytes")
    return tuple(
        (
            replace(layer.strategy, devices=()), places.index(layer.strategy.devices),
            *([layer.source, layer.pinned != "", len(layer.copies)] * figures),
            *(f"{getattr(layer, name):.2e}" for name in names if figures),
        )
        for layer in block
    )  # fmt: skip
