"""Small models, each with one thing that capture must get right; sizes that 2 and 3 divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Case"]


class Case:
    """A model in float64 and the call that it is captured with."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.model, self.args, self.kwargs = model.double(), args, kwargs


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Repeated(nn.Module):
    """One activation and one linear layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.conv(x)).mean((2, 3))
        return self.fc(self.relu(self.fc(x)))


class Siamese(nn.Module):
    """One encoder with a batch norm, called for two inputs: its statistics are updated twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.encoder(left) - self.encoder(right)


class Styled(nn.Module):
    """Instance norm that keeps statistics, which no row of the axis table tells."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.kept, self.free = nn.InstanceNorm2d(6, track_running_stats=True), nn.InstanceNorm2d(6, affine=True)

    def forward(self, x: Tensor) -> Any:
        return self.free(self.kept(self.conv(x)))


class Functional(nn.Module):
    """Raw parameters and buffers, no leaf modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(rand(6, 3, 3, 3))
        self.gain, self.shift = nn.Parameter(rand(6)), nn.Parameter(rand(6))
        self.v = nn.Parameter(rand(12, 6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.mean: Tensor
        self.var: Tensor

    def forward(self, x: Tensor) -> Any:
        x = F.relu(F.conv2d(x, self.w, stride=2))
        x = F.batch_norm(x, self.mean, self.var, self.gain, self.shift, self.training)
        x = F.max_pool2d(x, 2).flatten(1)[:, :6]
        return F.linear(F.dropout(x, 0.0, self.training), self.v).softmax(-1)


class Scale(nn.Module):
    """A leaf module of the user's own: one weighted op and some around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(6, 6))

    def forward(self, x: Tensor) -> Any:
        return F.gelu(F.linear(x * 2, self.weight)) + 1


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = Scale(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.scale(x) + x)


class Attention(nn.Module):
    """Multi-head attention written out: projections, views, softmax, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        b, t, _ = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(b, t, 6, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-2, -1) / 2**0.5).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).reshape(b, t, 12))


class Fused(nn.Module):
    """The fused kernel, one projection for all three, a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, 6, 2).transpose(1, 2) for part in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view(b, t, c))


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.attention(x, x, x, need_weights=False)
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.lstm(x)
        return self.fc(y[:, -1])


class Tied(nn.Module):
    """A look-up and a classifier that share one table; a learned position that knows no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.position = nn.Parameter(rand(5, 6))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embed(tokens) + self.position)


class Buffers(nn.Module):
    """A counter, a moving average, an overwritten value, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6))
        self.steps: Tensor
        self.average: Tensor
        self.last: Tensor

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.last.copy_(y.detach()[0])
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)


class Outputs(nn.Module):
    """Nested inputs and outputs, None, a number, an input handed back, one value twice, an input nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], unread: Tensor, mode: str, gain: int, skip: None) -> Any:
        x, more = pair
        y = self.fc(x) * gain + more["bias"]
        return {"y": y, "pair": (y, None), "x": x, "mode": mode, "twice": [y.relu(), 3]}


class Residual(nn.Module):
    """Batch norms, in-place additions, dropout, a branch that joins later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6)
        self.down, self.relu = nn.Conv2d(3, 6, 1), nn.ReLU(inplace=True)
        self.pool, self.drop, self.fc = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.0), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.down(x)
        return self.fc(self.drop(torch.flatten(self.pool(self.relu(y)), 1)))


class Loss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 12)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        scores = self.fc(x)
        each = F.cross_entropy(scores, target, reduction="none")
        return scores, F.cross_entropy(scores, target), each


class NoGrad(nn.Module):
    """A teacher without gradient, a detached path, and gradient switched on again inside."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            goal = self.teacher(x).relu()
            with torch.enable_grad():
                inner = self.student(x).tanh()
            goal = goal + 1
        return (self.student(x) - goal) ** 2 + inner


class InPlaceViews(nn.Module):
    """In-place changes through views and of values that others still read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        y[:, :3].mul_(2)
        z = y.view(-1, 3, 2)
        z.add_(1)
        w = F.dropout(y, 0.5, False)
        w.relu_()
        return y + z.reshape(-1, 6)


class LongWay(nn.Module):
    """Batch norm beside an op that is not in the table, so that torch's own functionalisation rewrites it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.0)
        self.norm = nn.InstanceNorm2d(6, affine=True)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.drop(self.bn(self.conv(x)).roll(1, 1))).mean((2, 3))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.a.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).relu()).relu()


def images() -> Tensor:
    return rand(6, 3, 8, 8)


MODELS = {
    "repeated": lambda: Case(Repeated(), images()),
    "siamese": lambda: Case(Siamese(), rand(6, 6), rand(6, 6)),
    "styled": lambda: Case(Styled(), images()),
    "functional": lambda: Case(Functional(), images()),
    "custom": lambda: Case(Custom(), rand(6, 6)),
    "attention": lambda: Case(Attention(), rand(6, 5, 12)),
    "fused": lambda: Case(Fused(), rand(6, 5, 12)),
    "multi_head": lambda: Case(MultiHead(), rand(6, 5, 12)),
    "recurrent": lambda: Case(Recurrent(), rand(6, 5, 4)),
    "tied": lambda: Case(Tied(), torch.randint(0, 12, (6, 5))),
    "buffers": lambda: Case(Buffers(), rand(6, 6)),
    "outputs": lambda: Case(Outputs(), (rand(6, 6), {"bias": rand(6)}), rand(6, 2), "fast", gain=2, skip=None),
    "residual": lambda: Case(Residual(), images()),
    "loss": lambda: Case(Loss(), rand(6, 6), torch.randint(0, 12, (6,))),
    "no_grad": lambda: Case(NoGrad(), rand(6, 6)),
    "in_place_views": lambda: Case(InPlaceViews(), rand(6, 6)),
    "long_way": lambda: Case(LongWay(), images()),
    "frozen": lambda: Case(Frozen(), rand(6, 6)),
}
