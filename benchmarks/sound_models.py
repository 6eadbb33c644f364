"""Models that run rightly under every plan, on which the self-check must not raise a false alarm.

Small, of many kinds, in float32, with whatever makes rounding show: kinks, norms over few samples, cancelling sums,
tied and frozen weights, draws of random numbers, casts to float32 within.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SOUND", "Sound"]

Sound = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


class Residual(nn.Module):
    """A block of two convolutions beside its input."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = norm(channels), norm(channels)

    def forward(self, x: Tensor) -> Any:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def residual(norm: Callable[[int], nn.Module], blocks: int) -> nn.Module:
    """A small residual network: (N, 3, 16, 16) to (N, 10)."""
    body = [Residual(12, norm) for _ in range(blocks)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)]
    return nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), *body, *head)


class Separable(nn.Module):
    """Inverted residuals with squeeze and excitation, as MobileNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm1 = nn.Conv2d(3, 24, 1), nn.BatchNorm2d(24)
        self.deep, self.norm2 = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24)
        self.squeeze, self.excite = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)
        self.down, self.head = nn.Conv2d(24, 12, 1), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.hardswish(self.norm2(self.deep(F.relu6(self.norm1(self.up(x))))))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(self.down(x * gate).mean((2, 3)))


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 6 * n, 6, 3, padding=1) for n in range(4)])
        self.head = nn.Linear(27, 10)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.cat((x, F.elu(layer(x))), 1)
        return self.head(x.amax((2, 3)))


class UNet(nn.Module):
    """Down and up again, with shortcuts: (N, 3, 16, 16) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.norm, self.middle = nn.GroupNorm(4, 24), nn.Conv2d(24, 24, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(24, 12, 2, stride=2), nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        first = F.silu(self.down1(x))
        second = F.silu(self.norm(self.down2(F.max_pool2d(first, 2))))
        up = self.up(F.silu(self.middle(second)))
        return self.out(torch.cat((first, up), 1))


class Autoencoder(nn.Module):
    """A variational one: the code is drawn in the forward; gives the picture and the divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(48, 24), nn.Linear(12, 48)

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.encode(x.flatten(1)).chunk(2, 1)
        code = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        return torch.sigmoid(self.decode(code)), (spread.exp() + mean**2 - 1 - spread).mean(1)


class Generator(nn.Sequential):
    """Of pictures, from a code."""

    def __init__(self) -> None:
        up = [nn.ConvTranspose2d(24, 12, 4, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.ConvTranspose2d(12, 3, 4, 2, 1)]
        super().__init__(nn.Linear(8, 24 * 16), nn.Unflatten(1, (24, 4, 4)), nn.BatchNorm2d(24), *up, nn.Tanh())


class Critic(nn.Sequential):
    """Spectrally normalised, as a generator's adversary is."""

    def __init__(self) -> None:
        norm = nn.utils.parametrizations.spectral_norm
        first, second = norm(nn.Conv2d(3, 12, 4, 2, 1)), norm(nn.Conv2d(12, 24, 4, 2, 1))
        super().__init__(first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(24 * 16, 1))


class Siamese(nn.Module):
    """One encoder with batch norm for two inputs, and their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return F.pairwise_distance(self.encoder(left), self.encoder(right)), F.cosine_similarity(left, right)


class Block(nn.Module):
    """Attention and a feed-forward layer, with norms in front."""

    def __init__(self, width: int, heads: int, drop: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.drop, self.causal = heads, drop, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        n, t, c = x.shape
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        rate = self.drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None, rate, self.causal)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(n, t, c)), self.drop, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A decoder that predicts the next token; its table is also its classifier."""

    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 24), nn.Linear(24, 30, bias=False)
        self.position = nn.Parameter(torch.randn(6, 24) * 0.02)
        self.blocks = nn.Sequential(*(Block(24, 4, drop, True) for _ in range(2)))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens) + self.position))


class RootNorm(nn.Module):
    """Root-mean-square norm in float32, whatever it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Any:
        long = x.float()
        return self.weight * (long * torch.rsqrt(long.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Llama(nn.Module):
    """Rotary positions, gated feed-forward, softmax in float32, grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Embedding(30, 24), RootNorm(24), RootNorm(24)
        self.q, self.kv, self.o = nn.Linear(24, 24, False), nn.Linear(24, 24, False), nn.Linear(24, 24, False)
        self.gate, self.up, self.down = nn.Linear(24, 48, False), nn.Linear(24, 48, False), nn.Linear(48, 24, False)
        angles = torch.outer(torch.arange(6.0), 1.0 / 100 ** (torch.arange(0, 6, 2) / 6))
        self.register_buffer("turns", torch.cat((angles, angles), -1))
        self.turns: Tensor

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.turns.cos().to(x.dtype) + torch.cat((-b, a), -1) * self.turns.sin().to(x.dtype)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        n, t, c = x.shape
        h = self.norm1(x)
        q = self.rotated(self.q(h).view(n, t, 4, 6).transpose(1, 2))
        k, v = (p.view(n, t, 2, 6).transpose(1, 2).repeat_interleave(2, 1) for p in self.kv(h).chunk(2, -1))
        weights = (q @ self.rotated(k).transpose(-2, -1) / 6**0.5).softmax(-1, dtype=torch.float32).to(v.dtype)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(n, t, c))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Vision(nn.Module):
    """A vision transformer with a class token, and whole branches dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 24, 4, 4), nn.Parameter(torch.zeros(1, 1, 24))
        self.blocks, self.head = nn.ModuleList([Block(24, 4, 0.0, False) for _ in range(2)]), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.9) if self.training else 0.9
            x = x + (block(x) - x) * kept / 0.9
        return self.head(x[:, 0])


class Experts(nn.Module):
    """Two experts of every token, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 4), nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * weights[..., None, :]).sum(-1), weights


class Recurrent(nn.Module):
    """A recurrent layer of any kind over sequences, with dropout between its two layers."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(6, 12, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.recurrent(x)[0][:, -1])


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(12, 3, 1, 1, 24, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        return self.transformer(source, target)


class Mixer(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.tokens, self.channels = nn.Linear(8, 8), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + F.mish(self.channels(self.norm2(x)))


class Dilated(nn.Module):
    """Gated dilated convolutions over time, as WaveNet has them, with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList([norm(nn.Conv1d(6, 12, 2, dilation=d)) for d in (1, 2, 4)])

    def forward(self, x: Tensor) -> Any:
        for layer, width in zip(self.layers, (1, 2, 4), strict=True):
            signal, gate = layer(F.pad(x, (width, 0))).chunk(2, 1)
            x = x + torch.tanh(signal) * torch.sigmoid(gate)
        return x


class Ranking(nn.Module):
    """Two towers of tables and numbers, crossed: a recommender that gives its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 12), nn.Embedding(30, 12)
        self.top = nn.Sequential(nn.Linear(28, 24), nn.PReLU(), nn.Linear(24, 1))

    def forward(self, user: Tensor, item: Tensor, numbers: Tensor, clicked: Tensor) -> Any:
        crossed = torch.cat((self.users(user), self.items(item), numbers), 1)
        scores = self.top(crossed).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, clicked), scores


class Teacher(nn.Module):
    """A frozen teacher beside its student, and the divergence between them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(12, 10), nn.Sequential(nn.Linear(12, 6), nn.Hardtanh(), nn.Linear(6, 10))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            wanted = self.teacher(x).softmax(-1)
        return F.kl_div(self.student(x).log_softmax(-1), wanted, reduction="none").sum(-1)


class Counting(nn.Module):
    """A moving average of its own features, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("average", torch.zeros(12))
        self.register_buffer("steps", torch.tensor(0))
        self.average: Tensor
        self.steps: Tensor

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y.tanh()


class Attending(nn.Module):
    """torch's own attention, with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


class Graphs(nn.Module):
    """Dense graph convolution, its adjacency made from features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        near = (x @ x.transpose(1, 2) / x.shape[-1]).softmax(-1)
        return self.second(near @ F.softplus(self.first(near @ x))).mean(1)


class Spectral(nn.Module):
    """Mixes by Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(torch.fft.fft(x, dim=-1).real))) + x


def pictures(samples: int = 12, side: int = 16) -> Tensor:
    return torch.randn(samples, 3, side, side)


def mlp(act: Callable[[], nn.Module], samples: int = 12, drop: float = 0.0) -> tuple[nn.Module, tuple[Any, ...]]:
    layers = [nn.Linear(12, 48), act(), nn.Dropout(drop), nn.Linear(48, 48), act(), nn.Linear(48, 10)]
    return nn.Sequential(*layers), (torch.randn(samples, 12),)


def convolutional(*ends: nn.Module) -> nn.Sequential:
    layers = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, *ends, nn.Flatten(), nn.LazyLinear(24), nn.ReLU(), nn.Linear(24, 10))


def made(module: nn.Module, *args: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model and what it is called with, its lazy layers made."""
    with torch.no_grad():
        module.eval()(*args)
    return module.train(), args


SOUND: dict[str, Sound] = {
    "mlp relu": lambda: mlp(nn.ReLU),
    "mlp dropout": lambda: mlp(nn.ReLU, drop=0.5),
    "mlp selu, large batch": lambda: mlp(nn.SELU, samples=200),
    "mlp rrelu": lambda: mlp(nn.RReLU),
    "alexnet": lambda: made(convolutional(nn.MaxPool2d(2), nn.Dropout2d(0.2)), pictures()),
    "vgg with batch norm": lambda: made(convolutional(nn.BatchNorm2d(24), nn.AvgPool2d(2)), pictures(64)),
    "instance norm": lambda: made(convolutional(nn.InstanceNorm2d(24, affine=True)), pictures()),
    "local response norm": lambda: made(convolutional(nn.LocalResponseNorm(3)), pictures()),
    "residual batch norm": lambda: (residual(nn.BatchNorm2d, 6), (pictures(),)),
    "residual group norm": lambda: (residual(lambda c: nn.GroupNorm(3, c), 3), (pictures(),)),
    "residual, four samples": lambda: (residual(nn.BatchNorm2d, 3), (pictures(4, 8),)),
    "separable": lambda: (Separable(), (pictures(),)),
    "dense": lambda: (Dense(), (pictures(),)),
    "u-net": lambda: (UNet(), (pictures(),)),
    "variational autoencoder": lambda: (Autoencoder(), (pictures(12, 4),)),
    "generator": lambda: (Generator(), (torch.randn(12, 8),)),
    "critic": lambda: (Critic(), (pictures(),)),
    "siamese": lambda: (Siamese(), (torch.randn(12, 12), torch.randn(12, 12))),
    "language": lambda: (Language(), (torch.randint(0, 30, (12, 6)),)),
    "language, large batch": lambda: (Language(0.0), (torch.randint(0, 30, (96, 6)),)),
    "llama": lambda: (Llama(), (torch.randint(0, 30, (12, 6)),)),
    "vision": lambda: (Vision(), (pictures(),)),
    "experts": lambda: (Experts(), (torch.randn(12, 12),)),
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(12, 7, 6),)),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(12, 7, 6),)),
    "rnn": lambda: (Recurrent(nn.RNN), (torch.randn(12, 7, 6),)),
    "translator": lambda: (Translator(), (torch.randn(12, 5, 12), torch.randn(12, 4, 12))),
    "mixer": lambda: (Mixer(), (torch.randn(12, 8, 12),)),
    "dilated": lambda: (Dilated(), (torch.randn(12, 6, 16),)),
    "ranking": lambda: (
        Ranking(),
        (torch.randint(0, 20, (12,)), torch.randint(0, 30, (12,)), torch.randn(12, 4), torch.rand(12).round()),
    ),
    "teacher": lambda: (Teacher(), (torch.randn(12, 12),)),
    "counting": lambda: (Counting(), (torch.randn(12, 12),)),
    "attending": lambda: (Attending(), (torch.randn(12, 5, 12),)),
    "graphs": lambda: (Graphs(), (torch.randn(12, 8, 6),)),
    "spectral": lambda: (Spectral(), (torch.randn(12, 12),)),
}
