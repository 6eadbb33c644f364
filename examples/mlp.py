"""A wide multi-layer perceptron: weights without arithmetic to hide their gradients behind, so sharding pays.

Sizes: 784 inputs (28 x 28 images), three hidden layers of 4096 and 10 classes; 36,818,954 parameters. The two square
layers are of the size of AlexNet's fc7, which footnote 4 of Krizhevsky (arXiv 1404.5997) works through.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

WIDTHS = (784, 4096, 4096, 4096, 10)


def layers(widths: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """fc1, relu1, fc2, relu2, ...: a ReLU after every layer but the last."""
    for index, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        if index > 1:
            yield f"relu{index - 1}", nn.ReLU()
        yield f"fc{index}", nn.Linear(inputs, outputs)


class MLP(nn.Sequential):
    """Fully-connected layers: features (N, widths[0]) to class scores (N, widths[-1])."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__(OrderedDict(layers(widths)))


def build() -> nn.Module:
    """The network at full size."""
    return MLP()


def example_inputs() -> tuple[Tensor]:
    """A batch of 256 samples."""
    return (torch.zeros(256, WIDTHS[0]),)


def small() -> tuple[nn.Module, tuple[Tensor]]:
    """The same layers, narrow, in sizes that 2, 3 and 4 divide; and 12 random samples."""
    generator = torch.Generator().manual_seed(0)
    return MLP((24, 48, 48, 48, 12)), (torch.randn(12, 24, generator=generator),)
