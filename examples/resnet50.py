"""ResNet-50: residual additions, batch norm, and almost all of its weights in convolutions.

Sizes: He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (arXiv 1512.03385), Table 1, with the
stride of a down-sampling block on its 3 x 3 convolution; 25,557,032 parameters. Parameters are named as in the common
checkpoints (conv1, layer1.0.conv1, ..., layer1.0.downsample.0, fc).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

EXPANSION = 4  # a block's output channels over its inner ones


@dataclass(frozen=True)
class Sizes:
    """Inner channels of the first stage (later ones double them), blocks per stage, and classes."""

    width: int = 64
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    classes: int = 1000


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions beside a shortcut: (N, C, H, W) to (N, 4 width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, EXPANSION * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(EXPANSION * width)
        self.relu3 = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or channels != EXPANSION * width:
            shortcut = nn.Conv2d(channels, EXPANSION * width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(EXPANSION * width))

    def forward(self, value: Tensor) -> Tensor:
        """The block's result added to its input, down-sampled where shapes differ."""
        out = self.relu1(self.bn1(self.conv1(value)))
        out = self.relu2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += value if self.downsample is None else self.downsample(value)
        result: Tensor = self.relu3(out)
        return result


def stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """A run of blocks of one width; the first one changes the channels and takes the stride."""
    rest = [Bottleneck(EXPANSION * width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(channels, width, stride), *rest)


class ResNet(nn.Module):
    """A stem, four stages of bottleneck blocks, and a classifier: images (N, 3, H, W) to scores (N, classes)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        s = sizes or Sizes()
        self.conv1 = nn.Conv2d(3, s.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(s.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(s.width, s.width, s.blocks[0], stride=1)
        self.layer2 = stage(4 * s.width, 2 * s.width, s.blocks[1], stride=2)
        self.layer3 = stage(8 * s.width, 4 * s.width, s.blocks[2], stride=2)
        self.layer4 = stage(16 * s.width, 8 * s.width, s.blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(32 * s.width, s.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores, not normalised."""
        value = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        value = self.layer4(self.layer3(self.layer2(self.layer1(value))))
        scores: Tensor = self.fc(self.flatten(self.avgpool(value)))
        return scores


def build() -> nn.Module:
    """The network at full size."""
    return ResNet()


def example_inputs() -> tuple[Tensor]:
    """A batch of 256 images; one image's memory, seen 256 times."""
    return (torch.zeros(1, 3, 224, 224).expand(256, -1, -1, -1),)


def small() -> tuple[nn.Module, tuple[Tensor]]:
    """Five narrow blocks (a repeated one too), in sizes that 2, 3 and 4 divide; and 12 random images."""
    generator = torch.Generator().manual_seed(0)
    network = ResNet(Sizes(width=12, blocks=(1, 2, 1, 1), classes=12))
    return network, (torch.randn(12, 3, 64, 64, generator=generator),)
