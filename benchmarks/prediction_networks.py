"""Networks whose step times are predicted: convolutional, fully-connected, transformers, of several widths and batches.

None of them was used to fit anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Network:
    """A model with its input; the batch is the whole step's.

    Args:
        build: makes the model.
        sample: shape of one sample's input.
        batch: samples of a step.
        vocabulary: above 0 the inputs are indices below it, else numbers.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int
    vocabulary: int = 0

    def inputs(self, batch: int) -> Tensor:
        """Random inputs."""
        shape = (batch, *self.sample)
        return torch.randint(self.vocabulary, shape) if self.vocabulary else torch.randn(shape)


def convnet(width: int, normalised: bool, classes: int = 10) -> nn.Module:
    """Three convolutions with pools and two fully-connected layers: (N, 3, 32, 32) to (N, classes)."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not normalised)]
        layers += [nn.BatchNorm2d(outputs)] if normalised else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 256), nn.ReLU(), nn.Linear(256, classes))


def small_alexnet(width: int) -> nn.Module:
    """Few convolutions, then large fully-connected layers, as in AlexNet: (N, 3, 64, 64) to (N, 100)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 96, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(96 * 64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 100),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        result: Tensor = functional.relu(x + self.norm2(self.conv2(y)))
        return result


def residual_net(width: int, blocks: int) -> nn.Module:
    """(N, 3, 32, 32) to (N, 10)."""
    stem = [nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*stem, *(Residual(width) for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, 10))  # fmt: skip


def mlp(inputs: int, width: int, depth: int, outputs: int = 10) -> nn.Module:
    """Linear layers with ReLU: (N, inputs) to (N, outputs)."""
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Block(nn.Module):
    """A transformer block with normalisation first: (N, T, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        y = self.norm1(x)
        query, key, value = (
            project(y).view(samples, tokens, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, tokens, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Language(nn.Module):
    """Embedding, blocks, and a layer over the vocabulary: (N, T) indices to (N, T, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return result


class Mixer(nn.Module):
    """Linear layers over tokens and over channels in turn: (N, T, width) to the same."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.over_channels(self.norm2(x))
        return result


def blocks(width: int, heads: int, depth: int) -> nn.Module:
    """Transformer blocks in a row."""
    return nn.Sequential(*(Block(width, heads) for _ in range(depth)))


def mixers(tokens: int, width: int, depth: int) -> nn.Module:
    """Mixers in a row."""
    return nn.Sequential(*(Mixer(tokens, width) for _ in range(depth)))


NETWORKS = (
    Network("convnet-32", partial(convnet, 32, False), (3, 32, 32), 16),
    Network("convnet-48-norm", partial(convnet, 48, True), (3, 32, 32), 24),
    Network("convnet-64", partial(convnet, 64, False), (3, 32, 32), 32),
    Network("small-alexnet-1024", partial(small_alexnet, 1024), (3, 64, 64), 8),
    Network("small-alexnet-2048", partial(small_alexnet, 2048), (3, 64, 64), 16),
    Network("residual-32", partial(residual_net, 32, 3), (3, 32, 32), 32),
    Network("residual-64", partial(residual_net, 64, 2), (3, 32, 32), 16),
    Network("mlp-512", partial(mlp, 784, 512, 3), (784,), 128),
    Network("mlp-1024", partial(mlp, 1024, 1024, 4), (1024,), 64),
    Network("mlp-2048", partial(mlp, 1024, 2048, 3, 100), (1024,), 256),
    Network("blocks-128", partial(blocks, 128, 4, 2), (64, 128), 16),
    Network("blocks-256", partial(blocks, 256, 8, 2), (96, 256), 8),
    Network("language-192", partial(Language, 4000, 192, 1, 6), (64,), 8, 4000),
    Network("mixer-128", partial(mixers, 49, 128, 2), (49, 128), 32),
)
