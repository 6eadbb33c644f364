"""Lines of layers, each said once: layers without weights with the one that feeds them, repeated blocks as one.

A line is a layer with the layers without weights behind it. Equal lines in a row (equal ops, sizes and strategies, and
names up to their numbers) are repeated blocks, listed once.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from parplan.planner.decision import LayerReport

__all__ = ["LEAST", "NUMBER", "Block", "Repeat", "folded", "name_span", "repeated_blocks", "repeats"]

NUMBER = re.compile(r"\d+")
LEAST = 3
"""Equal neighbours from which on a page shows one: two are read as fast as said."""


@dataclass(frozen=True)
class Block:
    """Adjacent layers on one line of `repeats` equal blocks; `run` numbers the repeated sequence that it is part of."""

    layers: tuple[LayerReport, ...]
    repeats: int = 1
    run: int | None = None

    @property
    def head(self) -> LayerReport:
        """The layer that the others of its (first) block follow."""
        return self.layers[0]


@dataclass(frozen=True)
class Repeat:
    """`count` equal stretches of `period` items each, from `start` on."""

    start: int
    period: int
    count: int


def folded(layers: Sequence[LayerReport]) -> list[tuple[LayerReport, ...]]:
    """The layers in order, those without weights together with the line in front of them if that feeds them."""
    lines: list[list[LayerReport]] = []
    for layer in layers:
        before = lines[-1] if lines else []
        fed = any(one.name in layer.inputs for one in before)
        if fed and not layer.parameters and layer.strategy.placement == before[0].strategy.placement:
            before.append(layer)
        else:
            lines.append([layer])
    return [tuple(line) for line in lines]


def repeated_blocks(lines: Sequence[tuple[LayerReport, ...]], least: int = 2) -> list[Block]:
    """The lines, those of `least` and more equal blocks in a row once, with the layers of all."""
    keys = [_key(line) for line in lines]
    found, at = list[Block](), 0
    for number, run in enumerate(repeats(keys)):
        if run.count < least:
            continue
        found += [Block(line) for line in lines[at : run.start]]
        for offset in range(run.period):
            copies = [lines[run.start + index * run.period + offset] for index in range(run.count)]
            found.append(Block(tuple(layer for line in copies for layer in line), run.count, number))
        at = run.start + run.period * run.count
    return found + [Block(line) for line in lines[at:]]


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
    """Names of equal layers in a row, their number as a range where only that differs.

    >>> name_span(["h.0.mlp", "h.1.mlp", "h.2.mlp"]), name_span(["a", "b"]), name_span(["a"])
    ('h.0-2.mlp', 'a .. b', 'a')
    """
    first, last = names[0], names[-1]
    if len(names) == 1:
        return first
    parts = [NUMBER.split(name) for name in names]
    numbers = [[int(number) for number in NUMBER.findall(name)] for name in names]
    if all(part == parts[0] for part in parts):
        places = [place for place in range(len(numbers[0])) if len({own[place] for own in numbers}) > 1]
        values = [own[places[0]] for own in numbers] if len(places) == 1 else []
        if values and values == list(range(values[0], values[0] + len(values))):
            found = list(NUMBER.finditer(first))[places[0]]
            return f"{first[: found.end()]}-{values[-1]}{first[found.end() :]}"
    return f"{first} .. {last}"


def _key(line: Sequence[LayerReport]) -> Hashable:
    """Equal for lines that a reader would call equal."""
    figures = ("forward_s", "backward_s", "transfer_s", "reduce_s", "memory_bytes")
    return tuple(
        (
            NUMBER.sub("#", layer.name), layer.kind, layer.strategy, layer.parameters, layer.source, layer.pinned != "",
            *(f"{getattr(layer, name):.2e}" for name in figures),
        )
        for layer in line
    )  # fmt: skip
