"""The devices of a layer as a grid, and how one tensor lies over them: along which dimensions, and in which sections.

A layer's devices form a grid of `replicas` rows and `shards` columns. Rows work on different samples, columns on
different slices of one axis. Where one dimension packs several tensors ([q | k | v]), each is a section that is cut by
itself: a shard holds its part of every section, one after another.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import gcd

__all__ = ["Grid", "Layout", "Sections"]


@dataclass(frozen=True)
class _Numbering:
    """Device numbers with the first one, where they are numbered on from there (else None), and their hash."""

    devices: tuple[int, ...]
    first: int | None
    hash: int


_NUMBERINGS: dict[int, _Numbering] = {}
"""By identity: thousands of grids are of one tuple of devices, which is kept, so that no other one has its `id`."""


def _numbering(devices: tuple[int, ...]) -> _Numbering:
    known = _NUMBERINGS.get(id(devices))
    if known is None:
        if len(_NUMBERINGS) >= 1024:
            _NUMBERINGS.clear()
        first = devices[0] if devices and devices == tuple(range(devices[0], devices[0] + len(devices))) else None
        known = _NUMBERINGS[id(devices)] = _Numbering(devices, first, hash(devices))
    return known


@dataclass(frozen=True)
class Grid:
    """Logical devices arranged as replicas x shards, row by row.

    Args:
        devices: logical device numbers, `replicas * shards` of them, all different.
        replicas: rows; each works on its own samples.
        shards: columns; each holds its own slice of the cut axis.
    """

    devices: tuple[int, ...]
    replicas: int
    shards: int

    def __post_init__(self) -> None:
        if self.replicas * self.shards != len(self.devices):
            raise ValueError(f"{self.replicas} x {self.shards} does not arrange {len(self.devices)} devices")

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Place of every device, row by row."""
        return {device: place for place, device in enumerate(self.devices)}

    @cached_property
    def first(self) -> int | None:
        """The first device, where they are numbered on from there; None in any other order."""
        return _numbering(self.devices).first

    def position(self, device: int) -> tuple[int, int]:
        """Row and column of `device`."""
        return divmod(self.places[device], self.shards)

    def device(self, row: int, column: int) -> int:
        """The device at one place of the grid."""
        return self.devices[row * self.shards + column]

    @property
    def key(self) -> Hashable:
        """A short key of its devices and their arrangement, as there may be thousands."""
        numbering = _numbering(self.devices)
        return (self.devices if numbering.first is None else numbering.first, self.replicas, self.shards)

    def __hash__(self) -> int:
        """That of its fields, without going through the devices each time."""
        return hash((_numbering(self.devices).hash, self.replicas, self.shards))

    def row(self, row: int) -> tuple[int, ...]:
        """The devices that hold the shards of one replica."""
        return self.devices[row * self.shards : (row + 1) * self.shards]

    def column(self, column: int) -> tuple[int, ...]:
        """The devices that hold the replicas of one shard."""
        return self.devices[column :: self.shards]


@dataclass(frozen=True)
class Sections:
    """Sections of a dimension, each of which is cut by itself; see `of`.

    Args:
        sizes: of the sections, relative to each other, without a common factor.
        limits: per section, how many parts it is cut into at most: of more shards, neighbours hold the same part
            (heads of keys that several heads of queries share). 0 where there is no limit.
    """

    sizes: tuple[int, ...]
    limits: tuple[int, ...]

    @staticmethod
    def of(sizes: Sequence[int], limits: Sequence[int] = ()) -> Sections | None:
        """Sections of these sizes; None for a single one without a limit, which is a dimension like any other.

        >>> Sections.of((64, 16, 16))
        Sections(sizes=(4, 1, 1), limits=(0, 0, 0))
        """
        if not any(limits) and len(sizes) == 1:
            return None
        common = reduce(gcd, sizes)
        return Sections(tuple(size // common for size in sizes), tuple(limits) or (0,) * len(sizes))

    @cached_property
    def total(self) -> int:
        """The sum of the relative sizes."""
        return sum(self.sizes)

    def text(self) -> str:
        """Relative sizes, with the limits of those that have one.

        >>> Sections((4, 1, 1), (0, 2, 2)).text()
        'sections 4:1(2):1(2)'
        """
        each = zip(self.sizes, self.limits, strict=True)
        return "sections " + ":".join(f"{size}({limit})" if limit else f"{size}" for size, limit in each)

    def parts(self, shards: int) -> tuple[int, ...]:
        """How many different parts there are of every section."""
        return tuple(min(limit, shards) if limit else shards for limit in self.limits)

    def over(self, shards: int) -> Sections | None:
        """The same without limits that so few shards do not meet; None for one section without a limit."""
        if all(limit < shards for limit in self.limits):
            return self
        return Sections.of(self.sizes, [limit if limit < shards else 0 for limit in self.limits])

    def fits(self, shards: int) -> bool:
        """Whether every limit is a multiple of the shards, or they of it: then all parts have equally many holders."""
        return all(shards % limit == 0 or limit % shards == 0 for limit in self.limits if limit)

    def bounds(self, size: int) -> tuple[int, ...]:
        """Where sections of a dimension of `size` begin, then its end.

        Raises:
            ValueError: `size` is no multiple of the sections.
        """
        if size % self.total:
            raise ValueError(f"a dimension of {size} has no sections in proportion {self.sizes}")
        return tuple(accumulate((own * (size // self.total) for own in self.sizes), initial=0))

    def local_bounds(self, size: int, shards: int) -> tuple[int, ...]:
        """The same in what one of `shards` holds of the dimension.

        Raises:
            ValueError: a section is not divisible.
        """
        bounds, parts = self.bounds(size), self.parts(shards)
        sizes = [end - start for start, end in pairwise(bounds)]
        if not self.fits(shards) or any(own % count for own, count in zip(sizes, parts, strict=True)):
            raise ValueError(f"sections of {sizes} cannot be cut in {shards} (in {parts} parts)")
        return tuple(accumulate((own // count for own, count in zip(sizes, parts, strict=True)), initial=0))


@dataclass(frozen=True)
class Layout:
    """Where the parts of one tensor are.

    Args:
        grid: the devices that hold it.
        batch_dim: dimension cut over the rows; None when every row holds the same.
        shard_dim: dimension cut over the columns; None when every column holds the same.
        partial: every column holds a term, and the tensor is the sum over the columns.
        sections: of `shard_dim`, where each is cut by itself; None for one, cut as a whole.
    """

    grid: Grid
    batch_dim: int | None
    shard_dim: int | None = None
    partial: bool = False
    sections: Sections | None = None

    def __post_init__(self) -> None:
        if self.sections is not None and (self.shard_dim is None or not self.sections.fits(self.grid.shards)):
            raise ValueError(f"{self.sections} of dimension {self.shard_dim} do not divide over {self.grid.shards}")
        if self.partial and self.shard_dim is not None:
            raise ValueError("a partial sum is not cut as well")
        if self.batch_dim is not None and self.batch_dim == self.shard_dim:
            raise ValueError("one dimension cannot be cut by replicas and by shards")

    @cached_property
    def cuts(self) -> Mapping[int, int]:
        """Into how many parts each cut dimension is cut."""
        cuts = ((self.batch_dim, self.grid.replicas), (self.shard_dim, self.grid.shards))
        return {dim: parts for dim, parts in cuts if dim is not None}

    def against(self, other: Layout) -> Layout:
        """This layout without sections where those make no difference to how much moves between it and `other`.

        They do where both cut one dimension and not in the same sections. Otherwise every section moves as the whole
        would; only where it lies in each block is told by the sections.
        """
        if self.sections is None or any(self.sections.limits):
            return self
        met = other.cuts.get(self.shard_dim, 1) > 1 if self.shard_dim is not None else False
        alike = self.shard_dim == other.shard_dim and self.sections == other.sections
        return replace(self, sections=None) if alike or not met else self

    @property
    def rows_differ(self) -> bool:
        """Whether rows hold different blocks."""
        return self.batch_dim is not None

    @property
    def columns_differ(self) -> bool:
        """Whether columns hold different blocks, or different terms of a sum."""
        return self.shard_dim is not None or self.partial
