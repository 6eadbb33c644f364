"""How one tensor lies over devices, and what must move to change that."""

from parplan.layout.exchanges import Assembly, EqualSlices, Exchange, Messages, equal_slices
from parplan.layout.grids import Grid, Layout, Sections
from parplan.layout.pieces import (
    IntArray,
    Piece,
    PieceTable,
    block_shapes,
    in_place,
    piece_table,
    pieces,
    regions,
    split_evenly,
)
from parplan.layout.ranges import (
    Block,
    Extent,
    Range,
    Ranges,
    Region,
    disjoint,
    extent_of,
    intervals,
    located,
    region_of,
    regions_of,
    shape_of,
    whole_block,
    within,
)

__all__ = [
    "Assembly", "Block", "EqualSlices", "Exchange", "Extent", "Grid", "IntArray", "Layout", "Messages", "Piece",
    "PieceTable", "Range", "Ranges", "Region", "Sections", "block_shapes", "disjoint", "equal_slices", "extent_of",
    "in_place", "intervals", "located", "piece_table", "pieces", "region_of", "regions", "regions_of", "shape_of",
    "split_evenly", "whole_block", "within",
]  # fmt: skip
