"""Networks whose memory is dominated by activations, weights or optimizer state in turn, from plain torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["NETWORKS", "Network"]


@dataclass(frozen=True)
class Network:
    """A model, the samples of one process, and what its results are compared with.

    Args:
        build: makes the model.
        batch: makes (inputs, targets) of so many samples.
        samples: of all processes together.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    samples: int


def _mlp(*widths: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return build


def _convnet(*channels: int, norm: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in zip((3, *channels[:-1]), channels, strict=True):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not norm)]
            layers += [nn.BatchNorm2d(outputs)] if norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(channels[-1] * 4, 10))

    return build


def _alexnet_like() -> nn.Module:
    """Few weights before, many weights after the flattening."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * 16, 1024), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 100),
    )  # fmt: skip


class Residual(nn.Module):
    """A small residual network with batch norm."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(width) for _ in range(blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _block(width: int) -> nn.Module:
        conv = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)]
        return nn.Sequential(conv[0], nn.BatchNorm2d(width), nn.ReLU(), conv[1], nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        result: Tensor = self.head(self.pool(x).flatten(1))
        return result


class Transformer(nn.Module):
    """Tokens to classes through encoder blocks of plain torch.nn."""

    def __init__(self, words: int = 500, width: int = 64, blocks: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


class Embeddings(nn.Module):
    """A big table and a small perceptron, as in recommendation."""

    def __init__(self, rows: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.top = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.top(self.table(ids).flatten(1))
        return result


class Tied(nn.Module):
    """A language model's table, which words come from and go to, around one layer."""

    def __init__(self, words: int = 4_000, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.middle(self.table(ids)).tanh().mean(1))
        return result


class Recurrent(nn.Module):
    """An LSTM over vectors, and classes of its last state."""

    def __init__(self, inputs: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.lstm(series)
        result: Tensor = self.head(states[:, -1])
        return result


def _images(side: int, classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, 3, side, side), torch.randint(classes, (samples,)))


def _vectors(*shape: int, classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, *shape), torch.randint(classes, (samples,)))


def _tokens(length: int, words: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randint(words, (samples, length)), torch.randint(10, (samples,)))


NETWORKS = (
    Network("mlp, wide", _mlp(512, 1024, 1024, 10), _vectors(512), 64),
    Network("mlp, large batch", _mlp(64, 256, 256, 128, 10), _vectors(64), 4096),
    Network("mlp, deep", _mlp(*[256] * 12, 10), _vectors(256), 512),
    Network("mlp, many classes", _mlp(64, 128, 4000), _vectors(64, classes=4000), 256),
    Network("convnet", _convnet(16, 32, 64), _images(32), 64),
    Network("convnet, wide", _convnet(64, 128, 256), _images(16), 8),
    Network("convnet, batch norm", _convnet(16, 32, 32, norm=True), _images(32), 32),
    Network("alexnet-like", _alexnet_like, _images(32, 100), 64),
    Network("residual", Residual, _images(16), 32),
    Network("transformer", Transformer, _tokens(32, 500), 32),
    Network("transformer, wide", lambda: Transformer(100, 256, 1, 0.0), _tokens(16, 100), 8),
    Network("transformer, long", lambda: Transformer(500, 32, 2, 0.1), _tokens(128, 500), 16),
    Network("embedding", Embeddings, _tokens(8, 20_000), 256),
    Network("tied words", Tied, _tokens(8, 4_000), 16),
    Network("lstm", Recurrent, _vectors(40, 32), 64),
)
