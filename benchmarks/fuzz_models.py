"""Models drawn by the fuzzer: a stem, blocks that keep the shape, and a head.

Every block of a family maps a tensor to one of the same shape, so that any selection of blocks is a model: that is what
lets a failing case be shrunk. Beside layers, blocks do what models do besides: hooks, buffers written in the forward,
custom autograd Functions, attributes that training changes, tied weights, tensors stored on self.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS", "FAMILIES", "HEADS", "Drawn", "Knob", "Reversed", "Stored", "blocks_of", "sample", "some"]

WIDTH = 8
FAMILIES = ("vector", "sequence", "image")
SHAPES = {"vector": (6,), "sequence": (4, 6), "image": (3, 6, 6)}


class StraightThrough(torch.autograd.Function):
    """Rounds; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Rounded to eighths."""
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """As it is."""
        return grad


class Reverse(torch.autograd.Function):
    """The identity; gradients are turned and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """As it is."""
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Turned."""
        return -ctx.scale * grad, None


class Gate(torch.autograd.Function):
    """A product whose backward clamps, with saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Clamped to the input's side, exact to the weight's."""
        x, weight = ctx.saved_tensors
        return (grad * weight).clamp(-0.05, 0.05), (grad * x).sum(tuple(range(x.ndim - 1)))


def _wide(family: str, width: int = WIDTH) -> nn.Module:
    """A layer that mixes the features of each place."""
    return nn.Conv2d(WIDTH, width, 1) if family == "image" else nn.Linear(WIDTH, width)


def _narrow(family: str, width: int) -> nn.Module:
    return nn.Conv2d(width, WIDTH, 1) if family == "image" else nn.Linear(width, WIDTH)


class Block(nn.Module):
    """A layer, and something done with its result by `act`."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        self.layer = _wide(family)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.act(self.layer(x))

    def act(self, x: Tensor) -> Tensor:
        """To be overridden."""
        return torch.tanh(x)

    def per_feature(self, tensor: Tensor) -> Tensor:
        """A vector of features, shaped to meet this family's tensors."""
        return tensor.view(-1, 1, 1) if self.family == "image" else tensor


class Plain(Block):
    """A layer and tanh."""


class Residual(Block):
    """x + a wide layer and back."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer, self.back = _wide(family, 16), _narrow(family, 16)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.back(F.gelu(self.layer(x)))  # type: ignore[no-any-return]


class Branches(Block):
    """Two branches side by side, one scaled by the other."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.other = _wide(family)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return torch.sigmoid(self.layer(x)) * torch.relu(self.other(x) + 0.1)


class Halves(Block):
    """Features cut in halves and put together crosswise."""

    def act(self, x: Tensor) -> Tensor:
        """Crosswise."""
        dim = 1 if self.family == "image" else -1
        a, b = x.chunk(2, dim)
        return torch.cat((torch.tanh(b), a.square() * 0.1), dim)


class Reshaped(Block):
    """Views and transposes there and back."""

    def act(self, x: Tensor) -> Tensor:
        """Through another shape."""
        shape = x.shape
        y = x.reshape(shape[0], -1, 2).transpose(1, 2).contiguous()
        return (y - y.mean(1, keepdim=True)).transpose(1, 2).reshape(shape)


class Flattened(Block):
    """Samples and places as one dimension, as language models do."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.family != "sequence":
            return super().forward(x)
        return torch.tanh(self.layer(x.flatten(0, 1))).view(x.shape)


class Normed(Block):
    """Batch norm."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.norm = nn.BatchNorm2d(WIDTH) if family == "image" else nn.BatchNorm1d(4 if family == "sequence" else WIDTH)

    def act(self, x: Tensor) -> Tensor:
        """Normed."""
        return torch.relu(self.norm(x))


class LayerNormed(Block):
    """Layer norm, or group norm of images."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.norm = nn.GroupNorm(2, WIDTH) if family == "image" else nn.LayerNorm(WIDTH)

    def act(self, x: Tensor) -> Tensor:
        """Normed."""
        return F.silu(self.norm(x))


class Convolution(Block):
    """3x3, in two groups."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2)


class Pooled(Block):
    """Pooled and spread out again."""

    def act(self, x: Tensor) -> Tensor:
        """In and out."""
        return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0)


class Attention(Block):
    """Heads of scaled dot products."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        n, t, _ = x.shape
        q, k, v = (part.view(n, t, 2, -1).transpose(1, 2) for part in self.layer(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))  # type: ignore[no-any-return]


class ModuleAttention(Block):
    """torch's own attention module."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Recurrent(Block):
    """A GRU over places."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.layer(x)[0]  # type: ignore[no-any-return]


class MixedSamples(Block):
    """Each sample less the mean of all."""

    def act(self, x: Tensor) -> Tensor:
        """Centred."""
        return x - x.mean(0)


class Rounded(Block):
    """A straight-through estimator."""

    def act(self, x: Tensor) -> Tensor:
        """Rounded."""
        return StraightThrough.apply(torch.tanh(x))  # type: ignore[no-any-return]


class Reversed(Block):
    """Gradient reversal, with a weight that training may change."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.alpha = 0.5

    def act(self, x: Tensor) -> Tensor:
        """As it is."""
        return Reverse.apply(torch.tanh(x), self.alpha)  # type: ignore[no-any-return]


class Gated(Block):
    """A custom Function with a parameter."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.family == "image":
            return Gate.apply(self.layer(x).movedim(1, -1), self.weight).movedim(-1, 1)  # type: ignore[no-any-return]
        return Gate.apply(self.layer(x), self.weight)  # type: ignore[no-any-return]


class TensorHook(Block):
    """A hook of a tensor in the forward."""

    def act(self, x: Tensor) -> Tensor:
        """As it is."""
        y = torch.tanh(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y


class Counted(Block):
    """A buffer counted in place and used."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def act(self, x: Tensor) -> Tensor:
        """Divided by the count."""
        self.count += 1
        return torch.tanh(x) / (1 + 0.1 * self.count)


class Assigned(Counted):
    """A buffer counted by assignment, in training only."""

    def act(self, x: Tensor) -> Tensor:
        """Divided by the count."""
        if self.training:
            self.count = self.count + 1
        return torch.tanh(x) / (1 + 0.1 * self.count)


class Tracked(Block):
    """A running mean of features over the whole batch."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def act(self, x: Tensor) -> Tensor:
        """Less the running mean."""
        if self.training:
            dims = (0, 2, 3) if self.family == "image" else tuple(range(x.ndim - 1))
            with torch.no_grad():
                self.mean.lerp_(x.mean(dims), 0.1)
        return torch.tanh(x - self.per_feature(self.mean))


class Knob(Block):
    """Attributes that training may change: a number, a flag, an entry of a list, one of a dictionary."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.temperature, self.linear, self.scales, self.config = 1.0, False, [1.0, 0.5], {"shift": 0.0}

    def act(self, x: Tensor) -> Tensor:
        """As the attributes say."""
        y = x / self.temperature + self.config["shift"]
        return (y if self.linear else torch.tanh(y)) * self.scales[0]


class Stored(Block):
    """Stores a tensor on itself."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.last = torch.zeros(())

    def act(self, x: Tensor) -> Tensor:
        """As it is."""
        self.last = x.detach() * 2
        return torch.tanh(x)


class Tallied(Block):
    """Counts calls in Python."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.calls = 0

    def act(self, x: Tensor) -> Tensor:
        """As it is."""
        self.calls += 1
        return torch.tanh(x)


class Dropped(Block):
    """Dropout that is off."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.dropout = nn.Dropout(0.0)

    def act(self, x: Tensor) -> Tensor:
        """As it is."""
        return torch.tanh(self.dropout(x))


class Scaled(Block):
    """A parameter of its own, and one that nothing uses."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.scale, self.unused = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), nn.Parameter(torch.ones(3))

    def act(self, x: Tensor) -> Tensor:
        """Scaled, with an odd function on top."""
        y = x * self.per_feature(self.scale)
        return torch.where(y > 0, torch.log1p(y.clamp(min=0)), y * 0.1)


class Recomputed(Residual):
    """A checkpoint in the forward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Reentrant(Recomputed):
    """The older kind of checkpoint."""

    reentrant = True


class Stopped(Block):
    """Part of the gradient stopped."""

    def act(self, x: Tensor) -> Tensor:
        """A softmax that no gradient passes, and one that does."""
        with torch.no_grad():
            weight = torch.softmax(x, -1)
        return x * weight + 0.1 * x.detach()


class WeightNormed(Block):
    """Weight norm, as a parametrization."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer = parametrizations.weight_norm(self.layer)


class OldWeightNormed(Block):
    """Weight norm, as a hook."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = nn.utils.weight_norm(self.layer)


class ForwardHook(Block):
    """A module hook that changes a result."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer.register_forward_hook(lambda module, args, out: out * 0.5)


class BackwardHook(Block):
    """A module hook that changes a gradient."""

    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.layer.register_full_backward_hook(_halved)


def _halved(module: nn.Module, grads: Any, outs: Any) -> Any:
    return (grads[0] * 0.5,) if grads[0] is not None else None


class Tied(Block):
    """One layer for all blocks of this kind in a model."""


BLOCKS: dict[str, type[Block]] = {
    block.__name__: block
    for block in (
        Plain, Residual, Branches, Halves, Reshaped, Flattened, Normed, LayerNormed, Convolution, Pooled, Attention,
        ModuleAttention, Recurrent, MixedSamples, Rounded, Reversed, Gated, TensorHook, Counted, Assigned, Tracked,
        Knob, Stored, Tallied, Dropped, Scaled, Recomputed, Reentrant, Stopped, WeightNormed, OldWeightNormed,
        ForwardHook, BackwardHook, Tied,
    )
}  # fmt: skip
_ONLY = {
    "image": {"Convolution", "Pooled"},
    "sequence": {"Attention", "ModuleAttention", "Recurrent", "Flattened"},
    "vector": set[str](),
}


def blocks_of(family: str) -> list[str]:
    """The names of blocks that a family has."""
    others = set[str]().union(*(names for name, names in _ONLY.items() if name != family))
    return [name for name in BLOCKS if name not in others]


@dataclass(frozen=True)
class Head:
    """What a model returns, and how a loss is made of it."""

    loss: Callable[[Any, Tensor, int], Tensor]


def _scores(result: Any, classes: Tensor, step: int) -> Tensor:
    return F.cross_entropy(result, classes)


def _dictionary(result: Any, classes: Tensor, step: int) -> Tensor:
    loss: Tensor = F.cross_entropy(result["scores"], classes) + 0.1 * result["more"][0].square().mean()
    return loss


def _in_turn(result: Any, classes: Tensor, step: int) -> Tensor:
    return F.cross_entropy(result["scores"], classes) if step % 2 else result["more"][0].square().mean()


def _inside(result: Any, classes: Tensor, step: int) -> Tensor:
    loss: Tensor = result[0]
    return loss


HEADS: Mapping[str, Head] = {
    "scores": Head(_scores), "dictionary": Head(_dictionary), "in turn": Head(_in_turn), "inside": Head(_inside),
}  # fmt: skip


class Drawn(nn.Module):
    """A stem, blocks and a head.

    Args:
        words: the inputs are words, which are looked up; else numbers.
        head: see HEADS.
    """

    def __init__(self, family: str, blocks: list[str], head: str, words: bool) -> None:
        super().__init__()
        self.family, self.kind = family, head
        first = SHAPES[family][0 if family == "image" else -1]
        embedding = nn.Embedding(10, WIDTH)
        self.stem = embedding if words else nn.Conv2d(first, WIDTH, 1) if family == "image" else nn.Linear(first, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[name](family) for name in blocks)
        tied = [block for block in self.blocks if isinstance(block, Tied)]
        for block in tied:
            block.layer = tied[0].layer
        self.head = nn.Linear(WIDTH, 4)
        self.other = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, classes: Tensor | None = None) -> Any:
        """As the head says."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        pooled = x.mean((2, 3)) if self.family == "image" else x[:, -1] if self.family == "sequence" else x
        scores = self.head(pooled)
        if self.kind == "inside" and classes is not None:
            return F.cross_entropy(scores, classes), scores
        if self.kind in ("dictionary", "in turn"):
            return {"scores": scores, "more": (self.other(pooled), None)}
        return scores


def sample(family: str, words: bool, batch: int) -> tuple[int, ...]:
    """The shape of a batch."""
    return (batch, *(SHAPES[family][:-1] if words else SHAPES[family]))


def some(draw: random.Random, names: list[str], most: int) -> list[str]:
    """A few names, rarely many."""
    return [draw.choice(names) for _ in range(1 + int(most * math.sqrt(draw.random()) * draw.random()))]
