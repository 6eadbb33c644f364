"""GPT-2, the smallest of the published four: a transformer decoder over tokens, its head tied to the token embedding.

Sizes: Radford, Wu, Child, Luan, Amodei and Sutskever, "Language models are unsupervised multitask learners" (2019):
12 layers of width 768 with 12 heads, 50,257 tokens and 1,024 positions; 124,439,808 parameters. `two_layers` is the
same cut after its second layer, small enough to be drawn layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Layers, width (features of a token), heads, tokens known, longest sequence."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    tokens: int = 50257
    positions: int = 1024


class Attention(nn.Module):
    """Causal self-attention: (N, T, width) to the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Every token sees itself and those in front of it."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a perceptron four times as wide, each behind a norm and beside a skip connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(sizes.width)
        self.attn = Attention(sizes)
        self.ln2 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to the same."""
        x = x + self.attn(self.ln1(x))
        wide: Tensor = self.down(self.gelu(self.up(self.ln2(x))))
        return x + wide


class GPT2(nn.Module):
    """Tokens (N, T) to scores of the next one (N, T, tokens)."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        chosen = sizes or Sizes()
        self.wte = nn.Embedding(chosen.tokens, chosen.width)
        self.wpe = nn.Embedding(chosen.positions, chosen.width)
        self.h = nn.ModuleList(Block(chosen) for _ in range(chosen.layers))
        self.ln_f = nn.LayerNorm(chosen.width)
        self.head = nn.Linear(chosen.width, chosen.tokens, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for every position."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        scores: Tensor = self.head(self.ln_f(x))
        return scores


def build() -> nn.Module:
    """The network at full size."""
    return GPT2()


def two_layers() -> nn.Module:
    """Its first two layers, between the same embeddings and head."""
    return GPT2(replace(Sizes(), layers=2))


def example_inputs() -> tuple[Tensor]:
    """A batch of 8 texts of 1,024 tokens; one text's memory, seen 8 times."""
    return (torch.zeros(1, 1024, dtype=torch.int64).expand(8, -1),)


def small() -> tuple[nn.Module, tuple[Tensor]]:
    """The same layers, narrow enough to run anywhere, in sizes that 2, 3 and 4 divide; and 12 random texts."""
    sizes = Sizes(layers=2, width=24, heads=12, tokens=12, positions=12)
    generator = torch.Generator().manual_seed(0)
    return GPT2(sizes), (torch.randint(12, (12, 12), generator=generator),)
