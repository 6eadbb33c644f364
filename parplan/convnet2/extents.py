"""Sizes of layers' outputs: cuda-convnet2's arithmetic, which rounds up where PyTorch rounds down.

A convolution or pooling covers the whole image: the last window may hang over the right and lower edge. 224 pixels
under 11 x 11 filters at stride 4 give 55 positions, one more than rounding down would.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Extent", "Window", "covering"]


@dataclass(frozen=True)
class Extent:
    """Output of a layer for one sample: square maps, or (`side` None) a vector of `channels` numbers."""

    channels: int
    side: int | None = None

    @property
    def count(self) -> int:
        """Numbers per sample, maps one after another."""
        return self.channels * (self.side or 1) ** 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (self.channels,) if self.side is None else (self.channels, self.side, self.side)

    def describe(self) -> str:
        """`64 maps of 55 x 55`, or `4096 numbers`."""
        if self.side is None:
            return f"{self.channels} numbers"
        return f"{self.channels} map{'s' if self.channels > 1 else ''} of {self.side} x {self.side}"


def covering(length: int, window: int, stride: int) -> int:
    """Windows needed to cover `length` pixels: ceil((length - window) / stride) + 1.

    >>> covering(224, 11, 4), covering(55, 3, 2), covering(27, 3, 2)
    (55, 27, 13)
    """
    return -(-(length - window) // stride) + 1


@dataclass(frozen=True)
class Window:
    """Filter window over one input: `channels` of them deep, with a border of `padding` zeros all around."""

    channels: int
    size: int
    stride: int
    padding: int
    groups: int

    def side(self, image: int) -> int:
        """Positions in each direction."""
        return covering(image + 2 * self.padding, self.size, self.stride)

    def overhang(self, image: int) -> int:
        """Zeros needed behind the border on the right and below, so that the last window is whole."""
        return (self.side(image) - 1) * self.stride + self.size - image - 2 * self.padding
