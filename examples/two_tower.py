"""The 2012 network in its two columns, each made to fit one GPU: model parallelism written into the model.

Sizes: Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural networks" (NIPS 2012),
section 3.5: 48, 128, 192, 192, 128 filters and 2 x 2048 units per tower; 60,965,224 parameters. A tower sees the other
one only at conv3 and in the fully-connected layers. Response normalisation is left out, and conv1 pads by 2 to give
55 x 55. Each tower joins its own copy of both halves, so that tower a can live on one device, tower b on another, and
every crossing sends one half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Per tower: filters of conv1-conv5 and units of fc6 and fc7. Then classes, and the side of what pool5 leaves."""

    filters: tuple[int, int, int, int, int] = (48, 128, 192, 192, 128)
    hidden: int = 2048
    classes: int = 1000
    side: int = 6


class Join(nn.Module):
    """Both towers' channels (or features), tower a's first: two of (N, C, ...) to (N, 2 C, ...)."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """The two halves side by side."""
        return torch.cat((a, b), dim=1)


class TwoTower(nn.Module):
    """AlexNet in two towers: images (N, 3, H, W) to class scores (N, classes)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        chosen = sizes or Sizes()
        for tower in ("a", "b"):
            self._add_convolutions(tower, chosen.filters)
            self._add_fully_connected(tower, chosen)
        self.join8 = Join()
        self.fc8 = nn.Linear(2 * chosen.hidden, chosen.classes)

    def _add_convolutions(self, tower: str, filters: tuple[int, int, int, int, int]) -> None:
        f1, f2, f3, f4, f5 = filters
        self.add_module(f"conv1{tower}", nn.Conv2d(3, f1, 11, stride=4, padding=2))
        self.add_module(f"conv2{tower}", nn.Conv2d(f1, f2, 5, padding=2))
        self.add_module(f"join3{tower}", Join())
        self.add_module(f"conv3{tower}", nn.Conv2d(2 * f2, f3, 3, padding=1))
        self.add_module(f"conv4{tower}", nn.Conv2d(f3, f4, 3, padding=1))
        self.add_module(f"conv5{tower}", nn.Conv2d(f4, f5, 3, padding=1))
        for layer in range(1, 6):
            self.add_module(f"relu{layer}{tower}", nn.ReLU(inplace=True))
        for layer in (1, 2, 5):
            self.add_module(f"pool{layer}{tower}", nn.MaxPool2d(3, stride=2))

    def _add_fully_connected(self, tower: str, sizes: Sizes) -> None:
        features = sizes.filters[-1] * sizes.side * sizes.side
        self.add_module(f"flatten{tower}", nn.Flatten())
        for layer, half in ((6, features), (7, sizes.hidden)):
            self.add_module(f"join{layer}{tower}", Join())
            self.add_module(f"fc{layer}{tower}", nn.Linear(2 * half, sizes.hidden))
            self.add_module(f"relu{layer}{tower}", nn.ReLU(inplace=True))
            self.add_module(f"drop{layer}{tower}", nn.Dropout())

    def _run(self, tower: str, layers: str, *inputs: Tensor) -> Tensor:
        first, *rest = (self.get_submodule(f"{layer}{tower}") for layer in layers.split())
        value: Tensor = first(*inputs)
        for layer in rest:
            value = layer(value)
        return value

    def forward(self, images: Tensor) -> Tensor:
        """The towers side by side; a line that takes two tensors is where they cross."""
        a, b = (self._run(t, "conv1 relu1 pool1 conv2 relu2 pool2", images) for t in "ab")
        a, b = (self._run(t, "join3 conv3 relu3 conv4 relu4 conv5 relu5 pool5 flatten", a, b) for t in "ab")
        a, b = (self._run(t, "join6 fc6 relu6 drop6", a, b) for t in "ab")
        a, b = (self._run(t, "join7 fc7 relu7 drop7", a, b) for t in "ab")
        scores: Tensor = self.fc8(self.join8(a, b))
        return scores


def build() -> nn.Module:
    """The network at full size."""
    return TwoTower()


def example_inputs() -> tuple[Tensor]:
    """A batch of 256 images; one image's memory, seen 256 times."""
    return (torch.zeros(1, 3, 224, 224).expand(256, -1, -1, -1),)


def small() -> tuple[nn.Module, tuple[Tensor]]:
    """The same layers, narrow enough to run anywhere, in sizes that 2, 3 and 4 divide; and 12 random images."""
    sizes = Sizes(filters=(12, 12, 12, 12, 12), hidden=24, classes=12, side=2)
    generator = torch.Generator().manual_seed(0)
    return TwoTower(sizes), (torch.randn(12, 3, 96, 96, generator=generator),)
