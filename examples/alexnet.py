"""AlexNet in one column, as cuda-convnet2 trains it: the network that hybrid parallelism was first written for.

Sizes: cuda-convnet2's `layers-imagenet-1gpu.cfg` (64, 192, 384, 256, 256 filters; 4096, 4096, 1000 units), the network
of Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997), Table 1;
61,100,840 parameters. Its convolutions hold 92 % of the arithmetic and 4 % of the weights, its fully-connected layers
the reverse. As in most later copies, response normalisation is left out and conv1 pads by 2 to give 55 x 55.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Filters of conv1-conv5, units of fc6 and fc7, classes, and the side in pixels of what pool5 leaves."""

    filters: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    hidden: int = 4096
    classes: int = 1000
    side: int = 6


class AlexNet(nn.Sequential):
    """Five convolutions, three fully-connected layers: images (N, 3, H, W) to class scores (N, classes)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        s = sizes or Sizes()
        f1, f2, f3, f4, f5 = s.filters
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(3, f1, 11, stride=4, padding=2)),
            ("relu1", nn.ReLU(inplace=True)),
            ("pool1", nn.MaxPool2d(3, stride=2)),
            ("conv2", nn.Conv2d(f1, f2, 5, padding=2)),
            ("relu2", nn.ReLU(inplace=True)),
            ("pool2", nn.MaxPool2d(3, stride=2)),
            ("conv3", nn.Conv2d(f2, f3, 3, padding=1)),
            ("relu3", nn.ReLU(inplace=True)),
            ("conv4", nn.Conv2d(f3, f4, 3, padding=1)),
            ("relu4", nn.ReLU(inplace=True)),
            ("conv5", nn.Conv2d(f4, f5, 3, padding=1)),
            ("relu5", nn.ReLU(inplace=True)),
            ("pool5", nn.MaxPool2d(3, stride=2)),
            ("flatten", nn.Flatten()),
            ("fc6", nn.Linear(f5 * s.side * s.side, s.hidden)),
            ("relu6", nn.ReLU(inplace=True)),
            ("drop6", nn.Dropout()),
            ("fc7", nn.Linear(s.hidden, s.hidden)),
            ("relu7", nn.ReLU(inplace=True)),
            ("drop7", nn.Dropout()),
            ("fc8", nn.Linear(s.hidden, s.classes)),
        ]
        super().__init__(OrderedDict(layers))


def build() -> nn.Module:
    """The network at full size."""
    return AlexNet()


def example_inputs() -> tuple[Tensor]:
    """A batch of 512 images, the paper's 128 on each of four GPUs; one image's memory, seen 512 times."""
    return (torch.zeros(1, 3, 224, 224).expand(512, -1, -1, -1),)


def small() -> tuple[nn.Module, tuple[Tensor]]:
    """The same layers, narrow enough to run anywhere, in sizes that 2, 3 and 4 divide; and 12 random images."""
    sizes = Sizes(filters=(12, 24, 24, 24, 12), hidden=48, classes=12, side=2)
    generator = torch.Generator().manual_seed(0)
    return AlexNet(sizes), (torch.randn(12, 3, 96, 96, generator=generator),)
