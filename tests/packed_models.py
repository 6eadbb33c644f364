"""Small models whose weights pack several projections in one, [q | k | v] and [gate | up], in the usual idioms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GROUPED", "PACKED", "ConvolutionLike", "Gated", "Grouped", "QueryKeyValue"]

Split = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class ConvolutionLike(nn.Module):
    """GPT-2's projection: a product with a weight [in, out] of flattened tokens."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, out) / features**0.5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class QueryKeyValue(nn.Module):
    """Attention with one projection for all three, taken apart by `split`, and the projection of its result.

    Args:
        split: [batch, tokens, out] to q, k and v [batch, heads, tokens, width].
        out: out-features of the projection.
    """

    def __init__(self, split: Split, out: int = 48, features: int = 16, convolution: bool = False) -> None:
        super().__init__()
        self.qkv = ConvolutionLike(features, out) if convolution else nn.Linear(features, out)
        self.o = nn.Linear(16, features)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, features] to the same."""
        q, k, v = self.split(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class Gated(nn.Module):
    """An MLP with one projection for gate and value, taken apart by `split`."""

    def __init__(self, split: Callable[[Tensor], tuple[Tensor, Tensor]], out: int = 24) -> None:
        super().__init__()
        self.up, self.down, self.split = nn.Linear(16, out), nn.Linear(out // 2, 16), split

    def forward(self, x: Tensor) -> Tensor:
        """[..., 16] to the same."""
        gate, value = self.split(self.up(x))
        result: Tensor = self.down(F.silu(gate) * value)
        return result


def _heads(x: Tensor, heads: int = 4) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _by_split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.split(16, dim=2)
    return _heads(q), _heads(k), _heads(v)


def _by_chunk(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.chunk(3, dim=-1)
    return _heads(q), _heads(k), _heads(v)


def _by_slices(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _heads(x[..., :16]), _heads(x[..., 16:32]), _heads(x[..., 32:])


def _by_narrow(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _heads(x.narrow(2, 0, 16)), _heads(x.narrow(2, 16, 16)), _heads(x.narrow(-1, -16, 16))


def _by_unbind(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vision transformers of timm."""
    q, k, v = x.reshape(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _by_index(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    return x[0], x[1], x[2]


def _unequal(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Phi-3: four heads of queries, two of keys and of values."""
    q, k, v = _heads(x[..., :16]), _heads(x[..., 16:24], 2), _heads(x[..., 24:], 2)
    return q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)


def _unequal_split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.split([16, 8, 8], dim=-1)
    k, v = (_heads(one, 2)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(x), 4, -1, 4) for one in (k, v))
    return _heads(q), k, v


def _by_split_with_unused(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _, _ = x.split([16, 16, 16, 4, 4], dim=2)
    return _turned(_heads(q)), _turned(_heads(k)), _heads(v)


def _turned(x: Tensor) -> Tensor:
    """Rotary positions. Without them scores would not depend on the bias of keys, whose gradient would be rounding."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    return x * angles.cos() + torch.cat([-x[..., 2:], x[..., :2]], dim=-1) * angles.sin()


def _one_head(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GPT-BigCode: four heads of queries, one of keys and of values, which is broadcast."""
    q, k, v = x.split([16, 4, 4], dim=-1)
    return _turned(_heads(q)), _turned(_heads(k, 1)), _heads(v, 1)


def _one_listed_head(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Falcon: six heads, the last two of which are the one of keys and the one of values."""
    heads = x.view(*x.shape[:2], 6, 4)
    q, k, v = (one.transpose(1, 2) for one in (heads[:, :, :-2], heads[:, :, [-2]], heads[:, :, [-1]]))
    return _turned(q), _turned(k), v


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, value = x.chunk(2, dim=-1)
    return gate, value


class _GatedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.glu(self.up(x), dim=-1))
        return result


class _Adapted(nn.Module):
    """An adapter of low rank beside the packed projection, as LoRA, and dropout-like scaling behind their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.low, self.high = nn.Linear(16, 48), nn.Linear(16, 2), nn.Linear(2, 48)
        self.o = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _by_split(torch.tanh(self.qkv(x) + self.high(self.low(x))))
        y = F.scaled_dot_product_attention(q, k, v)
        result: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class Grouped(nn.Module):
    """Grouped-query attention: eight heads of queries, two of keys and values, which `attend` repeats.

    Args:
        attend: q [batch, 8, tokens, 4], k and v [batch, 2, tokens, 4] to [batch, 8, tokens, 4].
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 4 * heads, bias=False), nn.Linear(16, 4 * heads)
        self.o, self.attend, self.heads = nn.Linear(32, 16), attend, heads

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, 16] to the same."""
        q, k, v = _heads(self.q(x), 8), _heads(self.k(x), self.heads), _heads(self.v(x), self.heads)
        turned = torch.cat([-k[..., 2:], k[..., :2]], dim=-1)  # as rotary positions do
        y = self.attend(q, k * 0.6 + turned * 0.8, v)
        result: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class _Normalised(Grouped):
    """Queries and keys normalised head by head, by layers between their projections and the attention."""

    def __init__(self) -> None:
        super().__init__(_enabled)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q(x).view(*x.shape[:2], 8, -1)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(*x.shape[:2], 2, -1)).transpose(1, 2)
        y = self.attend(q, k, _heads(self.v(x), 2))
        result: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


def _enabled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (one.repeat_interleave(8 // one.shape[1], dim=1) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """repeat_kv of transformers, and attention in its single steps."""
    b, n, t, d = k.shape
    k, v = (one[:, :, None].expand(b, n, 8 // n, t, d).reshape(b, 8, t, d) for one in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    return torch.matmul(scores.softmax(dim=-1), v)


GROUPED: dict[str, Callable[[], nn.Module]] = {
    "enabled": lambda: Grouped(_enabled),
    "interleaved": lambda: Grouped(_interleaved),
    "expanded": lambda: Grouped(_expanded),
    "normalised": _Normalised,
    "one": lambda: Grouped(_enabled, heads=1),
    "one_expanded": lambda: Grouped(_expanded, heads=1),
    "phi3": lambda: QueryKeyValue(_unequal, out=32),
    "split_sizes": lambda: QueryKeyValue(_unequal_split, out=32),
    "one_packed": lambda: QueryKeyValue(_one_head, out=24),
    "one_listed": lambda: QueryKeyValue(_one_listed_head, out=24),
}
"""Models with fewer heads of keys than of queries."""

PACKED: dict[str, Callable[[], nn.Module]] = {
    "split": lambda: QueryKeyValue(_by_split),
    "unused": lambda: QueryKeyValue(_by_split_with_unused, out=56),
    "gpt2": lambda: QueryKeyValue(_by_split, convolution=True),
    "chunk": lambda: QueryKeyValue(_by_chunk),
    "slices": lambda: QueryKeyValue(_by_slices),
    "narrow": lambda: QueryKeyValue(_by_narrow),
    "vit": lambda: QueryKeyValue(_by_unbind),
    "index": lambda: QueryKeyValue(_by_index),
    "phi3": lambda: QueryKeyValue(_unequal, out=32),
    "split_sizes": lambda: QueryKeyValue(_unequal_split, out=32),
    "gate_chunk": lambda: Gated(_halves),
    "gate_slices": lambda: Gated(lambda x: (x[..., :12], x[..., 12:])),
    "gate_unit": _GatedUnit,
    "adapted": _Adapted,
}
