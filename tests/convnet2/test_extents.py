"""Sizes as cuda-convnet2 computes them: windows cover the whole image."""

from __future__ import annotations

from pathlib import Path

import pytest

from parplan.convnet2.extents import Extent, Window, covering
from tests.convnet2.layer_files import fixture

# (length, window, stride, windows): the last window reaches the last pixel
COVERS = [(224, 11, 4, 55), (55, 3, 2, 27), (27, 3, 2, 13), (13, 3, 2, 6), (12, 3, 3, 4), (6, 3, 2, 3), (3, 3, 2, 1)]


@pytest.mark.parametrize(("length", "window", "stride", "count"), COVERS)
def test_windows_cover_the_image_and_none_is_idle(length: int, window: int, stride: int, count: int) -> None:
    assert covering(length, window, stride) == count
    assert (count - 1) * stride + window >= length
    assert (count - 2) * stride + window < length


def test_a_border_counts_and_the_last_filter_may_hang_over() -> None:
    way = Window(channels=3, size=5, stride=2, padding=2, groups=1)
    assert way.side(28) == 15
    assert way.overhang(28) == 14 * 2 + 5 - 32
    assert way.overhang(27) == 0


@pytest.mark.parametrize(("extent", "words", "count"), [(Extent(64, 55), "64 maps of 55 x 55", 193600),
                                                        (Extent(1, 2), "1 map of 2 x 2", 4),
                                                        (Extent(10), "10 numbers", 10)])  # fmt: skip
def test_words_and_numbers(extent: Extent, words: str, count: int) -> None:
    assert (extent.describe(), extent.count) == (words, count)


def test_the_published_sizes() -> None:
    """224 pixels give 55, 27, 13 and 6; 9,216 numbers reach fc6."""
    network = fixture("1gpu").network
    assert tuple(network.get_submodule("fc6").get_parameter("weight").shape) == (4096, 9216)
    assert [network.get_submodule(f"pool{n}").get_parameter for n in (1, 2, 5)]
    sides = [network.get_submodule(f"pool{n}").outputs for n in (1, 2, 5)]
    assert sides == [27, 13, 6]


def test_where_the_fixtures_are() -> None:
    assert Path(fixture("2gpu-data").path).name == "layers-2gpu-data.cfg"
