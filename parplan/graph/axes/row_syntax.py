"""The axes of one op, and the syntax of a row of the axis table.

A row is written like einops: `b.. i+, o i+, o^ -> b.. o`. Each word is one dimension of an operand,
letters that agree are the same axis. `x..` stands for any number of dimensions. Marks after a name:
`+` contracted (cutting it gives a term of a sum), `!` cannot be cut, `*` mixed by batch statistics (which replicas
exchange in a batch norm; in any other op it is as `!`),
`^` on an operand without that axis: counts once, so only the first shard may use it. What a row does not
mention cannot be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

__all__ = ["Cut", "OpAxis", "Place", "Repeats", "Section", "parse_row", "read_row"]


class Cut(Enum):
    """The effect of cutting an axis of an op."""

    MAP = "every part computes its part of the output"
    SUM = "every part computes a term of the output"
    MIXED = "parts must exchange statistics (batch norm in training)"
    BLOCKED = "the axis cannot be cut"


@dataclass(frozen=True)
class Section:
    """A section of a dimension that packs several tensors ([q | k | v]): indices from `start` to `stop`."""

    start: int
    stop: int


class Place(NamedTuple):
    """Where an axis lies in one tensor: the dimension, the size of what it is merged behind in it, and its section."""

    tensor: str
    dim: int
    outer: int = 1
    section: Section | None = None

    @property
    def plain(self) -> bool:
        """Whether the axis is all of the dimension."""
        return self.outer == 1 and self.section is None


@dataclass(frozen=True)
class Repeats:
    """A dimension along which each of `limit` parts is repeated: of more shards, each has a share of repetitions."""

    dim: int
    limit: int


@dataclass(frozen=True)
class OpAxis:
    """One axis of one op call.

    Args:
        dims: fx name of each operand or output that has the axis -> its dimension.
        cut: what cutting it does.
        name: the field's word for it ("out-features"), or "" to name it by position.
        units: parts must divide this as well as every size (groups, heads); 0 for no further limit.
        first_only: operands that only the first part may use.
        outer: for a tensor in whose dimension the axis is merged behind another, the size of what is in
            front (samples in [tokens * samples] have tokens); 1 where not listed.
        sections: for a tensor in whose dimension the axis is one section, which.
        shared: operands with fewer units of the axis (heads of keys) -> their dimension: of more parts than units,
            neighbours use the same one.
        repeats: operands that repeat each unit of `shared` -> the dimension of the repetitions.
        routed_by: integers by which every row of the result is looked up along the axis (the expert of each token);
            rows that another part looks up are zeros.
    """

    dims: Mapping[str, int]
    cut: Cut = Cut.MAP
    name: str = ""
    units: int = 0
    first_only: frozenset[str] = frozenset()
    outer: Mapping[str, int] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    routed_by: str = ""

    def places(self) -> list[Place]:
        """Where the axis lies in each of its tensors."""
        return self._places

    @cached_property
    def _places(self) -> list[Place]:
        return [Place(t, dim, self.outer.get(t, 1), self.sections.get(t)) for t, dim in self.dims.items()]

    def shared_places(self) -> list[Place]:
        """The dimensions whose parts neighbours may share."""
        return [Place(tensor, dim) for tensor, dim in self.shared.items()]

    @property
    def plain(self) -> bool:
        """Whether it is all of a dimension in each of its tensors."""
        return not self.outer and not self.sections and not self.shared


_MARKS = {"+": Cut.SUM, "!": Cut.BLOCKED, "*": Cut.MIXED}


@dataclass(frozen=True)
class _Word:
    letter: str
    cut: Cut
    repeated: bool
    once: bool


@dataclass(frozen=True)
class Row:
    """A parsed row: the words of every operand, then of every output."""

    operands: tuple[tuple[_Word, ...], ...]
    outputs: tuple[tuple[_Word, ...], ...]


def parse_row(row: str) -> Row:
    """Read the text of a row.

    >>> parse_row("b.. i+, o i+, o^ -> b.. o").outputs[0][1].letter
    'o'
    """
    sides = []
    for side in row.split("->"):
        operands = []
        for operand in side.split(","):
            words = [(word.rstrip("^.+!*"), word) for word in operand.split()]
            cuts = [next((cut for mark, cut in _MARKS.items() if mark in word), Cut.MAP) for _, word in words]
            found = zip(words, cuts, strict=True)
            operands.append(tuple(_Word(letter, cut, ".." in word, "^" in word) for (letter, word), cut in found))
        sides.append(tuple(operands))
    return Row(*sides)


@dataclass
class _Found:
    dims: dict[str, int] = field(default_factory=dict)
    cut: Cut = Cut.MAP


def read_row(
    row: str,
    operands: Sequence[str | None],
    outputs: Sequence[str],
    ranks: Mapping[str, int],
    names: Mapping[str, str] | None = None,
    units: Mapping[str, int] | None = None,
) -> tuple[OpAxis, ...]:
    """Axes of one call whose tensors are named `operands` -> `outputs`, with these `ranks`.

    An operand that is None (a missing bias) is skipped. `names` gives an axis its word by letter,
    `units` a further limit by letter. A call that the row does not fit has no axes: a tensor of
    another rank, or one tensor in two roles that would have to be cut along two of its dimensions.
    """
    parsed = parse_row(row)
    found: dict[str, _Found] = {}
    once: set[str] = set()
    sides = [*zip(parsed.operands, operands, strict=False), *zip(parsed.outputs, outputs, strict=True)]
    for words, tensor in sides:
        if tensor is None:
            continue
        # One (axis, word) per dimension, with `x..` given as many dimensions as are left over.
        left_over = ranks[tensor] - sum(not each.repeated for each in words)
        spread: list[tuple[str, _Word]] = []
        for each in words:
            count = left_over if each.repeated else 1
            # Counted from the right, so that leading batch dimensions of different operands align.
            spread += [
                (f"{each.letter}{count - index}" if each.repeated else each.letter, each) for index in range(count)
            ]
        if len(spread) != ranks[tensor]:
            return ()
        for dim, (letter, word) in enumerate(spread):
            entry = found.setdefault(letter, _Found())
            if entry.dims.setdefault(tensor, dim) != dim:
                return ()
            entry.cut = word.cut if word.cut is not Cut.MAP else entry.cut
            if word.once:
                once.add(tensor)
    return tuple(
        OpAxis(
            dims=entry.dims,
            cut=entry.cut,
            name=(names or {}).get(letter, ""),
            units=(units or {}).get(letter, 0),
            first_only=frozenset(once) if entry.cut is Cut.SUM else frozenset(),
        )
        for letter, entry in found.items()
    )
