"""VGG-16: thirteen 3 x 3 convolutions and the largest fully-connected layer of its time.

Sizes: configuration D of Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition"
(arXiv 1409.1556), Table 1; 138,357,544 parameters, 102,764,544 of them in fc6 alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CONVOLUTIONS = (2, 2, 3, 3, 3)  # in each block; a pool that halves the image ends the block


@dataclass(frozen=True)
class Sizes:
    """Filters of the five blocks, units of fc6 and fc7, classes, and the side in pixels of what pool5 leaves."""

    filters: tuple[int, int, int, int, int] = (64, 128, 256, 512, 512)
    hidden: int = 4096
    classes: int = 1000
    side: int = 7


def convolutions(sizes: Sizes) -> Iterator[tuple[str, nn.Module]]:
    """The five blocks: conv1_1, relu1_1, conv1_2, relu1_2, pool1, conv2_1 ... pool5."""
    channels = 3
    for block, (count, filters) in enumerate(zip(CONVOLUTIONS, sizes.filters, strict=True), start=1):
        for index in range(1, count + 1):
            yield f"conv{block}_{index}", nn.Conv2d(channels, filters, 3, padding=1)
            yield f"relu{block}_{index}", nn.ReLU(inplace=True)
            channels = filters
        yield f"pool{block}", nn.MaxPool2d(2)


def classifier(sizes: Sizes) -> Iterator[tuple[str, nn.Module]]:
    """The three fully-connected layers, dropout after the first two."""
    yield "flatten", nn.Flatten()
    features = sizes.filters[-1] * sizes.side * sizes.side
    for layer in (6, 7):
        yield f"fc{layer}", nn.Linear(features, sizes.hidden)
        yield f"relu{layer}", nn.ReLU(inplace=True)
        yield f"drop{layer}", nn.Dropout()
        features = sizes.hidden
    yield "fc8", nn.Linear(features, sizes.classes)


class VGG16(nn.Sequential):
    """Configuration D: images (N, 3, H, W) to class scores (N, classes)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        chosen = sizes or Sizes()
        super().__init__(OrderedDict([*convolutions(chosen), *classifier(chosen)]))


def build() -> nn.Module:
    """The network at full size."""
    return VGG16()


def example_inputs() -> tuple[Tensor]:
    """A batch of 256 images; one image's memory, seen 256 times."""
    return (torch.zeros(1, 3, 224, 224).expand(256, -1, -1, -1),)


def small() -> tuple[nn.Module, tuple[Tensor]]:
    """The same layers, narrow enough to run anywhere, in sizes that 2, 3 and 4 divide; and 12 random images."""
    sizes = Sizes(filters=(12, 12, 24, 24, 24), hidden=48, classes=12, side=2)
    generator = torch.Generator().manual_seed(0)
    return VGG16(sizes), (torch.randn(12, 3, 64, 64, generator=generator),)
