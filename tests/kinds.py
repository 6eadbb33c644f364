"""Small models of the kinds people bring: a language model, an encoder with an LSTM, a U-Net, raw functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["KINDS", "Kind"]


class Block(nn.Module):
    """A pre-norm transformer block with packed queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(samples, tokens, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(samples, tokens, width))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class Language(nn.Module):
    """Tokens to logits and a loss; the classes share the embedding's weights; positions have no samples."""

    def __init__(self, words: int = 36, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), following.flatten())


class Encoder(nn.Module):
    """PyTorch's own encoder layer (dropout inside its attention), then an LSTM; the last step is classified."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.rnn = nn.LSTM(24, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.fc = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.rnn(self.encoder(x))[0][:, -1])
        return y


def _convolved(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU())


class UNet(nn.Module):
    """Skips by concatenation, up-sampling both ways, a bare parameter, nested inputs, a dict with a None out."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.mid = _convolved(3, 12), _convolved(12, 24), _convolved(24, 24)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.join, self.out = _convolved(24, 12), nn.Conv2d(12, 2, 1)
        self.scale = nn.Parameter(torch.ones(1, 12, 1, 1))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
        a = self.down1(batch["image"])
        b = self.down2(functional.max_pool2d(a, 2))
        c = functional.interpolate(self.mid(functional.avg_pool2d(b, 2)), scale_factor=2)
        joined = self.join(torch.cat([self.up(b + c), a * self.scale], 1))
        return {"mask": self.out(joined), "mean": joined.mean((2, 3)), "none": None}


class Functions(nn.Module):
    """No modules at all: parameters and functions, a batch norm among them, and a number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(12, 3, 3, 3))
        self.gain, self.shift = nn.Parameter(torch.ones(12)), nn.Parameter(torch.zeros(12))
        self.weight = nn.Parameter(torch.randn(12, 12 * 36))
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("variance", torch.ones(12))
        self.mean: Tensor
        self.variance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.kernel, padding=1)
        x = functional.batch_norm(x, self.mean, self.variance, self.gain, self.shift, training=self.training)
        x = functional.linear(functional.relu(x).flatten(1), self.weight)
        return x / x.shape[0]


@dataclass(frozen=True)
class Kind:
    """How to build a model and a call of it with 12 samples."""

    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]


KINDS = {
    "language": Kind(Language, lambda: (torch.randint(36, (12, 8)), torch.randint(36, (12, 8)))),
    "encoder": Kind(Encoder, lambda: (torch.randn(12, 5, 24),)),
    "unet": Kind(UNet, lambda: ({"image": torch.randn(12, 3, 16, 16)},)),
    "functions": Kind(Functions, lambda: (torch.randn(12, 3, 6, 6),)),
}
