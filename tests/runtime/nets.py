"""Small networks for the runtime's tests, hand-made and random; all in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Adds", "ConvNet", "DropLinear", "Nested", "RandomNet", "Tied", "Towers", "conv_net", "mlp"]


def mlp(width: int = 12) -> nn.Sequential:
    """(N, 6) to (N, 4) through two hidden layers whose width 2, 3 and 4 divide."""
    net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    return net.double()


class ConvNet(nn.Module):
    """Convolutions with batch norm, then fully-connected layers: (N, 3, 8, 8) to (N, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(12 * 16, 24)
        self.fc2 = nn.Linear(24, 12)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        maps = self.pool(functional.relu(self.norm(self.conv(images))))
        scores: Tensor = self.fc2(functional.relu(self.fc1(maps.flatten(1))))
        return scores


def conv_net() -> ConvNet:
    """The network in float64."""
    return ConvNet().double()


class Tied(nn.Module):
    """Two layers that share one weight, (N, 8) to (N, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Twice through the weight."""
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Adds(nn.Module):
    """Adds a table under dropout, which no sample reaches, to (N, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(32, dtype=torch.float64))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """The same for every sample."""
        result: Tensor = x + self.drop(self.table)
        return result


class DropLinear(nn.Linear):
    """Dropout and a linear map in one layer, so that shards of out-features all drop the same whole input."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, in) to (N, out)."""
        return functional.linear(functional.dropout(x, training=self.training), self.weight, self.bias)


class Nested(nn.Module):
    """Nested arguments and several results, one of which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(5, 6)
        self.spare = nn.Linear(3, 3)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], scale: float = 1.0) -> dict[str, object]:
        """Both ways joined, one of them alone, and the scale."""
        left = self.left(pair[0])
        return {"both": left * scale + self.right(pair[1]["b"]), "left": [left], "scale": scale}


class Towers(nn.Module):
    """Two towers that cross twice, so that different devices wait for each other: (N, 6) to (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a1", "b1"):
            self.add_module(name, nn.Linear(6, 8))
        for name in ("a2", "b2", "a3", "b3"):
            self.add_module(name, nn.Linear(16, 8))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Each layer of a tower reads both towers."""
        a, b = (torch.relu(self.get_submodule(name)(x)) for name in ("a1", "b1"))
        for level in "23":
            # b first: the order of the layers is not that of the devices.
            b_next = torch.tanh(self.get_submodule(f"b{level}")(torch.cat((a, b), 1)))
            a = torch.tanh(self.get_submodule(f"a{level}")(torch.cat((b, a), 1)))
            b = b_next
        result: Tensor = self.last(torch.cat((a, b), 1))
        return result


class RandomNet(nn.Module):
    """A random image network of convolutions, norms, pools, branches and a fully-connected end.

    Widths are multiples of 12, so that 2, 3 and 4 shards divide them.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.channels, self.side = 3, 8
        self.steps: list[str] = []
        for _ in range(draw.randint(2, 5)):
            self._grow(draw)
        self.width = self.channels * self.side * self.side
        self.ends: list[str] = []
        for _ in range(draw.randint(1, 3)):
            self._end(draw)
        self.double()

    def _grow(self, draw: random.Random) -> None:
        kinds = ["conv", "conv", "residual", "concat"]
        if self.channels % 12 == 0:
            kinds += ["grouped", "batch_norm", "batch_norm", "group_norm", "relu", "depthwise"]
            kinds += ["max_pool", "avg_pool"] if self.side % 2 == 0 and self.side > 2 else []
        kind = draw.choice(kinds)
        name = f"{kind}{len(self.steps)}"
        if module := self._module(kind, draw):
            self.add_module(name, module)
        self.steps.append(name)

    def _module(self, kind: str, draw: random.Random) -> nn.Module | None:
        inputs = self.channels
        if kind in ("conv", "grouped", "concat"):
            self.channels = draw.choice((12, 24))
        groups = {"grouped": draw.choice((2, 4, 12)), "depthwise": inputs}.get(kind, 1)
        if kind in ("max_pool", "avg_pool"):
            self.side //= 2
        makers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv2d(inputs, self.channels, 3, padding=1, bias=draw.random() < 0.5),
            "grouped": lambda: nn.Conv2d(inputs, self.channels, 3, padding=1, groups=groups),
            "depthwise": lambda: nn.Conv2d(inputs, inputs, 3, padding=1, groups=groups),
            "residual": lambda: nn.Conv2d(inputs, inputs, 1),
            "concat": lambda: nn.Conv2d(inputs, self.channels // 2, 1),
            "batch_norm": lambda: nn.BatchNorm2d(inputs, affine=draw.random() < 0.7),
            "group_norm": lambda: nn.GroupNorm(draw.choice((2, 4, 12)), inputs),
            "max_pool": lambda: nn.MaxPool2d(2),
            "avg_pool": lambda: nn.AvgPool2d(2),
        }
        return makers[kind]() if kind in makers else None

    def _end(self, draw: random.Random) -> None:
        kind = draw.choice(("linear", "linear", "norm", "gelu"))
        name = f"end_{kind}{len(self.ends)}"
        if kind == "linear":
            outputs = draw.choice((12, 24))
            self.add_module(name, nn.Linear(self.width, outputs))
            self.width = outputs
        elif kind == "norm":
            self.add_module(name, nn.LayerNorm(self.width))
        self.ends.append(name)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 8, 8) to (N, width)."""
        for name in self.steps:
            x = self._step(name, x)
        x = x.reshape(x.shape[0], -1)
        for name in self.ends:
            x = functional.gelu(x) if "gelu" in name else self.get_submodule(name)(x)
        return x

    def _step(self, name: str, x: Tensor) -> Tensor:
        if name.startswith("relu"):
            return functional.relu(x)
        module = self.get_submodule(name)
        y: Tensor = module(x)
        if name.startswith("residual"):
            return x + y
        return torch.cat((y, torch.tanh(y)), 1) if name.startswith("concat") else y
