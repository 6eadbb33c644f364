"""Models for planning at scale: a stack of transformer blocks, and the layer profile of one of 405 B parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parplan.cost_models.layer_profile.records import AxisCut, Effect, LayerProfile, ProfiledLayer, ProfileEdge, Times

__all__ = ["LLAMA_405B", "TransformerSize", "block_stack", "transformer_profile"]


class Block(nn.Module):
    """A pre-norm transformer block: (samples, tokens, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        normed = self.norm1(x)
        query, key, value = (
            linear(normed).view(samples, tokens, self.heads, width // self.heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(samples, tokens, width)
        x = x + self.out(mixed)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


def block_stack(blocks: int, width: int = 1024, heads: int = 16) -> nn.Module:
    """So many blocks one after another, on the meta device: nothing is allocated."""
    with torch.device("meta"):
        return nn.Sequential(*(Block(width, heads) for _ in range(blocks)))


# ---- without a model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformerSize:
    """A decoder with grouped queries and a gated feed-forward part.

    Args:
        samples: sequences in a step.
        flops_per_s, bytes_per_s: of one device, as far as kernels reach them.
    """

    name: str
    blocks: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    words: int
    tokens: int
    samples: int
    flops_per_s: float
    bytes_per_s: float

    @property
    def step_tokens(self) -> int:
        """Tokens in a step."""
        return self.tokens * self.samples


# Llama 3.1 405B (arXiv 2407.21783, table 3, section 3.4.1 for the sequences it begins with), for a number of sequences
# that is chosen with the devices; an H100 at 0.4 of its dense bf16 peak and 0.8 of its memory's bandwidth: figures to
# plan with, not measurements.
LLAMA_405B = TransformerSize(
    "llama-405b", 126, 16_384, 128, 8, 53_248, 128_256, 4096, 1, 0.4 * 989e12, 0.8 * 3.35e12
)  # fmt: skip

_BYTES = 2  # of a number in bf16
_UPDATE_BYTES = 22  # that adam moves per parameter: weight and gradient in bf16, its two moments in fp32


def transformer_profile(size: TransformerSize) -> LayerProfile:
    """The layer profile (docs/profile-graph.md) of a transformer, at arithmetic or bandwidth, whichever is slower."""
    layers: list[ProfiledLayer] = []
    edges: list[ProfileEdge] = []
    for layer, feeders in _layers(size):
        layers.append(layer)
        edges += [ProfileEdge(feeder, layer.name) for feeder in feeders]
    return LayerProfile(size.name, size.samples, "h100-sxm by formula", tuple(layers), tuple(edges), "bf16")


def _layers(size: TransformerSize) -> Iterator[tuple[ProfiledLayer, tuple[str, ...]]]:
    """Every layer with those that feed it."""
    keys = size.width // size.heads * size.key_heads
    features = AxisCut("features", size.width, Effect.BOTH)
    yield (
        _layer(size, "embed", size.width, size.words * size.width, 0, AxisCut("features", size.width, Effect.OUTPUT)),
        (),
    )
    stream = "embed"
    for index in range(size.blocks):
        at = f"block.{index}"
        yield _layer(size, f"{at}.norm1", size.width, size.width, 8 * size.width), (stream,)
        for name, width in (("query", size.width), ("key", keys), ("value", keys)):
            yield _linear(size, f"{at}.{name}", size.width, width), (f"{at}.norm1",)
        attention = 2 * size.tokens * size.width  # half of the products: earlier tokens only
        cut = AxisCut("heads", size.key_heads, Effect.BOTH)
        fed_by = (f"{at}.query", f"{at}.key", f"{at}.value")
        yield _layer(size, f"{at}.attention", size.width, 0, attention, cut, kind="attention"), fed_by
        yield _linear(size, f"{at}.out", size.width, size.width), (f"{at}.attention",)
        yield _layer(size, f"{at}.add1", size.width, 0, size.width, features), (stream, f"{at}.out")
        yield _layer(size, f"{at}.norm2", size.width, size.width, 8 * size.width), (f"{at}.add1",)
        for name in ("gate", "up"):
            yield _linear(size, f"{at}.{name}", size.width, size.hidden), (f"{at}.norm2",)
        hidden = AxisCut("features", size.hidden, Effect.BOTH)
        yield _layer(size, f"{at}.product", size.hidden, 0, 5 * size.hidden, hidden), (f"{at}.gate", f"{at}.up")
        yield _linear(size, f"{at}.down", size.hidden, size.width), (f"{at}.product",)
        stream = f"{at}.add2"
        yield _layer(size, stream, size.width, 0, size.width, features), (f"{at}.add1", f"{at}.down")
    yield _layer(size, "norm", size.width, size.width, 8 * size.width), (stream,)
    yield _linear(size, "head", size.width, size.words), ("norm",)
    yield _layer(size, "loss", 1, 0, 5 * size.words, kind="loss"), ("head",)


def _linear(size: TransformerSize, name: str, takes: int, gives: int) -> ProfiledLayer:
    cuts = (AxisCut("out-features", gives, Effect.OUTPUT), AxisCut("in-features", takes, Effect.INPUT))
    return _layer(size, name, gives, takes * gives, 2 * takes * gives, *cuts, kind="linear")


def _layer(
    size: TransformerSize, name: str, width: int, parameters: int, token_flops: int, *cuts: AxisCut, kind: str = "other"
) -> ProfiledLayer:
    """A layer that hands on `width` numbers per token and takes `token_flops` for each; backward twice of that."""
    activation_bytes = size.step_tokens * width * _BYTES if kind != "loss" else 4
    moved_bytes = 2 * activation_bytes + parameters * _BYTES
    forward_s = max(size.step_tokens * token_flops / size.flops_per_s, moved_bytes / size.bytes_per_s)
    return ProfiledLayer(
        name,
        (Times(size.samples, forward_s, 2 * forward_s),),
        activation_bytes,
        parameters * _BYTES,
        kind=kind,
        cuts=cuts,
        update_s=parameters * _UPDATE_BYTES / size.bytes_per_s,
    )
