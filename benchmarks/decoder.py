"""A decoder of equal blocks with its loss, on the meta device: the transformer of configurations that others ran."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph

__all__ = ["Decoder", "DecoderSize", "captured"]

CAPTURED_BLOCKS = 5
"""Blocks of which a model is captured: of five and more the solver plans them alike."""


@dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder with grouped queries, rotary positions and a gated feed-forward part, no biases.

    Args:
        tied: the embedding's weights are those of the output, too.
        sequence: tokens of a sample.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    sequence: int

    @property
    def block_parameters(self) -> int:
        """Numbers in one block's matrices."""
        keys = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * keys + 3 * self.ffn)

    @property
    def parameters(self) -> int:
        """Numbers in all matrices."""
        return self.layers * self.block_parameters + (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def sample_flops(self) -> float:
        """Arithmetic that a sample's forward and backward need: 6 per parameter and token, and causal attention's."""
        products = self.layers * self.block_parameters + self.hidden * self.vocabulary
        return 6.0 * products * self.sequence + 6.0 * self.layers * self.hidden * self.sequence**2


class _Block(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        width, self.each = size.hidden, size.hidden // size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        keys = self.each * size.kv_heads
        self.query, self.key, self.value = (nn.Linear(width, own, bias=False) for own in (width, keys, keys))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, size.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(size.ffn, width, bias=False)
        self.grouped = size.heads != size.kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            linear(normed).unflatten(2, (-1, self.each)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        query, key = (
            one * cos + torch.cat((-one.chunk(2, -1)[1], one.chunk(2, -1)[0]), -1) * sin for one in (query, key)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Decoder(nn.Module):
    """A decoder of these sizes, with all of its blocks or so many: tokens and targets (N, sequence) to their loss."""

    def __init__(self, size: DecoderSize, blocks: int | None = None) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(size.vocabulary, size.hidden), nn.RMSNorm(size.hidden)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers if blocks is None else blocks))
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.embed.weight
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.ones(size.sequence, size.hidden // size.heads))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def captured(size: DecoderSize, samples: int = 2, blocks: int = CAPTURED_BLOCKS) -> LayerGraph:
    """A decoder of these sizes in bf16, captured with a few of its blocks.

    Raises:
        ParplanError: sizes that are no model.
    """
    with torch.device("meta"):
        model = Decoder(size, blocks).bfloat16()
        tokens = torch.zeros(samples, size.sequence, dtype=torch.long)
    return capture(model, (tokens, tokens))
